"""Is the KL of this run what its log says? Copy this file: it needs numpy alone."""

import numpy as np


def check_run(logp, old_logp, ref_logp, mask, completion=None):
    """Log-probs of the sampled tokens, a row a completion; mask is 1 where a token counts.

    Means are over all tokens given, in one division (``average`` says so); a mean of completions'
    means, as verl and OpenRLHF log a KL in the reward, is another number, and no KL. Errors are
    standard errors over completions; of flat arrays ``completion`` says which one each token is of,
    or each counts as one and errors are too small.
    """
    logp, old_logp, ref_logp, mask = (np.float64(x) for x in (logp, old_logp, ref_logp, mask))
    if not logp.shape == old_logp.shape == ref_logp.shape == mask.shape:
        raise ValueError("logp, old_logp, ref_logp and mask must have one shape")
    if not (np.isin(mask, (0, 1)).all() and mask.any()):
        raise ValueError("mask must hold 0 or 1, and count a token")
    unit = np.indices(mask.shape)[0] if completion is None else np.asarray(completion)
    _, unit = np.unique(np.broadcast_to(unit, mask.shape)[mask == 1], return_inverse=True)
    logp, old_logp, ref_logp = (x[mask == 1] for x in (logp, old_logp, ref_logp))
    count = unit.max() + 1

    def error(x):
        sums = np.bincount(unit, x - x.mean())
        return np.sqrt((sums**2).sum() * count / max(1, count - 1)) / len(x)

    log_ratio, update = logp - ref_logp, logp - old_logp
    k3 = np.expm1(-log_ratio) + log_ratio
    found = {
        "k1": log_ratio.mean(),  # unbiased on fresh tokens, but noisy near the reference
        "k1 error": error(log_ratio),
        "k2": np.square(log_ratio).mean() / 2,
        "k3": k3.mean(),  # unbiased too, if the sampler draws all that the reference does
        "k3 error": error(k3),
        "k1 - k3": (log_ratio - k3).mean(),  # of mean zero then: 1 less the mean of ref/policy
        "k1 - k3 error": error(log_ratio - k3),
        "staleness": (np.expm1(update) - update).mean(),  # fine below 0.01
        "largest update": np.exp(np.abs(update).max()),  # ratio of one token, either way
    }
    far, bound = found["k1 - k3"], 4 * found["k1 - k3 error"] + 1e-6
    if count < 20:
        verdict = "fewer than 20 completions: no verdict"
    elif found["staleness"] > 0.01:
        verdict = "stale: k1 and k3 are of no policy; use an estimator with a ratio"
    elif far < -bound:
        verdict = "not the policy's tokens, or columns exchanged"
    elif far > bound:
        verdict = "k3 misses what is rarely or never sampled: read k1"
    else:
        better = min("k1", "k3", key=lambda name: found[f"{name} error"])
        verdict = f"k1 and k3 agree within their errors: read {better}, whose own is smaller"
    return found | {"average": "over all tokens", "verdict": verdict}
