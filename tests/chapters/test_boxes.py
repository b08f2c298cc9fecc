"""The numbered boxes: one that says where training goes names the flow that it follows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
BOX = re.compile(
    r"(`{3,})\{prf:(?:theorem|proposition)\}([^\n]*)\n:label: (\S+)\n(.*?)\n\1(?=\n|$)", re.DOTALL
)
#: What happens to a policy on its way, which differs between the plain and the natural flow.
MOVES = re.compile(r"\battracts?\b|\brepels?\b|driven (?:apart|to)|is lost\b|\bvanish|every start")
FLOW = re.compile(r"natural|plain|\bflow|on the logits|\\dot z")


def boxes() -> dict[str, str]:
    """Title and text of every theorem and proposition, by label."""
    found = {}
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        prose = "\n".join("".join(x["source"]) for x in cells if x["cell_type"] == "markdown")
        found |= {label: f"{title}\n{text}" for _, title, label, text in BOX.findall(prose)}
    return found


def nameless(text: str) -> bool:
    return bool(MOVES.search(text)) and not FLOW.search(text)


def test_a_box_that_moves_a_policy_names_its_flow():
    moving = {label for label, text in boxes().items() if MOVES.search(text)}
    assert {"prop-control-reward", "thm-penalty-slope", "thm-penalty-equilibria"} <= moving
    assert not [label for label in moving if nameless(boxes()[label])]


@pytest.mark.parametrize("flow", ["along the natural flow ", ""])
def test_a_box_without_its_flow_is_seen(flow):
    assert nameless(f"Two tokens\n{flow}two tokens below it are driven apart.") == (not flow)
