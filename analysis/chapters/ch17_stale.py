"""Chapter 17: what recorded runs on stale and mismatched samples say, and bandits behind experts.

The bandits are trained here, through a mixture of experts whose sampler routes a little otherwise:
the inference engine's router sees other rounding than the trainer's, so near a tie it picks another
expert. Either the trainer replays the experts that sampled, or it routes again by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from torch import Tensor

from analysis.chapters.claims import difference, recorded
from analysis.chapters.policies import random_head
from analysis.chapters.training_figures import KL_LABEL, trade_off
from analysis.experiments.ablation import final
from analysis.experiments.recording import Recording
from analysis.experiments.statistics import Interval
from analysis.experiments.summaries import by_variant, paired
from analysis.training.config import RunConfig
from kl_term import style
from kl_term.kl.importance import effective_sample_size
from kl_term.objectives.advantages import group_centre
from kl_term.objectives.losses import policy_loss
from kl_term.objectives.routing import ExpertHead

# --- The recorded runs and what they are called -----------------------------------------------

RUNS = (
    "staleness",
    "stale_coefficients",
    "three_ways",
    "three_ways_half_step",
    "three_ways_on_policy",
    "stale_masking",
    "mismatch",
    "partial_rollouts",
    "stale_starts",
)
#: What the on-policy k2 of a large batch is called beside the other ways.
LARGE_BATCH = "large_batch"
#: Age of the oldest samples of ``staleness``, in updates; beta of most comparisons.
OLDEST, BETA = 16, 0.3
#: KL loss on stale samples -> what it is called.
LOSSES = {
    "none": "no KL term",
    "k2": "k₂",
    "k2_detached": "k₂, weighted",
    "k3": "k₃",
    "k3_attached": "k₃, weighted",
    "exact": "full vocabulary",
}
OBJECTIVES = {
    "fresh": "fresh samples, token ratio",
    "token": "token ratio, clipped",
    "token_wide": "token ratio, no clip",
    "gspo": "GSPO, 0.2",
    "gspo_tight": "GSPO, 0.03",
    "sequence": "sequence ratio, clipped",
    "cispo": "CISPO",
    "cispo_upper": "CISPO, upper bound only",
    "reinforce": "no weight",
}
SAMPLERS = {"cold": "temperature 0.7", "hot": "temperature 1.3", "top_p": "top-p 0.8"}
CORRECTIONS = {
    "uncorrected": "uncorrected",
    "truncated_token": "truncated, token",
    "masked_token": "masked, token",
    "truncated_sequence": "truncated, sequence",
    "masked_sequence": "masked, sequence",
    "keep_mask": "sampling mask kept",
}
#: Variant of any of the runs -> what tables call it.
NAMES = {
    **LOSSES,
    "none_wide": "no KL term, no clip",
    **{f"{name}_loss": called for name, called in LOSSES.items()},
    "k2_loss_detached": "k₂, weighted",
    "merged_old": "merged, old log-ratio",
    "merged_detached": "merged, present log-ratio",
    "merged_attached": "merged, log-ratio differentiated",
    "merged_old_wide": "merged, old, no clip",
    "merged_detached_wide": "merged, present, no clip",
    LARGE_BATCH: "large fresh batches",
    **OBJECTIVES,
    **{
        f"{name}_mask_{delta}": f"{OBJECTIVES[name]}, masked at {delta}"
        for name in ("token", "cispo", "reinforce")
        for delta in ("0.03", "0.1", "0.3")
    },
    "clipped": "clipped",
    "unclipped": "unclipped",
    "clipped_masked": "clipped, masked",
    "unclipped_masked": "unclipped, masked",
    "same": "sampler agrees",
    **{
        f"{sampler}_{how}": f"{name}, {correction}"
        for sampler, name in SAMPLERS.items()
        for how, correction in CORRECTIONS.items()
    },
    "replayed": "experts replayed",
    "recomputed": "experts chosen again",
    "whole": "whole rollouts",
    "budget_8_all": "8 tokens an update",
    "budget_4_all": "4 tokens an update",
    "budget_8_current": "8 tokens, last segment only",
    "budget_4_current": "4 tokens, last segment only",
}
NAMES |= {f"{name}_lag_{lag}": f"{NAMES[name]}, age {lag}" for name in LOSSES for lag in (0, 4, 16)}


# --- What the recorded runs cost --------------------------------------------------------------


def passes_per_completion(num_iterations: int) -> int:
    r"""Forward-equivalents of an update per completion that it draws.

    .. math:: \underbrace{1}_{\text{sampling}} + \underbrace{1}_{\text{reference}} +
        \underbrace{2}_{\text{first step}} + 3\, (K - 1)

    The first of :math:`K` steps goes back through the activations that sampling kept; each later
    one computes its own. A backward pass costs two forward ones; reading a KL off the logits is
    counted as nothing.

    Raises:
        ValueError: there is no step.
    """
    if num_iterations < 1:
        raise ValueError(f"num_iterations must be at least 1, got {num_iterations}")
    return 4 + 3 * (num_iterations - 1)


def with_costs(curves: pd.DataFrame, config: RunConfig) -> pd.DataFrame:
    """Curves with what each window had cost at its end.

    Two columns more: ``completions``; ``passes``, forward passes over one completion or their
    equivalents (:func:`passes_per_completion`).
    """
    updates = (curves["update"] + config.log_every).clip(upper=config.updates)
    completions = updates * config.num_prompts * config.group_size
    passes = completions * passes_per_completion(config.num_iterations)
    return curves.assign(completions=completions, passes=passes)


def final_within(
    curves: pd.DataFrame, cost: str, limit: float, *, share: float = 0.2
) -> pd.DataFrame:
    """One row per run: ``final`` of the windows that end within a cost, variant by variant.

    Variants may have windows of unequal length and cost.

    Raises:
        ValueError: no window of a variant does.
    """
    parts = []
    for (variant, beta), own in curves.groupby(["variant", "beta"], sort=False):
        within = own[own[cost] <= limit]
        if within.empty:
            raise ValueError(
                f"variant {variant!r} at beta={beta:g} has no window within {cost}={limit:g}: "
                f"its first ends at {own[cost].min():g}"
            )
        parts.append(final(within, share=share))
    return pd.concat(parts, ignore_index=True)


def at_equal_cost(several: Recording, large: Recording, cost: str) -> pd.DataFrame:
    """One row per run at :data:`BETA`: where each way stands when the cheapest has ended.

    Of several steps a rollout the unweighted k2 is left out; that of large batches is called
    :data:`LARGE_BATCH`. The cost is ``completions`` or ``passes``.
    """
    steps, batches = (with_costs(run.curves, run.preset.config) for run in (several, large))
    batches = batches[batches["variant"] == "k2_loss"].assign(variant=LARGE_BATCH)
    ways = pd.concat([steps[steps["variant"] != "k2_loss"], batches])
    ways = ways[ways["beta"] == BETA]
    return final_within(ways, cost, ways.groupby("variant")[cost].max().min())


def less_large_batches(variant: str, cost: str) -> Interval:
    """At the better step size: a variant less k2 on large batches in accuracy, at an equal cost."""
    ended = at_equal_cost(recorded("three_ways_half_step"), recorded("three_ways_on_policy"), cost)
    return difference(ended, variant, LARGE_BATCH, "accuracy")


def budgets() -> pd.DataFrame:
    """Partial rollouts less whole ones in accuracy, at equal ``updates`` and decoding ``steps``."""
    run = recorded("partial_rollouts")
    config = run.preset.config
    # Decoding steps of an update that follow one another.
    each = {v.name: v.sampler.budget or config.task.completion_length for v in run.preset.variants}
    ended = run.curves["update"] + config.log_every
    curves = run.curves.assign(steps=ended * run.curves["variant"].map(each))
    parts = []
    for budget in (8, 4):
        every, last = f"budget_{budget}_all", f"budget_{budget}_current"
        whole = [(every, "whole", "accuracy")]
        kept = curves[curves["variant"].isin((every, "whole"))]
        within = final_within(kept, "steps", budget * config.updates)
        at_updates = paired(run.finals, [*whole, (last, every, "accuracy")])
        parts += [at_updates.assign(at="updates"), paired(within, whole).assign(at="steps")]
    return pd.concat(parts, ignore_index=True)


# --- Bandits behind a mixture of experts ------------------------------------------------------

EXPERTS, VOCAB, WIDTH = 8, 8, 12
ROUTINGS = ("replayed", "recomputed")


class Bandits(NamedTuple):
    """One bandit a seed: states, and the one token that is right in each."""

    hidden: Tensor  #: [S, N, D]
    right: Tensor  #: [S, N]


class Sampled(NamedTuple):
    """Tokens of one rollout and how they came about."""

    experts: Tensor  #: [S, N], those of the sampler
    tokens: Tensor  #: [S, N, G]
    old_logp: Tensor  #: [S, N, G]
    advantages: Tensor  #: [S, N, G]


def random_bandits(seeds: Sequence[int], states: int) -> tuple[Bandits, ExpertHead]:
    """Bandits with Gaussian states, and the heads they start from: parameters [S, ...]."""
    hidden, right, heads = [], [], []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        hidden.append(torch.randn(states, WIDTH, generator=generator, dtype=torch.float64))
        right.append(torch.randint(VOCAB, (states,), generator=generator))
        heads.append(random_head(EXPERTS, VOCAB, WIDTH, seed=seed))
    start = ExpertHead(*(torch.stack(parts) for parts in zip(*heads, strict=True)))
    return Bandits(torch.stack(hidden), torch.stack(right)), start


def state_logp(head: ExpertHead, hidden: Tensor, experts: Tensor) -> Tensor:
    """[S, N, V]: :func:`kl_term.objectives.routing.routed_logp` of every seed's head at once."""
    gate = (hidden @ head.router.mT).softmax(dim=-1).gather(-1, experts.unsqueeze(-1))
    of_seed = torch.arange(len(hidden)).unsqueeze(-1)
    logits = (head.experts[of_seed, experts] @ hidden.unsqueeze(-1)).squeeze(-1)
    return (gate * logits).log_softmax(dim=-1)


