"""The baseline on a language model: one run of adapters at a time, on transformers.

The same model, adapters, task, batch and objective as a run of the population (k3 as a loss), as
one would write it: ``generate`` samples, every completion carries its own copy of the prompt, the
reference is the model with its adapters off, everything else is left to PyTorch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from analysis.chapters.plain_grpo import AGGREGATION, BETA
from analysis.records.language import LoraConfig, PretrainedConfig
from analysis.training.pretrained.llama import PAD
from analysis.training.pretrained.tasks import TextTask
from analysis.training.rollout import completion_inputs, token_logp
from kl_term.kl.surrogates import kl_loss
from kl_term.objectives.advantages import group_normalise
from kl_term.objectives.aggregation import aggregate
from kl_term.objectives.losses import policy_loss


class Adapted(nn.Module):
    """A frozen projection and its adapter."""

    def __init__(self, frozen: nn.Linear, config: LoraConfig) -> None:
        super().__init__()
        ins, outs = frozen.in_features, frozen.out_features
        like = {"dtype": frozen.weight.dtype, "device": frozen.weight.device}
        self.frozen, self.scale, self.on = frozen, config.alpha / config.rank, True
        self.a = nn.Parameter(
            torch.empty(config.rank, ins, **like).uniform_(-1, 1) / math.sqrt(ins)
        )
        self.b = nn.Parameter(torch.zeros(outs, config.rank, **like))

    def forward(self, x: Tensor) -> Tensor:
        y = self.frozen(x)
        return y + self.scale * F.linear(F.linear(x, self.a), self.b) if self.on else y


class PlainLlamaTrainer:
    """One GRPO run of adapters.

    Args:
        model: a causal language model of transformers; its projections are replaced.
        config: of the run.
        task: its questions.
        seed: of the adapters and of sampling.
    """

    def __init__(self, model: Any, config: PretrainedConfig, task: TextTask, seed: int) -> None:
        torch.manual_seed(seed)
        self.model, self.config, self.task = model.requires_grad_(False), config, task
        self.device = next(model.parameters()).device
        self.adapters: dict[str, Adapted] = {}
        for layer, block in enumerate(model.model.layers):
            for part in (block.self_attn, block.mlp):
                for name in [n for n, _ in part.named_children() if n in config.lora.targets]:
                    adapted = Adapted(getattr(part, name), config.lora)
                    self.adapters[f"block{layer}.{name}"] = adapted
                    setattr(part, name, adapted)
        self.weights = [w for part in self.adapters.values() for w in (part.a, part.b)]
        self.optimizer = torch.optim.AdamW(
            self.weights, lr=config.learning_rate, weight_decay=config.weight_decay
        )

    def update(self) -> None:
        """One rollout and one optimizer step."""
        draws = (1, self.config.num_prompts, self.task.draws_per_prompt)
        prompts = self.task.prompts(torch.rand(draws, dtype=torch.float64).to(self.device))[0]
        loss = self.loss(prompts, self.sample(prompts))
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.weights, self.config.max_grad_norm)
        self.optimizer.step()

    @torch.no_grad()
    def sample(self, prompts: Tensor) -> Tensor:
        """Completions [P, G, T] of prompts [P, L]; none ends early, as in the population."""
        opening = torch.full_like(prompts[:, :1], self.task.bos_token)
        rows = torch.cat([prompts, opening], dim=1).repeat_interleave(self.config.group_size, dim=0)
        options = {"do_sample": True, "top_k": 0, "top_p": 1.0, "eos_token_id": None}
        tokens = self.model.generate(
            rows.clamp(min=0),
            attention_mask=(rows != PAD).long(),
            max_new_tokens=self.task.completion_length,
            temperature=self.config.temperature,
            pad_token_id=0,
            **options,
        )
        return tokens[:, rows.shape[1] :].unflatten(0, (len(prompts), -1))

    def loss(self, prompts: Tensor, completions: Tensor) -> Tensor:
        """The loss of completions [P, G, T] of prompts [P, L], which this policy sampled."""
        rewards = self.task.score(prompts[None], completions[None]).rewards[0]
        advantages, rows = group_normalise(rewards).flatten(), completions.flatten(0, 1)
        mask = self.task.completion_mask(rows)
        with torch.no_grad():
            ref_logp = self.logp(prompts, rows, adapters=False)
        logp = self.logp(prompts, rows)
        loss = policy_loss(
            logp, old_logp=logp.detach(), advantages=advantages, mask=mask, aggregation=AGGREGATION
        ).loss
        kl = kl_loss(logp, ref_logp, estimator="k3", mask=mask)
        return loss + BETA * aggregate(kl, mask, AGGREGATION)

    def logp(self, prompts: Tensor, completions: Tensor, *, adapters: bool = True) -> Tensor:
        """Log-probs [P*G, T] of completions [P*G, T], ``G`` in a row for each of prompts [P, L]."""
        for part in self.adapters.values():
            part.on = adapters
        inputs = completion_inputs(completions, self.task.bos_token)
        repeated = prompts.repeat_interleave(len(completions) // len(prompts), dim=0)
        rows = torch.cat([repeated, inputs], dim=1)
        seen = (rows != PAD).long()
        logits = self.model(
            rows.clamp(min=0),
            attention_mask=seen,
            position_ids=(seen.cumsum(dim=1) - 1).clamp(min=0),
            logits_to_keep=completions.shape[1],
        ).logits
        for part in self.adapters.values():
            part.on = True
        return token_logp(logits, completions, self.config.temperature)
