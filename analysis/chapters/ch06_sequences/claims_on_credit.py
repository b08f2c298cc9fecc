"""Claims on the KL of later tokens: in the reward, in the loss, over the full vocabulary."""

from __future__ import annotations

from functools import partial

import pandas as pd
import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional

from analysis.evidence.claims import EXACT, Finding, claim, error_of, judge
from analysis.evidence.kl_estimates import kl_estimates
from analysis.evidence.policies import (
    RAGGED,
    SPREAD,
    Policies,
    flat_error,
    group_moments,
    log_ratios,
    measured,
    moved_logits,
    normal_draws,
    ragged_tables,
    random_tables,
)
from analysis.evidence.recorded import difference, recorded
from kl_term.kl.credit import (
    credit_moments,
    last_token_groups,
    tie_states,
    weighted_moments,
)
from kl_term.kl.divergences import reverse_kl
from kl_term.kl.enumeration import (
    expected_gradient,
    reverse_kl_gradient,
)
from kl_term.kl.full_vocabulary import full_vocabulary_gradients, markov_kl, visited_kl
from kl_term.kl.returns import reward_to_go
from kl_term.kl.scores import expected_score
from kl_term.kl.sequences import (
    Sequences,
    enumerate_sequences,
    expected_sequence_gradient,
    sequence_kl,
    sequence_kl_gradient,
    sequence_probability,
    state_visits,
    visited_kl_gradient,
)
from kl_term.objectives.advantages import group_normalise
from kl_term.objectives.gae import gae_kl_gradient
from kl_term.objectives.losses import policy_loss

BETA = 0.3


def _trees(count: int) -> list[tuple[Sequences, Policies, Tensor | None]]:
    """Fixed length, ragged, and shared parameters (only the last token is seen)."""
    fixed, ragged = enumerate_sequences(3, 4), enumerate_sequences(4, 3, eos=3)
    groups = last_token_groups(fixed, 3)
    shared = (normal_draws((count, 4, 3), seed=seed) for seed in (5, 6))
    return [
        (fixed, random_tables(fixed, 3, count, spread=SPREAD, seed=0), None),
        (ragged, random_tables(ragged, 4, count, spread=SPREAD, seed=1), None),
        (fixed, Policies(*(x[:, groups] for x in shared)), groups),
    ]


@claim("S4-12")
def k1_in_reward_is_k2_as_loss() -> Finding:
    """Both expected gradients on three kinds of sequences, then stale, normalised and clipped."""
    found = pd.concat(
        measured(partial(_credit_errors, sequences=sequences, groups=groups), *tables)
        for sequences, tables, groups in _trees(count=20)
    )
    logits, ref, drift = SPREAD * normal_draws((3, 20, 8), seed=4)
    stale = (logits, ref, logits + 0.3 * drift)  # in the reward k1 is the sampler's, and weighted
    reward = expected_gradient(*stale, estimator="k1", placement="reward", weighting="detached")
    figures = {
        "immediate_gap": found.immediate_gap.max(),
        "k2_error": found.k2_error.median(),
        "to_go_error": found.to_go_error.max(),
        "stale_gap": error_of(reward, expected_gradient(*stale, estimator="k2")),
        "normalised_gap": _normalised_gap(),
        "clipped_share": _clipped_share(),
    }
    equivalent = max(figures["immediate_gap"], figures["to_go_error"]) < EXACT
    departs = max(v for k, v in figures.items() if k not in ("immediate_gap", "to_go_error"))
    return Finding(judge(equivalent and departs < EXACT, equivalent), figures)


def _credit_errors(
    logits: Tensor, ref_logits: Tensor, sequences: Sequences, groups: Tensor | None = None
) -> dict[str, float]:
    """Errors of k1 in the reward and k2 as a loss, by shared parameters if groups are given."""
    costs = log_ratios(logits, ref_logits, sequences)
    gradients = {
        "kl": sequence_kl_gradient(logits, ref_logits, sequences),
        "k2": expected_sequence_gradient(logits, ref_logits, sequences, estimator="k2"),
        "immediate": credit_moments(logits, sequences, costs).mean,
        "to_go": credit_moments(logits, sequences, reward_to_go(costs)).mean,
    }
    if groups is not None:
        gradients = {name: tie_states(x, groups) for name, x in gradients.items()}
    return {
        "immediate_gap": flat_error(gradients["immediate"], gradients["k2"]),
        "k2_error": flat_error(gradients["k2"], gradients["kl"]),
        "to_go_error": flat_error(gradients["to_go"], gradients["kl"]),
    }


