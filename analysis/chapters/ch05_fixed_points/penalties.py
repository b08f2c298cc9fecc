"""Where KL penalties alone end: along their flows, and sample by sample."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pandas as pd
import torch
from torch import Tensor

from analysis.chapters.ch05_fixed_points.descent import sampled_descent
from analysis.chapters.ch05_fixed_points.flows import GROWTH, flow_paths
from analysis.evidence.claims import share
from analysis.evidence.policies import Coefficient
from kl_term.kl.ascent import Geometry
from kl_term.kl.surrogates import ESTIMATORS
from kl_term.kl.term import KLTerm
from kl_term.objectives.advantages import leave_one_out

#: Below this share of its reference probability a token is lost, where the plain flow is slow.
LOST = 0.01

#: How an expected gradient is followed: in which geometry, with how many times the step.
FLOWS: dict[str, tuple[Geometry, int]] = {
    "natural flow": ("natural", 1),
    "plain flow": ("plain", 5),  # slower near the edges
}

#: How samples are followed: to which length the gradient of a batch is cut, as trainers do.
CLIPS = {"sampled": math.inf, "sampled, clipped": 1.0}
DYNAMICS = (*FLOWS, *CLIPS)


def centred(coefficient: Coefficient) -> Coefficient:
    """The coefficient less the mean of the batch's other samples: a leave-one-out baseline."""
    return lambda logp, ref_logp: leave_one_out(coefficient(logp, ref_logp))


def penalty_paths(
    ref_logits: Tensor, starts: Tensor, estimators: Iterable[str], *, frames: int = 64, seed: int
) -> dict[tuple[str, str], Tensor]:
    """Policies [frames + 1, S, V] under each penalty alone, by estimator and :data:`DYNAMICS`;
    samples less a leave-one-out baseline."""
    step_size, reference = 0.1, ref_logits.expand_as(starts)
    per_frame = round(sum(GROWTH**frame for frame in range(frames)) / frames)
    sampling = {"batch_size": 8, "seed": seed, "step_size": step_size}
    sampling |= {"steps": frames * per_frame, "checkpoints": frames}
    paths = {}
    for name in estimators:
        term, penalty = KLTerm(estimator=name, placement="reward"), centred(ESTIMATORS[name])
        for dynamics, (geometry, times_step) in FLOWS.items():
            options = {"frames": frames, "geometry": geometry}
            options |= {"step_size": times_step * step_size}
            paths[name, dynamics] = flow_paths(term, starts, ref_logits, **options)
        for dynamics, max_norm in CLIPS.items():
            options = {"max_norm": max_norm, **sampling}
            paths[name, dynamics] = sampled_descent(starts, reference, penalty, **options).exp()
    return paths


def survivors_table(paths: dict[tuple[str, str], Tensor], ref_logits: Tensor) -> pd.DataFrame:
    """How many tokens are left at the end of :func:`penalty_paths`, and how near a truncation.

    ``one``: the share of starts that end with one token; ``tokens``: the mean number left;
    ``distance``: from the reference renormalised on the tokens left, median over the ends with more
    than one; ``least``: the least ``pi / ref`` of any token.
    """
    reference = ref_logits.softmax(-1)
    rows = []
    for (estimator, dynamics), path in paths.items():
        policy = path[-1]
        left = policy > LOST * reference
        cut = torch.where(left, reference, 0.0)
        apart = (policy - cut / cut.sum(-1, keepdim=True)).abs().amax(-1)
        rows.append(
            {
                "estimator": estimator,
                "dynamics": dynamics,
                "one": share(left.sum(-1) == 1),
                "tokens": left.double().sum(-1).mean().item(),
                "distance": apart[left.sum(-1) > 1].nanmedian().item(),
                "least": (policy / reference).min().item(),
            }
        )
    return pd.DataFrame(rows)
