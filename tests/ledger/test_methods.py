"""The table of methods: complete, evidenced, valid arms; and what it refuses."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch
import yaml

from analysis.errors import Refused
from analysis.experiments.ablations.catalogue import CATALOGUE
from analysis.kl.term import KLTerm
from analysis.report.build import book_generators
from analysis.report.ledger import load_ledger
from analysis.report.methods import (
    FAMILIES,
    Method,
    Table,
    arm_of,
    dangling,
    known,
    load_methods,
    methods_path,
    recordings,
    switches_on,
)
from analysis.report.methods_page import methods_page
from analysis.report.project import Project
from analysis.training.arms import Advantage, Arm, Distillation, Objective, Sampler

PROJECT = Project(Path(__file__).parents[2])
TABLE = load_methods(PROJECT)
METHODS = TABLE.methods
KNOWN = known(PROJECT)
BY_ID = {method.id: method for method in METHODS}

#: What the table must at least hold, however it is cut.
LISTED = re.findall(
    r"\S+",
    """
    grpo token-mean sequence ppo-clip clip-higher dr-grpo gspo cispo rloo merged-old
    merged-detached merged-attached mirror-descent dpo no-kl k1-loss k2-loss k3-loss k3-clip
    minimax01 exact k1-reward k2-reward k3-reward sequence-loss sequence-reward weight-attached
    weight-detached to-go immediate straight-through group-normalise group-normalise-population
    clip-std dynamic-sampling length-penalty relative-length soft-overlong process-supervision
    marginal-reward best-of-n early-stop repeats partial-rollouts sequence-mask
    keep-sampling-mask top-k keep-routing mismatch-truncated-token mismatch-masked-token
    mismatch-truncated-sequence mismatch-masked-sequence ess opd-immediate opd-to-go
    forward-distillation supervised kdrl-k2 annealed low-reward-mask long-to-short
    """,
)

ENTRY = {
    "id": "gspo",
    "family": "objective",
    "name": "GSPO",
    "source": "somebody",
    "equation": "gspo",
    "function": "analysis.objectives.losses.gspo",
    "test": "tests/objectives/test_losses.py::test_gspo_token_form_equals_its_sequence_form",
    "use": 'Arm(kl=KLTerm(estimator="none"), objective=Objective(kind="gspo"))',
    "presets": {"objectives": ["gspo"]},
    "section": "06_sequences#thm-geometric-weight",
    "claims": ["S3-23"],
}


def table_of(*entries, **shown):
    return Table(shown=shown, methods=[Method(**entry) for entry in entries])


def test_every_listed_method_has_its_row():
    assert set(LISTED) <= set(BY_ID)
    assert {method.family for method in METHODS} == set(FAMILIES)


def test_every_method_of_the_ledger_has_its_row():
    claims = {claim for method in METHODS for claim in method.claims}
    assert {claim.id for claim in load_ledger(PROJECT) if claim.kind == "method"} <= claims


def test_a_function_of_the_ledger_is_that_of_the_table():
    for claim in load_ledger(PROJECT):
        if claim.kind == "method" and claim.implemented:
            rows = [method for method in METHODS if claim.id in method.claims]
            modules = {method.function.rpartition(".")[0] for method in rows}
            assert claim.implemented.rpartition(".")[0] in modules | {
                "analysis.kl.surrogates",
                "analysis.kl.full_vocabulary",
            }


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.id)
def test_what_switches_a_method_on_works(method):
    if method.arm is None:
        module, _, name = method.function.rpartition(".")
        functions = vars(importlib.import_module(module))
        assert name in functions
        assert eval(method.use, functions | {"torch": torch}) is not None
        return
    plain = Arm()
    default = method.id in ("grpo", "ppo-clip", "no-kl", "group-normalise")
    assert (method.arm == plain) == default or method.arm.kl.estimator != "none"


#: Presets that measure no method of their own: budgets, starts and machines.
NO_METHODS = {
    "quick",
    "half_step",
    "starts",
    "smollm2",
    "smollm2_short",
    "smollm2_front",
    "llama_smoke",
    "three_ways_on_policy",
}
#: Presets that take arms of others again, over betas, ages or beside each other.
REPEATED = {"full", "figure2", "beta_front", "kl_axes"}


def test_every_preset_of_the_methods_is_in_the_table():
    trained = {preset for method in METHODS for preset in method.presets}
    assert set(CATALOGUE) - NO_METHODS <= trained


#: Arms that stand beside a method for comparison, and switch none on that a row names.
BASELINES = {"grpo", "fresh", "same", "whole", "outcome", "outcome_centre"} | {
    f"{sampler}_uncorrected" for sampler in ("cold", "hot", "top_p")
}


def test_every_arm_of_the_chapters_presets_is_some_method():
    for preset in set(CATALOGUE) - NO_METHODS - REPEATED:
        named = {arm for method in METHODS for arm in method.presets.get(preset, ())}
        assert {arm.name for arm in CATALOGUE[preset]().arms} <= named | BASELINES, preset


def test_an_arm_is_read_from_its_expression():
    text = 'Arm(label="x", kl=KLTerm(estimator="k2"), beta=-0.5, sampler=Sampler(by="teacher"))'
    assert arm_of(text) == Arm(
        label="x", kl=KLTerm(estimator="k2"), beta=-0.5, sampler=Sampler(by="teacher")
    )


@pytest.mark.parametrize(
    "text",
    [
        'Arm("none")',
        "Arm(**{})",
        "__import__('os').system('true')",
        "Arm(kl=KLTerm(estimator=print()))",
        'Objective(kind="gspo")',
        "Arm(",
        "3",
        'Arm(kl=KLTerm(estimator="none"), beta=1.0)',
    ],
)
def test_anything_else_is_no_arm(text):
    with pytest.raises(ValueError, match=r"is no|name an estimator"):
        arm_of(text)


def test_an_arm_switches_on_what_it_sets_whatever_its_numbers():
    pattern = arm_of(
        'Arm(kl=KLTerm(estimator="k2"), beta=0.1, distillation=Distillation(weight_end=0.0))'
    )
    lesson = Distillation(weight_end=0.0, weight=7.0)
    assert switches_on(Arm(kl=KLTerm(estimator="k2"), beta=3.0, distillation=lesson), pattern)
    for other in (
        Arm(kl=KLTerm(estimator="k3"), beta=3.0, distillation=lesson),
        Arm(kl=KLTerm(estimator="k2"), beta=0.0, distillation=lesson),
        Arm(kl=KLTerm(estimator="k2"), beta=3.0),
        Arm(kl=KLTerm(estimator="k2"), beta=3.0, distillation=Distillation()),
        Arm(kl=KLTerm(estimator="k2"), beta=3.0, distillation=Distillation(weight_end=0.5)),
    ):
        assert not switches_on(other, pattern)
    assert switches_on(
        Arm(objective=Objective(kind="gspo", epsilon_low=0.1)),
        arm_of(
            'Arm(kl=KLTerm(estimator="none"), objective=Objective(kind="gspo", epsilon_low=0.2))'
        ),
    )
    assert not switches_on(
        Arm(advantage=Advantage(drop_uniform_groups=True)),
        arm_of('Arm(kl=KLTerm(estimator="none"), advantage=Advantage(drop_uniform_groups=False))'),
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"equation": "gspoo"}, "no equation gspoo"),
        ({"function": "analysis.objectives.losses.gsp"}, "function names analysis.objectives.lo"),
        ({"test": "tests/objectives/test_losses.py::test_none"}, "no test tests/objectives"),
        ({"section": "06_sequences#thm-none"}, "06_sequences has no label thm-none"),
        ({"section": "99_none"}, "no page 99_none"),
        ({"claims": ["S3-99"]}, "no claim S3-99"),
        ({"presets": {"objectivs": ["gspo"]}}, "no preset objectivs"),
        ({"presets": {"objectives": ["gspo_"]}}, "preset objectives has no arm gspo_"),
        ({"presets": {"objectives": []}}, "names no arm of preset objectives"),
        ({"presets": {"objectives": ["grpo"]}}, "arm grpo of preset objectives is not what use"),
        ({"use": "cispo(x)", "presets": {}, "unmeasured": "x"}, "nor a call of gspo"),
    ],
)
def test_an_entry_that_dangles_is_named(changes, problem):
    assert dangling(PROJECT, table_of(ENTRY), KNOWN) == []
    (line,) = dangling(PROJECT, table_of(ENTRY | changes), KNOWN)
    assert line.startswith("book/methods.yaml: gspo: ") and problem in line


def test_a_place_that_shows_no_recording_is_named():
    table = table_of(full="04_grpo_ablation#fig-x", none="04")
    first, second, third = dangling(PROJECT, table, KNOWN)
    assert first == "book/methods.yaml: shown: full: 04_grpo_ablation has no label fig-x"
    assert second == "book/methods.yaml: shown: none: no preset none"
    assert third == "book/methods.yaml: shown: none: no page 04"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"presets": {}}, "give presets, or say in unmeasured"),
        ({"unmeasured": "no"}, "give presets, or say in unmeasured"),
        ({"use": "gspo(x)"}, "presets measure arms"),
        ({"use": 'Arm(kl=KLTerm(estimator="none"), objective=Objective(kind="ppo"))'}, "kind"),
        ({"family": "other"}, "family"),
        ({"extra": 1}, "extra"),
        ({"id": "Gspo"}, "id"),
    ],
)
def test_a_malformed_entry_is_refused_by_name(tmp_path, changes, message):
    (tmp_path / "book").mkdir()
    project = Project(tmp_path)
    methods_path(project).write_text(yaml.safe_dump({"shown": {}, "methods": [ENTRY | changes]}))
    with pytest.raises(Refused, match=rf"^book/methods.yaml: [Gg]spo: .*{re.escape(message)}"):
        load_methods(project)


def test_an_entry_written_twice_is_refused(tmp_path):
    (tmp_path / "book").mkdir()
    project = Project(tmp_path)
    methods_path(project).write_text(yaml.safe_dump({"shown": {}, "methods": [ENTRY, ENTRY]}))
    with pytest.raises(Refused, match="gspo is written twice"):
        load_methods(project)


def test_the_page_has_a_row_a_method_with_all_its_links():
    page, recorded = methods_page(PROJECT, TABLE), recordings(PROJECT)
    rows = {
        name: row for row in page.splitlines() for name in re.findall(r"^\| \*\*(.+?)\*\*", row)
    }
    assert len(rows) == len(METHODS)
    for method in METHODS:
        row = rows[method.name.replace("|", "&#124;")]
        assert row.count(" | ") == 3, "a cell holds a bar"
        assert f"\n# {method.name}\n{method.use[:8].partition('(')[0]}" in page
        assert f"{{eq}}`{method.equation}`" in row
        path, _, _ = method.test.partition("::")
        assert f"/{path}#L" in row and f"[`{method.function.rpartition('.')[2]}`](" in row
        for claim in method.claims:
            assert f"{{ref}}`{claim} <{claim.lower()}>`" in row
        for preset, arms in method.presets.items():
            assert preset in row and all(f"`{arm}`" in row for arm in arms)
            known_place = preset in recorded or preset in TABLE.shown
            assert (f"{preset} (not recorded)" in row) == (not known_place)
            assert (f"[{preset}](" in row) == (preset in recorded)


def test_the_code_on_the_page_is_that_of_the_table():
    page = methods_page(PROJECT, TABLE)
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        for entry in block.strip().split("\n\n"):
            name, _, code = entry.removeprefix("# ").partition("\n")
            (method,) = [method for method in METHODS if method.name == name]
            assert max(map(len, code.splitlines())) <= 120
            if method.arm is not None:
                assert arm_of(code) == method.arm


def test_recordings_are_found_by_their_preset():
    found = recordings(PROJECT)
    assert found["full"].name == "grpo_tiny_cpu"
    assert all((folder / "manifest.json").is_file() for folder in found.values())


def test_what_is_recorded_is_shown():
    trained = {preset for method in METHODS for preset in method.presets}
    assert trained & set(recordings(PROJECT)) <= set(TABLE.shown)
    assert trained <= set(recordings(PROJECT)), "a preset of the methods is not recorded"


def test_the_book_is_built_with_the_methods():
    assert "methods.md" in book_generators()
    assert "book/_generated/methods" in (PROJECT.root / "_toc.yml").read_text()
