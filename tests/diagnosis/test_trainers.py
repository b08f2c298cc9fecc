"""The lines of settings that findings on sampler, engine and versions name, by trainer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from kl_term.diagnosis.causes import CAUSES, find
from kl_term.diagnosis.measure import measure
from kl_term.diagnosis.page import lines
from kl_term.diagnosis.readers import read_rollouts
from kl_term.diagnosis.reports import report
from kl_term.diagnosis.schema import Settings
from kl_term.diagnosis.trainers import LINES, NONE, TRAINERS, lines_of
from tests.diagnosis.test_examples import FOLDER
from tests.released import checkout, source_of

#: What titles of findings on sampler, engine and versions say.
ABOUT = re.compile(
    "engine|updates behind|stale|ratio to old_logp|importance weights|[Tt]he sampler (is|trunc)"
    "|old_logp belongs"
)
#: Where a trainer of which nothing is released declares its settings.
DECLARED = {
    "AReaL": "areal/api/cli_args.py",
    "SkyRL": "skyrl/train/config/config.py",
    "prime-rl": "packages/prime-rl-configs/src/prime_rl/configs",
    "NeMo-RL": "examples/configs/grpo_math_1B.yaml",
    "slime": "slime/utils/arguments.py",
}


def cases(cause) -> list[str]:
    texts = [text for text in (cause.title, cause.advice) if not isinstance(text, str)]
    return list(dict.fromkeys(case for text in texts for case in text)) or [""]


def titles(cause) -> str:
    return cause.title if isinstance(cause.title, str) else " ".join(cause.title.values())


CONCERNED = [
    (cause.code, case) for cause in CAUSES if ABOUT.search(titles(cause)) for case in cases(cause)
]


def test_what_is_concerned_is_found() -> None:
    assert {code for code, _ in CONCERNED} >= {
        "sampler-filled",
        "old-not-sampler",
        "other-sampler",
        "ratio-is-one",
        "train-inference-mismatch",
        "weights-behind",
        "stale-samples",
        "heavy-weights",
    }


@pytest.mark.parametrize(("code", "case"), CONCERNED)
def test_every_finding_on_sampler_engine_and_versions_has_a_line_a_trainer(code, case) -> None:
    told = lines_of(code, case)
    assert set(told) == set(TRAINERS)
    assert all(line == NONE or re.search("`[^`]+`", line) for line in told.values())


def test_no_line_is_of_a_finding_or_case_that_does_not_exist() -> None:
    known = {f"{cause.code} {case}".strip() for cause in CAUSES for case in cases(cause)}
    assert set(LINES) <= known | {cause.code for cause in CAUSES}


def test_no_advice_names_a_setting_that_the_table_has() -> None:
    names = {setting for trainer in TRAINERS for setting in settings(trainer)}
    texts = [cause.advice for cause in CAUSES if lines_of(cause.code, cases(cause)[0])]
    said = " ".join(t if isinstance(t, str) else " ".join(t.values()) for t in texts)
    long = {name for name in names if "_" in name.rpartition(".")[2]}
    assert not {name for name in long - {"logprobs_mode"} if re.search(rf"\b{name}\b", said)}


def settings(trainer: str) -> set[str]:
    """Names of settings, without their values."""
    told = [line[trainer] for line in LINES.values()]
    found = {name for line in told for name in re.findall(r"`([^`]+)`", line)}
    return {re.split("[= ]", name)[0] for name in found} - {"AsyncGRPOConfig"}


@pytest.mark.parametrize("trainer", DECLARED)
def test_settings_are_those_of_the_sources(trainer: str) -> None:
    root = checkout(trainer) / DECLARED[trainer]
    files = [root] if root.is_file() else sorted(root.rglob("*.py"))
    source = "\n".join(file.read_text(encoding="utf-8") for file in files)
    for setting in settings(trainer):
        for part in [setting] if setting.startswith("--") else setting.split("."):
            declared = (
                rf'"{part}"' if part.startswith("--") else rf"^ *{part}:|^class {part}|\b{part}\b"
            )
            assert re.search(declared, source, re.MULTILINE | re.IGNORECASE), (setting, part)


@pytest.mark.peers
def test_settings_are_those_of_verls_fully_asynchronous_trainer() -> None:
    folder = "verl/experimental/fully_async_policy/config/fully_async_ppo_trainer.yaml"
    own = yaml.safe_load(source_of("verl", folder).read_text())
    base = yaml.safe_load(
        source_of("verl", "verl/trainer/config/_generated_ppo_trainer.yaml").read_text()
    )
    for setting in settings("verl, fully async"):
        assert has(own, setting) or has(base, setting), setting


def has(tree: dict, setting: str) -> bool:
    for part in setting.split("."):
        if part not in tree:
            return False
        tree = tree[part]
    return True


@pytest.mark.peers
@pytest.mark.parametrize(
    ("trainer", "package", "files"),
    [
        (
            "TRL",
            "trl",
            ["trl/trainer/grpo_config.py", "trl/experimental/async_grpo/async_grpo_config.py"],
        ),
        ("OpenRLHF", "openrlhf", ["openrlhf/cli/train_ppo_ray.py"]),
        ("verl", "verl", ["verl/trainer/config/_generated_ppo_trainer.yaml"]),
    ],
)
def test_settings_are_those_of_releases(trainer: str, package: str, files: list[str]) -> None:
    source = "\n".join(Path(source_of(package, file)).read_text() for file in files)
    if trainer == "verl":
        tree = yaml.safe_load(source)
        assert all(has(tree, setting) for setting in settings(trainer))
        return
    for setting in settings(trainer):
        declared = rf'"{setting}"' if setting.startswith("--") else rf"^    {setting}: "
        assert re.search(declared, source, re.MULTILINE), setting


@pytest.mark.parametrize(
    ("framework", "shown"),
    [
        ("unknown", set(TRAINERS)),
        ("verl", {"verl", "verl, fully async"}),
        ("trl", {"TRL"}),
        ("plain", set()),
    ],
)
def test_a_report_shows_the_lines_of_its_own_trainer(framework: str, shown: set[str]) -> None:
    measured = measure(
        read_rollouts(FOLDER / "stale_samples.csv.gz"), Settings(framework=framework, resamples=100)
    )
    (finding,) = [each for each in find(measured) if each.code == "stale-samples"]
    assert set(finding.settings) == shown
    told = lines(report(measured, source="x"))
    assert ("ppo_epochs=1" in told) == ("verl" in shown)
