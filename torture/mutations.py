"""Edits of source, configuration, lock, results and prose, and whether the build notices each."""

from __future__ import annotations

import ast
import json
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from analysis.freshness import import_closure, imported_files
from analysis.records.manifests import verify_results
from analysis.report.build import fingerprint
from analysis.report.ledger import load_ledger, recompute
from analysis.report.pages import config_problems, run_pages, run_problems, toc_pages
from analysis.report.project import Project, find_project
from analysis.report.prose import prose_problems, readme_problems, records_of
from analysis.report.provenance import ledger_problems, read_notebook
from kl_term.errors import UserError
from torture.outcome import Outcome
from torture.pretended import run_without_kernel

#: Not copied: what is made, and what is no input.
LEFT_OUT = shutil.ignore_patterns("__pycache__", "_run", "_generated", "_build")
_NUMBER = re.compile(r"\d")
_SENTENCE = re.compile(r"[A-Z][a-z]+ [A-Za-z ,']{30,}")


class Mutation(NamedTuple):
    """An edit of one file."""

    path: Path
    text: str
    #: What must be said: a pattern of a refusal, or nothing where a rebuilt book is enough.
    expected: str = ""


def mutations(count: int, chance: random.Random, say: Callable[[str], None]) -> list[Outcome]:
    """Make ``count`` edits, one at a time, as many of each kind."""
    kinds = {
        "line of source edited": (_source, run_problems),
        "comment in the source edited": (_comment, run_problems),
        "key of _config.yml misspelt": (_key, config_problems),
        "value of _config.yml edited": (_value, config_problems),
        "locked version edited": (_lock, run_problems),
        "number of a recording edited": (_table, _refusals),
        "manifest of a recording edited": (_manifest, _refusals),
        "figure of the ledger edited": (_figure, ledger_problems),
        "number typed in a page": (_typed_in_page, prose_problems),
        "number typed in a notebook": (_typed_in_notebook, prose_problems),
        "number quoted in README.md edited": (_quoted, readme_problems),
        "sentence of a page edited": (_sentence, prose_problems),
    }
    outcomes = []
    with tempfile.TemporaryDirectory() as root:
        project = _copied(Path(root, "book"))
        usual = fingerprint(project)
        for number, (kind, (mutate, check)) in enumerate(kinds.items()):
            known = set(check(project))
            tried = count // len(kinds) + (number < count % len(kinds))
            silent = 0
            for _ in range(tried):
                mutation = mutate(project, chance)
                before = mutation.path.read_bytes()
                mutation.path.write_text(mutation.text, encoding="utf-8")
                found = sorted(set(check(project)) - known)
                silent += not _as_expected(kind, mutation, found, fingerprint(project) != usual)
                mutation.path.write_bytes(before)
            assert set(check(project)) == known, "an edit was not undone"
            outcomes.append(Outcome(kind, tried, 0, silent))
            say(f"{kind}: {tried}, {silent} past the build")
    return outcomes


def _as_expected(kind: str, mutation: Mutation, found: list[str], rebuilt: bool) -> bool:
    """Refused with the right words; of a comment, not a word."""
    if kind.startswith("comment"):
        return not found
    if kind.startswith("figure"):
        return bool(found) and any(_disagreements(mutation))
    if mutation.expected:
        return any(re.search(mutation.expected, line) for line in found)
    return rebuilt


def _refusals(project: Project) -> list[str]:
    """What a recording is refused for."""
    try:
        verify_results(project.results)
    except UserError as refusal:
        return [str(refusal)]
    return []


def _disagreements(mutation: Mutation) -> Iterator[str]:
    """What recomputing the edited row says."""
    project = Project(mutation.path.parents[1])
    (claim,) = (c for c in load_ledger(project) if c.id == mutation.expected)
    (outcome,) = recompute([claim])
    if outcome.problem:
        yield outcome.problem


def _copied(root: Path) -> Project:
    """This checkout, as if every notebook had just run and the ledger agreed."""
    here, project = find_project(Path(__file__).parent), Project(root)
    for folder in ("kl_term", "analysis", "book", "notebooks", "results"):
        shutil.copytree(here.root / folder, root / folder, ignore=LEFT_OUT)
    for path in (here.config, here.toc, here.lock, here.readme, here.root / "pyproject.toml"):
        shutil.copy(path, root / path.name)
    reads = [p.relative_to(root).as_posix() for p in project.results.rglob("*") if p.is_file()]
    for run in run_pages(project):
        run_without_kernel(project, run.name, reads[:20])
        _quote(project, run.name)
    return project


def _quote(project: Project, chapter: str) -> None:
    """Let README.md quote a number that a chapter recorded."""
    records = records_of(read_notebook(project.runs / f"{chapter}.ipynb", chapter))
    with open(project.readme, "a", encoding="utf-8") as readme:
        for key, text in [each for each in records.items() if re.fullmatch(r"[\d.]+", each[1])][:1]:
            readme.write(f"\n<!-- glue: {chapter}::{key} -->{text}<!-- /glue -->\n")


def _source(project: Project, chance: random.Random) -> Mutation:
    """A number or a comparison of a module that a chapter imports becomes another."""
    (chapter,) = chance.sample([run.name for run in run_pages(project)], 1)
    notebook = read_notebook(project.notebooks / f"{chapter}.ipynb", chapter)
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    imports = {f for cell in cells for f in imported_files(cell, project.root)}
    while True:
        path = project.root / chance.choice(import_closure(imports, project.root))
        text = path.read_text(encoding="utf-8")
        places = [
            node
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Constant) and type(node.value) in (int, float)
        ]
        if places:
            return Mutation(
                path, _with(text, chance.choice(places)), rf"{chapter}\.ipynb: the code"
            )


