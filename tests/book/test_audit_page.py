"""The page "Test your trainer's loss": every snippet runs, and every output is the tool's own."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from torch import Tensor

from analysis.report.audit_corpus import REPAIRS, corpus_counts, corpus_page
from analysis.report.audit_findings import HOLE, all_findings, findings_page
from analysis.report.audit_sets import HELD_OUT, SEEN, LossSet
from kl_term.audit import audit
from kl_term.audit.findings import PROPERTIES, SEVERITIES
from kl_term.audit.loading import load
from kl_term.audit.targets import NEITHER, NOTHING, POTENTIALS
from tests.audit.corpus import read
from tests.audit.released_losses import _openrlhf, _verl
from tests.audit.scoring import RESULTS, audited
from tests.released import checkout, functions_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BLIND = [held_out for held_out in HELD_OUT if held_out.blind]
PAGE = (ROOT / "book/audit.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


#: File of a snippet, by its first line, -> the snippet.
FILES = {
    match[1]: text
    for language in ("python", "yaml")
    for text in blocks(language)
    if (match := re.match(r"# (\S+)\n", text))
}
COMMANDS = [line for text in blocks("sh") for line in text.replace("\\\n", " ").splitlines()]
WORKFLOW = yaml.safe_load(FILES[".github/workflows/kl-audit.yml"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        if name.endswith(".py"):
            (tmp_path / name).write_text(text)
    return tmp_path


def run(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """A command of the page, by this Python and this checkout."""
    program, *arguments = shlex.split(command)
    modules = {
        "kl-term": ["kl_term"],
        "pytest": ["pytest", "-p", "no:cacheprovider"],
    }
    return subprocess.run(
        [sys.executable, "-m", *modules[program], *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def command_of(name: str, program: str = "kl-term audit") -> str:
    (command,) = [line for line in COMMANDS if re.match(rf"{program} +{re.escape(name)}", line)]
    return command


def folded(text: str) -> str:
    """The page wraps long lines."""
    return " ".join(text.split())


def test_the_first_picture_is_what_the_command_prints(folder: Path) -> None:
    found = run(folder, command_of("my_trainer.py:loss"))
    assert found.returncode == 1
    assert folded(found.stdout) == folded(blocks("text")[0])


def test_the_loss_that_the_text_puts_in_its_place_passes(folder: Path) -> None:
    path = folder / "my_trainer.py"
    (k2,) = re.findall(r"^`(kl = 0\.5 .*?)` instead", PAGE, re.MULTILINE)
    assert "kl = logp - ref_logp" in path.read_text()
    path.write_text(path.read_text().replace("kl = logp - ref_logp", k2))
    assert run(folder, command_of("my_trainer.py:loss")).returncode == 0


def test_a_loop_with_names_of_its_own(folder: Path) -> None:
    found = run(folder, command_of("my_loop.py:loss"))
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_test_file_of_the_page_passes_and_fails_for_a_flipped_sign(folder: Path) -> None:
    assert "3 passed" in run(folder, "pytest -q test_loss.py").stdout
    loop = folder / "my_loop.py"
    loop.write_text(loop.read_text().replace("return strength", "return -strength"))
    assert "3 failed" in run(folder, "pytest -q test_loss.py").stdout


def test_the_plugin_prints_what_the_page_shows(folder: Path) -> None:
    (command,) = [line for line in COMMANDS if line.startswith("pytest --kl-audit")]
    found = run(folder, command)
    shown = re.findall(r"^(my_trainer:loss::.*? (?:PASSED|FAILED))", found.stdout, re.MULTILINE)
    assert shown == blocks("text")[1].splitlines()
    assert len(shown) == len(PROPERTIES) + 1


def test_the_workflow_runs_what_the_page_shows_and_keeps_what_it_writes(folder: Path) -> None:
    steps = WORKFLOW["jobs"]["audit"]["steps"]
    install, first, second = [step["run"] for step in steps if "run" in step]
    assert "kl-term[audit]" in install
    assert run(folder, first).returncode == run(folder, second).returncode == 1
    kept = {path.name for path in folder.glob(steps[-1]["with"]["path"])}
    assert kept == {"audit.json", "audit.html"}
    report = json.loads((folder / "audit.json").read_text())
    table = PAGE.partition("## The JSON")[2].partition("## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(report)
    for key in report["findings"][0]:
        assert f"`{key}`" in table


def test_the_actions_are_those_that_this_repository_pins() -> None:
    ours = "".join(path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml"))
    for step in WORKFLOW["jobs"]["audit"]["steps"]:
        assert step.get("uses", "") in ours


def test_the_names_of_the_contract_are_those_of_the_code() -> None:
    sentence = PAGE.partition("A name is ")[2].partition("\n\n")[0]
    named = {folded(name) for name in re.findall(r"`([^`]+)`", sentence)}
    ours = {name for name in POTENTIALS if "sampler" not in name}  # these are said to be neither
    assert named == {*ours, NOTHING, NEITHER, "minus"}


def test_the_list_of_findings_holds_all_that_is_ever_found() -> None:
    """Not by the source but by losses: each finding of each is a line, word by word."""
    lines = {}
    for each in all_findings():
        lines.setdefault((each.code, each.severity), []).append(each)
    assert len(lines) > 40
    met = set()
    for entry in read()[::8]:
        try:
            found = audited(entry).findings
        except ValueError:
            continue
        for finding in found:
            kinds = lines[finding.code, finding.severity]
            assert any(_says(kind.says, finding.says) for kind in kinds), finding
            assert any(_says(kind.advice, finding.advice) for kind in kinds), finding
            assert finding.theorem in {kind.theorem for kind in kinds}
            met.add(finding.code)
    assert len(met) > 12
    assert {severity for _, severity in lines} == set(SEVERITIES)


def _says(template: str, text: str) -> bool:
    parts = (re.escape(part) for part in template.split(HOLE))
    return re.match(".*".join(parts), text, re.DOTALL) is not None


def test_the_findings_have_a_line_each_and_no_empty_place() -> None:
    rows = [line for line in findings_page().splitlines() if line.startswith("- `")]
    assert len(rows) == len(all_findings())
    assert f"policy{HOLE}" not in findings_page()
    assert all(any(f"- `{code}`:" in row for row in rows) for code in sum(PROPERTIES.values(), ()))


def test_every_finding_above_a_note_fails_one_property() -> None:
    above = {each.code for each in all_findings() if each.severity != "note"}
    held = sorted(code for codes in PROPERTIES.values() for code in codes)
    assert held == sorted(above)


def told_of(losses: LossSet) -> str:
    """The part of the page that tells of a set."""
    page = folded(corpus_page(RESULTS)).split(":::")[0]
    titles = [each.title for each in (*HELD_OUT, SEEN)]
    starts = [page.index(f"*{title}.*") for title in titles] + [len(page)]
    at = titles.index(losses.title)
    return page[starts[at] : starts[at + 1]]


@pytest.mark.parametrize("held_out", HELD_OUT, ids=lambda held_out: held_out.name)
def test_the_page_says_of_the_record_what_the_record_says(held_out: LossSet) -> None:
    told, counts = told_of(held_out), corpus_counts(RESULTS / held_out.folder)
    assert f"{counts['broken']} broken and {counts['right']} right" in told
    assert (
        f"{counts['named']} were named by the first finding, {counts.get('missed', 0)} by" in told
    )
    assert f"Of the right ones {counts['clean']} had nothing above a note" in told


def test_the_page_says_of_the_losses_that_were_seen_that_they_were() -> None:
    told, seen = told_of(SEEN), corpus_counts(RESULTS / SEEN.folder)
    assert f"other {seen['broken']} broken and {seen['right']} right" in told
    assert f"{seen['named']} named first" in told


@pytest.mark.parametrize("held_out", BLIND, ids=lambda held_out: held_out.name)
def test_the_page_names_what_a_blind_set_found_missing(held_out: LossSet) -> None:
    told, counts = told_of(held_out), corpus_counts(RESULTS / held_out.folder)
    earlier = (SEEN, *HELD_OUT[: HELD_OUT.index(held_out)])
    before = {entry.source for each in earlier for entry in read(*each.sections)} - {None}
    sources = [
        REPAIRS.get(entry.source or "", entry.source) for entry in read(held_out.sections[0])
    ]
    known = sum(source in before for source in sources)
    assert known and f"{known} of these broken losses turned out to be after reports" in told
    assert f"The other {counts.get('false alarm', 0)} count as false alarms" in told
    assert told.count("*Missed*:") == counts.get("missed", 0)
    assert told.count("*False alarm*:") == counts.get("false alarm", 0)


class _Metric:
    """verl's, which holds what is logged."""

    def __init__(self, value: Tensor, aggregation: str) -> None:
        self.value, self.aggregation = value, aggregation

    @staticmethod
    def from_dict(metrics: dict[str, float], aggregation: str) -> dict[str, float]:
        return metrics


