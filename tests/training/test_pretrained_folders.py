"""A model that is converted appears whole or not at all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from analysis.training.pretrained import folders


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    class Tokenizer:
        @staticmethod
        def from_pretrained(folder: Path, **options) -> SimpleNamespace:
            return SimpleNamespace(save_pretrained=lambda to: (to / "tokenizer.json").touch())

    class Model:
        @staticmethod
        def from_pretrained(folder: Path, **options) -> None:
            (partial,) = (tmp_path / "cache").iterdir()
            assert (partial / "tokenizer.json").is_file(), "nothing was begun"
            raise OSError("no space left")

    libraries = SimpleNamespace(AutoTokenizer=Tokenizer, AutoModelForCausalLM=Model)
    monkeypatch.setattr(folders, "needed", lambda module, extra: libraries)
    with pytest.raises(OSError, match="no space left"):
        folders._convert(tmp_path / "model.gguf", tmp_path / "cache" / "model")
    assert list((tmp_path / "cache").iterdir()) == []
