"""A frozen model and a task, as what a population trains on."""

from __future__ import annotations

from analysis.training.pretrained.config import PretrainedConfig
from analysis.training.pretrained.llama import LlamaPolicy
from analysis.training.pretrained.tasks import TextTask
from analysis.training.pretrained.weights import Llama
from analysis.training.setting import Setting, Task


def pretrained_setting(config: PretrainedConfig, model: Llama, task: Task) -> Setting:
    """Adapters on ``model``, on the model's device; all members start as the model itself.

    Raises:
        ValueError: if the model has not the precision of the run.
    """
    dtype = model.embedding.dtype
    if dtype != config.dtype:
        raise ValueError(f"model is {dtype}: load it as {config.dtype}, the run's precision")
    shared = task.shared if isinstance(task, TextTask) else 0
    policy = LlamaPolicy(model, config.lora, config.forward, shared)
    return Setting(task, policy, policy.start())
