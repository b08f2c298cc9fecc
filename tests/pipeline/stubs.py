"""Programs that stand in for papermill and jupyter-book."""

from __future__ import annotations

import json
import os  # noqa: F401, cells use it
import sys
import time
from pathlib import Path


def papermill() -> None:
    """Run no kernel, and of the cells only those that begin with ``# stub``."""
    source, output = map(Path, sys.argv[1:3])
    notebook = json.loads(source.read_text())
    reads = output.with_name("reads")
    reads.touch()

    def fail(name: str) -> None:
        """End as papermill does when a cell raises."""
        cell["outputs"] = [{"output_type": "error", "ename": name, "evalue": "", "traceback": []}]
        output.write_text(json.dumps(notebook))
        sys.exit(1)

    for index, cell in enumerate(notebook["cells"], 1):
        cell["metadata"]["papermill"] = {"start_time": "now"}
        output.write_text(json.dumps(notebook))
        text = "".join(cell["source"])
        if text.startswith("# stub"):
            exec(text, globals() | locals())
        if cell["cell_type"] == "code":
            cell["execution_count"] = index
    notebook["metadata"]["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
    output.write_text(json.dumps(notebook))


def jupyter_book() -> None:
    """Fail soon in English, and never end in Chinese."""
    time.sleep(600 if sys.argv[2].endswith("zh") else 2)
    sys.exit("WARNING: broken")


def sleeper() -> None:
    """Say that it lives, with a child in a session of its own, and do nothing."""
    import subprocess

    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print(child.pid, flush=True)
    time.sleep(600)
