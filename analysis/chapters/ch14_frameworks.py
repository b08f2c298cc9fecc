r"""Chapter 14: what the KL terms of training frameworks optimise, as read from public sources.

Policies stay near enough to their reference that no clamp binds, so that a name in ``descends`` is
a statement about the formula; what the clamps do is asked token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from analysis.evidence.policies import (
    SAME,
    flat_error,
    medians,
    moved_logits,
    normal_draws,
    random_tables,
)
from kl_term import style
from kl_term.audit.batches import Batch
from kl_term.audit.readings import Part
from kl_term.audit.slopes import Advantages, slopes
from kl_term.audit.states import (
    Formula,
    States,
    coefficient,
    dead_zones_of,
    descends,
    known_gradients,
    mean_gradient,
)
from kl_term.audit.targets import NEITHER
from kl_term.audit.trees import Tree, expected_gradient, visited_gradient
from kl_term.kl.enumeration import cosine, relative_error
from kl_term.kl.estimators import k1, k2, k3
from kl_term.kl.sequences import enumerate_sequences
from kl_term.kl.surrogates import ESTIMATORS, straight_through
from kl_term.kl.term import KLTerm
from kl_term.objectives.advantages import group_centre, group_normalise, leave_one_out
from kl_term.objectives.ordering import kl_then_leave_one_out, kl_then_normalise, normalise_then_kl

# The terms as read. Each function takes ``logp`` (with gradient), ``ref_logp`` and ``old_logp``
# (without) of the same shape [...], in nats, and returns the per-token term [...] that is
# multiplied with beta and minimised, before any aggregation. Their clamps are kept.


def _value(estimator: str, ref_log_ratio: Tensor) -> Tensor:
    """An estimator of the log-ratio to the reference."""
    return ESTIMATORS[estimator](ref_log_ratio, torch.zeros_like(ref_log_ratio))


def trl_grpo(
    logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, bias_correction: bool, level: str = "token"
) -> Tensor:
    """k3, times the live ratio if ``use_bias_correction_kl``, at level ``sequence`` its
    geometric mean over the last axis; Liger's fused loss computes the same."""
    value = k3(logp, ref_logp)
    if not bias_correction:
        return value
    log_ratio = logp - old_logp
    if level == "sequence":
        log_ratio = log_ratio.mean(-1, keepdim=True)
    return value * log_ratio.exp()


def verl(logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, kind: str) -> Tensor:
    """``kl``, ``abs``, ``mse`` or ``low_var_kl``, which clamps the log-ratio at 20 and its value
    at 10; with ``+``, that value and the gradient of k2."""
    del old_logp
    ref_log_ratio = logp - ref_logp
    values = {
        "kl": ref_log_ratio,
        "abs": ref_log_ratio.abs(),
        "mse": k2(logp, ref_logp),
        "low_var_kl": _value("k3", ref_log_ratio.clamp(-20, 20)).clamp(-10, 10),
    }
    value = values[kind.removesuffix("+")]
    return straight_through(value, k2(logp, ref_logp)) if kind.endswith("+") else value


def openrlhf(
    logp: Tensor,
    ref_logp: Tensor,
    old_logp: Tensor,
    *,
    estimator: str,
    unbiased_gradient: bool = False,
) -> Tensor:
    """k1, k2 or k3 clamped at 10; k3's log-ratio is bounded before; with ``unbiased_gradient``
    the gradient is that of k2 times the detached ratio, at most 10."""
    ref_log_ratio = logp - ref_logp
    bounded = ref_log_ratio.clamp(min=-10) if estimator == "k3" else ref_log_ratio
    value = _value(estimator, bounded).clamp(-10, 10)
    if not unbiased_gradient:
        return value
    weight = (logp - old_logp).exp().clamp(max=10).detach()
    return straight_through(value, weight * k2(logp, ref_logp))


