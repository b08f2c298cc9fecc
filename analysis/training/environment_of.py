"""From a run's configuration to what its population trains on."""

from __future__ import annotations

import torch

from analysis.records.config import VOCAB_SIZE, SortTask, TrainConfig
from analysis.records.language import LanguageConfig, PopulationConfig, RandomModel
from analysis.training.environment import Environment
from analysis.training.precision import dtype_of
from analysis.training.pretrained.folders import folder_of
from analysis.training.pretrained.questions import arithmetic_task
from analysis.training.pretrained.reward_head import proxied
from analysis.training.pretrained.supervised import started
from analysis.training.pretrained.tasks import pretrained_environment
from analysis.training.pretrained.weights import Llama, load_llama, random_llama
from analysis.training.tiny.start import tiny_environment
from analysis.training.tiny.tasks import Sorting


def environment_of(config: PopulationConfig, device: torch.device | str = "cpu") -> Environment:
    """Policy, task and start of a configuration, on a device.

    Raises:
        ValueError: the model or an optional package cannot be had, or they do not fit together.
    """
    if isinstance(config, TrainConfig):
        return tiny_environment(config, device)
    environment, model = before_start(config, device)
    if config.start is not None:
        environment = started(environment, model, config)
    return environment if config.reward_model is None else proxied(environment, config)


def before_start(
    config: LanguageConfig, device: torch.device | str = "cpu"
) -> tuple[Environment, Llama]:
    """The environment of a model that has learned nothing yet, rewarded by its task; and the model.

    Raises: as :func:`environment_of`.
    """
    source, task = config.model, config.task
    if isinstance(source, RandomModel):
        if not isinstance(task, SortTask) or source.llama.vocab_size < VOCAB_SIZE:
            raise ValueError(f"a random model has no tokenizer: give it SortTask, {VOCAB_SIZE=}")
        model = random_llama(source.llama, source.seed, dtype_of(config), device)
        return pretrained_environment(config, model, Sorting(task)), model
    if isinstance(task, SortTask):
        raise ValueError("SortTask is for a random model: give a pretrained one ArithmeticTask")
    folder = folder_of(source)
    model = load_llama(folder, dtype_of(config), device)
    examples = 0 if config.start is None else config.start.examples
    texts = arithmetic_task(task, folder, examples)
    return pretrained_environment(config, model, texts), model
