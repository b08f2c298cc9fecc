"""The recorded ablations as the site serves them to its explorer.

A Sphinx extension: beside the built pages it writes one script a recording, which the page loads
when a reader chooses it, and an index. They are scripts, not JSON, since a browser fetches no data
from a disk and the book opens there. The digits are those of ``results/``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit
from sphinx.application import Sphinx

from analysis.records import recording
from analysis.records.manifests import read_table
from analysis.records.metrics import METRICS as KNOWN_METRICS
from analysis.records.statistics import LEVEL, MIN_SEEDS
from analysis.report.methods import load_methods
from analysis.report.project import Project
from analysis.report.translation import is_translated
from analysis.studies.presets import PRESETS
from kl_term.files import replace_file

FOLDER = "_static/explore/runs"
CURVES = "curves.csv"
#: What the explorer offers, most asked for first; of a recording those that vary.
METRICS = (
    *("reverse_kl", "accuracy", "reward", "forward_kl", "k1", "k2", "k3", "entropy"),
    *("own_accuracy", "teacher_kl", "length", "gradient_norm", "clip_fraction", "ratio_ess"),
)
#: What is chosen where a page opens.
FIRST = "half_step_cpu"


def recordings(results: Path) -> list[Path]:
    """The folders of recorded curves, the one that opens first."""
    found = sorted(path.parent for path in results.glob(f"*/{CURVES}"))
    return sorted(found, key=lambda path: path.name != FIRST)


def run_data(folder: Path) -> dict[str, Any]:
    """One recording: ``values[metric][variant][seed][update]``, None where nothing was measured."""
    curves = read_table(folder / CURVES)
    keys = ["variant", "beta"]
    variants = curves[keys].drop_duplicates().to_dict("records")
    seeds, updates = (sorted(int(x) for x in set(curves[key])) for key in ("seed", "update"))
    variant = curves.groupby(keys, sort=False).ngroup()
    seed, update = (
        np.searchsorted(known, curves[key]) for known, key in ((seeds, "seed"), (updates, "update"))
    )
    values: dict[str, list[Any]] = {}
    for metric in METRICS:
        if metric not in curves or curves[metric].nunique() < 2:
            continue
        measured = curves[metric].to_numpy(float)
        grid = np.full((len(variants), len(seeds), len(updates)), None)
        grid[variant, seed, update] = np.where(np.isnan(measured), None, measured)
        values[metric] = grid.tolist()
    return {"variants": variants, "seeds": seeds, "updates": updates, "values": values}


def index(results: Path, shown: dict[str, str]) -> dict[str, Any]:
    """The recordings with what they are about, the metrics, and the quantiles of Student's t.

    Args:
        shown: preset -> ``page#label`` of the section about it.
    """
    listed = []
    for folder in recordings(results):
        preset = str(recording.manifest_of(folder)["preset"])
        says = (PRESETS[preset].__doc__ or "").strip().splitlines() if preset in PRESETS else []
        page = shown.get(preset, "").partition("#")[0]
        listed.append({"name": folder.name, "about": says[0] if says else preset, "page": page})
    freedom = range(MIN_SEEDS - 1, 100)
    quantiles = {d + 1: float(stdtrit(d, (1 + LEVEL) / 2)) for d in freedom}
    metrics = {name: KNOWN_METRICS[name] for name in METRICS}
    return {"recordings": listed, "metrics": metrics, "quantiles": quantiles}


def write_run_data(app: Sphinx, failure: Exception | None) -> None:
    """Write the scripts into the built site, once: editions in other languages share them."""
    if failure is not None or app.builder.format != "html" or is_translated(app):
        return
    project = Project(Path(app.srcdir))
    target = Path(app.outdir) / FOLDER
    target.mkdir(parents=True, exist_ok=True)
    for folder in recordings(project.results):
        replace_file(target / f"{folder.name}.js", _script(folder.name, run_data(folder)))
    about = index(project.results, load_methods(project).shown)
    replace_file(target / "index.js", _script("index", about))


def _script(name: str, content: dict[str, Any]) -> bytes:
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return f"klRuns.receive({json.dumps(name)},{text});\n".encode()


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension (called by Sphinx)."""
    app.connect("build-finished", write_run_data)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
