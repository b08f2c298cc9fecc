"""A sweep of seconds: six runs in three shards. Imported by processes that tests kill."""

from __future__ import annotations

import io
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from analysis.records import recording
from analysis.records.config import PolicyConfig, SortTask, StartConfig, TeacherConfig, TrainConfig
from analysis.records.metrics import METRICS
from analysis.records.preset import Preset
from analysis.records.provenance import Provenance
from analysis.records.recording import Recording
from analysis.records.variants import Variant
from analysis.studies.presets.parts import NO_KL
from analysis.sweeps import in_process, pools, sweep
from analysis.sweeps.pools import LocalPool, Pool
from analysis.sweeps.progress import Progress
from analysis.sweeps.store import Store, StoredRun, run_record
from kl_term.kl.term import KLTerm

UPDATES = 24
CHECKPOINT_EVERY = 4
RUNS_PER_SHARD = 2


def make_tiny(
    updates: int = UPDATES, betas: tuple[float, ...] = (0.5,), name: str = "tiny"
) -> Preset:
    return Preset(
        name=name,
        config=TrainConfig(
            task=SortTask(num_digits=3, end_token=True, reward="graded"),
            policy=PolicyConfig(width=12, num_layers=1, num_heads=3),
            start=StartConfig(updates=2, batch_size=4),
            updates=updates,
            num_prompts=2,
            group_size=4,
            num_iterations=2,
            log_every=5,
        ),
        variants=(
            NO_KL,
            *(Variant(kl=KLTerm(estimator="k3"), beta=beta) for beta in betas),
            Variant(kl=KLTerm(estimator="k1", placement="reward"), beta=0.5),
        ),
        seeds=(0, 1),
        predictions=(),
    )


def two_digits(teacher_updates: int) -> Preset:
    """The preset ``distillation`` on two digits, so that a few updates teach something."""
    from analysis.studies.presets import make_preset  # not what the processes need

    wanted = make_preset("distillation", {"num_seeds": 2, "updates": 4})
    changes = {
        "task": SortTask(num_digits=2, end_token=True, max_fillers=2),
        "start": StartConfig(updates=30, fillers=(2, 2)),
        "teacher": TeacherConfig(start=StartConfig(updates=teacher_updates, fillers=(0, 0))),
    }
    return wanted.model_copy(update={"config": wanted.config.model_copy(update=changes)})


def short_llama(updates: int, variants: int | None = None) -> Preset:
    """The preset ``llama_smoke``, every update logged, of its first variants."""
    from analysis.studies.presets.language import llama_smoke

    preset = llama_smoke()
    config = preset.config.model_copy(update={"updates": updates, "log_every": 1})
    return preset.model_copy(update={"config": config, "variants": preset.variants[:variants]})


def trained_alone(
    recorded: Recording, variant: str, beta: float, seed: int, *, windows: int
) -> pd.DataFrame:
    """One recorded run trained alone for its first logging windows, beside what was recorded."""
    preset = recorded.preset
    config = preset.config.model_copy(update={"updates": windows * preset.config.log_every})
    variants = tuple(v for v in preset.variants if (v.name, v.beta) == (variant, beta))
    changes = {"config": config, "variants": variants, "seeds": (seed,)}
    again = in_process.run(preset.model_copy(update=changes))
    return recording.compared(recorded.curves, again.curves)


#: Of the sweeps in these tests; hashing the real source would be most of their time.
PROVENANCE = Provenance(source="a" * 64, device="cpu, tests", versions={"torch": torch.__version__})


class Heard(Progress):
    """Keeps what a sweep says, and how much it computed."""

    def __init__(self) -> None:
        self.stream = io.StringIO()
        super().__init__(self.stream)

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    @property
    def computed(self) -> int:
        return self._computed


def assert_same_bits(records: list[StoredRun], straight: Recording) -> None:
    """What was logged, to the bit."""
    preset = straight.preset
    assert [one.run for one in records] == list(preset.runs)
    logged = run_record(records).metrics
    windows = len(straight.curves) // len(records)
    for name in METRICS:
        expected = straight.curves[name].to_numpy().reshape(len(records), windows).T
        np.testing.assert_array_equal(logged[name], expected)


def assert_same_metrics(records: list[StoredRun], others: list[StoredRun]) -> None:
    """Of the same runs, to the bit."""
    assert [(r.config, r.run) for r in records] == [(r.config, r.run) for r in others]
    left, right = (run_record(side).metrics for side in (records, others))
    for name in METRICS:
        np.testing.assert_array_equal(left[name], right[name])


def sweep_tiny(
    folder: Path,
    heard: Heard,
    preset: Preset | None = None,
    *,
    workers: int = 1,
    pool: Pool | None = None,
) -> list[StoredRun]:
    return sweep.run_sweep(
        preset or make_tiny(),
        Store(folder),
        heard,
        pool or LocalPool(workers=workers),
        runs_per_shard=RUNS_PER_SHARD,
        checkpoint_every=CHECKPOINT_EVERY,
    )


def sweep_process(folder: Path, workers: int, sender: Connection) -> None:
    """A whole sweep in a process of its own: it says when it begins and how much it computed.

    The process is a fresh fork, so its workers may be forked from it: that takes no time.
    """
    sweep.source_of = lambda config: PROVENANCE.source
    pools._context = lambda: multiprocessing.get_context("fork")
    heard = Heard()
    sender.send(None)
    sweep_tiny(folder, heard, workers=workers)
    sender.send(heard.computed)
