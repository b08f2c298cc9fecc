"""The program of a notebook's kernel: ``python -P kernel.py LOG ROOT -f CONNECTION``.

It notes in LOG the files below ROOT that the notebook opens, and at the end the device it used. It
is started by its path, since the ``analysis`` of ROOT may be another one than this.
"""

from __future__ import annotations

import atexit
import importlib.util
import sys
from pathlib import Path

#: Before the name of the device, in the log.
DEVICE = "device: "


def main(log: Path, root: Path) -> None:
    """Watch, then serve until the kernel is asked to end."""
    source = Path(__file__).parents[1] / "freshness.py"
    spec = importlib.util.spec_from_file_location("freshness_of_the_kernel", source)
    assert spec is not None and spec.loader is not None
    freshness = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = freshness
    spec.loader.exec_module(freshness)

    def tell_device() -> None:
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            with open(log, "a", encoding="utf-8") as file:
                file.write(f"{DEVICE}{torch.cuda.get_device_name()}\n")

    atexit.register(tell_device)
    from ipykernel.kernelapp import launch_new_instance

    log.touch()
    freshness.watch(freshness.Reads(root, log))
    launch_new_instance()


if __name__ == "__main__":
    _, log_path, root_path, *sys.argv[1:] = sys.argv
    main(Path(log_path), Path(root_path))
