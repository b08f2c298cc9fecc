"""Flows of penalties without a reward: natural, plain, and sampled, chapter 5."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pandas as pd
import torch
from torch import Tensor

from analysis.experiments.chapters.single_samples import centred, sampled_descent
from analysis.kl.ascent import Geometry, expected_ascent
from analysis.kl.surrogates import ESTIMATORS
from analysis.kl.term import KLTerm


def flow_paths(
    arm: KLTerm,
    starts: Tensor,
    ref_logits: Tensor,
    *,
    frames: int,
    growth: float,
    step_size: float,
    geometry: Geometry = "natural",
) -> Tensor:
    """[frames + 1, S, V] probabilities along the exact flow of an arm, with no reward at all.

    Each frame lasts ``growth`` times as long as the one before, from one step on: fine where the
    flow is fast, long enough for where it is slow.
    """
    path = [starts.log_softmax(-1)]
    for frame in range(frames):
        end = expected_ascent(
            path[-1],
            torch.zeros_like(starts),
            ref_logits.expand_as(starts),
            beta=1.0,
            steps=round(growth**frame),
            step_size=step_size,
            geometry=geometry,
            **arm.at_one_state,
        )
        path.append(end)
    return torch.stack(path).exp()


#: Below this share of its reference probability a token is lost, where the plain flow is slow.
LOST = 0.01


#: How an expected gradient is followed, and how its samples are.
DYNAMICS = ("natural flow", "plain flow", "sampled", "sampled, clipped")


def penalty_paths(
    ref_logits: Tensor,
    starts: Tensor,
    estimators: Iterable[str],
    *,
    frames: int = 64,
    growth: float = 1.1,
    step_size: float = 0.1,
    batch_size: int = 8,
    seed: int,
) -> dict[tuple[str, str], Tensor]:
    """Policies [frames + 1, S, V] under each penalty alone, by estimator and :data:`DYNAMICS`.

    The plain flow, slower near the edges, takes five times the step. Sampled runs draw
    ``batch_size`` tokens a step, less a leave-one-out baseline; clipped ones cut each gradient to
    length one, as trainers do.
    """
    times = {"frames": frames, "growth": growth}
    per_frame = round(sum(growth**frame for frame in range(frames)) / frames)
    paths = {}
    for name in estimators:
        arm = KLTerm(estimator=name, placement="reward")
        flows = [
            flow_paths(arm, starts, ref_logits, step_size=size, geometry=geometry, **times)
            for geometry, size in (("natural", step_size), ("plain", 5 * step_size))
        ]
        samples = [
            sampled_descent(
                starts,
                ref_logits.expand_as(starts),
                centred(ESTIMATORS[name]),
                step_size=step_size,
                steps=frames * per_frame,
                checkpoints=frames,
                seed=seed,
                batch_size=batch_size,
                max_norm=max_norm,
            ).exp()
            for max_norm in (math.inf, 1.0)
        ]
        paths |= {
            (name, dynamics): path
            for dynamics, path in zip(DYNAMICS, (*flows, *samples), strict=True)
        }
    return paths


def survivors_table(paths: dict[tuple[str, str], Tensor], ref_logits: Tensor) -> pd.DataFrame:
    """How many tokens are left at the end of :func:`penalty_paths`, and how near a truncation.

    Columns: ``one``, the share of starts that end with one token; ``tokens``, the mean number
    left; ``distance``, the median distance in probability to the reference renormalised on the
    tokens left, over the ends with more than one; ``least``, the least ``pi / ref`` of any token.
    """
    reference = ref_logits.softmax(-1)
    rows = []
    for (estimator, dynamics), path in paths.items():
        policy = path[-1]
        left = policy > LOST * reference
        cut = torch.where(left, reference, 0.0)
        apart = (policy - cut / cut.sum(-1, keepdim=True)).abs().amax(-1)
        several = left.sum(-1) > 1
        rows.append(
            {
                "estimator": estimator,
                "dynamics": dynamics,
                "one": (~several).double().mean().item(),
                "tokens": left.double().sum(-1).mean().item(),
                "distance": apart[several].median().item() if several.any() else math.nan,
                "least": (policy / reference).min().item(),
            }
        )
    return pd.DataFrame(rows)


def simplex_grid(resolution: int, margin: float = 0.1) -> Tensor:
    """[S, 3] logits of evenly spaced policies over three tokens, the outermost near the edges."""
    points = [
        (i + margin, j + margin, resolution - i - j + margin)
        for i in range(resolution + 1)
        for j in range(resolution + 1 - i)
    ]
    return torch.tensor(points, dtype=torch.float64).log().log_softmax(-1)
