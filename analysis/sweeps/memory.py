"""How many runs may be trained at once before their activations fill the memory.

Of a language model an update holds some two dozen tensors of the size of all its logits at once;
one run more is one more of each. Of the tiny policy it holds the activations of each layer, of
which the attention grows with the square of a prompt's completions.
"""

from __future__ import annotations

import math

import psutil
import torch

from analysis.records.config import VOCAB_SIZE
from analysis.records.language import LanguageConfig, PopulationConfig, RandomModel
from analysis.records.preset import Preset
from analysis.sweeps.pools import (
    LocalPool,
    Pool,
)
from analysis.training.pretrained.folders import folder_of, read_config
from kl_term.errors import UserError

#: Peak of an update of one run over its logits, all metrics included; activations and adapters
#: are counted with them. Measured on SmolLM2-135M, prompts of 36 tokens and completions of six.
BYTES_PER_LOGIT = 96
#: The same of the tiny policy, over its rows times layers times width, and over its attention
#: matrices. Measured on a GPU, widths 32 and 64, 512 runs; a CPU needs half of it.
BYTES_PER_UNIT, BYTES_PER_SCORE = 160, 8
#: With CUDA graphs, whose recordings keep memory of their own. Of a language model without the
#: metric ``kl_cosine``, whose gradients run once as they are beside the recordings, it is less: 24
#: runs of SmolLM2-135M take 49 GB without graphs and 55 with them, counted on fake tensors.
GRAPHS, LANGUAGE_GRAPHS = 3.0, 1.5
#: Of the memory that is free; the rest is for the frozen weights and what else runs.
SHARE = 0.8


def runs_that_fit(
    config: PopulationConfig, device: str, workers: int = 1, *, graphs: bool = False
) -> int:
    """For each of ``workers`` on this machine, at least one.

    Raises:
        ValueError: the model cannot be had; one line says what to do.
    """
    more = 1.0
    if graphs:
        small = isinstance(config, LanguageConfig) and not config.cosine_every
        more = LANGUAGE_GRAPHS if small else GRAPHS
    return max(1, int(SHARE * free_bytes(device) / workers / (more * run_bytes(config))))


def run_bytes(config: PopulationConfig) -> int:
    """What one run of a population needs at its peak, roughly.

    Raises:
        ValueError: the model cannot be had; one line says what to do.
    """
    completed = config.group_size * config.task.completion_length  # tokens of a prompt
    if isinstance(config, LanguageConfig):
        source = config.model
        random = isinstance(source, RandomModel)
        llama = source.llama if random else read_config(folder_of(source))
        return BYTES_PER_LOGIT * config.num_prompts * completed * llama.vocab_size
    policy, rows = config.policy, config.task.prompt_length + completed
    units, scores = rows * policy.width, policy.num_heads * rows**2
    of_layer = BYTES_PER_UNIT * units + BYTES_PER_SCORE * scores
    logits = BYTES_PER_LOGIT * completed * VOCAB_SIZE
    return config.num_prompts * (policy.num_layers * of_layer + logits)


def free_bytes(device: str) -> int:
    """Of the GPU that ``device`` names, or of this machine."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


#: Runs trained at once: more are slower on a CPU, and lose more when killed.
RUNS_PER_SHARD = 24


#: A GPU has room for more, and an update of them takes little longer than one of 24.
RUNS_PER_GPU_SHARD = 512


def shard_size(runs: int, workers: int, most: int = RUNS_PER_SHARD) -> int:
    """``most``, or fewer where workers would idle."""
    return min(most, math.ceil(runs / workers))


def fitting_shard(preset: Preset, pool: Pool, *, graphs: bool) -> int:
    """Runs of a preset that a worker trains at once: no worker idles, and its memory holds them.

    What memory allows is known of this machine only, not of a cluster's.

    Raises:
        UserError: the model cannot be had.
    """
    if not isinstance(pool, LocalPool):
        return shard_size(len(preset.runs), pool.workers)
    device, on_each = pool.devices[0], math.ceil(pool.workers / len(pool.devices))
    most = RUNS_PER_SHARD if device == "cpu" else RUNS_PER_GPU_SHARD
    try:
        fitting = runs_that_fit(preset.config, device, on_each, graphs=graphs)
    except ValueError as error:
        raise UserError(str(error)) from None
    return min(shard_size(len(preset.runs), pool.workers, most), fitting)
