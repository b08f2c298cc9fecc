"""The inference engine's log-probs beside the trainer's: whose they are, and what moved them."""

from __future__ import annotations

import numpy as np

from kl_term.diagnosis.schema import Interval, Rollouts, Settings
from kl_term.diagnosis.statistics import sampled_kl, token_means

#: log(old/sampler) beyond a hundredth, which other kernels seldom reach.
ONE_SIGN = 0.01
#: A ratio of a token counts for no more in the means that say which column is the sampler's.
LARGEST_COUNTED = 100.0
#: Nats: a filler or a lost token counts for no more in how the engine's gap follows the advantage.
LARGEST_MOVE = 2.0


def measure_engine(rollouts: Rollouts) -> dict[str, float]:
    """Which policy the engine's log-probs are of.

    Returns:
        ``mismatch_above``, ``mismatch_below``: shares of tokens with log(old/sampler) beyond a
        hundredth; ``sampler_over_old_mean``: one, if the tokens were drawn from ``old_logp``
        whatever the engine reports; ``sampler_to_reference``, ``old_to_reference``: mean sizes of
        the log-ratios in the last third of the steps; ``mismatch_kl_early`` and
        ``mismatch_kl_late``: in the first step of the dump, and in that third;
        ``mismatch_kl_fresh``: in the first row of each completion, where some stand at several
        steps.
    """
    if rollouts.sampler_logp is None:
        return {}
    move = rollouts.old_logp - rollouts.sampler_logp
    found = {
        "mismatch_above": float((move > ONE_SIGN).mean()),
        "mismatch_below": float((move < -ONE_SIGN).mean()),
        "sampler_over_old_mean": float(np.exp(np.minimum(-move, np.log(LARGEST_COUNTED))).mean()),
    }
    step = np.zeros(rollouts.tokens, np.int64) if rollouts.step is None else rollouts.step
    steps = np.unique(step)
    early, late = step == steps[0], step >= steps[-max(1, len(steps) // 3)]
    for name, logp in (("sampler", rollouts.sampler_logp), ("old", rollouts.old_logp)):
        found[f"{name}_to_reference"] = float(np.abs(logp - rollouts.ref_logp)[late].mean())
    if len(steps) > 1:
        move = np.minimum(move, 50.0)
        chosen = {"early": early, "late": late}
        if not rollouts.units.fresh.all():
            chosen["fresh"] = rollouts.units.fresh[rollouts.sequence]
        found |= {f"mismatch_kl_{name}": sampled_kl(move[at]) for name, at in chosen.items()}
    return found


def engine_response(rollouts: Rollouts, settings: Settings) -> dict[str, Interval]:
    r"""How log(old/sampler) rises with the advantage: what lies between is training, or numerics.

    .. math:: \log\frac{\pi_{\mathrm{old}}}{\mu} \approx a + b A

    Updates move tokens along their advantage, of other completions too: to first order
    :math:`\mathbb{E}[A \log(\pi_{\mathrm{old}}/\mu)]` is what they gained. So b > 0 if the engine's
    weights are older, and zero if kernels or precision differ.
    """
    advantage = rollouts.advantage
    if rollouts.sampler_logp is None or advantage is None or not advantage.any():
        return {}
    move = np.clip(rollouts.old_logp - rollouts.sampler_logp, -LARGEST_MOVE, LARGEST_MOVE)
    move -= move.mean()
    square = advantage**2
    slope = np.divide(move, advantage, out=np.zeros_like(move), where=square > 0)
    unit = rollouts.by_prompt
    return token_means({"engine_response": slope}, unit, weight=square, **settings.bootstrap)