def nemo_rl(
    logp: Tensor,
    ref_logp: Tensor,
    old_logp: Tensor,
    *,
    kind: str,
    on_policy_approximation: bool = False,
) -> Tensor:
    """k1, k2 or k3 of the log-ratio clamped at 20, times a live weight, clamped at 10.

    The weight is the ratio to the sampler under ``use_on_policy_kl_approximation``; else it is 1
    with the ratio's gradient. Where the log-ratio is clamped the weight is detached.
    """
    ref_log_ratio = logp - ref_logp
    bounded = ref_log_ratio.clamp(-20, 20)
    weight = (logp - (old_logp if on_policy_approximation else logp.detach())).exp()
    weight = torch.where(bounded == ref_log_ratio, weight, weight.detach())
    return (weight * _value(kind, bounded)).clamp(-10, 10)


def slime(
    logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, kind: str, unbiased: bool = False
) -> Tensor:
    """k1, k2 or k3, times the live ratio if ``--use-unbiased-kl``; ``low_var_kl`` then clamps at
    10."""
    clamped = kind == "low_var_kl"
    value = ESTIMATORS["k3" if clamped else kind](logp, ref_logp)
    if unbiased:
        value = (logp - old_logp).exp() * value
    return value.clamp(-10, 10) if clamped else value


def open_instruct(logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, estimator: int) -> Tensor:
    """0: k1, 1: k2, 2: k3, 3: live ratio times k1; the log-ratio clamped at 40."""
    bounded = (logp - ref_logp).clamp(-40, 40)
    if estimator == 3:
        return (logp - old_logp).exp() * bounded
    return _value(("k1", "k2", "k3")[estimator], bounded)


def prime_rl(logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, kind: str) -> Tensor:
    """``rl``: squared log-ratio to the sampler; ``ref_kl``: the distillation term, live ratio
    times the detached log-ratio to the reference, of tokens whose probability fell by at most
    0.2. (A thousandth of ``rl`` that the framework adds is left out.)"""
    if kind == "rl":
        return (logp - old_logp).square()
    kept = logp.exp() - old_logp.exp() >= -0.2
    return kept * (logp - ref_logp).detach() * (logp - old_logp).exp()


def rpg(logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, kind: str) -> Tensor:
    """The losses of Regularised Policy Gradient for samples of the reference, clamped at 10;
    ``rpg_js`` and ``rpg_ujs`` are meant to be one formula and differ in a sign."""
    del old_logp
    log_w = logp - ref_logp
    if kind == "rpg_fkl":
        return -log_w
    w = log_w.exp()
    values = {
        "rpg_rkl": w * log_w,
        "rpg_ufkl": torch.expm1(log_w) - log_w,
        "rpg_urkl": w * (log_w - 1) + 1,
        "rpg_js": 0.5 * (w * log_w + log_w),
        "rpg_ujs": 0.5 * (w * log_w - log_w),
    }
    return values[kind].clamp(-10, 10)


def rlhf_book(logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, kind: str) -> Tensor:
    """``kl1``, ``kl2``, ``kl3`` with policy and reference in each other's place."""
    del old_logp
    return {"kl1": k1, "kl2": k2, "kl3": k3}[kind](ref_logp, logp)


class Source(NamedTuple):
    """A framework as it was read."""

    framework: str
    repository: str
    file: str
    version: str  #: release, or commit
    date: str  #: of the commit, or when the release was read


class Option(NamedTuple):
    """One setting of a framework's KL term in the loss."""

    framework: str
    setting: str
    loss: Formula
    #: The term of ours with the same gradient where no clamp binds; None = there is none.
    term: KLTerm | None = None
    default: bool = False  #: what the framework uses once its KL loss is on

    @property
    def reference_is_sampler(self) -> bool:
        return self.framework == "RPG" or self.setting == "rl"


def _read(
    source: str, loss: Callable[..., Tensor], *settings: tuple
) -> tuple[Source, tuple[Option, ...]]:
    """A framework's source and its options: name, flags, and the further fields of each."""
    read = Source(*source.split())
    options = (
        Option(read.framework, setting, partial(loss, **flags), *fields)
        for setting, flags, *fields in settings
    )
    return read, tuple(options)