def own_experts(head: ExpertHead, hidden: Tensor, noise: Tensor | float = 0.0) -> Tensor:
    """[S, N]: the experts that the heads choose, with ``noise`` [S, E, D] added to their router."""
    return (hidden @ (head.router + noise).mT).argmax(dim=-1)


def expected_reward(head: ExpertHead, bandits: Bandits) -> Tensor:
    """[S]: chance of the right token, summed over the vocabulary, by the heads' own routing."""
    logp = state_logp(head, bandits.hidden, own_experts(head, bandits.hidden))
    return logp.exp().gather(-1, bandits.right.unsqueeze(-1)).mean(dim=(1, 2))


def sample_groups(
    head: ExpertHead, bandits: Bandits, group_size: int, noise: float, generator: torch.Generator
) -> Sampled:
    """A group of tokens in each state, from a router moved by Gaussian noise of that size."""
    shake = noise * torch.randn(head.router.shape, generator=generator, dtype=head.router.dtype)
    experts = own_experts(head, bandits.hidden, shake)
    logp = state_logp(head, bandits.hidden, experts)
    flat = torch.multinomial(
        logp.exp().flatten(0, 1), group_size, replacement=True, generator=generator
    )
    tokens = flat.view(*bandits.right.shape, group_size)
    rewards = (tokens == bandits.right.unsqueeze(-1)).to(logp.dtype)
    return Sampled(experts, tokens, logp.gather(-1, tokens), group_centre(rewards))


