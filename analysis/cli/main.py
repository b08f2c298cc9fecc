"""``analysis COMMAND``: find the command's module, call it, and turn refusals into one line."""

from __future__ import annotations

import os
import sys

try:
    import difflib
    import importlib
    import importlib.machinery
    import io
    import sysconfig
    from collections.abc import Sequence

    importlib.import_module("typing").TYPE_CHECKING  # noqa: B018 - is it Python's own?
except (ImportError, AttributeError) as error:
    path = os.environ.get("PYTHONPATH", "")
    sys.exit(f"analysis: {error}: unset PYTHONPATH={path}, which hides Python's own modules")

try:
    from analysis import __version__
except ImportError:
    from importlib.metadata import packages_distributions

    names = ", ".join(sorted({*packages_distributions().get("analysis", []), "kl-term"}))
    path = os.environ.get("PYTHONPATH")
    fix = f"unset PYTHONPATH={path}, or " if path else ""
    sys.exit(f"analysis: several packages have this name ({names}): {fix}install each on its own")

from analysis.errors import Stopped, UserError

# A command is a module of this package with a function of the same name.
COMMANDS = {
    "run": "execute the notebooks whose inputs changed",
    "sweep": "train the runs of a population that are not stored yet",
    "reproduce": "train recorded runs again and compare every digit",
    "diagnose": "say what is wrong with the KL term of a run, from its log-probs",
    "claims": "recompute the ledger and refuse any disagreement",
    "build": "check the executed notebooks and build the book from them",
    "translate": "bring the catalogues of other languages up to date",
    "refresh": "copy the executed notebooks back over the committed ones",
}

#: The extra that a command needs, where it is not the book's.
EXTRAS = {"diagnose": "diagnose", "sweep": "ray", "reproduce": "ray"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    for stream in (sys.stdout, sys.stderr):  # a terminal without our signs still gets the rest
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
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
    except UserError as refusal:
        return _complain(str(refusal))
    except BrokenPipeError:  # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _complain(f"{error.filename or 'the system'}: {error.strerror or error}")
    except (ImportError, AttributeError):
        if shadow := _shadow():
            return _complain(shadow)
        raise
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
        raise UserError(
            f"{package} is not installed, and `analysis {name}` needs it; in a clone: "
            f"pip install -e '.[{EXTRAS.get(name, 'book')}]'"
        ) from None
    with stoppable():
        tyro.cli(command, prog=f"analysis {name}", args=arguments)
    return 0


def _shadow() -> str:
    """Something on PYTHONPATH that hides what is installed, in words; empty if there is none."""
    for folder in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None) or ""
            if os.path.abspath(file).startswith(os.path.abspath(folder) + os.sep):
                installed = importlib.machinery.PathFinder.find_spec(
                    name, [sysconfig.get_path("purelib"), sysconfig.get_path("stdlib")]
                )
                if installed is not None and installed.origin != file and "." not in name:
                    return f"{file} hides the installed {name}: unset PYTHONPATH, or rename it"
    return ""


def _complain(message: str) -> int:
    for line in message.splitlines():
        print(f"analysis: {line}", file=sys.stderr)
    return 1
