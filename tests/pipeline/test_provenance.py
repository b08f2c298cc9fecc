"""A run stands only for the inputs it was made from."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from analysis.errors import Refused
from analysis.report.jobs import stale_jobs
from analysis.report.provenance import read_provenance
from analysis.report.publication import refresh_notebooks
from tests.pipeline.conftest import DEFAULTS, Workspace


def reasons(workspace: Workspace, **options: object) -> list[str]:
    return [reason for _, reason in stale_jobs(workspace.plan(**options))]


@pytest.fixture
def ran(workspace: Workspace) -> Workspace:
    workspace.notebook("01_a", "x = 1")
    workspace.run()
    assert reasons(workspace) == []
    return workspace


def edit_notebook(workspace: Workspace) -> None:
    workspace.notebook("01_a", "x = 2")


def edit_prose(workspace: Workspace) -> None:
    workspace.notebook("01_a", "x = 1", prose="# Other")


def edit_default(workspace: Workspace) -> None:
    workspace.notebook("01_a", "x = 1", parameters=DEFAULTS.replace("n: int = 1", "n: int = 2"))


def edit_package(workspace: Workspace) -> None:
    (workspace.project.package / "kl").mkdir()
    (workspace.project.package / "kl" / "new.py").touch()


def edit_results(workspace: Workspace) -> None:
    (workspace.project.results / "README.md").write_text("new")


def edit_lock(workspace: Workspace) -> None:
    workspace.project.lock.write_text("tqdm==2\n")


def edit_output(workspace: Workspace) -> None:
    path = workspace.project.runs / "01_a.ipynb"
    path.write_text(path.read_text().replace("x = 1", "x = 7"))


def tear_provenance(workspace: Workspace) -> None:
    path = workspace.project.runs / "01_a.json"
    path.write_bytes(path.read_bytes()[:100])


def age_schema(workspace: Workspace) -> None:
    path = workspace.project.runs / "01_a.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 0}))


def forge_parameters(workspace: Workspace) -> None:
    path = workspace.project.runs / "01_a.json"
    record = json.loads(path.read_text())
    record["parameters"]["n"] = 99
    path.write_text(json.dumps(record))


def lose_output(workspace: Workspace) -> None:
    (workspace.project.runs / "01_a.ipynb").unlink()


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (edit_notebook, "the notebook changed"),
        (edit_prose, "the notebook changed"),
        (edit_default, "the notebook changed"),
        (edit_package, "analysis/ changed"),
        (edit_results, "results changed"),
        (edit_lock, "requirements.lock or torch changed"),
        (edit_output, "edited after the run"),
        (tear_provenance, "no readable provenance"),
        (age_schema, "no readable provenance"),
        (forge_parameters, "no readable provenance"),
        (lose_output, "never run"),
    ],
)
def test_change_makes_the_run_stale(
    ran: Workspace, edit: Callable[[Workspace], None], reason: str
) -> None:
    edit(ran)
    (found,) = reasons(ran)
    assert reason in found
    ran.run()
    assert reasons(ran) == []


def test_other_parameters_are_another_run(ran: Workspace) -> None:
    assert reasons(ran, texts={"n": "1"}) == []
    (reason,) = reasons(ran, texts={"n": "2"})
    assert "other parameters" in reason


def test_stored_outputs_of_the_source_do_not_matter(ran: Workspace) -> None:
    path = ran.project.notebooks / "01_a.ipynb"
    notebook = json.loads(path.read_text())
    notebook["cells"][2]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "1"}]
    notebook["cells"][2]["execution_count"] = 5
    path.write_text(json.dumps(notebook))
    assert reasons(ran) == []


def test_provenance_says_what_ran(workspace: Workspace) -> None:
    workspace.notebook("01_a")
    workspace.run(texts={"profile": "full", "n": "3"})
    provenance = read_provenance(workspace.project.runs / "01_a.json")
    assert provenance is not None
    assert provenance.notebook == "notebooks/01_a.ipynb"
    assert provenance.profile == "full"
    assert provenance.parameters == {"n": 3, "rate": 0.5, "label": "a", "profile": "full"}
    assert set(provenance.inputs) == {"notebook", "parameters", "package", "results", "environment"}
    assert provenance.threads == 1 and provenance.device.startswith("CPU (")
    assert provenance.finished_at.endswith("+00:00")


def test_refresh_copies_outputs_and_leaves_the_run_current(ran: Workspace) -> None:
    source = ran.project.notebooks / "01_a.ipynb"
    assert refresh_notebooks(ran.project) == [source]
    assert json.loads(source.read_text())["cells"][2]["execution_count"] == 3
    assert reasons(ran) == []
    assert refresh_notebooks(ran.project) == []


def test_refresh_refuses_other_parameters(ran: Workspace) -> None:
    before = (ran.project.notebooks / "01_a.ipynb").read_bytes()
    ran.run(texts={"n": "2"})
    with pytest.raises(Refused, match="01_a: other parameters"):
        refresh_notebooks(ran.project)
    assert (ran.project.notebooks / "01_a.ipynb").read_bytes() == before