K1, K2, K3 = (KLTerm(estimator=name) for name in ("k1", "k2", "k3"))
LIVE_K1, LIVE_K2, LIVE_K3 = (
    KLTerm(estimator=name, weighting="attached") for name in ("k1", "k2", "k3")
)
DETACHED_K2 = KLTerm(estimator="k2", weighting="detached")
_DEFAULT = True

FRAMEWORKS = (
    _read(
        "TRL huggingface/trl trl/trainer/grpo_trainer.py 1.16.0 2026-11-20",
        trl_grpo,
        ("use_bias_correction_kl", {"bias_correction": True}, LIVE_K3, _DEFAULT),
        ("without", {"bias_correction": False}, K3),
    ),
    _read(
        "Liger linkedin/Liger-Kernel liger_kernel/chunked_loss/grpo_loss.py 0.8.5 2026-11-20",
        trl_grpo,
        ("default", {"bias_correction": False}, K3, _DEFAULT),
    ),
    _read(
        "verl verl-project/verl verl/trainer/ppo/core_algos.py 0.9.1 2026-11-20",
        verl,
        ("low_var_kl", {"kind": "low_var_kl"}, K3, _DEFAULT),
        ("low_var_kl+", {"kind": "low_var_kl+"}, K2),
        ("kl", {"kind": "kl"}, K1),
        ("abs", {"kind": "abs"}),
        ("mse", {"kind": "mse"}, K2),
    ),
    _read(
        "OpenRLHF OpenRLHF/OpenRLHF openrlhf/models/utils.py 0.11.2 2026-11-20",
        openrlhf,
        ("k1", {"estimator": "k1"}, K1, _DEFAULT),
        ("k2", {"estimator": "k2"}, K2),
        ("k3", {"estimator": "k3"}, K3),
        ("k3, unbiased_gradient", {"estimator": "k3", "unbiased_gradient": True}, DETACHED_K2),
    ),
    _read(
        "NeMo-RL NVIDIA-NeMo/RL nemo_rl/algorithms/utils.py 7ea279a 2026-08-22",
        nemo_rl,
        ("k3", {"kind": "k3"}, K2, _DEFAULT),
        (
            "k3, use_on_policy_kl_approximation",
            {"kind": "k3", "on_policy_approximation": True},
            LIVE_K3,
        ),
        ("k1", {"kind": "k1"}),
        ("k2", {"kind": "k2"}),
    ),
    _read(
        "slime THUDM/slime slime/utils/ppo_utils.py 624b824 2026-08-21",
        slime,
        ("k1", {"kind": "k1"}, K1, _DEFAULT),
        ("k1, use-unbiased-kl", {"kind": "k1", "unbiased": True}, LIVE_K1),
        ("k2", {"kind": "k2"}, K2),
        ("k2, use-unbiased-kl", {"kind": "k2", "unbiased": True}, LIVE_K2),
        ("low_var_kl", {"kind": "low_var_kl"}, K3),
        ("low_var_kl, use-unbiased-kl", {"kind": "low_var_kl", "unbiased": True}, LIVE_K3),
    ),
    _read(
        "open-instruct allenai/open-instruct open_instruct/model_utils.py e6c3044 2026-08-20",
        open_instruct,
        ("2", {"estimator": 2}, K3, _DEFAULT),
        ("3", {"estimator": 3}, LIVE_K1),
    ),
    _read(
        "prime-rl PrimeIntellect-ai/prime-rl src/prime_rl/trainer/rl/loss.py 559b447 2026-08-21",
        prime_rl,
        ("rl", {"kind": "rl"}, None, _DEFAULT),
        ("ref_kl", {"kind": "ref_kl"}),
    ),
    _read(
        "RPG complex-reasoning/RPG verl/trainer/ppo/core_algos.py ec8e30b 2026-06-14",
        rpg,
        *(
            (f"rpg_{kl}", {"kind": f"rpg_{kl}"})
            for kl in ("fkl", "rkl", "ufkl", "urkl", "js", "ujs")
        ),
    ),
    _read(
        "rlhf-book natolambert/rlhf-book code/policy_gradients/loss.py a66b0bf 2026-08-21",
        rlhf_book,
        ("kl1", {"kind": "kl1"}),
        ("kl2", {"kind": "kl2"}, K2),
        ("kl3", {"kind": "kl3"}, None, _DEFAULT),
    ),
)
SOURCES = tuple(source for source, _ in FRAMEWORKS)
OPTIONS = tuple(option for _, options in FRAMEWORKS for option in options)


