"""What recorded runs, and bandits trained here, add to the identities of chapter 10."""

from __future__ import annotations

import itertools

import pandas as pd
from torch import Tensor
from torch.func import grad

from analysis.chapters.ch10_dpo.preferences import random_preferences
from analysis.chapters.ch10_dpo.training_data import routing_drift
from analysis.evidence import routed_bandits
from analysis.evidence.claims import EXACT, Finding, claim, judge, largest
from analysis.evidence.recorded import difference, recorded
from kl_term.kl.divergences import reverse_kl
from kl_term.kl.fixed_points import reverse_kl_optimum
from kl_term.objectives.mirror_descent import log_partition, mirror_descent_loss


@claim("S3-26")
def mirror_descent_step() -> Finding:
    """The surrogate's zero and gradient, the step's length, the mean as a stand-in; and recorded
    runs."""
    problem = random_preferences(6, beta=0.5, seed=3)
    start, rewards, tau = problem.ref_logp, problem.rewards, 0.5
    policy = start.exp()
    mean, baseline = policy @ rewards, log_partition(rewards, start, tau=tau)

    def loss(logits: Tensor, baseline: Tensor) -> Tensor:
        expected = baseline.expand_as(rewards)
        return policy @ mirror_descent_loss(
            logits.log_softmax(-1), start, rewards, expected, tau=tau
        )

    optimum = reverse_kl_optimum(rewards, start, beta=tau)
    at_start = grad(loss)(start, baseline)
    lengths = [
        reverse_kl(reverse_kl_optimum(rewards, start, beta=t), start).item()
        for t in (0.25, 0.5, 1.0, 2.0)
    ]
    figures = {
        "loss_at_optimum": loss(optimum, baseline).item(),
        "gradient_error": largest(at_start + 2 * tau * policy * (rewards - mean)),
        "step_kl_tau_025": lengths[0],
        "step_kl_tau_2": lengths[-1],
        "mean_stand_in_gradient": grad(loss)(optimum, mean).norm().item(),
    }
    finals = recorded("objectives").finals
    for metric in ("accuracy", "reverse_kl"):
        gain = difference(finals, "mirror_descent", "grpo", metric)
        figures |= gain.figures(f"trained_{metric}")
    identities = max(figures["loss_at_optimum"], figures["gradient_error"]) < EXACT
    conservative = all(a > b for a, b in itertools.pairwise(lengths))
    return Finding(judge(identities and conservative, identities), figures)


@claim("S3-32")
def keep_routing() -> Finding:
    """Log-probs of a small top-1 mixture by replayed and by new routing; and bandits trained
    through one, with a noisy sampler and without."""
    table = routing_drift([1e-4, 1e-3, 1e-2], seeds=4).set_index("size")
    figures = {
        "replayed_at_1e4": table.replayed[1e-4],
        "replayed_at_1e2": table.replayed[1e-2],
        "recomputed_at_1e2": table.recomputed[1e-2],
        "replayed_growth": table.replayed[1e-2] / table.replayed[1e-4],
        "flipped_at_1e2": table.flipped[1e-2],
    }
    options = {"seeds": range(200, 220), "updates": 24, "states": 16}
    for name, noise in (("trained_noisy", 0.3), ("trained_same_router", 0.0)):
        ways = routed_bandits.ROUTINGS
        curves = pd.concat(
            routed_bandits.train_bandits(way, noise=noise, **options) for way in ways
        )
        late = curves.query("update >= 16")
        finals = late.groupby(["variant", "seed"], as_index=False).mean()
        figures |= difference(finals, *ways, "reward").figures(name)
    linear = 80 < figures["replayed_growth"] < 125
    jumps = figures["recomputed_at_1e2"] > 10 * figures["replayed_at_1e2"]
    return Finding(judge(linear and jumps, False), figures)
