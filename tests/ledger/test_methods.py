"""The table of methods: what it names exists, and a preset trains the method that its row says."""

from __future__ import annotations

import importlib
import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml

from analysis.records import variants
from analysis.report.ledger import load_ledger
from analysis.report.methods import load_methods, methods_page
from analysis.report.project import Project
from analysis.studies.presets import PRESETS
from kl_term.errors import UserError
from kl_term.kl.term import KLTerm
from kl_term.schema import Schema

PROJECT = Project(Path(__file__).parents[2])
TABLE = load_methods(PROJECT)
METHODS = {method.name: method for methods in TABLE.methods.values() for method in methods}
TRAINED = {preset for method in METHODS.values() for preset in method.presets}
ENTRY = {
    "name": "GSPO",
    "reference": "somebody",
    "function": "objectives.losses.gspo",
    "use": 'Variant(kl=KLTerm(estimator="none"), objective=Objective(kind="gspo"))',
    "presets": ["objectives"],
    "section": "06_sequences#thm-geometric-weight",
}


def switches_on(variant: Schema, pattern: Schema) -> bool:
    """Does a variant set all that a pattern sets? Of numbers it counts whether they are 0."""
    return all(
        alike(getattr(variant, name), getattr(pattern, name)) for name in pattern.model_fields_set
    )


def alike(value: object, pattern: object) -> bool:
    if isinstance(pattern, Schema):
        return value is not None and switches_on(value, pattern)
    if isinstance(pattern, float | int) and not isinstance(pattern, bool):
        return value is not None and bool(value) == bool(pattern)
    return value == pattern


def switches(setting: Schema, name: str = "") -> set[tuple[str, object]]:
    """What the parts of a variant are set to, by name; of numbers whether they are 0."""
    found: set[tuple[str, object]] = set()
    for field in type(setting).model_fields:
        value = getattr(setting, field)
        if isinstance(value, Schema):
            found |= switches(value, f"{name}{field}.")
        elif name:  # label and beta are the variant's own
            number = isinstance(value, float | int) and not isinstance(value, bool)
            found.add((f"{name}{field}", bool(value) if number else value))
    return found


def recorded(folders: str) -> set[str]:
    manifests = PROJECT.results.glob(f"{folders}/manifest.json")
    return {json.loads(path.read_text(encoding="utf-8"))["preset"] for path in manifests}


@cache
def variants_of(preset: str) -> tuple[variants.Variant, ...]:
    return tuple(PRESETS[preset]().variants)


def trained_switches(presets: set[str]) -> set[tuple[str, object]]:
    return set().union(*(switches(v) for name in presets for v in variants_of(name)))


def test_no_name_is_written_twice():
    assert len(METHODS) == sum(map(len, TABLE.methods.values()))


@pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
def test_what_switches_a_method_on_works_and_its_presets_train_it(method):
    module, _, name = method.function.rpartition(".")
    functions = vars(importlib.import_module(module))
    assert callable(functions[name])
    found = eval(method.use, functions | vars(variants) | {"torch": torch, "KLTerm": KLTerm})
    assert found is not None
    assert isinstance(found, variants.Variant) == method.use.startswith("Variant(")
    for preset in method.presets:
        assert any(switches_on(v, found) for v in variants_of(preset)), preset


def test_every_method_of_the_ledger_has_its_row():
    claims = {claim for method in METHODS.values() for claim in method.claims}
    assert {claim.id for claim in load_ledger(PROJECT) if claim.kind == "method"} <= claims


def test_what_a_recorded_preset_alone_switches_on_has_its_row():
    """A preset without a row of its own tries no method that those with one do not."""
    known = trained_switches(TRAINED)
    for name in sorted(recorded("*") & set(PRESETS) - TRAINED):
        new = trained_switches({name}) - known
        assert not new, f"{name} alone sets {new}: name it in a row of book/methods.yaml"
    assert trained_switches({"partial_rollouts"}) - trained_switches(TRAINED - {"partial_rollouts"})


def test_what_is_trained_is_recorded_and_shown():
    assert recorded("*_cpu*") >= TRAINED
    assert set(TABLE.shown) >= TRAINED


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"presets": []}, "give presets, or say in unmeasured"),
        ({"unmeasured": "no"}, "give presets, or say in unmeasured"),
        ({"extra": 1}, "extra"),
    ],
)
def test_a_malformed_entry_is_refused(tmp_path, changes, message):
    (tmp_path / "book").mkdir()
    content = {"shown": {}, "methods": {"Losses": [ENTRY | changes]}}
    (tmp_path / "book/methods.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match=f"methods.Losses.0.*{message}"):
        load_methods(Project(tmp_path))


def test_the_page_has_a_row_a_method_with_all_its_links():
    page = methods_page(TABLE)
    rows = {
        name: row for row in page.splitlines() for name in re.findall(r"^\| \*\*(.+?)\*\*", row)
    }
    assert len(rows) == len(METHODS)
    for method in METHODS.values():
        row = rows[method.name.replace("|", "&#124;")]
        assert row.count(" | ") == 3, "a cell holds a bar"
        assert f"`~{method.function}`" in row
        assert all(f"{{ref}}`{claim} <{claim.lower()}>`" in row for claim in method.claims)
        assert all(preset in row for preset in method.presets)
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        assert max(map(len, block.splitlines())) <= 120
