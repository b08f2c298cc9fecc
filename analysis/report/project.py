"""Where the parts of a checkout lie, and which notebook a name means."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from kl_term.errors import UserError


class Project:
    """The paths of one checkout; everything in the pipeline is relative to ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.notebooks = root / "notebooks"
        self.library = root / "kl_term"
        self.package = root / "analysis"
        self.results = root / "results"
        self.lock = root / "requirements.lock"
        self.book = root / "book"
        self.claims = root / "book" / "claims.yaml"
        self.runs = root / "book" / "_run"
        self.generated = root / "book" / "_generated"
        self.config = root / "_config.yml"
        self.toc = root / "_toc.yml"
        self.readme = root / "README.md"
        self.address = root / "address.yaml"
        self.build = root / "_build"

    def relative(self, path: Path) -> str:
        """``path`` as a reader of the repository would write it."""
        return (
            path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)
        )


def find_project(start: Path) -> Project:
    """The checkout that holds ``start``."""
    for folder in (start.resolve(), *start.resolve().parents):
        if (folder / "pyproject.toml").is_file() and (folder / "notebooks").is_dir():
            return Project(folder)
    raise UserError(
        f"{start}: no pyproject.toml beside notebooks/ here or above; cd into a checkout"
    )


def select_notebooks(project: Project, names: Iterable[str]) -> list[Path]:
    """The notebooks that ``names`` mean, in the order of the book; all of them for no names.

    A name is a number (``01``), a stem (``01_estimators``) or a path.
    """
    available = sorted(project.notebooks.glob("*.ipynb"))
    if not available:
        raise UserError(f"{project.relative(project.notebooks)}/ holds no notebooks")
    chosen = {_select(project, name, available) for name in names}
    return [path for path in available if path in chosen] if chosen else available


def _select(project: Project, name: str, available: list[Path]) -> Path:
    path = Path(name)
    if path.suffix == ".ipynb" and path.resolve() in available:
        return path.resolve()
    stem = path.name.removesuffix(".ipynb")
    found = [p for p in available if p.stem == stem or p.stem.split("_")[0] == stem]
    if len(found) == 1:
        return found[0]
    stems = [p.stem for p in available]
    if found:
        raise UserError(f"{name!r} means several notebooks: {', '.join(p.stem for p in found)}")
    nearest = difflib.get_close_matches(stem, stems, 1, 0.5)
    hint = f"did you mean {nearest[0]}?" if nearest else f"choose from {', '.join(stems)}"
    raise UserError(f"no notebook {name!r} in {project.relative(project.notebooks)}/; {hint}")
