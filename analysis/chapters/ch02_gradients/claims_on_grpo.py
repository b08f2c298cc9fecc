"""Claims on the KL term of GRPO."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import grad

from analysis.evidence.claims import EXACT, Finding, claim, judge, largest
from analysis.evidence.far_policies import ragged, typical, worst
from analysis.evidence.length_weights import weight_errors
from analysis.evidence.policies import RAGGED, flat_error, normal_draws, pairs, random_tables
from kl_term.kl.credit import credit_moments
from kl_term.kl.divergences import reverse_kl
from kl_term.kl.sequences import sequence_probability, token_logp
from kl_term.kl.surrogates import kl_loss
from kl_term.kl.variance import estimator_means
from kl_term.objectives.losses import policy_loss


@claim("S0-4")
def grpo_names_the_reverse_kl() -> Finding:
    """Mean and expected gradient of k3 against both KLs, and what GRPO's ``1/|o|`` adds to the
    forward KL's, on ragged sequences."""
    far = random_tables(RAGGED, 3, 40, spread=1.5, seed=6)
    value = largest(estimator_means(*pairs())["k3"] - reverse_kl(*pairs()))
    figures = {
        "value_to_reverse": value,
        "gradient_to_forward": worst("k3", of="forward"),
        "gradient_to_reverse": typical("k3"),
        "off_under_mean": weight_errors(far, RAGGED).k3.median(),
    }
    return Finding(judge(max(value, worst("k3")) < EXACT, value < EXACT), figures)


@claim("S2-6")
def gradient_coefficient_of_grpo() -> Finding:
    """DeepSeekMath's eq. 3 by autograd against eq. 21 by hand, on ragged sequences, fresh and
    stale."""
    sequences, table, ref_table, old_table = ragged()
    advantages = normal_draws((len(sequences.tokens),), seed=7)
    ref_logp, lengths = token_logp(ref_table, sequences), sequences.mask.sum(-1, keepdim=True)

    def error(sampler: Tensor, *, sign: float = 1.0, mean: bool = True) -> float:
        old_logp, chance = token_logp(sampler, sequences), sequence_probability(sampler, sequences)

        def objective(at: Tensor) -> Tensor:
            logp, fixed = token_logp(at, sequences), {"mask": sequences.mask}
            loss = policy_loss(logp, old_logp=old_logp, advantages=advantages, **fixed).per_token
            penalty = kl_loss(logp, ref_logp, estimator="k3", **fixed)
            return chance @ ((-loss - 0.5 * penalty) / lengths).sum(-1)

        pull = torch.expm1(ref_logp - token_logp(table, sequences))
        coefficient = (advantages[:, None] + sign * 0.5 * pull) / (lengths if mean else 1)
        by_hand = credit_moments(table, sequences, coefficient, sampler).mean
        return flat_error(by_hand, grad(objective)(table))

    figures = {
        "fresh": error(table),
        "stale": error(old_table),
        "sign_flipped": error(table, sign=-1.0),
        "without_length": error(table, mean=False),
    }
    right = figures["fresh"] < EXACT < figures["sign_flipped"]
    return Finding(judge(right and figures["stale"] < EXACT, right), figures)
