"""An untrained model in a folder, with a tokenizer that reads sums as SmolLM2's does."""

from __future__ import annotations

from pathlib import Path

import torch

from analysis.records.language import LlamaConfig
from analysis.training.pretrained.weights import random_llama, save_llama

TOKENS = ["?", *"0123456789", " ", " +", " -", " =", ";", "\n"]


def checkpoint_of_sums(folder: Path) -> Path:
    """A digit, a space, an operator with the space before it and the end of a line are tokens."""
    import tokenizers
    import transformers

    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({t: i for i, t in enumerate(TOKENS)}, unk_token="?")
    )
    pieces = tokenizers.Regex(r" [-+=]|[\s\S]")
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(pieces, "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    llama = LlamaConfig(
        vocab_size=len(TOKENS),
        width=8,
        inner=12,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        norm_eps=1e-5,
        rope_theta=10_000.0,
        tied=False,
    )
    save_llama(random_llama(llama, 0, torch.float32), folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)
    return folder