class _ModuleOf:
    """The module of a function: what is set there is what the function then reads."""

    def __init__(self, function: FunctionType) -> None:
        self.__dict__ = function.__globals__


def _openrlhf_modules() -> dict[str, dict[str, Any]]:
    held = vars(_openrlhf())
    return {"openrlhf.models.loss": held, "openrlhf.models.utils": held}


def _verl_modules() -> dict[str, dict[str, Any]]:
    verl = _verl()
    (ppo_loss,) = functions_of(
        "verl",
        "verl/workers/utils/losses.py",
        "ppo_loss",
        no_padding_2_padding=None,  # the page gives another
        get_policy_loss_fn={"vanilla": verl.compute_policy_loss_vanilla}.get,
        kl_penalty=verl.kl_penalty,
        agg_loss=verl.agg_loss,
        AggregationType=SimpleNamespace(SUM="sum", MEAN="mean"),
        Metric=_Metric,
    )
    return {"verl.workers.utils": {"losses": _ModuleOf(ppo_loss)}}


#: Snippet -> what it imports, and where that needs more than the package itself, its own functions
#: without the rest.
PEERS = {
    "my_trl.py": ("trl", None),
    "my_liger.py": ("liger_kernel", None),
    "my_openrlhf.py": ("openrlhf", _openrlhf_modules),
    "my_verl.py": ("verl", _verl_modules),
    "my_nemo_rl.py": ("nemo_rl", None),
}


