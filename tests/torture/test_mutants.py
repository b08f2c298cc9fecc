"""What ``make mutants`` reads of mutmut's words, and the page that reads its record."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from analysis.records.manifests import write_folder
from analysis.report.mutants import UNEXPLAINED, equivalent, mutants_found, survivors
from analysis.report.project import Project
from torture import mutants

PROJECT = Project(Path(__file__).parents[2])
SAID = """\
    a.b.x_sum__mutmut_1: killed
    a.b.x_sum__mutmut_2: survived
    a.b.x_sum__mutmut_3: no tests
    a.c.x_mean__mutmut_1: timeout
"""
DIFF = """\
# a.b.x_sum__mutmut_2: survived
--- a/b.py
+++ a/b.py
@@ -1,3 +1,3 @@
 def total(x):
-    return x + 1
+    return x - 1
"""
FIELDS = {
    "preset": "mutants",
    "seeds": [],
    "device": "cpu",
    "versions": {"torch": "2"},
    "source": "abc",
    "commit": "12ab34 with changes",
    "mutmut": "3",
}


def test_what_no_test_runs_has_survived():
    found = mutants.of_modules(mutants.read_statuses(SAID))
    assert found.to_dict("list") == {"module": ["a.b", "a.c"], "mutants": [3, 1], "killed": [1, 1]}
    assert mutants.changed(DIFF) == {"was": "return x + 1", "becomes": "return x - 1"}


def test_mutants_that_were_not_tried_are_no_record():
    statuses = mutants.read_statuses(SAID + "a.c.x_mean__mutmut_2: not checked\n")
    with pytest.raises(ValueError, match=r"1 mutants .* such as a\.c\.x_mean__mutmut_2"):
        mutants.of_modules(statuses)


def test_a_survivor_stands_beside_its_reason_or_beside_none(tmp_path):
    assert "run `make mutants`" in mutants_found(Project(tmp_path))
    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "equivalent_mutants.yaml").write_text(
        "- module: a.b\n  becomes: [return x * 1]\n  reason: Nothing is multiplied.\n"
    )
    modules = pd.DataFrame([("a.b", 1200, 1198)], columns=["module", "mutants", "killed"])
    left = pd.DataFrame(
        [
            ("a.b", "return x", "return x * 1.0"),
            ("a.b", "return x", "return None"),
            ("a.b", "x += 1", ""),
        ],
        columns=["module", "was", "becomes"],
    )
    tables = {"modules.csv": modules, "survivors.csv": left}
    write_folder(tmp_path / "results" / "mutants", tables, FIELDS)
    page = mutants_found(Project(tmp_path))
    assert "at commit 12ab34 with changes" in page
    assert "noticed 1,198 of 1,200 changes" in page and "| 99.8% |" in page
    assert "| `return x * 1.0` | Nothing is multiplied. |" in page
    assert f"| `return None` | {UNEXPLAINED} |" in page
    assert page.count(UNEXPLAINED) == 2, "a line that is taken away is no number"


def test_the_record_is_above_the_bar_and_every_survivor_has_a_reason():
    folder = PROJECT.results / "mutants"
    modules = pd.read_csv(folder / "modules.csv")
    assert (modules["killed"] >= 0.9 * modules["mutants"]).all()
    assert len(pd.read_csv(folder / "survivors.csv")) == (
        modules["mutants"].sum() - modules["killed"].sum()
    )
    assert UNEXPLAINED not in mutants_found(PROJECT)


def test_every_reason_is_of_a_survivor_of_the_record():
    """One that matches none may excuse a later mutant. A new module waits for its record."""
    folder = PROJECT.results / "mutants"
    modules = set(pd.read_csv(folder / "modules.csv")["module"])
    found = survivors(folder)
    left = list(zip(found["module"], found["becomes"], strict=True))
    for module, line, _ in equivalent(PROJECT):
        assert (PROJECT.root / (module.replace(".", "/") + ".py")).is_file(), module
        matched = any(where == module and becomes.startswith(line) for where, becomes in left)
        assert matched or module not in modules, f"{module}: no mutant that survived is {line}"
