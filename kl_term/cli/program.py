"""A command line of several commands: find the command's module, call it, refuse in one line."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.machinery
import io
import os
import signal
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import NamedTuple, NoReturn

from kl_term.errors import Stopped, UserError


class Program(NamedTuple):
    """A program and its commands, each a module of one package with a function of the same name."""

    name: str  #: as it is called
    version: str
    package: str  #: that holds the modules
    commands: Mapping[str, str]  #: command -> what it does
    extras: Mapping[str, str]  #: command -> the extra it needs
    install: str  #: how to install an extra, with a place for its name


def run_program(program: Program, argv: Sequence[str] | None = None) -> int:
    """Run one command of a program and return its exit status."""
    for stream in (sys.stdout, sys.stderr):  # a terminal without our signs still gets the rest
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    arguments = list(sys.argv[1:] if argv is None else argv)
    name, *rest = arguments or ["--help"]
    try:
        if name in ("-h", "--help"):
            print(usage(program))
            return 0 if arguments else 2
        if name == "--version":
            print(f"{program.name} {program.version}")
            return 0
        if name not in program.commands:
            raise UserError(_unknown(name, program.commands))
        return _call(program, name, rest)
    except UserError as refusal:
        return _complain(program, str(refusal))
    except BrokenPipeError:  # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _complain(program, f"{error.filename or 'the system'}: {error.strerror or error}")
    except (ImportError, AttributeError):
        if shadow := _shadow():
            return _complain(program, shadow)
        raise
    except Stopped as stopped:
        _complain(program, "stopped; earlier outputs are as they were")
        return 128 + stopped.signum


def usage(program: Program) -> str:
    """The list of commands."""
    lines = [f"  {name:<10}{summary}" for name, summary in program.commands.items()]
    return "\n".join([f"usage: {program.name} COMMAND [--help] ...", "", *lines])


def _unknown(name: str, commands: Mapping[str, str]) -> str:
    nearest = difflib.get_close_matches(name, commands, 1)
    hint = f"did you mean {nearest[0]}?" if nearest else f"choose from {', '.join(commands)}"
    return f"no command {name!r}; {hint}"


def _call(program: Program, name: str, arguments: list[str]) -> int:
    try:
        import tyro

        command = getattr(importlib.import_module(f"{program.package}.{name}"), name)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("kl_term", program.package.partition(".")[0]):
            raise
        install = program.install.format(extra=program.extras[name])
        raise UserError(
            f"{package} is not installed, and `{program.name} {name}` needs it: {install}"
        ) from None
    with stoppable():
        tyro.cli(command, prog=f"{program.name} {name}", args=arguments)
    return 0


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Turn the signals that ask for an end into `Stopped`, so that ``finally`` blocks run."""

    def stop(signum: int, frame: FrameType | None) -> NoReturn:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)  # one request is enough; let cleaning finish
        raise Stopped(signum)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {each: signal.signal(each, stop) for each in signals}
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


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


def _complain(program: Program, message: str) -> int:
    for line in message.splitlines():
        print(f"{program.name}: {line}", file=sys.stderr)
    return 1
