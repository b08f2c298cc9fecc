"""Small books for Sphinx to build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace


def build_site(root: Path, builder: str = "html", **settings: Any) -> str:
    """Build what lies in ``root`` into ``root/out``; what Sphinx warned of.

    What its extensions register is forgotten again, so that the next site begins anew.
    """
    with open(root / "warnings", "w+") as log, docutils_namespace():
        folders = (root, None, root / "out", root / "trees")
        Sphinx(*folders, builder, settings, status=None, warning=log).build()
        log.seek(0)
        return log.read()
