"""Chapter 18: what a teacher is worth, in updates, in operations and in length."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch.func import grad

from analysis.evidence.claims import EXACT, Finding, claim, judge, largest
from analysis.evidence.far_policies import ragged, stale, typical, worst
from analysis.evidence.policies import flat_error, normal_draws
from analysis.evidence.recorded import difference, recorded, recorded_runs
from analysis.evidence.steps_to_success import steps_ratio
from analysis.records import statistics
from analysis.records.config import END, FILLER, NUM_DIGIT_TOKENS, Run, TrainConfig
from analysis.records.preset import Preset
from analysis.records.recording import Recording
from analysis.records.statistics import Interval
from analysis.records.variants import Variant
from analysis.training.counting import forward_flops
from analysis.training.tiny.tasks import Sorting
from analysis.training.trainer import PopulationTrainer
from kl_term.kl.enumeration import cosine, reverse_kl_gradient
from kl_term.kl.sequences import expected_sequence_gradient, sequence_kl_gradient
from kl_term.objectives.guidance import annealed, low_reward_mask
from kl_term.objectives.imitation import imitation_cost
from kl_term.plain_checks import check_choice


def completions_after(
    preset: Preset, variants: Iterable[str], *, updates: int, seed: int = 0, prompts: int = 3
) -> pd.DataFrame:
    """What runs of some variants write after so many updates, on the same prompts.

    Returns:
        One row per variant and prompt: ``variant``, ``prompt``, ``sorted`` and ``completion``, as
        text.
    """
    names, named = list(variants), {variant.name: variant for variant in preset.variants}
    config = preset.config.model_copy(update={"updates": updates, "log_every": updates})
    trainer = PopulationTrainer(config, [Run(variant=named[name], seed=seed) for name in names])
    trainer.run()
    rollout = trainer.rollout(updates).rollout
    answers = Sorting(config.task).targets(rollout.prompts)
    return pd.DataFrame(
        {
            "variant": name,
            "prompt": as_text(rollout.prompts[run, prompt]),
            "sorted": as_text(answers[run, prompt]),
            "completion": as_text(rollout.completions[run, prompt, 0]),
        }
        for run, name in enumerate(names)
        for prompt in range(prompts)
    )


def as_text(tokens: torch.Tensor) -> str:
    """Tokens [T] of the sorting task as characters; ``?`` for those that mean nothing."""
    signs = {END: ".", FILLER: "_"} | {digit: str(digit) for digit in range(NUM_DIGIT_TOKENS)}
    return "".join(signs.get(token, "?") for token in tokens.tolist())


#: What a threshold costs: updates and operations until a population first reaches it. Operations
#: are counted from the configuration (:mod:`analysis.training.counting`), not timed: two a weight
#: and token in each pass. A forward pass of the policy is one pass, its backward pass two; sampling
#: yields the activations of the gradient. A teacher or a reference that is asked for log-probs adds
#: a pass of its own size. Supervised training is charged for the teacher's samples, which are fresh
#: in every update here.
UNITS = ("updates", "flops")


class Ratio(NamedTuple):
    """How many times the cost of another variant: a geometric mean, and its interval."""

    mean: float
    low: float  #: zero if the other variant missed in a seed: its own ratio is an upper bound
    high: float  #: infinite if the variant did: a lower bound
    missed: int  #: seeds in which the variant never got there
    other_missed: int  #: seeds in which the other variant did not
    seeds: int


def update_flops(config: TrainConfig, variant: Variant) -> int:
    """Operations of an update with one optimizer step.

    Raises:
        ValueError: the variant needs a teacher and ``config`` has none, or updates have several
            steps.
    """
    if config.num_iterations * config.num_minibatches != 1:
        raise ValueError("update_flops counts one optimizer step an update: num_iterations=1")
    taught = variant.distillation is not None or variant.sampler.by == "teacher"
    if taught and config.teacher is None:
        raise ValueError(f"variant {variant.name!r} needs a teacher: set teacher in the config")
    samples_apart = variant.sampler.off_policy and variant.sampler.by == "policy"
    reads_reference = variant.kl.estimator != "none" or variant.objective.kind == "dpo"
    flops = (3 + samples_apart + reads_reference) * forward_flops(config)
    if taught:
        policy = config.teacher.policy or config.policy
        flops += forward_flops(config.model_copy(update={"policy": policy}))
    return flops


def crossings(curves: pd.DataFrame, preset: Preset, metric: str, threshold: float) -> pd.DataFrame:
    """What each run spent until a metric first reached a threshold.

    Between the middles of two logging windows the metric is taken to be a straight line.

    Returns:
        One row per run: ``variant``, ``seed``, ``start``, ``updates``, ``flops``, and ``reached``;
        where it is False they are those of the whole run, a lower bound.
    """
    config = preset.config
    costs = {variant.name: update_flops(config, variant) for variant in preset.variants}
    rows = []
    for (variant, seed), run in curves.groupby(["variant", "seed"], sort=False):
        middles = run["update"].to_numpy() + config.log_every / 2
        at = first_crossing(middles, run[metric].to_numpy(), threshold)
        reached = bool(np.isfinite(at))
        updates = at if reached else float(config.updates)
        start = seed % config.start.count if config.start.count > 1 else seed
        spent = {"updates": updates, "flops": updates * costs[variant], "reached": reached}
        rows.append({"variant": variant, "seed": seed, "start": start, **spent})
    return pd.DataFrame(rows)


def first_crossing(places: np.ndarray, values: np.ndarray, threshold: float) -> float:
    """Where a broken line first reaches a threshold; infinite if it does not."""
    above = np.flatnonzero(values >= threshold)
    if not above.size:
        return float("inf")
    ends = slice(max(above[0] - 1, 0), above[0] + 1)
    return float(np.interp(threshold, values[ends], places[ends]))


def cost_ratio(spent: pd.DataFrame, variant: str, other: str, unit: str) -> Ratio:
    """How many times more ``variant`` spent than ``other``, seed by seed.

    The interval is that of the mean logarithm, over the means of the starts. Who never got there is
    charged with the whole run, and the interval is open on the side on which its cost is not known.

    Raises:
        ValueError: an unknown variant or unit.
    """
    check_choice("unit", unit, UNITS)
    runs = {name: rows.set_index(["start", "seed"]) for name, rows in spent.groupby("variant")}
    if unknown := [name for name in (variant, other) if name not in runs]:
        raise ValueError(f"no variant {unknown[0]!r} among {list(runs)}")
    logs = np.log(runs[variant][unit] / runs[other][unit])
    of_starts = logs.groupby("start").mean().to_numpy()
    mean, low, high = (float(np.exp(value)) for value in statistics.interval(of_starts))
    missed, other_missed = (int((~runs[name]["reached"]).sum()) for name in (variant, other))
    low, high = 0.0 if other_missed else low, float("inf") if missed else high
    return Ratio(mean, low, high, missed, other_missed, len(logs))


def cost_table(
    recorded: Recording, variant: str, others: Sequence[str], thresholds: Iterable[float]
) -> pd.DataFrame:
    """How many times more a variant spends than others until the policy reaches an accuracy.

    Returns:
        One row per threshold, other variant and unit (``updates``, ``flops``): the geometric mean
        of the ratio ``mean``, its interval ``low`` to ``high``, and in how many seeds the variant
        (``missed``) and the other (``other_missed``) never got there.
    """
    rows = []
    for threshold in thresholds:
        spent = crossings(recorded.curves, recorded.preset, "own_accuracy", threshold)
        for other, unit in itertools.product(others, UNITS):
            ratio = cost_ratio(spent, variant, other, unit)
            rows.append({"threshold": threshold, "other": other, "unit": unit, **ratio._asdict()})
    return pd.DataFrame(rows)


# --- The recorded runs and what they are called -----------------------------------------------

RUNS = ("distillation", "distillation_sparse", "weak_teacher", "kdrl", "long_to_short")
#: A run that ends below this accuracy is lost: short and wrong.
LOST = 0.1


def kept(finals: pd.DataFrame, variant: str, other: str) -> float:
    """``variant`` less ``other`` in accuracy, over the seeds on which neither run is lost."""
    wide = finals.pivot(index="seed", columns="variant", values="own_accuracy")[[variant, other]]
    wide = wide[(wide >= LOST).all(axis=1)]
    return float((wide[variant] - wide[other]).mean())


def from_both_starts(metric: str) -> pd.DataFrame:
    """A final metric of each variant from the ``easy`` and the ``sparse`` starts, by start."""
    columns = {
        start: recorded(preset).finals.set_index(["variant", "seed"])[metric]
        for start, preset in (("easy", "distillation"), ("sparse", "distillation_sparse"))
    }
    return pd.DataFrame(columns).reset_index()


# --- The claims it decides --------------------------------------------------------------------

#: An accuracy that is given up for less length: equal up to this.
EQUAL_ACCURACY = 0.02
#: Designs of KDRL against the constant weight on all completions: (name, variant, other variant).
GUIDED = (
    ("masked", "kdrl_masked", "kdrl_k2"),
    ("masked_k3", "kdrl_k3_masked", "kdrl_k3"),
    ("annealed", "kdrl_annealed", "kdrl_k2"),
)
#: What reports say: on-policy distillation against reinforcement learning, in steps, and against
#: training on the teacher's samples, in operations.
CLAIMED_STEPS, CLAIMED_OFFLINE = 7.0, 9.0
#: Accuracies to which the ledger counts updates, by preset.
THRESHOLDS = {"distillation": 0.6, "distillation_sparse": 0.06}


@claim("S3-12")
def compounding_errors() -> Finding:
    """Growth exponent of the exact cost from T = 64 to 128, with and without a way back; and
    recorded: supervised on the teacher's samples against distillation on own samples, one sample
    each, eight tokens."""
    error = 1e-4

    def exponent(recovery: float) -> float:
        costs = [imitation_cost(error, horizon, recovery) for horizon in (64, 128)]
        return math.log2(costs[1] / costs[0])

    figures = {
        "exponent_no_way_back": exponent(0.0),
        "exponent_own_states": exponent(1 - error),
        "exponent_half_recovers": exponent(0.5),
        "cost_no_error": imitation_cost(0.0, 128, 0.0),
    }
    presets = ("distillation", "distillation_sparse", "weak_teacher")
    for name, preset in zip(("trained", "trained_sparse", "trained_weak"), presets, strict=True):
        finals = recorded(preset).finals
        figures |= difference(finals, "supervised", "opd_immediate", "own_accuracy").figures(name)
    quadratic = [figures["exponent_no_way_back"] > 1.9, figures["exponent_half_recovers"] > 1.9]
    return Finding(judge(all(quadratic), any(quadratic)), figures)


@claim("S3-15")
def kdrl_prefers_k2() -> Finding:
    """k2 and k3 losses against the exact gradient: one state, stale samples, whole sequences; and
    recorded: accuracy of k3 minus k2 beside GRPO."""
    sequences, table, teacher, _ = ragged()
    exact = sequence_kl_gradient(table, teacher, sequences)
    over = {
        level: expected_sequence_gradient(table, teacher, sequences, estimator="k2", level=level)
        for level in ("token", "sequence")
    }
    figures = {
        "k2": worst("k2"),
        "k3": typical("k3"),
        "k2_stale": typical("k2", stale()),
        "k2_tokens": flat_error(over["token"], exact),
        "k2_sequence": flat_error(over["sequence"], exact),
    }
    trained = difference(recorded("kdrl").finals, "kdrl_k3", "kdrl_k2", "own_accuracy")
    figures |= trained.figures("trained_k3_minus_k2")
    always = max(figures["k2_stale"], figures["k2_tokens"]) < EXACT
    return Finding(judge(always, figures["k2"] < EXACT < figures["k3"]), figures)


@claim("S3-16")
def annealing_and_masking() -> Finding:
    """The schedule, and what a mask on rewards does to the expected distillation gradient; and
    recorded: annealed and masked against the constant weight, with a teacher of longer answers."""
    logits, teacher = normal_draws((2, 6), seed=0)
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    mask = low_reward_mask(rewards, 0.5).to(torch.float64)

    def terms(at: torch.Tensor) -> torch.Tensor:  # of the reverse KL, where the mask lets them
        return at.softmax(-1) * mask * (at.log_softmax(-1) - teacher.log_softmax(-1))

    masked = terms(logits) @ (torch.eye(6, dtype=torch.float64) - logits.softmax(-1))
    failing = grad(lambda at: (at.softmax(-1) * mask).sum())(logits)
    whole = grad(lambda at: terms(at).sum())(logits)
    figures = {
        "schedule_middle": annealed(5, 10, start=1.0, end=0.0),
        "cosine_with_full_kl": cosine(masked, reverse_kl_gradient(logits, teacher)).item(),
        "decomposition_error": largest(masked + failing - whole),
    }
    shorter = []
    for name, variant, other in GUIDED:
        length, accuracy = (
            difference(recorded("kdrl").finals, variant, other, metric)
            for metric in ("own_length", "own_accuracy")
        )
        figures |= length.figures(f"{name}_length") | accuracy.figures(f"{name}_accuracy")
        shorter.append(shorter_at_equal_accuracy(length, accuracy))
    return Finding(judge(all(shorter), any(shorter)), figures)


def shorter_at_equal_accuracy(length: Interval, accuracy: Interval) -> bool:
    """Is the whole interval of the length below zero, and all of the accuracy's above the loss?"""
    return length.below and accuracy.low > -EQUAL_ACCURACY


