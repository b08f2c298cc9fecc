"""GRPO as one would write it: one run, on modules and autograd.

The same task, model, batch and objective as the population (k3 as a loss), without its tricks.
Chapter 4 shows it; the benchmark of chapter 12 times it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from analysis.records.config import NUM_DIGIT_TOKENS, SEPARATOR, TrainConfig
from analysis.records.variants import Objective
from analysis.training.rollout import completion_inputs, token_logp
from analysis.training.tiny.policy import make_policy
from analysis.training.tiny.tasks import Sorting
from kl_term.kl.surrogates import kl_loss
from kl_term.objectives.advantages import group_normalise
from kl_term.objectives.aggregation import aggregate
from kl_term.objectives.losses import policy_loss

BETA = 0.3
AGGREGATION = Objective().aggregation


class Block(nn.Module):
    """Causal self-attention and a ReLU MLP, each behind a LayerNorm."""

    def __init__(self, width: int, num_heads: int, inner: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_in = nn.Linear(width, inner, bias=False)
        self.mlp_out = nn.Linear(inner, width, bias=False)

    def forward(
        self, x: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """New hidden states [B, T, d], and keys and values [B, H, S, D] of all tokens so far."""
        qkv = self.attention_in(_norm(x)).unflatten(-1, (3, self.num_heads, -1))
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, D)
        if past is not None:
            keys, values = (
                torch.cat(parts, dim=2) for parts in zip(past, (keys, values), strict=True)
            )
        scores = queries @ keys.transpose(-1, -2) * queries.shape[-1] ** -0.5
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(keys.shape[2] - x.shape[1])
        probs = torch.softmax(scores.masked_fill(~allowed, -torch.inf), dim=-1)
        x = x + self.attention_out((probs @ values).transpose(1, 2).flatten(2))
        return x + self.mlp_out(F.relu(self.mlp_in(_norm(x)))), (keys, values)


class Transformer(nn.Module):
    """The architecture of the population's policy."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        policy, shapes = config.policy, make_policy(config).shapes
        self.tokens = nn.Embedding(*shapes["token_embedding"])
        self.positions = nn.Embedding(*shapes["position_embedding"])
        inner = policy.mlp_factor * policy.width
        self.blocks = nn.ModuleList(
            Block(policy.width, policy.num_heads, inner) for _ in range(policy.num_layers)
        )
        self.head = nn.Linear(*shapes["head"], bias=False)

    def forward(
        self, tokens: Tensor, past: list[tuple[Tensor, Tensor]] | None = None
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Logits [B, T, V] of tokens [B, T] that follow those of ``past``, and the new cache."""
        first = 0 if past is None else past[0][0].shape[2]
        positions = torch.arange(first, first + tokens.shape[1])
        x = self.tokens(tokens) + self.positions(positions)
        cache = []
        for layer, block in enumerate(self.blocks):
            x, kept = block(x, None if past is None else past[layer])
            cache.append(kept)
        return self.head(_norm(x)), cache


class PlainTrainer:
    """One GRPO run."""

    def __init__(self, config: TrainConfig, seed: int) -> None:
        torch.manual_seed(seed)
        self.config = config
        self.model, self.reference = Transformer(config), Transformer(config)
        self.reference.load_state_dict(self.model.state_dict())
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
        )

    def update(self) -> None:
        """One rollout and one optimizer step."""
        config, task = self.config, Sorting(self.config.task)
        prompts = torch.randint(NUM_DIGIT_TOKENS, (config.num_prompts, task.draws_per_prompt))
        rows = prompts.repeat_interleave(config.group_size, dim=0)
        completions, old_logp = self.sample(rows)
        groups = completions.unflatten(0, (config.num_prompts, config.group_size))
        rewards = task.score(prompts, groups).rewards
        advantages = group_normalise(rewards).flatten()
        mask = task.completion_mask(completions)
        with torch.no_grad():
            ref_logp = self.logp(self.reference, rows, completions)
        logp = self.logp(self.model, rows, completions)
        loss = policy_loss(
            logp, old_logp=old_logp, advantages=advantages, mask=mask, aggregation=AGGREGATION
        ).loss
        kl = kl_loss(logp, ref_logp, estimator="k3", mask=mask)
        loss = loss + BETA * aggregate(kl, mask, AGGREGATION)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), config.max_grad_norm)
        self.optimizer.step()

    @torch.no_grad()
    def sample(self, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Completions [B, T] of prompts [B, L] and their log-probs."""
        temperature = self.config.temperature
        bos = torch.full_like(prompts[:, :1], SEPARATOR)
        logits, past = self.model(torch.cat([prompts, bos], dim=1))
        tokens, logps = [], []
        for step in range(self.config.task.completion_length):
            logp = torch.log_softmax(logits[:, -1] / temperature, dim=-1)
            tokens.append(torch.multinomial(logp.exp(), 1))
            logps.append(logp.gather(1, tokens[-1]))
            if step + 1 < self.config.task.completion_length:
                logits, past = self.model(tokens[-1], past)
        return torch.cat(tokens, dim=1), torch.cat(logps, dim=1)

    def logp(self, model: Transformer, prompts: Tensor, completions: Tensor) -> Tensor:
        """Log-probs [B, T] of completions [B, T] behind prompts [B, L]."""
        inputs = completion_inputs(completions, SEPARATOR)
        logits, _ = model(torch.cat([prompts, inputs], dim=1))
        return token_logp(logits[:, prompts.shape[1] :], completions, self.config.temperature)


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])
