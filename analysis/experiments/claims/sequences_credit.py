"""Claims on credit within a sequence: which token answers for the KL that comes later."""

from __future__ import annotations

import torch
from torch import Tensor

from analysis.experiments.chapters.gradients import Policies, random_tables
from analysis.experiments.chapters.sequences import EXACT, SPREAD, flat_error, quantile
from analysis.experiments.claims import Finding, decides, settle
from analysis.experiments.claims.recorded import difference, recorded
from analysis.kl.credit import (
    credit_moments,
    last_token_groups,
)
from analysis.kl.enumeration import expected_gradient, relative_error, reverse_kl_gradient
from analysis.kl.sequences import (
    Sequences,
    enumerate_sequences,
    expected_sequence_gradient,
    sequence_kl,
    sequence_kl_gradient,
    state_visits,
    token_logp,
)
from analysis.objectives.advantages import group_normalise, reward_to_go
from analysis.objectives.gae import gae_kl_gradient
from analysis.objectives.losses import policy_loss

BETA = 0.3


def _worlds(count: int, seed: int) -> list[tuple[Sequences, Policies, Tensor | None]]:
    """Fixed length, ragged, and shared parameters (only the last token is seen)."""
    fixed, ragged = enumerate_sequences(3, 4), enumerate_sequences(4, 3, eos=3)
    groups = last_token_groups(fixed, 3)
    shared = Policies(
        *(
            torch.randn(
                count, 4, 3, generator=torch.Generator().manual_seed(seed + k), dtype=torch.float64
            )[:, groups]
            for k in (5, 6)
        )
    )
    return [
        (fixed, random_tables(fixed, 3, count, spread=SPREAD, seed=seed), None),
        (ragged, random_tables(ragged, 4, count, spread=SPREAD, seed=seed + 1), None),
        (fixed, shared, groups),
    ]


@decides("S4-12")
def k1_in_reward_is_k2_as_loss() -> Finding:
    """Both expected gradients on three kinds of sequences, then stale, normalised and clipped.

    The route is the sum over sequences; the referee is autograd through the sequence KL.
    """
    same, k2_error, to_go_error = [], [], []
    for sequences, tables, groups in _worlds(count=20, seed=0):
        for logits, ref_logits in zip(*tables, strict=True):
            exact = sequence_kl_gradient(logits, ref_logits, sequences)
            k2 = expected_sequence_gradient(logits, ref_logits, sequences, estimator="k2")
            costs = token_logp(logits, sequences) - token_logp(ref_logits, sequences)
            immediate = credit_moments(logits, sequences, costs).mean
            to_go = credit_moments(logits, sequences, reward_to_go(costs)).mean
            same.append(flat_error(immediate, k2, groups))
            k2_error.append(flat_error(k2, exact, groups))
            to_go_error.append(flat_error(to_go, exact, groups))
    figures = {
        "immediate_gap": max(same),
        "k2_error": quantile(k2_error),
        "to_go_error": max(to_go_error),
        "stale_gap": _stale_gap(),
        "normalised_gap": _normalised_gap(),
        "clipped_share": _clipped_share(),
    }
    equivalent = max(figures["immediate_gap"], figures["to_go_error"]) < EXACT
    departs = max(v for k, v in figures.items() if k not in ("immediate_gap", "to_go_error"))
    return Finding(settle(equivalent and departs < EXACT, equivalent), figures)


def _stale_gap() -> float:
    """In the reward k1 keeps the sampler's log-ratio and a ratio weight; the k2 loss does not."""
    generator = torch.Generator().manual_seed(4)
    logits, ref, old = SPREAD * torch.randn(3, 20, 8, generator=generator, dtype=torch.float64)
    old = logits + 0.3 * old
    reward = expected_gradient(
        logits, ref, old, estimator="k1", placement="reward", weighting="detached"
    )
    loss = expected_gradient(logits, ref, old, estimator="k2")
    return relative_error(reward, loss).median().item()


def _normalised_gap() -> float:
    """The KL part of the gradient when the KL enters before group normalisation, against beta."""
    generator = torch.Generator().manual_seed(7)
    logits, ref, rewards = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    groups = torch.cartesian_prod(*[torch.arange(4)] * 3)
    policy = logits.softmax(-1)
    probability = policy[groups].prod(-1)
    score = torch.eye(4, dtype=torch.float64)[groups] - policy

    def gradient(values: Tensor) -> Tensor:
        advantages = group_normalise(values[groups], eps=0.0)
        return torch.einsum("n,ng,ngv->v", probability, advantages, score) / groups.shape[-1]

    penalty = logits.log_softmax(-1) - ref.log_softmax(-1)
    kl_part = gradient(rewards - BETA * penalty) - gradient(rewards)
    return relative_error(kl_part, -BETA * reverse_kl_gradient(logits, ref)).item()


