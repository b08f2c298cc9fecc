"""What the argument checks of the public functions cost: ``python -m benchmarks.guard``."""

from __future__ import annotations

import timeit
from functools import partial

import torch

from analysis.checks import trusted
from analysis.kl.estimators import k1, k3
from analysis.kl.surrogates import kl_loss, kl_penalty
from analysis.objectives.losses import policy_loss

ROUNDS, CALLS = 400, 4


def main() -> None:
    """One line a function and shape: microseconds without the checks, and what they add."""
    draw = torch.Generator().manual_seed(0)
    for shape in ((1, 1), (64, 512)):
        logp, ref_logp, old_logp = -torch.rand(3, *shape, generator=draw)
        mask = torch.ones(shape, dtype=torch.bool)
        off_policy = {"old_logp": old_logp, "mask": mask}
        for function, args, options in (
            (k1, (logp, ref_logp), {}),
            (k3, (logp, ref_logp), {}),
            (kl_penalty, (logp, ref_logp), {"mask": mask}),
            (kl_loss, (logp, ref_logp), {**off_policy, "weighting": "attached"}),
            (policy_loss, (logp,), {**off_policy, "advantages": logp[:, 0]}),
        ):
            bare, added = _microseconds(function, args, options)
            share = f"{added / bare:.1%}"
            print(f"{list(shape)!s:10} {function.__name__:12} {bare:8.2f} +{added:5.2f} ({share})")


def _microseconds(function, args, options) -> tuple[float, float]:
    """The shortest of alternating calls: without the checks, and the difference with them."""
    guarded = partial(function, *args, **options)
    bare = partial(function.__wrapped__, *args, **options)
    with_checks, without = [], []
    for _ in range(ROUNDS):
        with_checks.append(timeit.timeit(guarded, number=CALLS))
        with trusted():
            without.append(timeit.timeit(bare, number=CALLS))
    shortest = 1e6 * min(without) / CALLS
    return shortest, 1e6 * min(with_checks) / CALLS - shortest


if __name__ == "__main__":
    main()
