"""DPO, the data it does not need, and the data that training does need: chapter 10.

Each problem is small enough to sum over every pair, path or position.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily, Normal
from torch.func import grad

from analysis.evidence import routed_bandits
from analysis.evidence.claims import EXACT, Finding, claim, judge, largest, median, share
from analysis.evidence.policies import by_token, normal_draws
from analysis.evidence.recorded import difference, recorded
from analysis.evidence.routed_bandits import random_head
from kl_term import style
from kl_term.kl.credit import advantage_table, state_average
from kl_term.kl.divergences import reverse_kl
from kl_term.kl.fixed_points import reverse_kl_optimum
from kl_term.kl.sequences import enumerate_sequences, sequence_probability
from kl_term.objectives.gae import generalised_advantage
from kl_term.objectives.imitation import imitation_cost
from kl_term.objectives.mirror_descent import log_partition, mirror_descent_loss
from kl_term.objectives.preference import dpo_gradient_weight, dpo_loss, implicit_reward
from kl_term.objectives.routing import ExpertHead, choose_experts, routed_logp

# What the chapter computes.


class Preferences(NamedTuple):
    """One prompt: a reference over V completions and the reward behind the preferences."""

    ref_logp: Tensor  #: [V]
    rewards: Tensor  #: [V], up to a constant
    beta: float

    @property
    def optimum(self) -> Tensor:
        """[V], log-probs of the maximiser of reward less beta times the KL from the reference."""
        return reverse_kl_optimum(self.rewards, self.ref_logp, beta=self.beta)


def random_preferences(vocab_size: int, *, beta: float, seed: int) -> Preferences:
    """A reference far from uniform and rewards of standard deviation one."""
    ref_logits, rewards = normal_draws((2, vocab_size), seed=seed)
    return Preferences((1.5 * ref_logits).log_softmax(-1), rewards, beta)


def bradley_terry(rewards: Tensor) -> Tensor:
    """[V, V]: probability that the completion of the row is preferred to that of the column."""
    return (rewards[:, None] - rewards[None, :]).sigmoid()


def pair_distributions(problem: Preferences) -> dict[str, Tensor]:
    """[V, V] distributions of the compared pair: who made the data, from near to far.

    ``chain`` compares neighbours only; ``two islands`` never compares across the halves.
    """
    size = len(problem.rewards)
    index = torch.arange(size)
    same_half = (index[:, None] < size // 2) == (index[None, :] < size // 2)
    reference, optimum = problem.ref_logp.exp(), problem.optimum.exp()
    shapes = {
        "the optimum's own samples": optimum[:, None] * optimum[None, :],
        "the reference's samples": reference[:, None] * reference[None, :],
        "uniform": torch.ones(size, size, dtype=reference.dtype),
        "what the reference avoids": 1 / (reference[:, None] * reference[None, :]),
        "chain": ((index[:, None] - index[None, :]).abs() == 1).to(reference.dtype),
        "two islands": same_half.to(reference.dtype),
    }
    return {name: w.fill_diagonal_(0) / w.sum() for name, w in shapes.items()}


def population_loss(logp: Tensor, problem: Preferences, counts: Tensor) -> Tensor:
    """DPO loss averaged over pairs: ``counts[w, l]`` is the weight of w being preferred to l."""
    preferred, other, ref_preferred, ref_other = (
        side for x in (logp, problem.ref_logp) for side in torch.broadcast_tensors(x[:, None], x)
    )
    return (counts * dpo_loss(preferred, other, ref_preferred, ref_other, beta=problem.beta)).sum()


def labelled(pairs: Tensor, rewards: Tensor) -> Tensor:
    """[V, V] distribution of (preferred, other) when Bradley and Terry's model labels the pairs."""
    return (pairs + pairs.T) * bradley_terry(rewards)


