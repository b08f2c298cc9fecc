"""The GRPO ablation: a preset to tidy tables, one row per member and logging window.

A tidy table has one row per member and logging window: the member's arm (``arm``,
``kl_estimator``, ``kl_placement``, ``kl_weighting``, ``beta``), its ``seed``, the window's first
``update``, and one column per metric of :data:`analysis.training.metrics.METRICS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch

from analysis.experiments import statistics
from analysis.experiments.ablations.memory import members_that_fit
from analysis.experiments.ablations.presets import Preset
from analysis.experiments.ablations.settings import PopulationConfig, setting_of
from analysis.experiments.ablations.stamp import Stamp, current_stamp
from analysis.training.config import Member
from analysis.training.metrics import METRICS
from analysis.training.records import Failure, RunRecord
from analysis.training.setting import Setting
from analysis.training.trainer import PopulationTrainer

#: Most members trained at once. Results do not depend on it; memory and cache use do.
CHUNK = 24

ARM_COLUMNS = ("arm", "kl_estimator", "kl_placement", "kl_weighting", "beta")
MEMBER_COLUMNS = (*ARM_COLUMNS, "seed")

#: What the predictions compare, as (arm, other arm, metric).
COMPARISONS = (
    ("k1_loss", "none", "reverse_kl"),
    ("k2_loss", "exact_loss", "reverse_kl"),
    ("k1_reward", "k2_loss", "reverse_kl"),
    ("k3_loss", "k2_loss", "reverse_kl"),
    ("k3_loss", "k2_loss", "forward_kl"),
    ("k2_reward", "k1_reward", "reverse_kl"),
    ("k3_reward", "k1_reward", "reverse_kl"),
    ("k2_loss", "none", "reverse_kl"),
    ("k1_loss", "none", "accuracy"),
    ("k2_loss", "none", "accuracy"),
    ("k3_loss", "none", "accuracy"),
    ("k1_reward", "none", "accuracy"),
    ("exact_loss", "none", "accuracy"),
    ("k2_reward", "none", "accuracy"),
    ("k3_reward", "none", "accuracy"),
    ("k3_loss", "k2_loss", "accuracy"),
)


class Ablation(NamedTuple):
    """What a preset gave."""

    preset: Preset
    curves: pd.DataFrame  #: tidy, one row per member and logging window
    failures: tuple[Failure, ...]  #: members by their place in ``preset.members``
    wall_seconds: float
    stamp: Stamp  #: source, device and versions at the start of the run


def run(preset: Preset, *, device: torch.device | str = "cpu", progress: bool = False) -> Ablation:
    """Train the population of a preset, ``CHUNK`` members at a time or as many as memory holds.

    Raises:
        ValueError: a pretrained model or an optional package of the preset cannot be had.
    """
    stamp = current_stamp(preset.config, device)
    setting = setting_of(preset.config, device)
    records = train(preset.config, preset.members, setting, progress=progress)
    curves = pd.concat([tidy(record) for record in records], ignore_index=True)
    failures = tuple(failure for record in records for failure in record.failures)
    return Ablation(preset, curves, failures, sum(r.wall_seconds for r in records), stamp)


def train(
    config: PopulationConfig,
    members: Sequence[Member],
    setting: Setting,
    *,
    progress: bool = False,
) -> list[RunRecord]:
    """Train members, ``CHUNK`` at a time or as many as memory holds.

    Returns:
        One record per chunk, in the order of ``members``; its failures name members by their place
        in the whole.
    """
    chunk = min(CHUNK, members_that_fit(config, str(setting.start.device)) or CHUNK)
    records = []
    for first in range(0, len(members), chunk):
        trainer = PopulationTrainer(config, members[first : first + chunk], setting)
        record = trainer.run(progress=progress)
        failures = tuple(f._replace(member=f.member + first) for f in record.failures)
        records.append(record._replace(failures=failures))
    return records


def tidy(record: RunRecord) -> pd.DataFrame:
    """One row per member and logging window, members in their order."""
    frames = []
    for row, member in enumerate(record.members):
        arm = member.arm
        axes = {f"kl_{name}": value for name, value in arm.kl.at_one_state.items()}
        fields = {"arm": arm.name, **axes, "beta": arm.beta, "seed": member.seed}
        values = {name: record.metrics[name][:, row] for name in METRICS}
        frames.append(pd.DataFrame({**fields, "update": record.updates, **values}))
    return pd.concat(frames, ignore_index=True)[[*MEMBER_COLUMNS, "update", *METRICS]]


def final(curves: pd.DataFrame, *, share: float = 0.1) -> pd.DataFrame:
    """One row per member: the mean of each metric over the last ``share`` of the windows."""
    updates = np.sort(curves["update"].unique())
    last = updates[-max(1, round(share * len(updates))) :]
    kept = curves[curves["update"].isin(last)]
    return kept.groupby([*MEMBER_COLUMNS], sort=False, as_index=False)[list(METRICS)].mean()


def coarsen(curves: pd.DataFrame, updates: int) -> pd.DataFrame:
    """Curves with one row per member and ``updates`` updates: the mean of the windows that begin
    in each span, named by its first update."""
    spans = curves.assign(update=curves["update"] // updates * updates)
    keys = [*MEMBER_COLUMNS, "update"]
    return spans.groupby(keys, sort=False, as_index=False)[list(METRICS)].mean()


def at_beta(table: pd.DataFrame, beta: float) -> pd.DataFrame:
    """The rows of one beta, and those without a KL term.

    Raises:
        ValueError: if no row has that beta.
    """
    if beta not in set(table["beta"]):
        raise ValueError(f"no arm has beta={beta}: known are {sorted(set(table['beta']))}")
    return table[(table["beta"] == beta) | (table["kl_estimator"] == "none")]


def kl_cosines(curves: pd.DataFrame, beta: float) -> pd.DataFrame:
    """The metric ``kl_cosine`` at one beta: means over training, then over seeds.

    Returns:
        One row per arm with a KL term: ``arm``, and ``mean`` with its interval over seeds, ``low``
        to ``high``.
    """
    measured = at_beta(curves, beta).dropna(subset=["kl_cosine"])
    by_seed = measured.groupby(["arm", "seed"], sort=False)["kl_cosine"].mean().unstack()
    values = statistics.interval(by_seed.to_numpy())._asdict()
    return pd.DataFrame(values, index=by_seed.index).reset_index()
