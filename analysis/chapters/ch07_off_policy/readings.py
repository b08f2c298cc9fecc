"""What readings of a merged KL and its clip do to the KL of stale samples, at one state."""

from __future__ import annotations

import pandas as pd
import torch
from torch import Tensor

from analysis.evidence.claims import band
from analysis.evidence.stale_states import StaleStates, merged_kl_gradient, stale_states
from kl_term.kl.divergences import reverse_kl
from kl_term.kl.enumeration import exact_kl_gradient, relative_error
from kl_term.kl.scores import expected_score
from kl_term.objectives.merged import kl_coefficient_kept

#: How the policy left its sampler.
MOVES = ("along the advantage", "random")


def clipped_kl_gradient(states: StaleStates, *, beta: float, epsilon: float) -> Tensor:
    """[N, V]: what the clip leaves of the KL part of the detached reading."""
    kept = _kept_coefficient(states, beta, epsilon)
    return expected_score(states.logits, states.old_logits.softmax(-1) * kept)


def silenced_mass(states: StaleStates, *, beta: float, epsilon: float) -> pd.DataFrame:
    """Share of the KL's force that the clip removes, for each state.

    A token's force is its probability times its coefficient. ``silenced`` is the share at clipped
    tokens, ``opposing`` the part of it that pulled against the token's move since it was sampled.
    """
    logp, ref_logp, old_logp = (x.log_softmax(-1) for x in states[:3])
    force = logp.exp() * (logp - ref_logp)
    lost = (_kept_coefficient(states, beta, epsilon) == 0) & (force != 0)
    against = lost & (force * (logp - old_logp) > 0)
    size = force.abs()
    return pd.DataFrame(
        {
            name: (torch.where(where, size, 0.0).sum(-1) / size.sum(-1)).numpy()
            for name, where in (("silenced", lost), ("opposing", against))
        }
    )


def _kept_coefficient(states: StaleStates, beta: float, epsilon: float) -> Tensor:
    logps = (x.log_softmax(-1) for x in states[:3])
    everywhere = torch.ones_like(states.logits, dtype=torch.bool)
    clip = {"beta": beta, "epsilon_low": epsilon, "epsilon_high": epsilon}
    return kl_coefficient_kept(*logps, states.advantages, everywhere, **clip)


def reading_curves(
    distances: Tensor, *, count: int, vocab_size: int, beta: float, epsilon: float, seed: int
) -> pd.DataFrame:
    """Relative error of the KL part against the reverse KL's gradient, as samples age.

    Three readings without clip, and ``clipped``: the detached one inside the clip, the policy
    moving along the advantage. Staleness is the median KL of sampler from policy (nats).
    """
    rows = []
    for distance in distances.tolist():
        for name in ("old", "detached", "attached", "clipped"):
            states = stale_states(
                count, vocab_size, distance, seed=seed, along_advantage=name == "clipped"
            )
            if name == "clipped":
                gradient = clipped_kl_gradient(states, beta=beta, epsilon=epsilon)
            else:
                gradient = merged_kl_gradient(states, reading=name)
            exact = exact_kl_gradient(states.logits, states.ref_logits, direction="reverse")
            error = relative_error(gradient, exact)
            rows.append({"name": name, "staleness": _staleness(states)} | band(error))
    return pd.DataFrame(rows)


def silenced_curves(
    distances: Tensor,
    betas: tuple[float, ...],
    *,
    count: int,
    vocab_size: int,
    epsilon: float,
    seed: int,
) -> pd.DataFrame:
    """Silenced and opposing share of the KL's force against staleness, moving either way."""
    rows = []
    for move in MOVES:
        for distance in distances.tolist():
            along = move == "along the advantage"
            states = stale_states(count, vocab_size, distance, seed=seed, along_advantage=along)
            for beta in betas:
                lost = silenced_mass(states, beta=beta, epsilon=epsilon)
                row = {"move": move, "beta": beta, "staleness": _staleness(states)}
                row |= {f"{k}_{q}": lost[k].quantile(q / 100) for k in lost for q in (10, 50, 90)}
                rows.append(row)
    return pd.DataFrame(rows)


def _staleness(states: StaleStates) -> float:
    return reverse_kl(states.old_logits, states.logits).median().item()