# What the chapter computes.


def states(count: int, vocab_size: int, *, drift: float, staleness: float, seed: int) -> States:
    """References with Gaussian logits, policies ``drift`` away, samplers ``staleness`` behind."""
    ref_logits = normal_draws((count, vocab_size), seed=seed)
    logits = moved_logits(ref_logits, drift, seed=seed + 1)
    return States(logits, ref_logits, moved_logits(logits, staleness, seed=seed + 2))


def audit(at: States, options: Iterable[Option] = OPTIONS) -> pd.DataFrame:
    """What each option descends, fresh and stale, with its median relative error to the reverse
    KL's.

    An option whose reference is its sampler has no fresh case: there is nothing to descend.
    """
    rows = []
    for option in options:
        row = {"framework": option.framework, "setting": option.setting, "default": option.default}
        cases = {"fresh": at._replace(old_logits=at.logits), "stale": at}
        if option.reference_is_sampler:
            cases = {"stale": at._replace(old_logits=at.ref_logits)}
        for case, where in cases.items():
            known = known_gradients(where)
            gradient = mean_gradient(option.loss, where)
            found = descends(gradient, known, tolerance=SAME)
            row[f"{case}_descends"] = NEITHER if found.known == NEITHER else found.said
            row[f"{case}_error"] = relative_error(gradient, known["reverse KL"]).median().item()
            row[f"{case}_cosine"] = cosine(gradient, known["reverse KL"]).median().item()
        rows.append(row)
    return pd.DataFrame(rows)


def dead_zones(options: Iterable[Option] = OPTIONS) -> pd.DataFrame:
    """Log-ratios (nats) below and above which an option's coefficient is exactly zero on fresh
    samples; NaN where there is no such zone."""
    rows = []
    for option in options:
        below, above = dead_zones_of(
            option.loss,
            furthest=30.0,
            count=60_001,
            reference_is_sampler=option.reference_is_sampler,
        )
        row = {"framework": option.framework, "setting": option.setting}
        rows.append(row | {"below": below, "above": above})
    return pd.DataFrame(rows)


# Where the KL meets the normalisation of rewards.

#: Name -> where it was read, and the advantages. For the exchange rate it does not matter that a
#: KL in the loss is differentiated.
PLACEMENTS: dict[str, tuple[str, Advantages]] = {
    "before the group's std": ("verl, KL in reward", partial(kl_then_normalise, eps=1e-6)),
    "after the group's std": ("OpenRLHF group_norm", partial(normalise_then_kl, eps=1e-9)),
    "loss, beside the group's std": ("TRL, verl, slime: KL loss", normalise_then_kl),
    "before leave-one-out": ("TRL RLOO", kl_then_leave_one_out),
    "after leave-one-out": ("OpenRLHF rloo", lambda r, kl, *, beta: leave_one_out(r) - beta * kl),
    "after centring": ("OpenRLHF dr_grpo", lambda r, kl, *, beta: group_centre(r) - beta * kl),
    "ignored": ("slime GRPO, kl-coef", lambda r, kl, *, beta: group_normalise(r, eps=1e-6)),
}