#: Packages that no index offers -> the name of their framework.
CHECKOUTS = {"nemo_rl": "NeMo-RL"}


@pytest.mark.peers
@pytest.mark.parametrize("name", PEERS)
def test_a_released_loss_is_what_the_command_beside_it_expects(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, functions = PEERS[name]
    if package in CHECKOUTS:
        monkeypatch.syspath_prepend(checkout(CHECKOUTS[package]))
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if functions is not None:
        for module, held in functions().items():
            made = ModuleType(module)
            vars(made).update(held)
            parts = module.split(".")
            for end in range(1, len(parts)):
                parent = ".".join(parts[:end])
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
            monkeypatch.setitem(sys.modules, module, made)
    loss = load(f"{folder / name}:loss")
    words = shlex.split(command_of(f"{name}:loss"))
    wanted = words[words.index("--expect") + 1]
    found = audit(loss)
    assert found.minimises["fresh"]["state"] == wanted
    if "--stale" in words:
        assert found.minimises["stale"]["state"] == wanted
    loud = [f for f in found.findings if f.severity != "note"]
    assert not [f for f in loud if f.severity == "error"]
    assert found.term is not None
    assert found.policy is not None and found.policy.has_gradient


def test_every_tab_is_about_twenty_lines_and_every_peer_is_tested() -> None:
    tabs = {name for name in FILES if name.startswith("my_")} - {"my_trainer.py", "my_loop.py"}
    assert tabs == set(PEERS)
    for name in tabs:
        code = [line for line in FILES[name].splitlines() if line.strip()]
        assert len(code) <= 26, name
        ast.parse(FILES[name])
