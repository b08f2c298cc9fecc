"""An audit in a process of its own: whatever the user's file does, the caller gets one line."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from pydantic import ValidationError

from kl_term.audit.request import Answer, Request
from kl_term.errors import UserError
from kl_term.files import replace_file


def answer_isolated(request: Request, *, seconds: float) -> Answer:
    """As :func:`kl_term.audit.answering.answer`, in a new process that gets so many seconds.

    What the file prints is not shown; every process that it starts ends with it.

    Raises:
        UserError: one line: it failed, ended, or did not come back.
    """
    with tempfile.TemporaryDirectory(prefix="kl-term-audit-") as folder:
        result = Path(folder, "answer.json")
        process = subprocess.Popen(
            [sys.executable, "-m", "kl_term.audit.isolated", str(result)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            with contextlib.suppress(BrokenPipeError):
                process.communicate(request.model_dump_json().encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            raise UserError(
                f"{request.target}: did not return within {seconds:g} seconds"
            ) from None
        finally:
            _end(process)
        if not result.exists():
            how = _ended(process.returncode)
            raise UserError(f"{request.target}: {how} before there was a result")
        try:
            found = Answer.model_validate_json(result.read_bytes())
        except ValidationError:
            raise UserError(f"{request.target}: left no readable result") from None
    if found.refusal:
        raise UserError(found.refusal)
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _ended(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def main() -> None:
    """Read a request from stdin, write the answer to the file named by the one argument."""
    from kl_term.audit.answering import answer  # torch, which the process that asks has no use for

    request = Request.model_validate_json(sys.stdin.buffer.read())
    try:
        found = answer(request)
    except UserError as refusal:
        found = Answer(refusal=str(refusal).splitlines()[0])
    replace_file(Path(sys.argv[1]), found.model_dump_json().encode())
    os._exit(0)  # threads that the file left behind must not hold us


if __name__ == "__main__":
    main()