def fit(
    problem: Preferences, counts: Tensor, *, features: Tensor | None = None, ridge: float = 0.0
) -> Tensor:
    """The policy [V] that minimises the DPO loss of weights [V, V], by Newton's method.

    It moves from the reference, along ``features @ theta`` only if given, [V, D]; a ridge on the
    implicit rewards keeps data finite that separates.
    """
    features = torch.eye(len(counts), dtype=counts.dtype) if features is None else features
    directions = problem.beta * (features[:, None, :] - features[None, :, :]).flatten(0, 1)
    weight = counts.flatten().unsqueeze(-1)
    penalty = ridge * problem.beta**2 * features.T @ features
    theta = torch.zeros(features.shape[-1], dtype=counts.dtype)
    for _ in range(60):
        wrong = (-(directions @ theta)).sigmoid().unsqueeze(-1)
        gradient = penalty @ theta - (weight * wrong * directions).sum(0)
        hessian = penalty + directions.T @ (weight * wrong * (1 - wrong) * directions)
        step = torch.linalg.pinv(hessian, hermitian=True, rtol=1e-13) @ gradient
        moved = float((directions @ step).abs().max())
        theta = theta - step * min(1.0, 2.0 / max(moved, 1e-30))
        if moved < 1e-13:
            break
    return (problem.ref_logp + features @ theta).log_softmax(-1)


def fit_with_sft(problem: Preferences, counts: Tensor, *, weight: float) -> Tensor:
    """Minimiser [V] of the DPO loss plus ``weight`` times the preferred answers' NLL."""
    preferred = counts.sum(-1)

    def loss(logits: Tensor) -> Tensor:
        logp = logits.log_softmax(-1)
        return population_loss(logp, problem, counts) - weight * (preferred * logp).sum()

    return _minimise(loss, problem.ref_logp).log_softmax(-1)


def objective(logp: Tensor, problem: Preferences) -> Tensor:
    """[...]: expected reward of policies [..., V] less beta times the reverse KL."""
    kl = reverse_kl(logp, problem.ref_logp.expand_as(logp))
    return logp.exp() @ problem.rewards - problem.beta * kl


def data_table(problem: Preferences, features: Tensor) -> pd.DataFrame:
    """Where the population DPO loss is minimal, by who made the pairs and what can be learned.

    ``kl`` from the optimum and ``objective`` of the policy fitted over all, and (``_limited``) over
    those that move along the features only.
    """
    rows = []
    for name, pairs in pair_distributions(problem).items():
        counts = labelled(pairs, problem.rewards)
        tabular, limited = fit(problem, counts), fit(problem, counts, features=features)
        rows.append(
            {
                "pairs": name,
                "kl": reverse_kl(tabular, problem.optimum).item(),
                "objective": objective(tabular, problem).item(),
                "objective_limited": objective(limited, problem).item(),
            }
        )
    return pd.DataFrame(rows)


def best_limited(problem: Preferences, features: Tensor) -> float:
    """Objective of the best policy that moves along the features only."""

    def policy(theta: Tensor) -> Tensor:
        return (problem.ref_logp + features @ theta).log_softmax(-1)

    start = torch.zeros(features.shape[-1], dtype=features.dtype)
    best = _minimise(lambda theta: reverse_kl(policy(theta), problem.optimum), start)
    return objective(policy(best), problem).item()


class SharedFeatures(NamedTuple):
    """Three completions whose log-probs share parameters: preferred, other, and a bystander."""

    features: Tensor  #: [3, D]
    ref_logp: Tensor  #: [3]


def bystander(overlap: float) -> SharedFeatures:
    """A bystander that moves ``overlap`` times as far as the preferred completion does."""
    features = torch.tensor([[1.0, 1.0], [0.0, 1.0], [overlap, 0.0]], dtype=torch.float64)
    return SharedFeatures(features, torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log())


def pair_path(model: SharedFeatures, *, beta: float, rate: float, steps: int) -> pd.DataFrame:
    """Implicit rewards of all three while gradient descent on one pair's DPO loss runs."""

    def logp(theta: Tensor) -> Tensor:
        return (model.ref_logp + model.features @ theta).log_softmax(-1)

    slope = grad(lambda at: dpo_loss(*logp(at)[:2], *model.ref_logp[:2], beta=beta))
    theta = torch.zeros(model.features.shape[-1], dtype=torch.float64)
    path = []
    for _ in range(steps):
        path.append(beta * (logp(theta) - model.ref_logp))
        theta = theta - rate * slope(theta)
    table = pd.DataFrame(torch.stack(path), columns=["chosen", "rejected", "bystander"])
    return table.rename_axis("step").reset_index()


