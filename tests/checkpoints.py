"""An untrained model in a folder, with a tokenizer that reads sums as SmolLM2's does."""

from __future__ import annotations

from pathlib import Path

import torch

from analysis.training.pretrained.weights import random_llama, save_llama
from tests.training.conftest import llama

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
    model = random_llama(llama(vocab_size=len(TOKENS), rope_theta=1e4), 0, torch.float32)
    save_llama(model, folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)
    return folder
