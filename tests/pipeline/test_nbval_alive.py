"""The plugin through which notebooks are compared with their stored outputs."""

from __future__ import annotations

import nbval.kernel
import pytest

from tests.pipeline import nbval_alive


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_a_kernel_that_never_answers_is_started_once_more(
    monkeypatch: pytest.MonkeyPatch, silent: int
) -> None:
    tries = []

    def start(**options):
        tries.append(options)
        if len(tries) <= silent:
            raise RuntimeError("Kernel didn't respond in 60 seconds")
        return "manager", "client"

    monkeypatch.setattr(nbval_alive, "_start_new_kernel", start)
    if silent < 2:
        assert nbval.kernel.start_new_kernel(cwd="here") == ("manager", "client")
    else:
        with pytest.raises(RuntimeError, match="didn't respond"):
            nbval.kernel.start_new_kernel(cwd="here")
    assert tries == [{"cwd": "here"}] * min(2, silent + 1)
