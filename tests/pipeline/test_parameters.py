"""Parameters are refused before anything runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import papermill
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.report.parameters import (
    changed_parameters,
    declared_parameters,
    parse_assignments,
    resolve_parameters,
)
from analysis.report.strict_yaml import load_yaml
from kl_term.errors import UserError
from tests.pipeline.conftest import DEFAULTS, make_notebook

DECLARED = declared_parameters(
    make_notebook(
        parameters=DEFAULTS
        + "\nseeds: list[int] = [1, 2]\nclip = None  # type: float|None  no clip, if None"
        + "\nflag: bool = True"
    ),
    "nb",
)


def resolve(texts: dict[str, str] | None = None, **values: Any) -> dict[str, Any]:
    return resolve_parameters(DECLARED, values, texts or {}, "nb")


def test_defaults_are_the_declared_ones() -> None:
    parameters = resolve()
    assert parameters["n"] == 1 and parameters["seeds"] == [1, 2] and parameters["clip"] is None
    assert changed_parameters(DECLARED, parameters) == {}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (("n", "3"), 3),
        (("rate", "1e-3"), 0.001),
        (("rate", "2"), 2.0),
        (("label", "5"), "5"),
        (("flag", "false"), False),
        (("seeds", "[3, 4]"), [3, 4]),
        (("clip", "none"), None),
        (("clip", ".5"), 0.5),
    ],
)
def test_text_is_read_by_the_declared_type(text: tuple[str, str], value: Any) -> None:
    name, typed = text
    found = resolve({name: typed})[name]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("n", 1.5, "n must be int, not 1.5"),
        ("n", 1.0, "n must be int"),
        ("n", True, "n must be int"),
        ("n", "1", "n must be int"),
        ("rate", "0.5", "rate must be finite float"),
        ("rate", "1e-3", r"YAML reads 1e-3 as text: write 1\.0e-3"),
        ("rate", float("nan"), "finite float"),
        ("rate", float("inf"), "finite float"),
        ("label", 5, "label must be str"),
        ("flag", 1, "flag must be bool"),
        ("seeds", [1, 2.5], r"list\[int\]"),
        ("clip", float("-inf"), "finite float | None"),
        ("profile", "fast", "quick, full"),
        ("profil", "quick", "did you mean profile?"),
        ("n;import os", 1, "is no parameter name"),
        ("class", 1, "is no parameter name"),
    ],
)
def test_bad_value_is_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        resolve(**{name: value})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", ["nan", "NaN", "inf", "-inf", "Infinity", "abc", ""])
def test_text_that_is_no_finite_number_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="rate must be finite float"):
        resolve({"rate": text})


@pytest.mark.parametrize("name", ["hf_token", "token", "api_key", "PASSWORD", "client_secret"])
def test_secret_is_refused_and_its_value_never_said(name: str) -> None:
    with pytest.raises(UserError, match=name) as refusal:
        parse_assignments([f"{name}=canary"])
    assert "canary" not in str(refusal.value)


@pytest.mark.parametrize("name", ["max_tokens", "token_mean", "per_token", "keys"])
def test_ordinary_name_is_no_secret(name: str) -> None:
    assert parse_assignments([f"{name}=1"]) == {name: "1"}


@pytest.mark.parametrize("assignments", [["n"], ["n=1", "n=2"], ["=1"], ["n =1"]])
def test_bad_assignment_is_refused(assignments: list[str]) -> None:
    for option in ("-p", "-o"):
        with pytest.raises(UserError, match=f"^{option}"):
            parse_assignments(assignments, option)


#: Any character but halves of one. The table of ``st.text()`` takes longer to make than all else.
CHARACTERS = st.one_of(st.integers(0, 0x7F), st.integers(0, 0xD7FF), st.integers(0xE000, 0x10FFFF))


@given(st.lists(CHARACTERS.map(chr)).map("".join))
def test_any_text_survives(text: str) -> None:
    assert resolve({"label": parse_assignments([f"label={text}"])["label"]})["label"] == text


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ([], "0 cells are tagged"),
        ([DEFAULTS, DEFAULTS], "2 cells are tagged"),
        (["n = 1"], "name: type = literal"),
        (["n: int"], "name: type = literal"),
        (["n: int = f()"], "name: type = literal"),
        (["n: Path = 1"], "name: type = literal"),
        (["n: int = 1.5"], "n must be int"),
        (["import os"], "line 1"),
        (["n: int = 1\nn: int = 2"], "declared twice"),
        (["n: int ="], "is no Python"),
        (["n: int = " + "-" * 5000 + "1"], "nested too deeply"),
    ],
)
def test_bad_parameters_cell_is_refused(cells: list[str], message: str) -> None:
    notebook = make_notebook(parameters=None)
    for cell in cells:
        notebook.cells += make_notebook(parameters=cell).cells[1:]
    with pytest.raises(UserError, match=message) as refusal:
        declared_parameters(notebook, "notebooks/03_x.ipynb")
    assert "notebooks/03_x.ipynb" in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n: 5\nrate: 1.0\nn: 6\n", r"p\.yaml:3: the key 'n' is written twice"),
        ("n: [1\n", r"p\.yaml:2: "),
        ("a: {b: 1, b: 2}", "the key 'b' is written twice"),
        ("n: " + "[" * 5000, "nested too deeply"),
        ("n: &a [*a]", "no valid YAML"),
        ("? [1]\n: 2", "unhashable|no valid YAML"),
    ],
)
def test_bad_yaml_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as refusal:
        load_yaml(path)
    assert "\n" not in str(refusal.value)


ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_papermill_lists_each_parameter_with_its_type(path: Path) -> None:
    declared = declared_parameters(json.loads(path.read_text()), path.name)
    listed = papermill.inspect_notebook(str(path))
    assert list(listed) == list(declared)
    for name, parameter in declared.items():
        assert listed[name]["inferred_type_name"].replace("|", " | ") == parameter.annotation


def test_the_spelling_that_papermill_cannot_read_would_be_seen() -> None:
    cell = "beta: float | None = None\nn: int = 1"
    notebook = make_notebook(parameters=cell)
    assert list(declared_parameters(notebook, "nb")) == ["beta", "n"]
    translator = papermill.translators.PythonTranslator
    assert "beta" not in [p.name for p in translator.inspect(notebook["cells"][0])]


@pytest.mark.slow
@pytest.mark.parametrize("folder", [".", "notebooks", "tests"])
def test_papermill_s_own_command_refuses_a_misspelt_name(folder: str, tmp_path: Path) -> None:
    path = Path("../notebooks" if folder != "." else "notebooks", "22_proxy_rewards.ipynb")
    command = [sys.executable, "-m", "papermill", path, tmp_path / "out.ipynb", "-p", "gian", "0.5"]
    found = subprocess.run(command, cwd=ROOT / folder, capture_output=True, text=True, check=False)
    assert found.returncode != 0
    assert "got 'gian'; did you mean 'gain'?" in found.stderr
