"""How far log-probs of a mixture of experts move when its parameters do, by what routes them."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
import torch

from analysis.objectives.routing import ExpertHead, choose_experts, routed_logp


def random_head(experts: int, vocab_size: int, width: int, *, seed: int) -> ExpertHead:
    """A router and experts with Gaussian parameters."""
    generator = torch.Generator().manual_seed(seed)
    return ExpertHead(
        torch.randn(experts, width, generator=generator, dtype=torch.float64) / width**0.5,
        2 * torch.randn(experts, vocab_size, width, generator=generator, dtype=torch.float64),
    )


def routing_drift(sizes: Iterable[float], *, seeds: int, states: int = 2000) -> pd.DataFrame:
    """Largest change of the sampled token's log-prob after a random step of a given size.

    ``replayed`` keeps the experts that sampled, ``recomputed`` lets the moved router choose;
    ``flipped`` is the share of states whose expert changes. Medians over ``seeds`` heads.
    """
    rows = []
    for seed in range(seeds):
        head = random_head(8, 16, 12, seed=seed)
        generator = torch.Generator().manual_seed(1000 + seed)
        hidden = torch.randn(states, 12, generator=generator, dtype=torch.float64)
        step = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in head]
        sampled_by = choose_experts(head, hidden)
        logp = routed_logp(head, hidden, sampled_by)
        tokens = torch.multinomial(logp.exp(), 1, generator=generator)
        for size in sizes:
            moved = ExpertHead(*(p + size * s for p, s in zip(head, step, strict=True)))
            now = choose_experts(moved, hidden)
            drift = {
                name: (routed_logp(moved, hidden, experts) - logp).gather(-1, tokens).abs().max()
                for name, experts in (("replayed", sampled_by), ("recomputed", now))
            }
            flipped = (now != sampled_by).double().mean().item()
            rows.append(
                {"size": size, **{k: v.item() for k, v in drift.items()}, "flipped": flipped}
            )
    return pd.DataFrame(rows).groupby("size", as_index=False).median()