@claim("S3-18")
def distillation_speed() -> Finding:
    """Exact-gradient steps to a success of 0.9, sparse reward over dense teacher, by length; and
    recorded: what GRPO spends over what distillation spends to one accuracy, easy and sparse."""
    figures = {f"steps_ratio_length_{n}": steps_ratio(n, vocab_size=4) for n in (1, 2, 4)}
    runs = {preset: recorded_runs(preset) for preset in THRESHOLDS}
    easy, sparse = (
        crossings(run.curves, run.preset, "own_accuracy", THRESHOLDS[preset])
        for preset, run in runs.items()
    )
    ratios = {
        "easy": cost_ratio(easy, "grpo", "opd_immediate", "updates"),
        "sparse": cost_ratio(sparse, "grpo", "opd_immediate", "updates"),
        "easy_flops": cost_ratio(easy, "grpo", "opd_immediate", "flops"),
        "sparse_flops": cost_ratio(sparse, "grpo", "opd_immediate", "flops"),
        "offline_flops": cost_ratio(easy, "supervised", "opd_immediate", "flops"),
    }
    for name, ratio in ratios.items():
        figures |= Interval(ratio.mean, ratio.low, ratio.high).figures(name)
    faster = [
        figures["steps_ratio_length_4"] >= CLAIMED_STEPS,
        reaches(ratios["easy"], CLAIMED_STEPS),
        reaches(ratios["sparse"], CLAIMED_STEPS),
        reaches(ratios["offline_flops"], CLAIMED_OFFLINE),
    ]
    return Finding(judge(all(faster), any(faster)), figures)


def reaches(ratio: Ratio, claimed: float) -> bool:
    """Does the band allow the claimed factor? Where most seeds only bound it, any band does."""
    return ratio.high >= claimed or ratio.missed > ratio.seeds // 2
