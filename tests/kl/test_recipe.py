"""The recipe *An estimator* of CONTRIBUTING.md, followed in a copy of the package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kl_term.kl
from analysis.freshness import ROOT
from kl_term.kl import estimators

FUNCTION = '''
@checked
def cubic(logp: LogProbs, ref_logp: LogProbs) -> Values:
    """A square and a cube, to be taken away again."""
    ref_log_ratio = _ref_log_ratio(logp, ref_logp)
    return ref_log_ratio.square() / 2 - ref_log_ratio**3 / 6


def _slope_of_cubic(logp: Tensor, ref_logp: Tensor) -> Tensor:
    return (logp - ref_logp) - (logp - ref_logp).square() / 2


class TokenEstimator('''
ROW = """
    "cubic": TokenEstimator(cubic, _slope_of_cubic, None),
    "minimax01": """

#: What the new estimator is used for, each in one statement or a few.
USES = """
import inspect, torch
from kl_term.kl import cubic, kl_loss, kl_penalty
from kl_term import kl, style
from kl_term.kl.enumeration import expected_gradient
from kl_term.kl.potentials import kl_potential
from kl_term.kl.surrogates import gradient_coefficient
from kl_term.kl.term import KLTerm
from analysis.records.config import Run, StartConfig, TrainConfig
from analysis.records.variants import Variant
from analysis.records.config import PolicyConfig
from analysis.records.config import SortTask
from analysis.training.trainer import PopulationTrainer
from kl_term.cli.main import main

assert "cubic" in kl.__all__ and inspect.getdoc(cubic), "exported, and on the reference's page"
logp, ref_logp = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True), torch.full((3,), -1.25)
loss = kl_loss(logp, ref_logp, estimator="cubic")
(slope,) = torch.autograd.grad(loss.sum(), logp)
torch.testing.assert_close(slope, gradient_coefficient(logp, ref_logp, estimator="cubic"))
assert torch.equal(kl_penalty(logp, ref_logp, estimator="cubic"), loss.detach())
assert expected_gradient(logp, ref_logp, estimator="cubic").abs().max() > 0
try:
    kl_potential(logp, ref_logp, estimator="cubic")
except ValueError as error:
    assert "estimator must be one of ['k1'" in str(error)
else:
    raise AssertionError("it has no closed form")
look = style.line("cubic")
assert look["label"] == "cubic" and look["color"] not in map(style.COLOURS.get, ("k1", "k2", "k3"))
terms = [KLTerm(estimator="cubic"), KLTerm(estimator="cubic", placement="reward")]
config = TrainConfig(
    task=SortTask(num_digits=2), policy=PolicyConfig(width=4, num_layers=1, num_heads=1),
    start=StartConfig(updates=2), updates=2, num_prompts=1, group_size=2,
)
runs = [Run(variant=Variant(kl=term, beta=1.0), seed=0) for term in terms]
assert not PopulationTrainer(config, runs).run().failures
dump = "kl_term/diagnosis/examples/healthy.csv.gz"
assert main(["diagnose", dump, "--estimator", "cubic", "--json", "report.json"]) == 0
"""


def write(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


@pytest.mark.slow
def test_two_files_make_an_estimator_that_everything_knows(tmp_path: Path) -> None:
    package, ignored = tmp_path / "kl_term", shutil.ignore_patterns("__pycache__")
    for house in ("kl_term", "analysis"):
        shutil.copytree(ROOT / house, tmp_path / house, ignore=ignored)
    write(package / "kl/estimators.py", "\nclass TokenEstimator(", FUNCTION)
    write(package / "kl/estimators.py", '\n    "minimax01": ', ROW)
    write(package / "kl/names.py", "\nValue = Literal[", '\nValue = Literal["cubic", ')
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", USES], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["settings"]["kl"]["estimator"] == "cubic"
    assert "cubic" in {row["estimator"] for row in report["estimates"]}


def test_the_package_exports_every_estimator_with_a_value_and_no_other_name() -> None:
    assert all(getattr(kl_term.kl, name) is value for name, value in estimators.ESTIMATORS.items())
    with pytest.raises(AttributeError, match="no attribute 'cubic'"):
        kl_term.kl.cubic  # noqa: B018


@pytest.mark.parametrize(("named", "known"), [(["k1"], ["k1", "k2"]), (["k1", "k2"], ["k1"])])
def test_a_name_and_the_table_may_not_disagree(named: list[str], known: list[str]) -> None:
    with pytest.raises(ValueError, match=r"kl_term/kl/.* got 'k2'"):
        estimators._check_names(tuple(named), known)
