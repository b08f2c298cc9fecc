"""How many runs may be trained at once before a language model's logits fill the memory.

The tiny policy is never the limit. A language model is: an update holds some two dozen tensors of
the size of all its logits at once, one run more is one more of each.
"""

from __future__ import annotations

import psutil
import torch

from analysis.experiments.environment import PopulationConfig
from analysis.experiments.language.model import LanguageConfig, RandomModel, folder_of
from analysis.training.pretrained.weights import read_config

#: Peak of an update of one run over its logits, all metrics included; activations and adapters
#: are counted with them. Measured on SmolLM2-135M, prompts of 36 tokens and completions of six.
BYTES_PER_LOGIT = 96
#: Of the memory that is free; the rest is for the frozen weights and what else runs.
SHARE = 0.8


def runs_that_fit(config: PopulationConfig, device: str, workers: int = 1) -> int | None:
    """For each of ``workers`` on this machine, at least one; None where memory is no limit.

    Raises:
        ValueError: the model cannot be had; one line says what to do.
    """
    if not isinstance(config, LanguageConfig):
        return None
    return max(1, int(SHARE * free_bytes(device) / workers) // run_bytes(config))


def run_bytes(config: LanguageConfig) -> int:
    """What one run of a population on a language model needs at its peak, roughly.

    Raises:
        ValueError: the model cannot be had; one line says what to do.
    """
    source = config.model
    random = isinstance(source, RandomModel)
    vocab_size = source.llama.vocab_size if random else read_config(folder_of(source)).vocab_size
    tokens = config.num_prompts * config.group_size * config.task.completion_length
    return BYTES_PER_LOGIT * tokens * vocab_size


def free_bytes(device: str) -> int:
    """Of the GPU that ``device`` names, or of this machine."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
