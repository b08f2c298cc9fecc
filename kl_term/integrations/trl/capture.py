"""What a GRPO trainer of TRL sampled and scored, caught at each call of its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kl_term.diagnosis.schema import Settings
from kl_term.kl.term import KLTerm

Fields = dict[str, Tensor | None]


def loss_mask(inputs: dict[str, Any]) -> Tensor:
    """[B, T] booleans: tokens of completions that the model itself wrote."""
    mask = inputs["completion_mask"]
    return (mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).bool()


def own_rewards(trainer: Any, rewards: Tensor, count: int) -> Tensor:
    """[B]: the weighted sum of the rewards of this process, from those of all by function."""
    first = trainer.accelerator.process_index * count
    own = rewards[first : first + count]
    return (own * trainer.reward_weights.to(own.device)).nansum(dim=1)


def own_groups(trainer: Any, count: int) -> Tensor:
    """[B]: the number of each completion's prompt, new in each generation batch."""
    process = trainer.accelerator
    size = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
    rows = torch.arange(process.process_index * count, (process.process_index + 1) * count)
    prompts = count * process.num_processes // size
    return (generation(trainer) * prompts + rows // size).to(process.device)


def generation(trainer: Any) -> int:
    """Number of the generation batch that the present step belongs to, from 0."""
    return trainer.state.global_step * trainer.args.gradient_accumulation_steps // _trained(trainer)


def _trained(trainer: Any) -> int:
    """Micro-batches that are trained on one generation batch."""
    return trainer.args.steps_per_generation * trainer.num_iterations


def fields(
    inputs: dict[str, Any], logp: Tensor, entropy: Tensor | None, kl_term: Tensor | None = None
) -> Fields:
    """The columns of a dump that a micro-batch of TRL holds."""
    logp = logp.detach()
    return {
        "logp": logp,
        "old_logp": inputs.get("old_per_token_logps", logp),
        "ref_logp": inputs.get("ref_per_token_logps"),
        "sampler_logp": inputs.get("sampling_per_token_logps"),
        "mask": loss_mask(inputs),
        "entropy": None if entropy is None else entropy.detach(),
        "advantage": inputs["advantages"],
        "reward": inputs.get("rewards"),
        "group": inputs.get("group"),
        "token": inputs["completion_ids"],
        "padding": (inputs["prompt_mask"] == 0).sum(1),
        "kl_term": None if kl_term is None else kl_term.detach(),
    }


def settings(trainer: Any, term: KLTerm) -> Settings:
    """What the diagnosis should know of a run with this term; without a coefficient, of none."""
    return Settings(
        framework="trl",
        adaptive=getattr(trainer, "_target", None) is not None,
        kl=term if trainer.beta else KLTerm(estimator="none"),
        epsilon_low=trainer.epsilon_low,
        epsilon_high=trainer.epsilon_high,
        ratio_level=trainer.importance_sampling_level,
        group_size=trainer.num_generations,
        rollout_steps=max(1, _trained(trainer) // trainer.args.gradient_accumulation_steps),
    )


class Capture:
    """Calls ``each`` with the fields of every training micro-batch of a trainer that is not ours.

    It wraps methods of this one object; the class stays as it is.
    """

    def __init__(self, trainer: Any, each: Callable[[Fields], None]) -> None:
        self._trainer, self._each = trainer, each
        self._rewards: Tensor | None = None
        self._scored: tuple[Tensor, Tensor | None] | None = None
        for name in (
            "_calculate_rewards",
            "_generate_and_score_completions",
            "_get_per_token_logps_and_entropies",
            "_compute_loss",
        ):
            setattr(trainer, name, self._around(name, getattr(trainer, name)))

    def _around(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        after = getattr(self, f"_after{name}")

        def wrapped(*positional: Any, **named: Any) -> Any:
            found = method(*positional, **named)
            after(found, *positional, **named)
            return found

        return wrapped

    def _after_calculate_rewards(self, found: Tensor, inputs: Any, prompts: Any, *_: Any) -> None:
        self._rewards = own_rewards(self._trainer, found, len(prompts))

    def _after_generate_and_score_completions(self, found: dict[str, Any], *_: Any) -> None:
        found["rewards"] = self._rewards
        found["group"] = own_groups(self._trainer, len(self._rewards))

    def _after_get_per_token_logps_and_entropies(self, found: Any, *_: Any, **__: Any) -> None:
        self._scored = (found[0].detach(), found[1])

    def _after_compute_loss(self, found: Tensor, model: Any, inputs: dict[str, Any]) -> None:
        if self._trainer.model.training and self._scored is not None:
            self._each(fields(inputs, *self._scored))
        self._scored = None
