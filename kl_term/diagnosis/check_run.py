"""Is the KL of this run what its log says? Copy this file: it needs numpy alone."""

import numpy as np


def check_run(logp, old_logp, ref_logp, mask):
    """Equally shaped log-probs of the sampled tokens; mask is 1 where a token counts."""
    logp, old_logp, ref_logp, mask = (np.float64(x) for x in (logp, old_logp, ref_logp, mask))
    if not logp.shape == old_logp.shape == ref_logp.shape == mask.shape:
        raise ValueError("logp, old_logp, ref_logp and mask must have one shape")
    if not (np.isin(mask, (0, 1)).all() and mask.any()):
        raise ValueError("mask must hold 0 or 1, and count a token")
    logp, old_logp, ref_logp = (x[mask == 1] for x in (logp, old_logp, ref_logp))
    log_ratio = logp - ref_logp
    k3 = np.expm1(-log_ratio) + log_ratio
    update = logp - old_logp
    return {
        "k1": log_ratio.mean(),  # the KL, unbiased if fresh; clearly below 0: wrong columns
        "k2": np.square(log_ratio).mean() / 2,
        "k3": k3.mean(),  # what GRPO logs; fresh and far below k1: misses rare tokens
        "missing mass": (log_ratio - k3).mean(),  # what the reference does elsewhere
        "staleness": (np.expm1(update) - update).mean(),  # fine below 0.01
        "largest update": np.exp(np.abs(update).max()),  # ratio of one token, either way
    }