def _normalised_gap() -> float:
    """The KL part of the gradient when the KL enters before group normalisation, against beta."""
    logits, ref, rewards = normal_draws((3, 4), seed=7)
    normalise = partial(group_normalise, eps=0.0)
    penalised = rewards - BETA * (logits.log_softmax(-1) - ref.log_softmax(-1))
    with_kl, without = (group_moments(logits, x, 3, normalise).mean for x in (penalised, rewards))
    return flat_error(with_kl - without, -BETA * reverse_kl_gradient(logits, ref))


def _clipped_share() -> float:
    """Share of sampled tokens whose KL in the reward is silenced by the PPO clip."""
    logits, ref, drift = normal_draws((3, 64), seed=8)
    logp, old_logp = logits.log_softmax(-1), (logits + 0.3 * drift).log_softmax(-1)
    output = policy_loss(
        logp[None],
        old_logp=old_logp[None],
        advantages=(ref.log_softmax(-1) - old_logp)[None],
        mask=torch.ones(1, 64, dtype=torch.bool),
        kind="grpo_off_policy",
    )
    return (old_logp.exp() * output.clipped[0]).sum().item()


@claim("S1-11")
def kl_in_the_reward() -> Finding:
    """The gradient of the printed token reward under five kinds of credit, against autograd."""
    found = measured(_reward_errors, *ragged_tables(12, seed=11))
    figures = {name: x.max() if x.max() < EXACT else x.median() for name, x in found.items()}
    right = max(figures["to_go_error"], figures["gae_exact_critic_error"]) < EXACT
    return Finding(judge(right and max(figures.values()) < EXACT, right), figures)


def _reward_errors(logits: Tensor, ref: Tensor) -> dict[str, float]:
    mask = RAGGED.mask
    last = mask & ~functional.pad(mask, (0, 1))[:, 1:]
    outcomes = normal_draws((len(mask), 1), seed=12)
    kl_exact = sequence_kl_gradient(logits, ref, RAGGED)
    exact = credit_moments(logits, RAGGED, outcomes.expand(mask.shape)).mean - BETA * kl_exact
    costs = BETA * log_ratios(logits, ref, RAGGED)
    at_end, everywhere = (torch.where(at, outcomes, 0.0) - costs for at in (last, mask))
    credits = {
        "to_go_error": reward_to_go(at_end),
        "gamma_error": reward_to_go(at_end, gamma=0.95),
        "immediate_error": at_end,
        "outcome_everywhere_error": reward_to_go(everywhere),
    }
    errors = {
        name: flat_error(credit_moments(logits, RAGGED, credit).mean, exact)
        for name, credit in credits.items()
    }
    for critic in ("exact", "zero"):
        gradient = gae_kl_gradient(logits, ref, RAGGED, lam=0.95, critic=critic)
        errors[f"gae_{critic}_critic_error"] = flat_error(gradient, kl_exact)
    return errors


@claim("S3-13")
def on_policy_distillation() -> Finding:
    """The printed loss against the sequence KL, gradients of per-token scores, and recorded
    gains of credit to go."""
    tables = ragged_tables(20, seed=21)
    estimates = kl_estimates(tables, RAGGED).query("vocabulary == 'sampled'")
    error = estimates.groupby("credit").error
    found = measured(_distillation_loss, *tables)
    figures = {
        "identity_error": found.identity.max(),
        "to_go_error": error.max()["to_go"],
        "immediate_error": error.median()["immediate"],
        "k2_error": found.k2.median(),
        "differentiated_share": found.differentiated.max(),
    }
    for start in ("easy", "sparse"):
        preset = "distillation_sparse" if start == "sparse" else "distillation"
        trained = difference(recorded(preset).finals, "opd_to_go", "opd_immediate", "own_accuracy")
        figures |= trained.figures(f"to_go_{start}")
    right = max(figures["identity_error"], figures["to_go_error"]) < EXACT
    return Finding(judge(right and figures["immediate_error"] < EXACT, right), figures)


def _distillation_loss(logits: Tensor, teacher: Tensor) -> dict[str, Tensor | float]:
    """The printed loss's value, its k2 form, and autograd through a sample's log-ratio."""
    exact = sequence_kl_gradient(logits, teacher, RAGGED)
    printed = state_visits(logits, RAGGED) @ reverse_kl(logits, teacher)
    k2 = expected_sequence_gradient(logits, teacher, RAGGED, estimator="k2")
    of_sample = credit_moments(logits, RAGGED, torch.ones(RAGGED.mask.shape).double()).mean
    return {
        "identity": (printed - sequence_kl(logits, teacher, RAGGED)).abs(),
        "k2": flat_error(k2, exact),
        "differentiated": of_sample.norm() / exact.norm(),
    }


