"""The equation index: both sides are read right, and each kind of disagreement is named."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
import pytest

from analysis.report import equations

ROOT = Path(__file__).resolve().parents[2]

CONFIG = "repository:\n  url: https://example.org/book/\n  branch: main\n"
MODULE = '''
def k3(logp):
    """The third, of :math:`l`; see :func:`plain`.

    .. math:: l +
        1

        - 2

    Equation: ``k3``
    Source: someone.
    """

class Policy:
    def density(self):
        """Of a policy.

        Equation: ``density``
        """

def plain():
    """The equation of motion: ``x``; not a field."""
'''
PAGE = """\
```{math}
:label: density
x
```
"""
CHAPTER = [
    "intro",
    "```{math}\n:nowrap:\n:label: k3\nx\n```\n\n$$\ny\n$$ (k3-step-1)\n",
    "$$z$$ end",
]


def tree(root: Path, module: str = MODULE, page: str = PAGE, chapter: list[str] = CHAPTER) -> Path:
    for folder in ("analysis/kl", "book/_generated", "notebooks"):
        (root / folder).mkdir(parents=True)
    (root / "_config.yml").write_text(CONFIG)
    (root / "analysis/kl/estimators.py").write_text(module)
    (root / "book/notation.md").write_text(page)
    (root / "book/_generated/equations.md").write_text("$$ q $$ (generated)")
    cells = [nbformat.v4.new_markdown_cell(source) for source in chapter]
    cells.append(nbformat.v4.new_code_cell('"""\n$$ q $$ (code)\n"""'))
    nbformat.write(nbformat.v4.new_notebook(cells=cells), root / "notebooks/01_estimators.ipynb")
    return root


def test_fields_are_found_with_function_file_and_line(tmp_path: Path) -> None:
    path = "analysis/kl/estimators.py"
    module = "analysis.kl.estimators"
    assert equations.implementations(tree(tmp_path)) == [
        equations.Implementation(
            "k3", f"{module}.k3", path, 2, "The third, of $l$; see `plain`.", "l +\n1\n\n- 2"
        ),
        equations.Implementation(
            "density", f"{module}.Policy.density", path, 15, "Of a policy.", ""
        ),
    ]


def test_equations_are_found_in_pages_and_notebooks_but_not_in_code_or_generated_pages(
    tmp_path: Path,
) -> None:
    assert equations.equations(tree(tmp_path)) == [
        equations.Equation("density", "book/notation.md"),
        equations.Equation("k3", "notebooks/01_estimators.ipynb"),
        equations.Equation("k3-step-1", "notebooks/01_estimators.ipynb"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "```{math}\n:label: a\nx\n```",
        ":::{math}\n:label: a\nx\n:::",
        "   ```{math}\n   :class: big\n   :label: a\n   x\n   ```",
        "$$\nx\n$$ (a)",
        "$$x$$ (a)",
    ],
)
def test_every_form_of_a_label_is_read(text: str) -> None:
    assert equations.labels(text) == ["a"]


def test_unlabelled_maths_and_other_labels_are_not_equations() -> None:
    text = "```{math}\nx\n```\n```{prf:theorem} T\n:label: thm\n$$x$$ (as\nshown)\n```\n$a$ (b)"
    assert equations.labels(text) == []


def test_sides_that_agree_have_no_problems(tmp_path: Path) -> None:
    assert equations.problems(tree(tmp_path)) == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"page": ""}, "Policy.density names equation 'density' and shows none"),
        (
            {"page": PAGE + "$$x$$ (k9)"},
            "book/notation.md: equation 'k9' names no function",
        ),
        ({"page": PAGE + "$$x$$ (k31)"}, "equation 'k31' names no function"),
        ({"page": PAGE + "$$x$$ (k3)"}, "label 'k3' is used twice"),
        (
            {"module": MODULE.replace("def k3", "def k_three")},
            "use the function's own name",
        ),
        ({"module": MODULE + MODULE[: MODULE.index("class")]}, "with another function"),
    ],
)
def test_each_disagreement_is_one_line_that_names_the_place(
    tmp_path: Path, change: dict[str, str], complaint: str
) -> None:
    found = equations.problems(tree(tmp_path, **change))
    assert any(complaint in line for line in found), found
    assert not any("\n" in line for line in found)


def test_index_links_equation_function_and_page(tmp_path: Path) -> None:
    path = tree(tmp_path) / "book/_generated/equations.md"
    equations.write_index(path, tmp_path)
    source = "https://example.org/book/blob/main/analysis/kl/estimators.py"
    rows = path.read_text().splitlines()
    assert (
        f"| {{eq}}`k3` | [`kl.estimators.k3`]({source}#L2) | {{doc}}`../_run/01_estimators` |"
    ) in rows
    assert any(row.endswith("| {doc}`../notation` |") for row in rows)


def test_index_shows_the_formula_that_no_chapter_shows(tmp_path: Path) -> None:
    path = tree(tmp_path, chapter=["intro"]) / "book/_generated/equations.md"
    equations.write_index(path, tmp_path)
    assert "**`k3`**. The third, of $l$; see `plain`." in path.read_text()
    assert "```{math}\n:label: k3\nl +\n1\n\n- 2\n```" in path.read_text()
    assert equations.labels(path.read_text()) == ["k3"]


@pytest.mark.parametrize(
    ("formula", "lines"),
    [
        (r"a = b, \qquad c = d", 1),
        (r"a = b, \qquad c = d" + " + e" * 20, 2),
        (r"a = b,\qquad c = d \qquad e = f" + " + e" * 20, 3),
        (r"\begin{cases} a \qquad b \end{cases}" + " + e" * 20, 1),
        ("a" + " + e" * 40, 1),
    ],
)
def test_long_formulas_are_broken_between_statements_only(formula: str, lines: int) -> None:
    broken = equations.in_lines(formula)
    assert broken.count(r"\\") == lines - 1
    assert (broken == formula) == (lines == 1)
    assert broken.startswith(r"\begin{gathered}") == (lines > 1)


def test_index_refuses_a_book_that_disagrees_with_its_code(tmp_path: Path) -> None:
    path = tree(tmp_path, page="") / "book/_generated/equations.md"
    with pytest.raises(ValueError, match=r"estimators.py:15: .*density"):
        equations.write_index(path, tmp_path)


def test_reading_the_package_does_not_import_it(tmp_path: Path) -> None:
    (tree(tmp_path) / "analysis/kl/broken.py").write_text("import not_there_at_all\n")
    equations.implementations(tmp_path)
    assert "not_there_at_all" not in sys.modules


def test_the_package_and_the_book_agree() -> None:
    assert equations.problems(ROOT) == []
