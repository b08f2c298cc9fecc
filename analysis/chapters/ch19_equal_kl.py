"""Chapter 19: KL terms compared at equal KL, on several starts, and on every other axis."""

from __future__ import annotations

from functools import cache

import pandas as pd
import torch

from analysis.chapters.claims import recorded
from analysis.chapters.comparisons import pairs, rows
from analysis.experiments import ablation
from analysis.experiments.presets import make_preset
from analysis.experiments.summaries import fluctuation, paired, paired_along, paired_at_equal
from analysis.kl.term import KLTerm
from analysis.training.config import Run
from analysis.training.trainer import PopulationTrainer

# --- What the chapter computes ----------------------------------------------------------------

COMPARISONS = 84
BETA, FIGURE2_BETA = 0.3, 0.04
#: Part of the range of KL that two curves share -> its ends, in shares of the logarithm.
PARTS = {
    "all they share": (0.0, 1.0),
    "its nearer half": (0.0, 0.5),
    "its farther half": (0.5, 1.0),
}
LEVELS = (0.045, 0.06, 0.08, 0.1, 0.12)
SAMPLED = "k2_loss/exact_loss k3_loss/exact_loss k1_reward/exact_loss"
#: What fluctuates in figure 2 -> the name of its fluctuation.
JUMPS = {name: f"fluctuation of {name}" for name in ("gradient_norm", "reverse_kl")}
#: Variant -> what tables call it.
NAMES = {
    "none": "no KL term",
    "k1_loss": "k₁ as a loss",
    "k2_loss": "k₂ as a loss",
    "k3_loss": "k₃ as a loss",
    "exact_loss": "exact KL",
    "k1_reward": "k₁ in the reward",
    "k2_reward": "k₂ in the reward",
    "k3_reward": "k₃ in the reward",
    "k3_loss_attached_prefix": "k₃, prefix ratio",
    "forward_loss": "exact forward KL",
    "minimax01_loss": "MiniMax-01",
    "k3_clip_loss": "k₃, clipped",
    "k2_loss_shows_k3": "k₂, logged as k₃",
    "k2_loss_sequence": "k₂, whole sequence",
    "k1_reward_to_go": "k₁ in the reward, credit to go",
    "k1_reward_immediate": "k₁ in the reward, immediate",
    "k1_reward_sequence": "k₁ in the reward, whole sequence",
    "k1_reward_before_std": "k₁ in the reward, then std",
    "k1_reward_before_loo": "k₁ in the reward, then leave-one-out",
}


@cache
def curves_over_beta() -> pd.DataFrame:
    """Final rows of all runs of the KL terms over all coefficients."""
    return pd.concat([recorded("full").finals, recorded("beta_front").finals], ignore_index=True)


def compare() -> dict[str, pd.DataFrame]:
    """Every comparison of the page, seed by seed."""
    finals, sampled = curves_over_beta(), pairs(SAMPLED)
    equal = {"of": "reverse_kl", "metric": "accuracy"}
    return {
        **{
            part.split()[1]: paired_along(finals, sampled, part=ends, **equal)
            for part, ends in PARTS.items()
        },
        "between": paired_along(
            finals, pairs("k2_loss/k3_loss"), part=PARTS["its farther half"], **equal
        ),
        **{f"at_{level:g}": paired_at_equal(finals, sampled, [level], **equal) for level in LEVELS},
        **{
            name: paired(recorded(run).finals, ablation.COMPARISONS, beta=BETA)
            for name, run in (("one_start", "full"), ("starts", "starts"))
        },
        "axes": paired(recorded("kl_axes").finals, AXES),
        "figure2": _figure2(),
    }


#: What is compared at one coefficient: (variant, other variant, metric).
AXES = (
    *pairs("k2_loss_sequence/k1_reward_sequence", "reverse_kl", "accuracy"),
    *pairs("k2_loss_sequence/k2_loss_shows_k3", "reverse_kl", "accuracy"),
    *pairs("k1_reward_immediate/k1_reward_to_go", "reverse_kl", "accuracy"),
    *pairs("k1_reward_sequence/k1_reward_to_go", "reverse_kl", "accuracy"),
    *pairs("k1_reward_before_std/k1_reward_to_go k1_reward_before_loo/k1_reward_to_go", "accuracy"),
    *pairs("minimax01_loss/none minimax01_loss/k2_loss_shows_k3", "reverse_kl"),
    *pairs("forward_loss/exact_loss", "reverse_kl", "accuracy"),
)


def _figure2() -> pd.DataFrame:
    """The replica of figure 2: where it ends, and how much it fluctuates on the way."""
    run = recorded("figure2")
    jumps = fluctuation(run.curves, JUMPS)
    jumps = jumps.rename(columns=JUMPS)
    parts = []
    for pair in ("k3_loss/k2_loss", "k3_loss/none", "k2_loss/none"):
        ends = pairs(pair, "accuracy", "reverse_kl")
        parts.append(paired(run.finals, ends, beta=FIGURE2_BETA))
        parts.append(paired(jumps, pairs(pair, *JUMPS.values()), beta=FIGURE2_BETA))
    reward = pairs("k3_reward/none", "accuracy")
    parts.append(paired(run.finals, reward, beta=FIGURE2_BETA))
    return pd.concat(parts, ignore_index=True)


def shown_is_trained(updates: int) -> bool:
    """Does k2 that is logged as k3 end at the weights of plain k2, to the bit?"""
    preset = make_preset("kl_axes", {})
    shown = next(each for each in preset.variants if each.name == "k2_loss_shows_k3")
    plain = shown.model_copy(update={"label": "", "kl": KLTerm(estimator="k2")})
    runs = [Run(variant=variant, seed=0) for variant in (shown, plain)]
    trainer = PopulationTrainer(preset.config, runs)
    for _ in range(updates):
        trainer.advance()
    return torch.equal(trainer.weights[0], trainer.weights[1])


#: Verdicts that the prose states.
SAYS = {
    "differs": rows("starts", "k3_loss/k2_loss", "accuracy"),
    "equivalent": [
        *rows("they", "k2_loss/exact_loss"),
        *rows("farther", "k2_loss/exact_loss k3_loss/exact_loss k1_reward/exact_loss"),
        *rows("axes", "k2_loss_sequence/k1_reward_sequence", "accuracy"),
        *rows("axes", "k2_loss_sequence/k2_loss_shows_k3", "reverse_kl"),
        *rows("axes", "k1_reward_immediate/k1_reward_to_go", "reverse_kl"),
        *rows("axes", "k1_reward_sequence/k1_reward_to_go", "reverse_kl"),
    ],
    "suggestive": [
        *rows("they", "k3_loss/exact_loss k1_reward/exact_loss"),
        *rows("nearer", "k3_loss/exact_loss k1_reward/exact_loss"),
        *rows("between", "k2_loss/k3_loss"),
        *rows("starts", "k1_loss/none", "accuracy"),
        *rows("axes", "minimax01_loss/none minimax01_loss/k2_loss_shows_k3", "reverse_kl"),
        *rows("axes", "forward_loss/exact_loss", "reverse_kl"),
        *rows("figure2", "k3_reward/none", "accuracy"),
    ],
    "unresolved": [
        *rows("nearer", "k2_loss/exact_loss"),
        *rows("axes", "k2_loss_sequence/k1_reward_sequence", "reverse_kl"),
        *rows("axes", "k2_loss_sequence/k2_loss_shows_k3 forward_loss/exact_loss", "accuracy"),
        *rows("figure2", "k3_loss/k2_loss", *JUMPS.values()),
    ],
}
