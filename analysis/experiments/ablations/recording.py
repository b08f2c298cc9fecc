"""A recorded ablation: tables in a folder, sealed by a manifest with the hash of each file.

``curves.csv`` holds the tidy curves, ``final.csv`` one row per member, both with six significant
digits. The folder appears whole or not at all. The recorded runs of the book are made by::

    python -c "from analysis.experiments.ablations.recording import record_all; record_all()"
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from pydantic import ValidationError

import analysis
from analysis.experiments.ablations.ablation import Ablation, final, run, tidy, train
from analysis.experiments.ablations.folders import read_manifest, read_table, write_folder
from analysis.experiments.ablations.presets import FULL, HALF_STEP, Preset
from analysis.experiments.ablations.settings import setting_of
from analysis.training.metrics import METRICS

#: Where recorded folders lie.
RESULTS = Path(analysis.__path__[0]).parent / "results"
#: The recorded runs of the book: ``FULL`` and ``HALF_STEP`` of
#: :mod:`analysis.experiments.ablations.presets`.
RECORDED = RESULTS / "grpo_tiny_cpu"
RECORDED_HALF_STEP = RESULTS / "grpo_tiny_cpu_half_step"
#: The first, trained once more on another make of processor.
RECORDED_ELSEWHERE = RESULTS / "grpo_tiny_cpu_elsewhere"


def folder_of(preset: str) -> Path:
    """Where the recording of a preset of the catalogue lies, on the CPU."""
    return {"full": RECORDED, "half_step": RECORDED_HALF_STEP}.get(
        preset, RESULTS / f"{preset}_cpu"
    )


class Recorded(NamedTuple):
    """A recorded ablation, read back."""

    preset: Preset
    curves: pd.DataFrame
    finals: pd.DataFrame
    manifest: dict[str, Any]

    @property
    def sources(self) -> tuple[str, ...]:
        """Hashes of the source it was computed with, and of each that has reproduced it since."""
        again = self.manifest.get("reproduced", [])
        return (self.manifest["source"], *(entry["source"] for entry in again))


def record_all() -> None:
    """Run the recorded presets on one thread, with a progress bar, and save them."""
    torch.set_num_threads(1)
    for directory, preset in ((RECORDED, FULL), (RECORDED_HALF_STEP, HALF_STEP)):
        save(run(preset, progress=True), directory)


def save(ablation: Ablation, directory: Path) -> None:
    """Write an ablation to ``directory``, replacing what it held."""
    tables = {"curves.csv": ablation.curves, "final.csv": final(ablation.curves)}
    preset, stamp = ablation.preset, ablation.stamp
    fields = {
        "preset": preset.name,
        "seeds": list(preset.seeds),
        "device": stamp.device,
        "versions": stamp.versions,
        "source": stamp.source,
        "wall_seconds": round(ablation.wall_seconds, 1),
        "failures": [failure._asdict() for failure in ablation.failures],
        "configuration": preset.model_dump(mode="json"),
    }
    write_folder(directory, tables, fields)


def load(directory: Path) -> Recorded:
    """Read a recorded ablation, after checking its files against the manifest.

    Raises:
        ValueError: a file is missing or is not the one that was recorded, or its configuration is
            no longer understood.
    """
    manifest = read_manifest(directory)
    curves, finals = (read_table(directory / name) for name in ("curves.csv", "final.csv"))
    try:
        preset = Preset.model_validate_json(json.dumps(manifest["configuration"]))
    except ValidationError:
        raise ValueError(
            f"{directory} was recorded by a version whose arms are not those of this one: record "
            f"it again with analysis sweep {manifest['preset']} --record {directory}"
        ) from None
    return Recorded(preset, curves, finals, manifest)


def rerun(recorded: Recorded, arm: str, beta: float, seed: int, *, windows: int) -> pd.DataFrame:
    """Train one recorded member again, alone, for its first logging windows; compare.

    Returns:
        One row per window and metric measured: ``recorded``, ``again`` and their ``difference``. On
        the recording machine the difference is the rounding to six digits. On another, sums differ
        in the last bit; from the first update at which that flips a sampled token, the runs part.

    Raises:
        ValueError: if the recording has no such member.
    """
    preset = recorded.preset
    members = [m for m in preset.members if (m.arm.name, m.arm.beta, m.seed) == (arm, beta, seed)]
    if not members:
        raise ValueError(f"no member {arm!r} with beta={beta} and seed={seed} in {preset.name!r}")
    config = preset.config.model_copy(update={"updates": windows * preset.config.log_every})
    (record,) = train(config, members, setting_of(config))
    both = compared(recorded.curves, tidy(record))
    return both[["update", "metric", "recorded", "again", "difference"]]


def compared(curves: pd.DataFrame, again: pd.DataFrame) -> pd.DataFrame:
    """Tidy curves of some members trained again, beside the recorded ones.

    Returns:
        One row per member, window and metric of ``again`` that either has measured: ``arm``,
        ``beta``, ``seed``, ``update``, ``metric``, ``recorded``, ``again`` and ``difference``, its
        absolute value. A number that only one of them has is NaN in the other.
    """
    keys = ["arm", "beta", "seed", "update"]
    tables = [
        table.astype({"beta": float}).melt(keys, list(METRICS), "metric")
        for table in (curves, again)
    ]
    both = tables[0].merge(
        tables[1], how="right", on=[*keys, "metric"], suffixes=("_recorded", "_again")
    )
    both = both.rename(columns={"value_recorded": "recorded", "value_again": "again"})
    both = both.dropna(subset=["recorded", "again"], how="all").reset_index(drop=True)
    both["difference"] = (both["recorded"] - both["again"]).abs()
    return both
