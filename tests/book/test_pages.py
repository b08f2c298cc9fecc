"""The hand-written pages: their examples run, their works are real, their copies are current."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import nbformat
import pytest
import torch
from pybtex.database import Entry, parse_file

from analysis.report import run_figures
from kl_term.kl import kl_loss
from kl_term.style import COLOURS

ROOT = Path(__file__).resolve().parents[2]
BOOK = ROOT / "book"
WORKS = parse_file(str(BOOK / "references.bib")).entries


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def test_the_example_for_trainers_runs_and_does_what_the_text_says() -> None:
    namespace: dict[str, object] = {}
    examples = blocks(BOOK / "reproduce.md", "python")
    assert len(examples) == 2
    for example in examples:
        exec(compile(example, "book/reproduce.md", "exec"), namespace)
    gradient, mask = namespace["logp"].grad, namespace["mask"]
    assert torch.isfinite(gradient).all()
    assert (gradient[~mask] == 0).all()
    assert (gradient[mask] != 0).any()


def test_the_lines_of_torch_on_the_answer_page_are_the_attached_k3() -> None:
    (example,) = [b for b in tab_blocks("python") if "def kl_term" in b]
    namespace: dict[str, object] = {}
    exec(compile(example, "book/answer.md", "exec"), namespace)
    generator = torch.Generator().manual_seed(0)
    logp, old_logp, ref_logp = -3 * torch.rand(3, 4, 6, generator=generator, dtype=torch.float64)
    mask = torch.arange(6) < torch.tensor([[6], [4], [1], [3]])
    old_logp[~mask] = ref_logp[~mask] = torch.nan
    results = []
    for function in (
        namespace["kl_term"],
        lambda *x: (
            kl_loss(
                *(x[0], x[2]), old_logp=x[1], estimator="k3", weighting="attached", mask=x[3]
            ).sum()
            / x[3].sum()
        ),
    ):
        leaf = logp.clone().requires_grad_(True)
        value = function(leaf, old_logp, ref_logp, mask)
        results.append((value.detach(), torch.autograd.grad(value, leaf)[0]))
    (value, gradient), (ours, its_gradient) = results
    torch.testing.assert_close(value, ours, rtol=0, atol=1e-14)
    torch.testing.assert_close(gradient, its_gradient, rtol=0, atol=1e-14)
    assert (gradient[mask] != 0).all()
    of_integers = namespace["kl_term"](logp, old_logp, ref_logp, mask.long())  # as TRL's is
    torch.testing.assert_close(of_integers, value, rtol=0, atol=0)


def test_the_flags_of_the_answer_page_are_those_of_the_packages() -> None:
    """TRL's defaults by its own configuration; the other two by the text of their files."""
    trl = pytest.importorskip("trl")
    (lines,) = [b for b in tab_blocks("python") if "GRPOConfig" in b]
    fields = trl.GRPOConfig.__dataclass_fields__
    assert fields["beta"].default == 0.0
    for name, value in re.findall(r"^    (\w+)=(\S+),", lines, re.MULTILINE):
        assert name in fields
        if name != "beta":
            assert fields[name].default == eval(value), name
    for package, marks in (("verl", "kl_loss_type"), ("openrlhf", "--algo.kl.unbiased_gradient")):
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            pytest.skip(f"{package} is not installed: make test-full")
        files = Path(spec.submodule_search_locations[0]).rglob("*.*")
        sources = [p.read_text() for p in files if p.suffix in (".py", ".yaml")]
        assert any(marks in source for source in sources)
    defaults = {
        name: int(re.search(rf'"--{name}", type=int, default=(\d+)', "".join(sources))[1])
        for name in ("train.batch_size", "rollout.batch_size", "rollout.n_samples_per_prompt")
    }  # of OpenRLHF
    assert defaults["rollout.n_samples_per_prompt"] == 1
    assert 8 * defaults["train.batch_size"] == defaults["rollout.batch_size"]


def tab_blocks(language: str) -> list[str]:
    return blocks(BOOK / "answer.md", language)


def test_the_commands_set_parameters_that_the_notebook_has() -> None:
    lines = "".join(blocks(BOOK / "reproduce.md", "sh")).splitlines()
    commands = [line for line in lines if " -p " in line]
    assert len(commands) == 3
    for command in commands:
        number = re.search(r"\b(\d\d)(_\w+)?", command)[1]
        (path,) = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
        (source,) = (
            cell.source
            for cell in nbformat.read(path, as_version=4).cells
            if "parameters" in cell.metadata.get("tags", [])
        )
        names = re.findall(r" -p (\w+)", command)
        assert names and set(names) <= set(re.findall(r"^(\w+):", source, re.MULTILINE)), command


@pytest.mark.parametrize("work", WORKS.values(), ids=list(WORKS))
def test_every_work_can_be_found_by_its_reader(work: Entry) -> None:
    assert work.persons["author"]
    assert work.fields["title"]
    assert "eprint" in work.fields or work.fields["url"].startswith("http")


@pytest.mark.parametrize(
    "work", [w for w in WORKS.values() if "eprint" in w.fields], ids=lambda work: work.key
)
def test_the_year_of_a_preprint_is_that_of_its_number(work: Entry) -> None:
    number = re.fullmatch(r"(\d\d)(0[1-9]|1[0-2])\.\d{4,5}", work.fields["eprint"])
    assert number, work.fields["eprint"]
    assert work.fields["year"] == f"20{number[1]}"


def test_no_preprint_is_listed_twice() -> None:
    numbers = [work.fields["eprint"] for work in WORKS.values() if "eprint" in work.fields]
    assert len(numbers) == len(set(numbers))


def test_notation_lists_every_estimator_that_figures_draw() -> None:
    named = set(re.findall(r"`([a-z0-9_]+)`", (BOOK / "notation.md").read_text()))
    assert set(COLOURS) - {"none", "exact", "reverse", "forward"} <= named


def test_copies_of_figures_are_those_of_the_committed_notebooks(tmp_path: Path) -> None:
    copies = sorted((BOOK / "_static/figures").glob("fig-*.png"))
    for copy in copies:
        (tmp_path / copy.name).write_bytes(copy.read_bytes())
    stale = run_figures.refresh_copies(tmp_path, ROOT / "notebooks")
    assert [path.name for path in stale] == []
    shown = set(
        re.findall(r"book/_static/figures/(fig-[\w-]+\.png)", (ROOT / "README.md").read_text())
    )
    assert shown == {copy.name for copy in copies}


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_no_caption_cites(path: Path) -> None:
    """A citation in a figure caption is a moving argument that LaTeX cannot carry."""
    for cell in nbformat.read(path, as_version=4).cells:
        caption = cell.metadata.get("mystnb", {}).get("figure", {}).get("caption", "")
        assert "{cite" not in caption