def chosen_slope(model: SharedFeatures) -> float:
    """Change of the preferred log-prob per unit of DPO's first step along the pair's difference."""
    step = model.features[0] - model.features[1]
    moved = model.features @ step
    return (moved[0] - (model.ref_logp.exp() * moved).sum()).item()


def _minimise(loss: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Minimiser of a smooth loss, by L-BFGS from ``start``."""
    leaf = start.detach().clone().requires_grad_(True)
    optimiser = torch.optim.LBFGS(
        [leaf], max_iter=300, tolerance_grad=1e-12, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = loss(leaf)
        value.backward()
        return value

    optimiser.step(closure)
    return leaf.detach()


def mixture(means: tuple[float, float] = (-2.0, 2.0)) -> MixtureSameFamily:
    """Two Gaussians of weights 0.7 and 0.3 and of standard deviation one half."""
    weights, places = torch.tensor([[0.7, 0.3], means], dtype=torch.float64)
    return MixtureSameFamily(Categorical(weights), _normal(places, 0.5))


def _normal(mean: Tensor | float, std: Tensor | float) -> Normal:
    return Normal(*(torch.as_tensor(x, dtype=torch.float64) for x in (mean, std)))


def gaussian_kl(target: MixtureSameFamily, mean: Tensor, std: Tensor, direction: str) -> Tensor:
    """KL of a Gaussian from the target (``reverse``) or of the target from it, by the trapezoid
    rule."""
    grid = torch.linspace(-12, 12, 801, dtype=torch.float64)
    log_p, log_q = target.log_prob(grid), _normal(mean, std).log_prob(grid)
    if direction == "reverse":
        log_p, log_q = log_q, log_p
    return torch.trapezoid(log_p.exp() * (log_p - log_q), grid)


def fits(target: MixtureSameFamily, starts: Iterable[float] = (-2.0, 0.0, 2.0)) -> pd.DataFrame:
    """Gaussians of least KL in both directions, from several starting means: ``mean``, ``std``,
    ``kl``."""
    rows = []
    for direction, start in itertools.product(("forward", "reverse"), starts):

        def kl(at: Tensor, direction: str = direction) -> Tensor:
            return gaussian_kl(target, at[0], at[1].exp(), direction)

        best = _minimise(kl, torch.tensor([start, 0.0], dtype=torch.float64))
        row = {"direction": direction, "start": start, "mean": best[0].item()}
        rows.append(row | {"std": best[1].exp().item(), "kl": kl(best).item()})
    return pd.DataFrame(rows)


def density_curves(target: MixtureSameFamily, table: pd.DataFrame) -> pd.DataFrame:
    """The mixture and the best Gaussian of each direction on a grid."""
    grid = torch.linspace(-5.0, 5.0, 401, dtype=torch.float64)
    best = table.loc[table.groupby("direction").kl.idxmin()].set_index("direction")
    curves = {name: _normal(row["mean"], row["std"]) for name, row in best.iterrows()}
    densities = {"mixture": target, **curves}
    frame = {name: density.log_prob(grid).exp().numpy() for name, density in densities.items()}
    return pd.DataFrame({"x": grid.numpy(), **frame})


def routing_drift(sizes: Iterable[float], *, seeds: int, states: int = 2000) -> pd.DataFrame:
    """Largest change of the sampled token's log-prob after a random step of a given size.

    ``replayed`` keeps the experts that sampled, ``recomputed`` lets the moved router choose;
    ``flipped`` is the share of states whose expert changes. Medians over ``seeds`` heads.
    """
    rows = []
    for seed in range(seeds):
        head = random_head(8, 16, 12, seed=seed)
        generator = torch.Generator().manual_seed(1000 + seed)
        hidden = torch.randn(states, 12, generator=generator, dtype=torch.float64)
        step = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in head]
        sampled_by = choose_experts(head, hidden)
        logp = routed_logp(head, hidden, sampled_by)
        tokens = torch.multinomial(logp.exp(), 1, generator=generator)
        for size in sizes:
            moved = ExpertHead(*(p + size * s for p, s in zip(head, step, strict=True)))
            now = choose_experts(moved, hidden)
            row = {"size": size, "flipped": share(now != sampled_by)}
            for name, experts in (("replayed", sampled_by), ("recomputed", now)):
                drift = routed_logp(moved, hidden, experts) - logp
                row[name] = largest(drift.gather(-1, tokens))
            rows.append(row)
    return pd.DataFrame(rows).groupby("size", as_index=False).median()


# What it draws.


def plot_data_distributions(
    table: pd.DataFrame, *, best_limited: float, reference: float
) -> Figure:
    """Objective of the DPO minimiser by who made the pairs, with every policy and with few."""
    figure, axes = style.subplots(height=3.9)
    rows = range(len(table))[::-1]
    axes.hlines(rows, table.objective_limited, table.objective, color="#C9C9C9", linewidth=1.5)
    columns = {"objective": "every policy", "objective_limited": "two parameters"}
    for look, (column, name) in zip(style.SERIES, columns.items(), strict=False):
        axes.plot(table[column], rows, **{**look, "linestyle": "none"}, label=name)
    for x, text, dash in (
        (reference, "reference", ":"),
        (best_limited, "best with\ntwo parameters", "--"),
    ):
        style.guide(axes, x=x, linestyle=dash)
        above = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom"}
        style.note(axes, text, (x, 1.01), **above, fontsize=10)
    axes.set_yticks(rows, table.pairs)
    axes.grid(False, axis="y")
    axes.set_xlabel("expected reward less $\\beta$ KL")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, fontsize=10)
    return figure


def plot_pair_paths(paths: dict[str, pd.DataFrame]) -> Figure:
    """Implicit rewards of the three completions while one pair's loss falls."""
    figure, panels = style.subplots(1, len(paths), sharey=True, height=3.7)
    for axes, (title, path) in zip(panels, paths.items(), strict=True):
        for look, name in zip(style.SERIES, ("chosen", "rejected", "bystander"), strict=False):
            axes.plot(path.step, path[name], **{**look, "marker": ""}, label=name)
        style.guide(axes, y=0, linestyle="-")
        axes.set_title(title)
    panels[0].set_ylabel("implicit reward\n(change of log-prob times $\\beta$)")
    panels[0].legend(loc="lower left")
    figure.supxlabel("gradient steps", fontsize="medium")
    return figure


def plot_imitation(error: float, horizons: Sequence[int]) -> Figure:
    """Expected steps off the path against the horizon, by how easily the student finds back."""
    names = ("never finds back", "one time in ten", "trained on its own states")
    figure, axes = style.subplots(height=3.7)
    for look, name, recovery in zip(style.SERIES, names, (0.0, 0.1, 1 - error), strict=False):
        costs = [imitation_cost(error, t, recovery) for t in horizons]
        axes.loglog(horizons, costs, **look, label=name)
    axes.set_xlabel("horizon $T$ (steps, log scale)")
    axes.set_ylabel("expected steps off the\npath (log scale)")
    axes.legend(loc="upper left")
    return figure


def plot_projection(curves: pd.DataFrame) -> Figure:
    """The mixture and the best Gaussian in either direction."""
    figure, axes = style.subplots(height=3.5)
    axes.fill_between(curves.x, curves.mixture, color="#D9D9D9", linewidth=0)
    axes.annotate("teacher", (2.75, 0.12), color=style.QUIET)
    for direction, place in (("forward", (-0.9, 0.25)), ("reverse", (-1.35, 0.62))):
        axes.plot(curves.x, curves[direction], color=style.COLOURS[direction])
        style.note(
            axes, f"best in {style.LABELS[direction]}", place, colour=direction, va="baseline"
        )
    axes.set_ylim(bottom=0)
    axes.set(xlabel="x", ylabel="density")
    return figure


def plot_routing(table: pd.DataFrame) -> Figure:
    """Largest change of a log-prob against the size of a parameter step."""
    figure, axes = style.subplots(height=3.5)
    for look, name in zip(style.SERIES, ("replayed", "recomputed"), strict=False):
        shown = table[table[name] > 0]
        axes.loglog(shown["size"], shown[name], **look, label=f"routing {name}")
    axes.set_xlabel("standard deviation of the step (log scale)")
    axes.set_ylabel("largest change of a\nlog-prob (nats, log scale)")
    axes.legend(loc="lower right")
    return figure


# What it decides.


@claim("S4-41")
def regularised_optimum() -> Finding:
    """2000 random policies against the identity; the optimum; Bradley and Terry's odds."""
    problem = random_preferences(8, beta=0.5, seed=0)
    policies = (2 * normal_draws((2000, 8), seed=1)).log_softmax(-1)
    optimum, value = problem.optimum, objective(policies, problem)
    normaliser = log_partition(problem.rewards, problem.ref_logp, tau=problem.beta)
    identity = -problem.beta * reverse_kl(policies, optimum.expand_as(policies)) + normaliser
    implied = implicit_reward(optimum, problem.ref_logp, beta=problem.beta)
    errors = {
        "identity_error": largest(value - identity),
        "reward_error": largest(implied + normaliser - problem.rewards),
        "odds_error": largest(bradley_terry(implied) - bradley_terry(problem.rewards)),
    }
    figures = {
        "smallest_loss": (objective(optimum, problem) - value).min().item(),
        "flipped_identity_error": largest(value + identity),
    }
    holds = max(errors.values()) < EXACT and figures["smallest_loss"] > 0
    return Finding(judge(holds, False), errors | figures)


@claim("S4-43")
def dpo_loss_and_gradient() -> Finding:
    """Autograd through the loss against the printed gradient, by the logits of 200 policies."""
    logits, ref_logits = normal_draws((2, 200, 6), seed=0)
    ref_logp, beta = ref_logits.log_softmax(-1), 0.3

    def pair(z: Tensor) -> tuple[Tensor, ...]:
        logp = z.log_softmax(-1)
        return logp[:, 0], logp[:, 1], ref_logp[:, 0], ref_logp[:, 1]

    by_autograd = grad(lambda z: dpo_loss(*pair(z), beta=beta).sum())(logits)
    weight = dpo_gradient_weight(*pair(logits), beta=beta).unsqueeze(-1)
    scores = torch.eye(6, dtype=torch.float64)[:2, None] - logits.softmax(-1)
    printed = -weight * (scores[0] - scores[1])
    shift = logits - ref_logits
    value = torch.log1p((-beta * (shift[:, 0] - shift[:, 1])).exp())
    figures = {
        "value_error": largest(dpo_loss(*pair(logits), beta=beta) - value),
        "gradient_error": largest(by_autograd - printed),
        "flipped_error": largest(by_autograd + printed),
    }
    exact = max(figures["value_error"], figures["gradient_error"]) < EXACT
    return Finding(judge(exact, False), figures)


@claim("S4-44")
def dpo_needs_no_samples_of_the_policy() -> Finding:
    """Minimiser of the population loss under six pair distributions; few parameters; few pairs."""
    problem = random_preferences(6, beta=0.5, seed=0)
    features = normal_draws((6, 2), seed=1)
    table = data_table(problem, features).set_index("pairs")
    near, far = "the optimum's own samples", "what the reference avoids"
    number, data = 2000, {}
    for name in (near, far):
        weights, kls = labelled(pair_distributions(problem)[name], problem.rewards), []
        for seed in range(5):
            generator = torch.Generator().manual_seed(seed)
            drawn = weights.flatten().multinomial(number, replacement=True, generator=generator)
            counts = torch.bincount(drawn, minlength=weights.numel()).to(weights.dtype) / number
            # a ridge of one pseudo-comparison keeps data finite that separates
            fitted = fit(problem, counts.view_as(weights), ridge=1 / number)
            kls.append(reverse_kl(fitted, problem.optimum))
        data[name] = median(torch.stack(kls))
    figures = {
        "largest_kl_connected": table.kl.drop("two islands").max(),
        "kl_two_islands": table.kl["two islands"],
        "limited_objective_reference": table.objective_limited["the reference's samples"],
        "limited_objective_avoided": table.objective_limited[far],
        "limited_objective_optimum": table.objective_limited[near],
        "kl_2000_pairs_near": data[near],
        "kl_2000_pairs_far": data[far],
    }
    return Finding(judge(figures["largest_kl_connected"] > EXACT, False), figures)


@claim("S3-26")
def mirror_descent_step() -> Finding:
    """The surrogate's zero and gradient, the step's length, the mean as a stand-in; and recorded
    runs."""
    problem = random_preferences(6, beta=0.5, seed=3)
    start, rewards, tau = problem.ref_logp, problem.rewards, 0.5
    policy = start.exp()
    mean, baseline = policy @ rewards, log_partition(rewards, start, tau=tau)

    def loss(logits: Tensor, baseline: Tensor) -> Tensor:
        expected = baseline.expand_as(rewards)
        return policy @ mirror_descent_loss(
            logits.log_softmax(-1), start, rewards, expected, tau=tau
        )

    optimum = reverse_kl_optimum(rewards, start, beta=tau)
    at_start = grad(loss)(start, baseline)
    lengths = [
        reverse_kl(reverse_kl_optimum(rewards, start, beta=t), start).item()
        for t in (0.25, 0.5, 1.0, 2.0)
    ]
    figures = {
        "loss_at_optimum": loss(optimum, baseline).item(),
        "gradient_error": largest(at_start + 2 * tau * policy * (rewards - mean)),
        "step_kl_tau_025": lengths[0],
        "step_kl_tau_2": lengths[-1],
        "mean_stand_in_gradient": grad(loss)(optimum, mean).norm().item(),
    }
    finals = recorded("objectives").finals
    for metric in ("accuracy", "reverse_kl"):
        gain = difference(finals, "mirror_descent", "grpo", metric)
        figures |= gain.figures(f"trained_{metric}")
    identities = max(figures["loss_at_optimum"], figures["gradient_error"]) < EXACT
    conservative = all(a > b for a, b in itertools.pairwise(lengths))
    return Finding(judge(identities and conservative, identities), figures)


@claim("S4-xa")
def chosen_and_rejected_fall_together() -> Finding:
    """Gradient descent on one pair, the same data throughout, with and without a bystander."""
    models = {"no_overlap": bystander(0.0), "overlap": bystander(2.0)}
    ends = {
        name: pair_path(model, beta=0.5, rate=0.5, steps=60).iloc[-1]
        for name, model in models.items()
    }
    figures = {
        "chosen_no_overlap": ends["no_overlap"].chosen,
        "chosen_overlap": ends["overlap"].chosen,
        "rejected_overlap": ends["overlap"].rejected,
        **{f"slope_{name}": chosen_slope(model) for name, model in models.items()},
    }
    depends_on_sampler_only = figures["chosen_no_overlap"] * figures["chosen_overlap"] > 0
    both = figures["chosen_overlap"] < 0 < figures["chosen_no_overlap"]
    return Finding(judge(depends_on_sampler_only, both), figures)


@claim("S4-xc")
def sft_term_as_a_remedy() -> Finding:
    """Minimiser with an SFT term on the preferred answers, for pairs from near and from far."""
    problem = random_preferences(6, beta=0.5, seed=0)
    pairs = pair_distributions(problem)
    near, far = (
        labelled(pairs[name], problem.rewards)
        for name in ("the optimum's own samples", "what the reference avoids")
    )
    fitted = {
        "kl_without_near": fit(problem, near),
        "kl_without_far": fit(problem, far),
        "kl_near": fit_with_sft(problem, near, weight=0.1),
        "kl_far": fit_with_sft(problem, far, weight=0.1),
    }
    kls = {name: reverse_kl(policy, problem.optimum).item() for name, policy in fitted.items()}
    without = max(kls.pop("kl_without_near"), kls.pop("kl_without_far"))
    return Finding(judge(max(kls.values()) < 1e-6, False), {"kl_without": without, **kls})


@claim("S1-4")
def ppo_compares_with_a_critic() -> Finding:
    """GAE with an exact critic against Q - V, and against the return of a reference's answers."""
    sequences = enumerate_sequences(2, 3)
    generator = torch.Generator().manual_seed(0)
    logits, ref_logits = torch.randn(2, 7, 2, generator=generator, dtype=torch.float64)
    rewards = torch.rand(8, generator=generator, dtype=torch.float64)
    probability = sequence_probability(logits, sequences)
    reference = sequence_probability(ref_logits, sequences) @ rewards

    whole = by_token(rewards, sequences)
    values = state_average(whole, logits, sequences)[sequences.states]
    last_only = F.pad(rewards[:, None], (2, 0))
    sampled = generalised_advantage(last_only, values, sequences.mask, lam=1.0)
    by_action = state_average(sampled, logits, sequences, by_action=True)
    figures = {
        "gae_error": largest(by_action - advantage_table(whole, logits, sequences)),
        "mean_advantage": (probability @ sampled[:, 0]).abs().item(),
        "mean_against_reference": (probability @ (rewards - reference)).item(),
    }
    is_critic = max(figures["gae_error"], figures["mean_advantage"]) < EXACT
    is_reference = abs(figures["mean_against_reference"]) < EXACT
    return Finding(judge(is_reference, not is_critic), figures)


@claim("S3-14")
def covering_and_seeking() -> Finding:
    """One Gaussian fitted to two bumps and to two that overlap, in both directions."""
    found = fits(mixture(), starts=(-2.0, 2.0)).set_index(["direction", "start"])
    forward, left, right = (
        found.loc[key] for key in (("forward", -2.0), ("reverse", -2.0), ("reverse", 2.0))
    )
    overlapping = fits(mixture(means=(-0.4, 0.4)), starts=(0.0,))["mean"]
    figures = {
        "forward_mean": forward["mean"],
        "forward_std": forward["std"],
        "reverse_mean": left["mean"],
        "reverse_std": left["std"],
        "reverse_kl": left["kl"],
        "reverse_other_minimum": right["kl"],
        "overlapping_mean_gap": abs(overlapping[0] - overlapping[1]),
    }
    covers = abs(figures["forward_mean"] + 0.8) < 1e-3 and figures["forward_std"] > 1.5
    seeks = abs(figures["reverse_mean"] + 2) < 0.01 and figures["reverse_std"] < 0.6
    seeks_always = figures["overlapping_mean_gap"] > 0.1
    return Finding(judge(covers and seeks and seeks_always, covers and seeks), figures)


@claim("S3-32")
def keep_routing() -> Finding:
    """Log-probs of a small top-1 mixture by replayed and by new routing; and bandits trained
    through one, with a noisy sampler and without."""
    table = routing_drift([1e-4, 1e-3, 1e-2], seeds=4).set_index("size")
    figures = {
        "replayed_at_1e4": table.replayed[1e-4],
        "replayed_at_1e2": table.replayed[1e-2],
        "recomputed_at_1e2": table.recomputed[1e-2],
        "replayed_growth": table.replayed[1e-2] / table.replayed[1e-4],
        "flipped_at_1e2": table.flipped[1e-2],
    }
    options = {"seeds": range(200, 220), "updates": 24, "states": 16}
    for name, noise in (("trained_noisy", 0.3), ("trained_same_router", 0.0)):
        ways = routed_bandits.ROUTINGS
        curves = pd.concat(
            routed_bandits.train_bandits(way, noise=noise, **options) for way in ways
        )
        late = curves.query("update >= 16")
        finals = late.groupby(["variant", "seed"], as_index=False).mean()
        figures |= difference(finals, *ways, "reward").figures(name)
    linear = 80 < figures["replayed_growth"] < 125
    jumps = figures["recomputed_at_1e2"] > 10 * figures["replayed_at_1e2"]
    return Finding(judge(linear and jumps, False), figures)
