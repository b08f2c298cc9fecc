"""From measurements to findings, in the order in which they should be dealt with."""

from __future__ import annotations

from collections.abc import Callable

from analysis.errors import Refused
from analysis.experiments.diagnosis.causes_data import (
    advantage_sign,
    clamped_values,
    coarse_logprobs,
    counted_padding,
    few_sequences,
    identical_reference,
    impossible_tokens,
    kl_rewarded,
    misaligned,
    negative_kl,
    no_signal,
    ratio_mean,
)
from analysis.experiments.diagnosis.causes_samples import (
    masked_when_scored,
    old_not_sampler,
    other_sampler,
    starts_away,
    unsampled_end,
)
from analysis.experiments.diagnosis.causes_signs import (
    k1_in_loss,
    kl_maximised,
    kl_without_reward,
    penalty_in_reward,
    uniform_push,
)
from analysis.experiments.diagnosis.causes_training import (
    concentrated,
    dead_zone,
    far_from_reference,
    heavy_tail,
    heavy_weights,
    k3_gradient,
    mismatch,
    overflow,
    stale_samples,
    unseen_mass,
)
from analysis.experiments.diagnosis.measure import Measured
from analysis.experiments.diagnosis.schema import SEVERITIES, Finding

Cause = Callable[[Measured], Finding | None]

#: Most fundamental first: a wrong column makes every later number meaningless, a wrong sign makes
#: tuning meaningless, and only then do samples, tails and clamps matter.
CAUSES: dict[str, Cause] = {
    "counted-padding": counted_padding,
    "misaligned": misaligned,
    "masked-when-scored": masked_when_scored,
    "unsampled-end": unsampled_end,
    "impossible-tokens": impossible_tokens,
    "identical-reference": identical_reference,
    "negative-kl": negative_kl,
    "old-not-sampler": old_not_sampler,
    "other-sampler": other_sampler,
    "starts-away": starts_away,
    "coarse-logprobs": coarse_logprobs,
    "clamped-values": clamped_values,
    "ratio-mean": ratio_mean,
    "advantage-sign": advantage_sign,
    "kl-rewarded": kl_rewarded,
    "kl-maximised": kl_maximised,
    "k1-in-loss": k1_in_loss,
    "penalty-in-reward": penalty_in_reward,
    "uniform-push": uniform_push,
    "train-inference-mismatch": mismatch,
    "stale-samples": stale_samples,
    "overflow": overflow,
    "heavy-tail": heavy_tail,
    "unseen-mass": unseen_mass,
    "dead-zone": dead_zone,
    "k3-gradient": k3_gradient,
    "heavy-weights": heavy_weights,
    "concentrated": concentrated,
    "kl-without-reward": kl_without_reward,
    "far-from-reference": far_from_reference,
    "no-signal": no_signal,
    "few-sequences": few_sequences,
}


#: Where these are found, the columns are not what they say, and what follows from them is noise.
SPOILS_THE_REST = (
    "counted-padding",
    "masked-when-scored",
    "unsampled-end",
    "misaligned",
    "identical-reference",
    "negative-kl",
    "old-not-sampler",
)


def find(measured: Measured) -> list[Finding]:
    """All findings: errors before warnings before notes, each group most fundamental first.

    Where a column is not what it says, only findings about the data are given.
    """
    found = [finding for cause in CAUSES.values() if (finding := cause(measured)) is not None]
    spoilt = any(finding.code in SPOILS_THE_REST for finding in found)
    if spoilt:
        about_data = [
            *list(CAUSES)[: list(CAUSES).index("ratio-mean") + 1],
            "few-sequences",
        ]
        found = [finding for finding in found if finding.code in about_data]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def matching(findings: list[Finding], wanted: tuple[str, ...]) -> list[Finding]:
    """Findings whose code or severity is among ``wanted``.

    Raises:
        Refused: a name that is neither.
    """
    for name in wanted:
        if name not in CAUSES and name not in SEVERITIES:
            from difflib import get_close_matches

            near = get_close_matches(name, [*CAUSES, *SEVERITIES], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise Refused(f"--fail-on {name}: no such code or severity{hint}")
    return [f for f in findings if f.code in wanted or f.severity in wanted]
