"""``analysis COMMAND``: find the command's module, call it, and turn refusals into one line."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

from analysis import __version__
from analysis.errors import Refused, Stopped

# A command is a module of this package with a function of the same name.
COMMANDS = {
    "run": "execute the notebooks whose inputs changed",
    "sweep": "train the members of a population that are not stored yet",
    "reproduce": "train recorded members again and compare every digit",
    "bench": "time the population beside a plain trainer, TRL and the machine's floor",
    "diagnose": "say what is wrong with the KL term of a run, from its log-probs",
    "claims": "recompute the ledger and refuse any disagreement",
    "build": "check the executed notebooks and build the book from them",
    "refresh": "copy the executed notebooks back over the committed ones",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"analysis {__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"choose from {', '.join(COMMANDS)}"
        return _complain(f"no command {name!r}; {hint}")
    try:
        return _call(name, rest)
    except Refused as refusal:
        return _complain(str(refusal))
    except BrokenPipeError:  # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _complain(f"{error.filename or 'the system'}: {error.strerror or error}")
    except Stopped as stopped:
        _complain("stopped; earlier outputs are as they were")
        return 128 + stopped.signum


def usage() -> str:
    """The list of commands."""
    lines = [f"  {name:<10}{summary}" for name, summary in COMMANDS.items()]
    return "\n".join(["usage: analysis COMMAND [--help] ...", "", *lines])


def _call(name: str, arguments: list[str]) -> int:
    try:
        import tyro

        from analysis.report.processes import stoppable

        command = getattr(importlib.import_module(f"analysis.cli.{name}"), name)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == __name__.partition(".")[0]:
            raise
        raise Refused(
            f"{package} is not installed, and `analysis {name}` needs it: "
            "pip install 'kl-term[book]'"
        ) from None
    with stoppable():
        tyro.cli(command, prog=f"analysis {name}", args=arguments)
    return 0


def _complain(message: str) -> int:
    for line in message.splitlines():
        print(f"analysis: {line}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
