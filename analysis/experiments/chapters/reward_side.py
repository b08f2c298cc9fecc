"""What the KL in the reward does to flows, steps and returns, enumerated: chapter 8."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import pandas as pd
import torch
from torch import Tensor

from analysis.experiments.chapters.group_orders import Prompts
from analysis.experiments.chapters.single_samples import sampled_descent
from analysis.kl.ascent import expected_ascent
from analysis.kl.credit import credit_moments
from analysis.kl.divergences import reverse_kl
from analysis.kl.enumeration import expected_gradient, relative_error
from analysis.kl.fixed_points import reverse_kl_optimum
from analysis.kl.mirror_steps import mirror_step
from analysis.kl.sequences import (
    Sequences,
    sequence_kl_gradient,
    sequence_probability,
    token_logp,
)
from analysis.kl.surrogates import ESTIMATORS
from analysis.objectives.credit import reward_to_go

#: A start has returned when its reverse KL from the reference is below this (nats).
RETURNED = 1e-3
#: A token has been given up when its probability is below this share of the reference's.
GIVEN_UP = 1e-6


def penalty_force(log_odds: Tensor, ref_probability: float) -> pd.DataFrame:
    """Push of each penalty on the log-odds of the first of two tokens, natural gradient.

    ``d/dt log(p / (1 - p)) = k(second) - k(first)``: positive raises the first token.
    """
    logits = torch.stack([log_odds, torch.zeros_like(log_odds)], -1)
    ref = torch.tensor([ref_probability, 1 - ref_probability], dtype=log_odds.dtype)
    logp = logits.log_softmax(-1)
    frames = []
    for name in ("k1", "k2", "k3"):
        penalty = ESTIMATORS[name](logp, ref.log().expand_as(logp))
        force = penalty[:, 1] - penalty[:, 0]
        frames.append(pd.DataFrame({"estimator": name, "log_odds": log_odds, "force": force}))
    return pd.concat(frames, ignore_index=True)


def flow_table(
    starts: Prompts, estimators: Iterable[str], *, steps: int, step_size: float
) -> pd.DataFrame:
    """Where training on the penalty alone ends: exact natural ascent, no reward, from each start.

    ``share_returned``: starts whose policy ends at the reference; ``share_collapsed``: starts that
    lose at least one token; ``rising``: mean share of tokens that the first step raises.
    """
    rows = []
    nothing = torch.zeros_like(starts.rewards)
    for name in estimators:
        end = expected_ascent(
            starts.logits,
            nothing,
            starts.ref_logits,
            beta=1.0,
            estimator=name,
            placement="reward",
            steps=steps,
            step_size=step_size,
        )
        lost = end < starts.ref_logits.log_softmax(-1) + torch.tensor(GIVEN_UP).log()
        raised = -expected_gradient(*starts[:2], estimator=name, placement="reward") > 0
        rows.append(
            {
                "estimator": name,
                "share_returned": _share(reverse_kl(end, starts.ref_logits) < RETURNED),
                "share_collapsed": _share(lost.any(-1)),
                "tokens_lost": lost.double().sum(-1).mean().item(),
                "rising": _share(raised),
                "fewest_rising": int(raised.sum(-1).min()),
                "survivors": survivor_error(end, starts.ref_logits, ~lost),
            }
        )
    return pd.DataFrame(rows)


def sample_table(
    starts: Prompts, *, shift: float, steps: int, step_size: float, seed: int
) -> pd.DataFrame:
    """Training on the penalty alone with one sampled token a step, no baseline: one run a start.

    ``k1 + shift`` is k1 made positive by a constant; ``constant`` is that constant alone. Columns:
    the smallest penalty any token has at the start, the reverse KL from the reference at the start
    and at the end (median, 90th percentile; nats) and the share of runs with a token below a
    twentieth of its reference probability.
    """
    logp, ref_logp = (x.log_softmax(-1) for x in starts[:2])
    penalties = {
        "k1": ESTIMATORS["k1"],
        "k1 + shift": lambda logp, ref_logp: logp - ref_logp + shift,
        "constant": lambda logp, ref_logp: torch.full_like(logp, shift),
        "k2": ESTIMATORS["k2"],
        "k3": ESTIMATORS["k3"],
    }
    rows = []
    for name, penalty in penalties.items():
        end = sampled_descent(
            starts.logits,
            starts.ref_logits,
            penalty,
            step_size=step_size,
            steps=steps,
            seed=seed,
        )[-1]
        kl = reverse_kl(end, starts.ref_logits)
        rows.append(
            {
                "penalty": name,
                "smallest": penalty(logp, ref_logp).min().item(),
                "kl_start": reverse_kl(starts.logits, starts.ref_logits).median().item(),
                "kl_end": kl.median().item(),
                "kl_end_p90": kl.quantile(0.9).item(),
                "share_low": _share((end - ref_logp < torch.tensor(0.05).log()).any(-1)),
            }
        )
    return pd.DataFrame(rows)


def survivor_error(logp: Tensor, ref_logits: Tensor, alive: Tensor) -> float:
    """Median distance of an end to the reference renormalised on its surviving tokens."""
    conditional = torch.where(alive, ref_logits, -torch.inf).log_softmax(-1)
    return (logp.exp() - conditional.exp()).abs().amax(-1).median().item()


def surrogate_curves(
    prompts: Prompts, products: Iterable[float], *, beta: float, iterations: int
) -> pd.DataFrame:
    """Median KL from the optimum over repeated mirror steps, for several ``step_size * beta``."""
    optimum = reverse_kl_optimum(prompts.rewards, prompts.ref_logits, beta=beta)
    rows = []
    for product in products:
        logp = prompts.ref_logits.log_softmax(-1)
        step = partial(
            mirror_step,
            ref_logits=prompts.ref_logits,
            rewards=prompts.rewards,
            beta=beta,
            step_size=product / beta,
        )
        for iteration in range(iterations + 1):
            kl = reverse_kl(logp, optimum).median().item()
            rows.append({"product": product, "iteration": iteration, "kl": kl})
            logp = step(logp)
    return pd.DataFrame(rows)


#: How the printed per-token reward can be credited, and PPO's own way.
CREDITS = ("own token only", "every token, to go", "last token, to go")


def folded_return_gradient(
    logits: Tensor,
    ref_logits: Tensor,
    rewards: Tensor,
    sequences: Sequences,
    *,
    beta: float,
    credit: str,
) -> Tensor:
    """[states, vocab]: exact ascent direction of a task reward [N] with the KL folded in.

    ``own token only`` weighs a token with ``R - beta l_t``, ``every token, to go`` passes that
    through the return, ``last token, to go`` gives the reward once, at the end.
    """
    mask = sequences.mask
    penalty = beta * (token_logp(logits, sequences) - token_logp(ref_logits, sequences))
    everywhere = torch.where(mask, rewards.unsqueeze(-1), 0.0)
    follows = torch.nn.functional.pad(mask[:, 1:], (0, 1))
    once = torch.where(mask & ~follows, rewards.unsqueeze(-1), 0.0)
    returns = {
        CREDITS[0]: everywhere - penalty,
        CREDITS[1]: reward_to_go(everywhere - penalty),
        CREDITS[2]: reward_to_go(once - penalty),
    }[credit]
    return credit_moments(logits, sequences, returns).mean


def folded_return_table(
    logits: Tensor, ref_logits: Tensor, rewards: Tensor, sequences: Sequences, *, beta: float
) -> pd.DataFrame:
    """Each credit's median relative error against the gradient of ``E[R] - beta KL``.

    Args:
        logits, ref_logits: [M, states, vocab], one table a case.
        rewards: [M, N], one a sequence.
        sequences, beta: as :func:`folded_return_gradient`.
    """
    rows = []
    for credit in CREDITS:
        errors = []
        for policy, ref, reward in zip(logits, ref_logits, rewards, strict=True):
            gradient = folded_return_gradient(
                policy, ref, reward, sequences, beta=beta, credit=credit
            )
            exact = regularised_sequence_gradient(policy, ref, reward, sequences, beta=beta)
            errors.append(relative_error(gradient.flatten(), exact.flatten()))
        rows.append({"credit": credit, "error": torch.stack(errors).median().item()})
    return pd.DataFrame(rows)


def regularised_sequence_gradient(
    logits: Tensor, ref_logits: Tensor, rewards: Tensor, sequences: Sequences, *, beta: float
) -> Tensor:
    """[states, vocab]: gradient of mean reward minus beta times the sequence KL, by autograd."""
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_(True)
        mean = (sequence_probability(leaf, sequences) * rewards).sum()
        (ascent,) = torch.autograd.grad(mean, leaf)
    return ascent - beta * sequence_kl_gradient(logits, ref_logits, sequences)


def _share(where: Tensor) -> float:
    return where.double().mean().item()
