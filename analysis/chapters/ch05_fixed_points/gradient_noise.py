"""The noise of one sample's gradient under the k3 loss, over that under the k2 loss."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from analysis.chapters.ch05_fixed_points.reward_noise import kl_under_noise
from analysis.evidence.claims import Finding, claim, judge, median, share
from analysis.evidence.figure2 import figure2
from analysis.evidence.noise_ratio import noise_ratio
from analysis.evidence.policies import pairs, random_policies
from analysis.evidence.recorded import difference, recorded
from analysis.records.statistics import Interval
from analysis.records.summaries import fluctuation
from kl_term import style


def noise_map(resolution: int, vocab_size: int) -> pd.DataFrame:
    """``noise_ratio`` by the log-odds of one token, policy (rows) and reference; the others
    share the rest equally."""
    odds = torch.linspace(-7, 7, resolution, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(odds, odds, indexing="ij")).unsqueeze(-1)
    rest = torch.full_like(grid, -math.log(vocab_size - 1)).expand(*grid.shape[:-1], vocab_size - 1)
    ratio = noise_ratio(*torch.cat([grid, rest], dim=-1))
    return pd.DataFrame(ratio, index=odds.tolist(), columns=odds.tolist())


def plot_noise(table: pd.DataFrame) -> Figure:
    """Where one sample of the k3 loss is noisier than one of the k2 loss, by one token's odds."""
    figure, axes = style.subplots(height=4.4)
    odds, label = table.index.to_numpy(), "variance, $k_3$ loss over\n$k_2$ loss (log scale)"
    style.ratio_mesh(axes, odds, odds, table.to_numpy(), decades=3, cmap="PuOr", label=label)
    axes.plot(odds, odds, color="#111111", linewidth=1, linestyle=":")
    axes.set_aspect("equal")
    axes.set(xlabel="log-odds of a token, reference", ylabel="log-odds of the token, policy")
    return figure


@claim("S4-22")
def k3_noise_against_k2() -> Finding:
    """One sample's gradient covariance, enumerated, far, near and where the reference nearly
    forbids; noisy steps of both losses; and how the gradient norm fluctuated in recorded runs: a
    ratio of k3's to k2's at equal KL, a difference on a language model."""
    near = random_policies(300, 16, spread=0.1, seed=12)
    policy = torch.tensor([[0.7, 0.3]], dtype=torch.float64).log()
    forbidden = torch.tensor([[0.0, 14.0]], dtype=torch.float64)
    far = noise_ratio(*pairs())
    equal_kl = figure2().set_index("metric").loc["jumps of gradient_norm", [*Interval._fields]]
    jumps = fluctuation(recorded("smollm2_short").curves, ["gradient_norm"])
    language = difference(jumps, "k3_loss", "k2_loss", "gradient_norm", beta=0.3)
    figures = {
        "noisier_share_far": share(far > 1),
        "ratio_far": median(far),
        "noisier_share_near": share(noise_ratio(*near) > 1),
        "ratio_forbidden": noise_ratio(policy, forbidden).item(),
        "kl_k2_noisy_steps": kl_under_noise("k2", beta=1.0, step_size=1.0),
        "kl_k3_noisy_steps": kl_under_noise("k3", beta=1.0, step_size=1.0),
        **Interval(*np.exp(equal_kl.to_numpy(float))).figures("equal_kl"),
        **language.figures("language"),
    }
    noisier = figures["noisier_share_far"]
    always = noisier == figures["noisier_share_near"] == 1 < figures["ratio_forbidden"]
    return Finding(judge(always, noisier > 0.5), figures)