def _with(text: str, place: ast.Constant) -> str:
    """Source with one number replaced by the next."""
    lines = text.encode().splitlines(keepends=True)
    line = lines[place.lineno - 1]
    said = f"({place.value!r} + 1)".encode()
    lines[place.lineno - 1] = line[: place.col_offset] + said + line[place.end_col_offset :]
    return b"".join(lines).decode()


def _comment(project: Project, chance: random.Random) -> Mutation:
    path = chance.choice(sorted((project.library / "kl").glob("*.py")))
    return Mutation(path, path.read_text(encoding="utf-8") + f"\n# {chance.random()}\n")


def _key(project: Project, chance: random.Random) -> Mutation:
    text = project.config.read_text(encoding="utf-8")
    keys = re.findall(r"^(title|author|logo|execute|html|sphinx|latex|parse):", text, re.MULTILINE)
    key = chance.choice(keys)
    return Mutation(project.config, re.sub(rf"(?m)^{key}:", f"{key}s:", text), f"key {key}s")


def _value(project: Project, chance: random.Random) -> Mutation:
    text = project.config.read_text(encoding="utf-8")
    return Mutation(project.config, text.replace('"2026"', f'"{chance.randrange(2027, 9999)}"'))


def _lock(project: Project, chance: random.Random) -> Mutation:
    text = _digit_changed(project.lock.read_text(encoding="utf-8"), chance)
    return Mutation(project.lock, text, "requirements.lock or torch changed")


def _table(project: Project, chance: random.Random) -> Mutation:
    path = chance.choice(sorted(project.results.rglob("*.csv")))
    changed = _digit_changed(path.read_text(encoding="utf-8"), chance)
    return Mutation(path, changed, f"{path.name} changed since it was recorded")


def _manifest(project: Project, chance: random.Random) -> Mutation:
    path = chance.choice(sorted(project.results.glob("*/manifest.json")))
    changed = _digit_changed(path.read_text(encoding="utf-8"), chance)
    return Mutation(path, changed, f"{path.parent.name}/manifest.json")


def _figure(project: Project, chance: random.Random) -> Mutation:
    """A measured figure of a claim that is recomputed in no time."""
    claim = chance.choice([claim for claim in load_ledger(project) if claim.id in QUICK])
    name = chance.choice([n for n, value in claim.measured.items() if abs(value) > ROUNDING])
    text = project.claims.read_text(encoding="utf-8")
    start = re.search(rf"id: {claim.id}\b", text)
    assert start is not None
    place = re.compile(rf"\b{name}: ([-+.\de]+)").search(text, start.end())
    assert place is not None
    wrong = repr(float(place[1]) * 1.5)
    changed = text[: place.start(1)] + wrong + text[place.end(1) :]
    return Mutation(project.claims, changed, claim.id)


#: Claims decided by enumeration alone.
QUICK = ("S0-2", "S4-12")
#: Figures below it are rounding, and no claim is decided by their digits.
ROUNDING = 1e-6


def _typed_in_page(project: Project, chance: random.Random) -> Mutation:
    pages = [page.with_suffix(".md") for page in toc_pages(project)]
    while True:
        path = chance.choice([page for page in pages if page.is_file()])
        lines = path.read_text(encoding="utf-8").split("\n")
        places = _plain(lines)
        if places:
            typed, at = _typed(chance), chance.choice(places)
            lines[at] += f" It is {typed} here."
            return Mutation(path, "\n".join(lines), re.escape(f"the number {typed} is typed"))


def _typed_in_notebook(project: Project, chance: random.Random) -> Mutation:
    path = project.notebooks / f"{chance.choice(run_pages(project)).name}.ipynb"
    notebook = json.loads(path.read_text(encoding="utf-8"))
    prose = [cell for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
    typed = _typed(chance)
    chance.choice(prose)["source"].append(f"\n\nIt is {typed} here.\n")
    expected = re.escape(f"the number {typed} is typed")
    return Mutation(path, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", expected)


def _quoted(project: Project, chance: random.Random) -> Mutation:
    text = project.readme.read_text(encoding="utf-8")
    quote = chance.choice([*re.finditer(r"(?<=-->)[^<]*\d[^<]*(?=<!-- /glue -->)", text)])
    changed = _digit_changed(quote.group(), chance)
    return Mutation(
        project.readme,
        text[: quote.start()] + changed + text[quote.end() :],
        re.escape(f"not {changed.strip()!r}"),
    )


def _sentence(project: Project, chance: random.Random) -> Mutation:
    """No number: the page is built again."""
    pages = {page: page.read_text(encoding="utf-8") for page in project.book.glob("*.md")}
    found = [(page, lines) for page, text in pages.items() if _plain(lines := text.split("\n"))]
    path, lines = chance.choice(found)
    lines[chance.choice(_plain(lines))] += " Not so."
    return Mutation(path, "\n".join(lines))


def _plain(lines: list[str]) -> list[int]:
    """Lines that are the beginning of a sentence, and of nothing else."""
    places, fenced = [], False
    for at, line in enumerate(lines):
        fenced ^= line.lstrip().startswith(("```", "~~~", ":::", "---"))
        if not fenced and _SENTENCE.match(line):
            places.append(at)
    return places


def _typed(chance: random.Random) -> str:
    return chance.choice(
        [
            f"{chance.random():.3f}",
            f"{chance.randrange(1, 100)}%",
            f"{chance.randrange(10, 1900)}",
            f"{chance.randrange(1, 10)}e-{chance.randrange(1, 10)}",
        ]
    )


def _digit_changed(text: str, chance: random.Random) -> str:
    at = chance.choice([match.start() for match in _NUMBER.finditer(text)])
    return text[:at] + str((int(text[at]) + chance.randrange(1, 10)) % 10) + text[at + 1 :]
