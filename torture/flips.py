"""One bit flipped in a file that was written, and whether its reader notices."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from analysis.records.manifests import verify_results
from analysis.report.project import Project, find_project
from analysis.report.provenance import RunFiles, ledger_problems, why_stale
from analysis.sweeps.checkpoints import Checkpoints
from analysis.sweeps.provenance import current_provenance
from analysis.sweeps.store import CorruptFile, Shard, Store, stored_runs
from analysis.training.environment_of import environment_of
from analysis.training.trainer import PopulationTrainer, TrainerState
from kl_term.errors import UserError
from torture.outcome import Outcome
from torture.pretended import run_without_kernel
from torture.sweeps import tiny

#: Small recordings of the book, and a chapter with its run.
RECORDINGS = ("untrained_cpu", "full_vocabulary_cpu", "process_graded_cpu")
CHAPTER = "03_k3_counterexample"


class Target(NamedTuple):
    """A kind of file, those there are, and whether their reader still believes them."""

    kind: str
    paths: list[Path]
    believed: Callable[[Path], bool]


def flips(count: int, chance: random.Random, say: Callable[[str], None]) -> list[Outcome]:
    """Flip ``count`` bits, one at a time, as often in each kind of file."""
    outcomes = []
    with tempfile.TemporaryDirectory() as root:
        targets = [*_store(Path(root, "store")), *_book(Path(root, "book"))]
        for number, target in enumerate(targets):
            assert all(map(target.believed, target.paths)), target.kind
            tried = count // len(targets) + (number < count % len(targets))
            silent = 0
            for _ in range(tried):
                path = chance.choice(target.paths)
                before = path.read_bytes()
                changed = bytearray(before)
                changed[chance.randrange(len(before))] ^= 1 << chance.randrange(8)
                path.write_bytes(changed)
                silent += target.believed(path)
                path.write_bytes(before)
            assert all(map(target.believed, target.paths)), target.kind
            outcomes.append(Outcome(f"bit flipped: {target.kind}", tried, 0, silent))
            say(f"{target.kind}: {tried} bits")
    return outcomes


def _store(root: Path) -> list[Target]:
    """Stored runs, and the newest checkpoint of a shard."""
    preset, store = tiny(), Store(root)
    config = preset.config.model_copy(update={"updates": 10})
    part = Shard(config=config, runs=preset.runs[:2])
    provenance = current_provenance(config)
    trainer = PopulationTrainer(config, part.runs, environment_of(config))
    checkpoints = Checkpoints(store.checkpoints, part)
    trainer.advance()
    checkpoints.save(trainer.state(), provenance)
    while trainer.done < config.updates:
        trainer.advance()
    runs = {}
    for one in stored_runs(trainer.record(), provenance):
        store.write(one)
        runs[store.path(config, one.run, provenance.source)] = one.run

    def is_read(path: Path) -> bool:
        try:
            return store.read(config, runs[path], provenance.source) is not None
        except CorruptFile:
            return False

    def is_taken_up(_: Path) -> bool:
        taker = _Taker()
        checkpoints.restore(taker, provenance, lambda path: path, lambda text: None)  # type: ignore[arg-type]
        return taker.taken

    return [
        Target("stored run", list(runs), is_read),
        Target("checkpoint", checkpoints.paths(), is_taken_up),
    ]


class _Taker:
    """Takes the place of a trainer that goes on from a checkpoint."""

    taken = False

    def restore(self, state: TrainerState) -> None:
        self.taken = True


def _book(root: Path) -> list[Target]:
    """Recordings, a page's run with its provenance, and the outcome of the ledger."""
    here, project = find_project(Path(__file__).parent), Project(root)
    for name in RECORDINGS:
        shutil.copytree(here.results / name, project.results / name)
    for folder in ("kl_term", "analysis", "notebooks"):
        shutil.copytree(
            here.root / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    (root / "book").mkdir()
    for path in (here.lock, here.claims):
        shutil.copy(path, root / path.relative_to(here.root))
    recorded = [path for path in project.results.rglob("*") if path.is_file()]
    inputs = run_without_kernel(
        project, CHAPTER, [p.relative_to(root).as_posix() for p in recorded]
    )
    run = RunFiles(project.runs, CHAPTER)

    def verified(_: Path) -> bool:
        try:
            verify_results(project.results)
        except UserError:
            return False
        return True

    def current(_: Path) -> bool:
        return why_stale(project, run, inputs) is None

    return [
        Target("recording's table", [p for p in recorded if p.suffix == ".csv"], verified),
        Target("recording's manifest", [p for p in recorded if p.suffix == ".json"], verified),
        Target("executed notebook", [run.output], current),
        Target("its provenance", [run.provenance], current),
        Target(
            "ledger's outcome",
            [project.runs / "claims.json"],
            lambda _: not ledger_problems(project),
        ),
    ]
