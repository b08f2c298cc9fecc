"""Chapter 0: k1, k2 and k3 on three tokens, and what their gradients do."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from kl_term import style
from kl_term.kl.divergences import forward_kl, reverse_kl
from kl_term.kl.surrogates import kl_loss

# --- What it computes


def expected_gradients(policy: Tensor, reference: Tensor) -> pd.DataFrame:
    """A row a loss or KL, a column a token: its expected gradient, nats per unit of a logit."""
    logits = policy.log().requires_grad_(True)
    logp = logits.log_softmax(-1)
    values = {
        "reverse KL": reverse_kl(logits, reference.log()),
        "forward KL": forward_kl(logits, reference.log()),
    }
    for name in ("k1", "k2", "k3"):  # tokens drawn from the policy: weights without gradient
        loss = kl_loss(logp, reference.log(), estimator=name)
        values[f"{name} as a loss"] = (policy * loss).sum()
    rows = {
        name: torch.autograd.grad(value, logits, retain_graph=True)[0].tolist()
        for name, value in values.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index")


# --- What it draws


def draw_pulls(policy: Tensor, reference: Tensor) -> Figure:
    """Two distributions as bars, and below them how each loss moves each logit."""
    figure, (above, below) = style.subplots(2, height=5.4, sharex=True)
    places = np.arange(len(policy))
    for shift, name, label, shown in (
        (-0.2, "k2", "policy", policy),
        (0.2, "none", "reference", reference),
    ):
        above.bar(places + shift, shown.tolist(), 0.36, color=style.COLOURS[name], label=label)
    moves = -expected_gradients(policy, reference)  # a step goes against the gradient
    for shift, name in ((-0.2, "k2"), (0.2, "k3")):
        row, label = f"{name} as a loss", f"{style.LABELS[name]} as a loss"
        below.bar(places + shift, moves.loc[row], 0.36, color=style.COLOURS[name], label=label)
    style.guide(below, y=0, color="black", linewidth=0.8, linestyle="-")
    above.set_ylabel("probability")
    below.set_ylabel("push on the logit (nats)")
    below.set_xticks(places, [f"token {i}" for i in range(1, len(policy) + 1)])
    for panel in (above, below):
        panel.legend()
    return figure
