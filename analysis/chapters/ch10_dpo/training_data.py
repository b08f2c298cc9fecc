"""The data that training does need: its own path, a critic, the routing that sampled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

from analysis.evidence.claims import EXACT, Finding, claim, judge, largest, share
from analysis.evidence.policies import by_token
from analysis.evidence.routed_bandits import random_head
from kl_term import style
from kl_term.kl.credit import advantage_table, state_average
from kl_term.kl.sequences import enumerate_sequences, sequence_probability
from kl_term.objectives.gae import generalised_advantage
from kl_term.objectives.imitation import imitation_cost
from kl_term.objectives.routing import ExpertHead, choose_experts, routed_logp


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
            row = {"size": size, "flipped": share(now != sampled_by)}
            for name, experts in (("replayed", sampled_by), ("recomputed", now)):
                drift = routed_logp(moved, hidden, experts) - logp
                row[name] = largest(drift.gather(-1, tokens))
            rows.append(row)
    return pd.DataFrame(rows).groupby("size", as_index=False).median()


def plot_imitation(error: float, horizons: Sequence[int]) -> Figure:
    """Expected steps off the path against the horizon, by how easily the student finds back."""
    names = ("never finds back", "one time in ten", "trained on its own states")
    figure, axes = style.subplots(height=3.7)
    for look, name, recovery in zip(style.SERIES, names, (0.0, 0.1, 1 - error), strict=False):
        costs = [imitation_cost(error, t, recovery) for t in horizons]
        axes.loglog(horizons, costs, **look, label=name)
    axes.set_xlabel("horizon $T$ (steps, log scale)")
    axes.set_ylabel("expected steps off the\npath (log scale)")
    axes.legend(loc="upper left")
    return figure


def plot_routing(table: pd.DataFrame) -> Figure:
    """Largest change of a log-prob against the size of a parameter step."""
    figure, axes = style.subplots(height=3.5)
    for look, name in zip(style.SERIES, ("replayed", "recomputed"), strict=False):
        shown = table[table[name] > 0]
        axes.loglog(shown["size"], shown[name], **look, label=f"routing {name}")
    axes.set_xlabel("standard deviation of the step (log scale)")
    axes.set_ylabel("largest change of a\nlog-prob (nats, log scale)")
    axes.legend(loc="lower right")
    return figure


@claim("S1-4")
def ppo_compares_with_a_critic() -> Finding:
    """GAE with an exact critic against Q - V, and against the return of a reference's answers."""
    sequences = enumerate_sequences(2, 3)
    generator = torch.Generator().manual_seed(0)
    logits, ref_logits = torch.randn(2, 7, 2, generator=generator, dtype=torch.float64)
    rewards = torch.rand(8, generator=generator, dtype=torch.float64)
    probability = sequence_probability(logits, sequences)
    reference = sequence_probability(ref_logits, sequences) @ rewards

    whole = by_token(rewards, sequences)
    values = state_average(whole, logits, sequences)[sequences.states]
    last_only = F.pad(rewards[:, None], (2, 0))
    sampled = generalised_advantage(last_only, values, sequences.mask, lam=1.0)
    by_action = state_average(sampled, logits, sequences, by_action=True)
    figures = {
        "gae_error": largest(by_action - advantage_table(whole, logits, sequences)),
        "mean_advantage": (probability @ sampled[:, 0]).abs().item(),
        "mean_against_reference": (probability @ (rewards - reference)).item(),
    }
    is_critic = max(figures["gae_error"], figures["mean_advantage"]) < EXACT
    is_reference = abs(figures["mean_against_reference"]) < EXACT
    return Finding(judge(is_reference, not is_critic), figures)