def train_bandits(
    routing: str,
    *,
    noise: float,
    seeds: Sequence[int],
    updates: int = 100,
    steps: int = 4,
    states: int = 32,
    group_size: int = 8,
    learning_rate: float = 0.02,
) -> pd.DataFrame:
    """Train every seed's bandit with the clipped surrogate, routing ``replayed`` or ``recomputed``.

    Unit Gaussians times ``noise`` are added to the sampler's router; both routings see the same
    draws, and take ``steps`` of Adam on each rollout. One row per seed and update, the routing in
    ``variant``: the exact ``reward`` before it, and of the *first* step on its rollout ``ess`` and
    ``clip_fraction`` of the ratios and ``flipped``, the share of states that the trainer would
    route otherwise than the sampler did.
    """
    bandits, start = random_bandits(seeds, states)
    head = ExpertHead(*(part.clone().requires_grad_() for part in start))
    optimizer = torch.optim.Adam(head, lr=learning_rate)
    generator = torch.Generator().manual_seed(seeds[0])
    rows = []
    for update in range(updates):
        with torch.no_grad():
            reward = expected_reward(head, bandits)
            drawn = sample_groups(head, bandits, group_size, noise, generator)
            flipped = own_experts(head, bandits.hidden) != drawn.experts
        for step in range(steps):
            experts = drawn.experts if routing == "replayed" else own_experts(head, bandits.hidden)
            logp = state_logp(head, bandits.hidden, experts).gather(-1, drawn.tokens)
            everything = torch.ones_like(drawn.tokens, dtype=torch.bool)
            loss = policy_loss(
                logp, old_logp=drawn.old_logp, advantages=drawn.advantages, mask=everything
            )
            if step == 0:
                ratios = (logp.detach().flatten(1), drawn.old_logp.flatten(1))
                measured = {
                    "ess": effective_sample_size(*ratios, everything.flatten(1)),
                    "clip_fraction": loss.clipped.double().mean(dim=(1, 2)),
                    "flipped": flipped.double().mean(dim=1),
                }
            optimizer.zero_grad()
            loss.loss.backward()
            optimizer.step()
        rows.append(pd.DataFrame({"seed": seeds, "update": update, "reward": reward, **measured}))
    return pd.concat(rows, ignore_index=True).assign(variant=routing, noise=noise, beta=0.0)


