"""The table of methods as a page: a row each, everything linked."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

from analysis.files import replace_file
from analysis.report.equations import equations, source_url
from analysis.report.evidence import code_link, section_link, tested_link
from analysis.report.methods import FAMILIES, Method, Table, load_methods, recordings
from analysis.report.project import Project

_INTRODUCTION = """\
# Methods: equation, code, test, measurement

{total} methods, each one small function. A row gives its equation, the function that computes it
and an exact test of that, the presets that train it with the labels of their arms (linked to the
recording, where there is one), and where it is explained and which claims it is about. Below each
table stands how an arm of a population switches its methods on.

All arms are made of one [`Arm`]({arms}): its parts combine freely, and a combination in which one
part would go unread is refused. `analysis sweep NAME` trains a preset. Beyond the test named here
every axis is [compared]({naive}), loss and gradient, with a token-by-token run that shares no code
with the trainer; random compositions of all axes are [compared]({composed}) bit for bit with their
solo runs.
"""
_COLUMNS = ("Method", "Equation, code, test", "Trained in", "Explained in")
_WIDTH = 88  #: of a line of code


def write_methods(project: Project, path: Path) -> None:
    """Write the page of methods.

    Raises:
        Refused: an entry is malformed or dangles.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, methods_page(project, load_methods(project)).encode())


def methods_page(project: Project, table: Table) -> str:
    """The page as MyST text."""
    source = source_url(project.root)
    labelled = {equation.label for equation in equations(project.root)}
    presets = {
        preset: f"[{preset}]({source}/{project.relative(folder)}/manifest.json)"
        for preset, folder in recordings(project).items()
    }
    for preset, section in table.shown.items():
        presets[preset] = f"{presets.get(preset, preset)} in {section_link(section, labelled)}"
    parts = [
        _INTRODUCTION.format(
            total=len(table.methods),
            arms=f"{source}/analysis/training/arms.py",
            naive=f"{source}/tests/training/test_methods.py",
            composed=f"{source}/tests/training/test_compositions.py",
        )
    ]
    for family, heading in FAMILIES.items():
        of_family = [method for method in table.methods if method.family == family]
        rule = "|".join("---" for _ in _COLUMNS)
        parts += [f"## {heading}\n", f"| {' | '.join(_COLUMNS)} |", f"|{rule}|"]
        parts += [_row(project, method, labelled, presets) for method in of_family]
        parts += ["\nSwitched on by\n", "```python", "\n\n".join(map(_switch, of_family)), "```\n"]
    return "\n".join(parts)


def _switch(method: Method) -> str:
    """The expression as code under the method's name, a keyword a line where it is long."""
    call = ast.parse(method.use, mode="eval").body
    if len(method.use) <= _WIDTH or not isinstance(call, ast.Call):
        return f"# {method.name}\n{method.use}"
    words = [*call.args, *call.keywords]
    lines = "".join(f"    {ast.unparse(word)},\n" for word in words).replace("'", '"')
    return f"# {method.name}\n{ast.unparse(call.func)}(\n{lines})"


def _row(project: Project, method: Method, labelled: set[str], presets: Mapping[str, str]) -> str:
    cells = (
        f"**{method.name}**<br>{method.source}",
        f"{{eq}}`{method.equation}`<br>{code_link(project, method.function)}<br>"
        f"{tested_link(project, method.test, 'test')}",
        _trained(method, presets),
        _explained(method, labelled),
    )
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _trained(method: Method, presets: Mapping[str, str]) -> str:
    if not method.presets:
        return method.unmeasured
    return "<br>".join(
        f"{presets.get(preset, f'{preset} (not recorded)')}: {', '.join(f'`{a}`' for a in arms)}"
        for preset, arms in method.presets.items()
    )


def _explained(method: Method, labelled: set[str]) -> str:
    claims = ", ".join(f"{{ref}}`{claim} <{claim.lower()}>`" for claim in method.claims)
    place = section_link(method.section, labelled)
    return f"{place}; {claims}" if claims else place