def exchange_table(beta: float, *, group_size: int, kl_spread: float, seed: int) -> pd.DataFrame:
    """By placement, exchange rate and force of the KL over beta, with half, one or none right;
    KLs have standard deviation ``kl_spread`` nats."""
    kl = kl_spread * normal_draws((group_size,), seed=seed)
    rows = []
    for name, (used_by, placement) in PLACEMENTS.items():
        row = {"placement": name, "used_by": used_by}
        for label, right in (("half", group_size // 2), ("one", 1), ("none", 0)):
            rewards = (torch.arange(group_size) < right).double()
            by_reward, by_kl = slopes(placement, rewards, kl, beta)
            row |= {f"rate_{label}": by_kl / by_reward / beta, f"force_{label}": by_kl / beta}
        rows.append(row)
    return pd.DataFrame(rows)


# A ratio of the whole sequence on the KL of one token, enumerated over every sequence.


def _mean_row(formula: Formula, batch: Batch) -> Part:
    """A formula summed over the tokens of an answer, the mean over answers."""
    three = (batch.logp, batch.ref_logp, batch.old_logp)
    return Part(formula(*three), coefficient(formula, *three) / batch.rows)


def level_errors(*, staleness: float, seed: int) -> pd.DataFrame:
    """Median relative error of TRL's corrected KL by the ratio's level, against the per-token
    reverse KL at the states that the sampler visits."""
    sequences = enumerate_sequences(3, 4)
    tables = random_tables(sequences, 3, 20, spread=1.0, seed=seed)
    noise = normal_draws(tables.logits.shape, seed=seed + 1)
    unpaid = torch.zeros(len(sequences.mask)).double()
    rows = []
    for samples, distance in (("fresh", 0.0), ("stale", staleness)):
        for logits, ref_logits, step in zip(*tables, noise, strict=True):
            at = Tree(sequences, logits, ref_logits, logits - distance * step, unpaid)
            exact = visited_gradient(at, direction="reverse")
            for level in ("token", "sequence"):
                part = partial(_mean_row, partial(trl_grpo, bias_correction=True, level=level))
                error = flat_error(expected_gradient(part, at, separable=True), exact)
                rows.append({"samples": samples, "level": level, "error": error})
    return medians(rows, "samples", "level", interpolation="lower")


# What the chapter draws.

#: Colour of what a term descends, by the name the audit gives it.
DESCENDS = {
    "reverse KL": style.COLOURS["reverse"],
    "forward KL": style.COLOURS["forward"],
    "nothing": style.COLOURS["none"],
    "neither KL": style.COLOURS["k1"],
}


def descents(table: pd.DataFrame) -> Figure:
    """Relative error on fresh and on stale samples, one row a setting, coloured by its descent."""
    rows = table[table.fresh_descends.notna()].iloc[::-1].reset_index(drop=True)
    floor = 1e-3
    figure, axes = style.subplots(height=0.27 * len(rows) + 1.2)
    for y, row in enumerate(rows.itertuples()):
        errors = [max(row.fresh_error, floor), max(row.stale_error, floor)]
        colour = DESCENDS.get(row.fresh_descends, DESCENDS["neither KL"])
        axes.plot(errors, [y, y], color=colour, linewidth=1.2)
        axes.plot(errors[0], y, marker="o", color=colour, linestyle="none")
        axes.plot(errors[1], y, marker="s", color=colour, markerfacecolor="white", linestyle="none")
    settings = rows.setting.str.replace("use_on_policy_kl_approximation", "on-policy approx.")
    names = rows.framework + ": " + settings + rows.default.map({True: " *", False: ""})
    axes.set_yticks(range(len(rows)), names, fontsize=9.5)
    axes.set_xscale("log")
    axes.set_xticks([floor, 1e-2, 1e-1, 1], ["exact", "0.01", "0.1", "1"])
    axes.set_xlabel("relative error (log scale)")
    axes.grid(False, axis="y")
    for name, colour in DESCENDS.items():
        axes.plot([], [], marker="o", linestyle="none", color=colour, label=name)
    axes.legend(loc="upper center", bbox_to_anchor=(0.2, -0.09), ncols=4, fontsize=9.5)
    return figure