@claim("S4-14")
def full_vocabulary() -> Finding:
    """The full-vocabulary loss at one state, over sequences, at stale states, and as printed."""
    tables = ragged_tables(20, seed=31)
    found = measured(_full_vocabulary_errors, *tables, range(20))
    immediate = kl_estimates(tables, RAGGED).query("credit == 'immediate'")
    immediate = immediate.groupby("vocabulary").median(numeric_only=True)
    figures = {
        "state_error": found.state.max(),
        "visited_error": found.visited.max(),
        "printed_stale_error": found.printed.median(),
        "sequence_error": immediate.error["full"],
        "stale_states_error": found.stale.median(),
        "noise": immediate.samples["full"],
        "noise_sampled": immediate.samples["sampled"],
    }
    one_state = max(figures["state_error"], figures["visited_error"]) < EXACT
    everything = max(figures[k] for k in figures if k != "noise_sampled") < EXACT
    return Finding(judge(everything, one_state), figures)


def _full_vocabulary_errors(logits: Tensor, ref: Tensor, seed: int) -> dict[str, float]:
    by_autograd = grad(lambda z: reverse_kl(z, ref).sum())(logits)
    old = moved_logits(logits, 0.3, seed=seed)
    old_logp = old.log_softmax(-1)  # equation 22 as printed, with the policy's score
    printed = expected_score(logits, old_logp.exp() * (old_logp - ref.log_softmax(-1)))
    visited = visited_kl_gradient(logits, ref, RAGGED)
    gradients = full_vocabulary_gradients(logits, ref, RAGGED)
    mean = weighted_moments(sequence_probability(logits, RAGGED), gradients).mean
    return {
        "state": flat_error(reverse_kl_gradient(logits, ref), by_autograd),
        "printed": flat_error(printed, by_autograd),
        "visited": flat_error(mean, visited),
        "stale": flat_error(visited_kl_gradient(logits, ref, RAGGED, old), visited),
    }


@claim("S1-14")
def exact_kl_of_sequences() -> Finding:
    """Sequence KL over sequences, prefixes and Markov states, and the variance that is left."""
    sequences = enumerate_sequences(3, 5)
    groups = last_token_groups(sequences, 3)
    generator = torch.Generator().manual_seed(41)
    draw = partial(torch.randn, 2, 4, 3, generator=generator, dtype=torch.float64)

    def routes(shared: Tensor, shared_ref: Tensor) -> dict[str, Tensor]:
        logits, ref = shared[groups], shared_ref[groups]
        exact = sequence_kl(logits, ref, sequences)
        probability = sequence_probability(logits, sequences)
        full = visited_kl(logits, ref, sequences).sum(-1)
        k1 = log_ratios(logits, ref, sequences).sum(-1)
        variances = (probability @ (x - exact).square() for x in (full, k1))
        return {
            "prefix": (probability @ full - exact).abs(),
            "sampled": (probability @ k1 - exact).abs(),
            "markov": (markov_kl(shared, shared_ref, 5) - exact).abs(),
            "left": torch.div(*variances),
        }

    found = measured(routes, *zip(*(draw() for _ in range(10)), strict=True))
    figures = {f"{name}_error": found[name].max() for name in ("prefix", "sampled", "markov")}
    figures["variance_left"] = found.left.median()
    figures |= {"prefixes": float(sequences.num_states), "markov_states": float(groups.max() + 1)}
    sampling_works = figures["sampled_error"] < EXACT
    computed_exactly = max(figures["prefix_error"], figures["markov_error"]) < EXACT
    return Finding(judge(sampling_works and not computed_exactly, sampling_works), figures)


@claim("S4-3")
def state_distribution() -> Finding:
    """Total mass of the printed state distribution, and the actions drawn as printed."""
    logits = ragged_tables(1, seed=51).logits[0]
    visits = state_visits(logits, RAGGED)
    mean_length = sequence_probability(logits, RAGGED) @ RAGGED.mask.double().sum(-1)
    policy = logits.softmax(-1)
    distance = (policy - policy[0]).abs().sum(-1) / 2  # pi(.|s) against pi(.|x), x the empty prefix
    figures = {
        "mass": visits.sum().item(),
        "mean_length": mean_length.item(),
        "length_error": (visits.sum() - mean_length).abs().item(),
        "action_distance": (visits @ distance / visits.sum()).item(),
    }
    is_distribution = abs(figures["mass"] - 1) < EXACT
    always = is_distribution and figures["action_distance"] < EXACT
    return Finding(judge(always, is_distribution), figures)
