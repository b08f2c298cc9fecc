"""Runs of TRL on tiny models made from a configuration: seconds each on the CPU, no network."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

for _offline in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
    os.environ.setdefault(_offline, "1")

VOCABULARY = 48
END = "."

#: What a run has unless its case says otherwise.
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 32,
    "num_generations": 8,
    "max_completion_length": 16,
    "max_steps": 12,
    "num_iterations": 2,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "beta": 0.05,
}


class Case(NamedTuple):
    """One run."""

    name: str
    settings: Mapping[str, Any] = MappingProxyType({})
    term: dict[str, Any] | None = None  #: of the KL term; None = TRL's own
    model: str = "llama"
    reward: str = "even"
    prompts: tuple[int, int] = (3, 3)  #: shortest and longest, in tokens
    lora: dict[str, Any] | None = None
    seed: int = 0
    fault: Callable[[Any], None] | None = None  #: plants a fault in the trainer
    scale: float = 0.3  #: standard deviation of the initial weights


def tokenizer(vocabulary: int = VOCABULARY) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*(str(digit) for digit in range(10)), "=", END, "<pad>", "<unk>"]
    words += [f"<{index}>" for index in range(len(words), vocabulary)]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        padding_side="left",
        pad_token="<pad>",
        eos_token=END,
        unk_token="<unk>",
    )


def make_model(kind: str, seed: int, scale: float) -> Any:
    """A random model: ``llama``, ``qwen2`` or ``gpt2`` (which has absolute positions)."""
    import torch
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
    )

    words = tokenizer()
    torch.manual_seed(seed)
    ids = {
        "vocab_size": VOCABULARY,
        "pad_token_id": words.pad_token_id,
        "eos_token_id": words.eos_token_id,
        "bos_token_id": None,
        "initializer_range": scale,
    }
    if kind == "gpt2":
        config = GPT2Config(
            n_embd=48,
            n_layer=2,
            n_head=2,
            n_positions=128,
            **ids,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
        )
        return GPT2LMHeadModel(config)
    classes = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}
    config_class, model_class = classes[kind]
    return model_class(
        config_class(
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            intermediate_size=96,
            max_position_embeddings=128,
            **ids,
        )
    )


def prompts(seed: int, lengths: tuple[int, int]) -> Any:
    from datasets import Dataset

    draw = random.Random(seed)
    rows = [
        " ".join([*(str(draw.randrange(10)) for _ in range(draw.randint(*lengths))), "="])
        for _ in range(256)
    ]
    return Dataset.from_list([{"prompt": row} for row in rows])


def even(completions: list[str], **_: object) -> list[float]:
    """Share of even digits among the words."""
    texts = [completion.split() for completion in completions]
    return [sum(w in "02468" for w in text) / max(1, len(text)) for text in texts]


def correct(completions: list[str], **_: object) -> list[float]:
    """One if a chosen digit is among the words."""
    return [float("7" in completion.split()) for completion in completions]


def constant(completions: list[str], **_: object) -> list[float]:
    return [1.0] * len(completions)


REWARDS = {"even": even, "correct": correct, "constant": constant}


def run(case: Case, folder: Path) -> Path:
    """Train, and return the folder with its dump."""
    import torch
    import transformers
    from trl import GRPOConfig

    from kl_term.integrations.trl import KLGRPOTrainer
    from kl_term.kl.term import KLTerm

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    model_folder = folder / "model"
    make_model(case.model, 1000 + case.seed, case.scale).save_pretrained(model_folder)
    tokenizer().save_pretrained(model_folder)
    peft = None
    if case.lora is not None:
        from peft import LoraConfig

        peft = LoraConfig(task_type="CAUSAL_LM", **case.lora)
    args = GRPOConfig(
        output_dir=str(folder / "out"),
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1000,
        dataloader_pin_memory=False,
        seed=case.seed,
        **SETTINGS | {"bf16": False} | case.settings,
    )
    trainer = KLGRPOTrainer(
        model=str(model_folder),
        reward_funcs=REWARDS[case.reward],
        args=args,
        train_dataset=prompts(case.seed, case.prompts),
        processing_class=tokenizer(),
        kl_term=None if case.term is None else KLTerm(**case.term),
        dump_rollouts=folder / "dump",
        peft_config=peft,
    )
    trainer.log = lambda *_, **__: None
    torch.manual_seed(case.seed)
    if case.fault is not None:
        case.fault(trainer)
    trainer.train()
    return folder / "dump"
