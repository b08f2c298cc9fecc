"""No data is run as code, and the workflows trust nobody more than they must."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDERS = ("kl_term", "analysis", "benchmarks", "torture")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
assert NOTEBOOKS and WORKFLOWS, "an empty parametrisation would pass"

#: Modules whose files run code when they are read.
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
#: Calls by their last name, with what makes them safe: a keyword and its value as written.
SAFE_WITH = {
    "torch.load": ("weights_only", "True"),
    "numpy.load": ("allow_pickle", "False"),
    "np.load": ("allow_pickle", "False"),
    "yaml.load": ("Loader", "_StrictLoader"),
}
NEVER = {
    *("eval", "exec", "os.system", "os.popen", "yaml.unsafe_load", "yaml.full_load"),
    *("pd.read_pickle", "pandas.read_pickle", "yaml.load_all", "yaml.unsafe_load_all"),
}
#: Jobs that may write, and what.
WRITES = {
    ("book", "deploy"): {"pages": "write", "id-token": "write"},
    ("release", "publish"): {"contents": "write", "id-token": "write", "attestations": "write"},
}


def faults(source: str) -> Iterator[str]:
    """What in a piece of Python could run code that came as data."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").partition(".")[0]}
        else:
            names = set()
        yield from (f"imports {name}" for name in sorted(names & PICKLES))
        if isinstance(node, ast.Call):
            called = dotted(node.func)
            keywords = {each.arg: dotted(each.value) for each in node.keywords}
            if called in NEVER or keywords.get("shell") == "True":
                yield f"calls {called}"
            if called in SAFE_WITH and keywords.get(SAFE_WITH[called][0]) != SAFE_WITH[called][1]:
                yield f"calls {called} without {'='.join(SAFE_WITH[called])}"


def dotted(node: ast.expr) -> str:
    """A name such as ``np.load``, or a constant, as written; empty for anything else."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Constant):
        parts.append(repr(node.value))
    elif isinstance(node, ast.Name):
        parts.append(node.id)
    else:
        return ""
    return ".".join(reversed(parts))


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "def f():\n    import dill as d",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.unsafe_load(text)",
        "pd.read_pickle(path)",
        "eval(text)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_what_runs_data_as_code_is_found(source: str) -> None:
    assert list(faults(source))
    assert not list(faults("torch.load(p, weights_only=True); policy.eval(); literal_eval(t)"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_source_runs_data_as_code(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    found = {str(path): list(faults(path.read_text(encoding="utf-8"))) for path in paths}
    assert paths and not {path: what for path, what in found.items() if what}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_notebook_runs_data_as_code(path: Path) -> None:
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert not list(faults("".join(cell["source"])))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_pinned_actions_and_may_only_read(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
    used = re.findall(r"uses:\s*(\S+)(.*)", text)
    for action, comment in used:
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), action
        assert re.search(r"# v\d", comment), f"{action}: say which version this is"
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job.get("permissions", {}) == WRITES.get((path.stem, name), {})
        assert job["timeout-minutes"] <= 180, name
        for step in job["steps"]:
            if "actions/checkout@" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False
    assert "pull_request_target" not in text, "it would run a stranger's code with our rights"
    for command in re.findall(r"run: .*\$\{\{([^}]*)", text):
        assert command.strip().startswith("matrix."), "text of a stranger in a shell"
    assert "secrets." not in text
    assert "PIP_EXTRA_INDEX_URL" not in text, "a second index for every package"


def test_the_dependency_audit_must_find_a_known_bad_version_first() -> None:
    """An audit that finds nothing anywhere is no audit."""
    script = (ROOT / ".github" / "audit.sh").read_text(encoding="utf-8")
    canary = script.index("jinja2==2.4.1")
    assert canary < script.index("requirements.lock") < script.index("cuda.lock")
    assert "--strict" in script and "set -eu" in script
    (job,) = yaml.safe_load((ROOT / ".github/workflows/audit.yml").read_text())["jobs"].values()
    assert any(step.get("run") == ".github/audit.sh" for step in job["steps"])


def test_every_python_and_the_odd_machines_have_a_job() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/elsewhere.yml").read_text())["jobs"]
    assert jobs["python"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13", "3.14"]
    said = {name: "\n".join(step.get("run", "") for step in jobs[name]["steps"]) for name in jobs}
    assert "make book" in said["python"] and "make test" in said["python"]
    assert "rm -rf .git" in said["no-git-another-user"]
    assert "-u reader" in said["no-git-another-user"]
    assert "tests.pipeline.shuffled" in said["random-order"] and "taskset" in said["one-core"]
    (fuzz,) = yaml.safe_load((ROOT / ".github/workflows/fuzz.yml").read_text())["jobs"].values()
    assert any("tests/fuzz" in step.get("run", "") for step in fuzz["steps"])