def _clipped_share() -> float:
    """Share of sampled tokens whose KL in the reward is silenced by the PPO clip."""
    generator = torch.Generator().manual_seed(8)
    logits, ref, drift = torch.randn(3, 64, generator=generator, dtype=torch.float64)
    old = logits + 0.3 * drift
    logp, old_logp = logits.log_softmax(-1), old.log_softmax(-1)
    output = policy_loss(
        logp[None],
        old_logp=old_logp[None],
        advantages=(ref.log_softmax(-1) - old_logp)[None],
        mask=torch.ones(1, 64, dtype=torch.bool),
        kind="grpo_off_policy",
    )
    return (old_logp.exp() * output.clipped[0]).sum().item()


@decides("S1-11")
def kl_in_the_reward() -> Finding:
    """The gradient of the printed token reward under five kinds of credit, against autograd.

    The referee differentiates the mean outcome minus beta times the sequence KL as one finite sum.
    """
    sequences = enumerate_sequences(3, 4, eos=2)
    tables = random_tables(sequences, 3, 12, spread=SPREAD, seed=11)
    outcomes = torch.randn(
        len(sequences.mask), generator=torch.Generator().manual_seed(12), dtype=torch.float64
    )
    last = sequences.mask & ~torch.nn.functional.pad(sequences.mask, (0, 1))[:, 1:]
    errors: dict[str, list[float]] = {}
    for logits, ref in zip(*tables, strict=True):
        kl_exact = sequence_kl_gradient(logits, ref, sequences)
        whole = outcomes[:, None].expand(sequences.mask.shape)
        exact = credit_moments(logits, sequences, whole).mean - BETA * kl_exact
        costs = token_logp(logits, sequences) - token_logp(ref, sequences)
        rewards = torch.where(last, outcomes[:, None], 0.0) - BETA * costs
        everywhere = torch.where(sequences.mask, outcomes[:, None], 0.0) - BETA * costs
        found = {
            "to_go_error": (rewards, 1.0),
            "gamma_error": (rewards, 0.95),
            "immediate_error": (rewards, 0.0),
            "outcome_everywhere_error": (everywhere, 1.0),
        }
        for name, (values, gamma) in found.items():
            credit = reward_to_go(values, gamma=gamma)
            gradient = credit_moments(logits, sequences, credit).mean
            errors.setdefault(name, []).append(flat_error(gradient, exact))
        for critic in ("exact", "zero"):
            gradient = gae_kl_gradient(logits, ref, sequences, lam=0.95, critic=critic)
            errors.setdefault(f"gae_{critic}_critic_error", []).append(
                flat_error(gradient, kl_exact)
            )
    figures = {
        name: max(found) if max(found) < EXACT else quantile(found)
        for name, found in errors.items()
    }
    right = max(figures["to_go_error"], figures["gae_exact_critic_error"]) < EXACT
    return Finding(settle(right and max(figures.values()) < EXACT, right), figures)


@decides("S3-13")
def on_policy_distillation() -> Finding:
    """The printed loss against the sequence KL, and the gradients that per-token scores give; and
    recorded: accuracy with credit to go minus immediate, from a sparse and an easy start."""
    sequences = enumerate_sequences(3, 4, eos=2)
    tables = random_tables(sequences, 3, 20, spread=SPREAD, seed=21)
    identity, immediate, k2, to_go, differentiated = [], [], [], [], []
    for logits, teacher in zip(*tables, strict=True):
        exact = sequence_kl_gradient(logits, teacher, sequences)
        per_state = state_visits(logits, sequences) @ (
            logits.softmax(-1) * (logits.log_softmax(-1) - teacher.log_softmax(-1))
        ).sum(-1)
        identity.append((per_state - sequence_kl(logits, teacher, sequences)).abs().item())
        scores = token_logp(logits, sequences) - token_logp(teacher, sequences)
        immediate.append(flat_error(credit_moments(logits, sequences, scores).mean, exact))
        to_go.append(
            flat_error(credit_moments(logits, sequences, reward_to_go(scores)).mean, exact)
        )
        k2_loss = expected_sequence_gradient(logits, teacher, sequences, estimator="k2")
        k2.append(flat_error(k2_loss, exact))
        ones = torch.ones_like(scores)  # autograd through the printed log-ratio of a sample
        share = credit_moments(logits, sequences, ones).mean.norm() / exact.norm()
        differentiated.append(share.item())
    figures = {
        "identity_error": max(identity),
        "to_go_error": max(to_go),
        "immediate_error": quantile(immediate),
        "k2_error": quantile(k2),
        "differentiated_share": max(differentiated),
    }
    for name in ("distillation", "distillation_sparse"):
        trained = difference(recorded(name).finals, "opd_to_go", "opd_immediate", "own_accuracy")
        figures |= trained.figures("to_go_sparse" if name.endswith("sparse") else "to_go_easy")
    right = max(figures["identity_error"], figures["to_go_error"]) < EXACT
    return Finding(settle(right and figures["immediate_error"] < EXACT, right), figures)
