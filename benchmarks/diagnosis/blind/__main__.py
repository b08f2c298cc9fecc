"""Write the dumps and their index: ``python -m benchmarks.diagnosis.blind FOLDER [--seed 0]``."""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path

from benchmarks.diagnosis.blind import WORDS
from benchmarks.diagnosis.blind.dumps import write
from benchmarks.diagnosis.blind.faults import FAULTS
from benchmarks.diagnosis.blind.sound import SOUND


def main() -> None:
    """Write all dumps, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=list(FAULTS | SOUND), help="names of dumps")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    words = tomllib.loads(WORDS.read_text())
    index = []
    for name in asked.only:
        dump = (FAULTS | SOUND)[name]
        path = write(dump, name, asked.folder, asked.seed)
        row = {"name": name, "faulty": name in FAULTS, **words[name]}
        index.append(row | {"file": path.name, "command": dump.command(path)})
    (asked.folder / "index.json").write_text(json.dumps(index, indent=1) + "\n")
    print(f"{len(index)} dumps in {asked.folder}, listed in index.json")


if __name__ == "__main__":
    main()