def gains_of_replay(curves: pd.DataFrame, *, last: int = 10) -> pd.DataFrame:
    """Replayed less recomputed reward over the ``last`` updates, by noise of the sampler's router.

    Of :func:`train_bandits`, all noises and both routings. One row per ``noise``: the columns of
    :func:`analysis.experiments.summaries.paired`, and of the recomputed runs ``flipped`` and
    ``ess``.
    """
    late = curves[curves["update"] > curves["update"].max() - last]
    ends = late.groupby(["noise", "variant", "seed"], as_index=False).mean()
    rows = []
    for noise, own in ends.groupby("noise"):
        means = own.loc[own["variant"] == "recomputed", ["flipped", "ess"]].mean()
        found = paired(own, [(*ROUTINGS, "reward")])
        rows.append(found.assign(noise=noise, **means))
    return pd.concat(rows, ignore_index=True)


# --- What it draws ----------------------------------------------------------------------------

#: One of the three ways -> its estimator and placement.
WAYS = {
    "none": ("none", "loss"),
    "exact_loss": ("exact", "loss"),
    "merged_old": ("k1", "reward"),
    "merged_detached": ("k1", "reward"),
    LARGE_BATCH: ("k2", "loss"),
}
#: What is hollow and dotted beside its like: a weighted loss, the sampler's log-ratio.
HOLLOW = {"linestyle": ":", "markerfacecolor": "white"}


def ages(finals: pd.DataFrame) -> Figure:
    """Own accuracy and exact reverse KL over the age of the samples, one line a KL loss."""
    table = by_variant(finals, ["own_accuracy", "reverse_kl"])
    table[["loss", "lag"]] = table["variant"].str.split("_lag_", expand=True)
    lags = list(table["lag"].unique())
    figure, panels = style.subplots(1, 2, height=4.0)
    labels = {"own_accuracy": "final accuracy", "reverse_kl": "reverse KL (nats), log scale"}
    for panel, (metric, label) in zip(panels, labels.items(), strict=True):
        for place, name in enumerate(LOSSES):
            rows = table[(table["metric"] == metric) & (table["loss"] == name)]
            estimator, _, weighted = name.partition("_")
            look = style.line(estimator, label=LOSSES[name]) | (HOLLOW if weighted else {})
            x = np.arange(len(rows)) + 0.05 * (place - 2.5)
            panel.errorbar(x, rows["mean"], yerr=style.bars(rows), elinewidth=1.0, **look)
        panel.set(ylabel=label, xlabel="age (updates)")
        panel.set_xticks(range(len(lags)), lags)
    panels[1].set_yscale("log")
    panels[1].yaxis.set_minor_locator(NullLocator())
    panels[1].set_yticks([0.05, 0.1, 0.2, 0.4], ["0.05", "0.1", "0.2", "0.4"])
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def ways(several: pd.DataFrame, large: pd.DataFrame) -> Figure:
    """Accuracy against exact reverse KL of the three ways, one line a way, one point a beta, from
    the final rows of several steps a rollout and of large batches."""
    batches = large[large["beta"] > 0].assign(variant=LARGE_BATCH)
    looks = {
        name: style.line(*drawn, label=NAMES[name]) | (HOLLOW if name == "merged_old" else {})
        for name, drawn in WAYS.items()
    }
    figure, axes = style.subplots(height=3.7)
    trade_off(axes, pd.concat([several[several["variant"] != "k2_loss"], batches]), looks)
    axes.set_xlabel(KL_LABEL)
    figure.legend(loc="outside upper center", ncols=2)
    return figure
