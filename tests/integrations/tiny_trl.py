"""TRL on a language model of a few thousand weights, without a network."""

from __future__ import annotations

import random

from benchmarks.diagnosis import tiny_runs  # which keeps TRL off the network

VOCABULARY = 20
PROMPTS, GROUP, LENGTH = 2, 4, 8


def save_model(folder, *, seed: int) -> str:
    """A random Llama and its tokenizer; returns the folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    words = tiny_runs.tokenizer(VOCABULARY)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=96,
        max_position_embeddings=64,
        initializer_range=0.2,  # far from uniform, so that completions end at different lengths
        pad_token_id=words.pad_token_id,
        eos_token_id=words.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return str(folder)


def digits():
    from datasets import Dataset

    draw = random.Random(0)
    rows = [[str(draw.randrange(10)) for _ in range(3)] for _ in range(64)]
    return Dataset.from_list([{"prompt": " ".join([*row, "="])} for row in rows])


def config(folder, **settings):
    from trl import GRPOConfig

    defaults = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": PROMPTS * GROUP,
        "num_generations": GROUP,
        "max_completion_length": LENGTH,
        "beta": 0.5,
        "learning_rate": 0.01,
        "max_steps": 3,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return GRPOConfig(**defaults | settings)


def arguments(model: str, folder, **settings) -> dict:
    """What both TRL's trainer and ours take."""
    return {
        "model": model,
        "reward_funcs": tiny_runs.even,
        "args": config(folder, **settings),
        "train_dataset": digits(),
        "processing_class": tiny_runs.tokenizer(VOCABULARY),
    }
