r"""Chapter 7: which supports an off-policy KL term needs, decided by enumeration.

A token may be forbidden by the policy, by the sampler or by the reference. Every geometry of the
three supports is tried, on one state and over trees of sequences, and what a term descends is
found by comparing its expected gradient with those of the divergences it could have.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from analysis import style
from analysis.chapters.ch07_stale_sequences import weighted_kl_gradient
from analysis.chapters.claims import EXACT, band
from analysis.chapters.policies import Policies, normal_draws, random_policies
from analysis.kl.divergences import forward_kl, reverse_kl
from analysis.kl.enumeration import exact_kl_gradient, expected_gradient, relative_error
from analysis.kl.scores import expected_score
from analysis.kl.sequences import (
    Sequences,
    can_draw,
    enumerate_sequences,
    expected_sequence_gradient,
    sequence_kl_gradient,
    visited_kl_gradient,
)
from analysis.kl.term import KLTerm
from analysis.kl.truncation import covered_kl, keep_top, masked_logits

# --- What the chapter computes -----------------------------------------------------------------

SETS = ("policy", "sampler", "reference")
LETTERS = {"policy": "P", "sampler": "M", "reference": "R"}  #: of the tokens that each allows
PAIRS = tuple(itertools.permutations(SETS, 2))
RATIOS = ("token", "prefix", "sequence")

#: Where the log-ratio of a row stands; ``recomputed``: in the reward, of the current policy.
WHERE = {"loss": "as a loss", "reward": "in the reward", "recomputed": "recomputed"}

Row = Mapping[str, str]

#: The rows of the table: choices of :class:`analysis.kl.term.KLTerm`, and the ratio of the policy
#: gradient as the weighting of the reward.
ROWS: tuple[dict[str, str], ...] = (
    *(
        {"estimator": estimator, "placement": "loss", "weighting": weighting}
        for weighting in ("none", "detached", "attached")
        for estimator in ("k1", "k2", "k3")
    ),
    *(
        {"estimator": "k1", "placement": placement, "weighting": weighting, "credit": credit}
        for placement, weighting in (
            ("reward", "none"),
            ("reward", "detached"),
            ("recomputed", "detached"),
        )
        for credit in ("immediate", "to_go")
    ),
)


class Supports(NamedTuple):
    """One state: the logits [V] of policy, sampler and reference, ``-inf`` where forbidden."""

    policy: Tensor
    sampler: Tensor
    reference: Tensor

    def hold(self, inclusion: tuple[str, str]) -> bool:
        """Whether one support lies inside another."""
        inside, around = (getattr(self, name) > -torch.inf for name in inclusion)
        return bool((around | ~inside).all())


def row_gradient(
    pair: Policies, old_logits: Tensor, sequences: Sequences, row: Row, ratio: str = "token"
) -> Tensor:
    """Expected gradient [states, vocab] of a row of the table, which descent on the KL follows.

    A token that the sampler never draws adds nothing, nor does one of weight zero; the policy may
    forbid tokens at one state only.
    """
    drawn = can_draw(old_logits, sequences)
    if row["weighting"] != "none":
        drawn &= can_draw(pair.logits, sequences)
    counted = sequences.only(drawn)
    if row["placement"] == "recomputed":
        options = {"level": ratio, "credit": row["credit"]}
        return weighted_kl_gradient(pair, old_logits, counted, **options)
    ratios = {} if row["weighting"] == "none" else {"ratio": ratio}
    return expected_sequence_gradient(*pair, counted, old_logits, **row, **ratios)


def geometries(*, seed: int) -> list[Supports]:
    """Every way in which three supports can overlap, as long as one token belongs to all of them.

    The seven regions of the diagram hold two tokens each or none; the logits are random.
    """
    generator = torch.Generator().manual_seed(seed)
    regions = [r for r in itertools.product((True, False), repeat=3) if any(r)]
    cases = []
    for present in itertools.product((True, False), repeat=len(regions) - 1):
        allowed = torch.tensor(
            [
                [there and run for run in region]
                for region, there in zip(regions, (True, *present), strict=True)
                for _ in range(2)
            ]
        ).T
        logits = torch.randn(allowed.shape, generator=generator, dtype=torch.float64)
        cases.append(Supports(*torch.where(allowed, logits, -torch.inf)))
    return cases


def one_state_targets(case: Supports) -> dict[str, Tensor]:
    """Gradient [1, V] of everything that a term is found to descend at one state, by its name."""
    keep = (case.sampler > -torch.inf) & (case.policy > -torch.inf)
    with torch.enable_grad():
        leaf = case.policy.clone().requires_grad_(True)
        mass = torch.where(keep, leaf.softmax(-1), 0.0).sum()
        covered = covered_kl(leaf, case.reference, keep)
        objectives = {
            "reverse": reverse_kl(leaf, case.reference),
            "forward": forward_kl(leaf, case.reference),
            "nothing": 0.0 * mass,
            "reverse − drift": reverse_kl(leaf, case.reference) - reverse_kl(leaf, case.sampler),
            "covered reverse": covered,
            "covered forward": covered_kl(case.reference, leaf, keep),
            "covered reverse + mass": covered + mass,
            "covered mass": mass,
            "reverse of the cut policy × mass": mass
            * reverse_kl(masked_logits(leaf, keep), case.reference),
        }
        return {
            name: torch.autograd.grad(objective, leaf, retain_graph=True)[0].unsqueeze(0)
            for name, objective in objectives.items()
            if objective.isfinite()
        }


def tree_targets(pair: Policies, old_logits: Tensor, sequences: Sequences) -> dict[str, Tensor]:
    """Gradient [states, vocab] of everything that a term is found to descend over sequences."""

    def by_place(reference: Tensor, direction: str) -> dict[str, Tensor]:
        """Over whole sequences, and with the visits of either policy held fixed."""
        both, options = (pair.logits, reference, sequences), {"direction": direction}
        return {
            "whole": sequence_kl_gradient(*both, **options),
            "policy's states": visited_kl_gradient(*both, **options),
            "sampler's states": visited_kl_gradient(*both, old_logits, **options),
        }

    reverse, forward = (by_place(pair.ref_logits, d) for d in ("reverse", "forward"))
    drift = by_place(old_logits, "reverse")
    found = {"nothing": torch.zeros_like(pair.logits)}
    for place in reverse:
        found[f"reverse, {place}"] = reverse[place]
        found[f"forward, {place}"] = forward[place]
        found[f"reverse − drift, {place}"] = reverse[place] - drift[place]
    return found


def name_of(gradient: Tensor, candidates: Mapping[str, Tensor]) -> str:
    """The first candidate that a gradient equals, ``neither`` if there is none."""
    if not gradient.isfinite().all():
        return "infinite"
    for name, candidate in candidates.items():
        if (gradient - candidate).abs().max() < EXACT:
            return name
    return "neither"


def at_one_state(case: Supports, row: Row) -> Tensor:
    """Gradient [1, V] of a row; without a weight, times the mass that the sampler covers."""
    policy, sampler, reference = (x.unsqueeze(0) for x in case)
    sequences = enumerate_sequences(policy.shape[-1], 1)
    gradient = row_gradient(Policies(policy, reference), sampler, sequences, row)
    if row["weighting"] != "none":
        return gradient
    return gradient * policy.softmax(-1)[sampler > -torch.inf].sum()


def descends(case: Supports, row: Row) -> str:
    """The name of what a row descends at one state."""
    return name_of(at_one_state(case, row), one_state_targets(case))


def report(case: Supports, row: Row) -> Tensor:
    """Mean of a weighted loss at one state (nats), a scalar."""
    policy, sampler, reference = (x.log_softmax(-1) for x in case)
    drawn = (sampler > -torch.inf) & (policy > -torch.inf)
    logp, old_logp, ref_logp = (x[drawn].unsqueeze(-1) for x in (policy, sampler, reference))
    loss = KLTerm(**row).loss(logp, ref_logp, old_logp=old_logp)
    return (old_logp.exp() * loss).sum()


def reports_the_kl(case: Supports, row: Row) -> bool:
    """Whether that mean is the reverse KL."""
    return bool((report(case, row) - reverse_kl(case.policy, case.reference)).abs() < EXACT)


def needs(holds: Sequence[bool], cases: Sequence[Supports]) -> str:
    """The inclusions without each of which something never holds, and with which it always does.

    Raises:
        ValueError: if no set of inclusions decides it.
    """
    where = [case for case, found in zip(cases, holds, strict=True) if found]
    needed = [i for i in PAIRS if all(case.hold(i) for case in where)]
    if [all(case.hold(i) for i in needed) for case in cases] != list(holds):
        raise ValueError("no set of inclusions decides where it holds")
    for a, b in list(needed):  # what two others imply goes, one at a time
        if any((a, c) in needed and (c, b) in needed for c in SETS):
            needed.remove((a, b))
    equal = [(a, b) for a, b in needed if (b, a) in needed and SETS.index(a) < SETS.index(b)]
    inside = [pair for pair in needed if pair[::-1] not in needed]
    return ", ".join(
        [f"{LETTERS[a]} = {LETTERS[b]}" for a, b in equal]
        + [f"{LETTERS[a]} ⊆ {LETTERS[b]}" for a, b in inside]
    )


def support_table(*, seed: int) -> pd.DataFrame:
    """Every term: what it descends, which supports that needs, and what is left without them.

    ``fresh`` and ``stale`` are one state and equal supports; ``needs`` and ``report_needs`` (that
    its mean be the reverse KL) are decided over all overlaps of the three supports; ``cut`` is a
    policy that samples its likeliest tokens only. Where the ``policy`` or the fresh policy's
    ``reference`` forbids tokens, the two others agree. The ratios are those of stale sequences.
    """
    cases = geometries(seed=seed)
    equal, cut = cases[-1], cut_sampler(seed=seed)
    policy_cut, reference_cut = (
        next(case for case in cases if all(case.hold(i) == (i[1] != small) for i in PAIRS))
        for small in ("policy", "reference")
    )
    reference_cut = reference_cut._replace(sampler=reference_cut.policy)
    tree = enumerate_sequences(3, 3, eos=2)
    tables = normal_draws((3, tree.num_states, 3), seed=seed)
    pair, old = Policies(*tables[:2]), tables[2]
    by_tree = tree_targets(pair, old, tree)
    rows = []
    for row in ROWS:
        stale = descends(equal, row)
        future = ", to go" if row.get("credit") == "to_go" else ""
        found = {
            "term": f"{row['estimator']} {WHERE[row['placement']]}{future}",
            "weight": row["weighting"],
            "fresh": descends(equal._replace(sampler=equal.policy), row),
            "stale": stale,
            "cut": descends(cut, row),
            "policy": descends(policy_cut, row),
            "reference": descends(reference_cut, row),
        }
        if stale != "neither":
            found["needs"] = needs([descends(case, row) == stale for case in cases], cases)
        weighted = row["weighting"] != "none"
        if weighted and row["placement"] == "loss" and reports_the_kl(equal, row):
            found["report_needs"] = needs([reports_the_kl(case, row) for case in cases], cases)
        for ratio in RATIOS if weighted else RATIOS[:1]:
            found[ratio] = name_of(row_gradient(pair, old, tree, row, ratio), by_tree)
        rows.append(found)
    return pd.DataFrame(rows)


def cut_sampler(*, seed: int, vocab_size: int = 6, top_p: float = 0.7) -> Supports:
    """A policy that samples its own likeliest tokens only, beside a reference of full support."""
    policy, reference = normal_draws((2, vocab_size), seed=seed)
    return Supports(policy, masked_logits(policy, keep_top(policy, top_p=top_p)), reference)


def cut_curves(
    top_ps: Iterable[float], *, count: int, vocab_size: int, distance: float, seed: int
) -> pd.DataFrame:
    """Error of weighted KL terms against the reverse KL's gradient when the sampler cuts its tail.

    The policy is its reference moved by ``distance`` and samples its likeliest tokens only; the
    weight is the true ratio to that sampler. Returns, by ``top_p``, the median ``missing`` mass and
    the 10th, 50th and 90th percentile of the relative error of each term over ``count`` states.
    """
    ref_logits, shift = random_policies(count, vocab_size, spread=1.0, seed=seed)
    logits = ref_logits + distance * shift
    exact = exact_kl_gradient(logits, ref_logits, direction="reverse")
    rows = []
    for top_p in top_ps:
        keep = keep_top(logits, top_p=top_p)
        sampler = masked_logits(logits, keep)
        penalty = torch.where(keep, sampler.log_softmax(-1) - ref_logits.log_softmax(-1), 0.0)
        centred = penalty - (sampler.softmax(-1) * penalty).sum(-1, keepdim=True)
        weighting = {"weighting": "attached"}
        kept = torch.where(keep, logits.softmax(-1), 0.0)
        gradients = {
            "k1": expected_gradient(logits, ref_logits, sampler, estimator="k1", **weighting),
            "k3": expected_gradient(logits, ref_logits, sampler, estimator="k3", **weighting),
            "reward": expected_score(logits, kept * penalty),
            "baseline": expected_score(logits, kept * centred),
        }
        missing = (1 - kept.sum(-1)).median().item()
        for name, gradient in gradients.items():
            error = band(relative_error(gradient, exact))
            rows.append({"top_p": top_p, "missing": missing, "name": name} | error)
    return pd.DataFrame(rows)


# --- What it draws -----------------------------------------------------------------------------

#: Colour, line style and label of each term under a sampler that cuts its tail.
CUT_TERMS = {
    "k1": ("k1", "-", r"$\rho\, k_1$"),
    "k3": ("k3", "-", r"$\rho\, k_3$"),
    "reward": ("reverse", "--", "reward"),
    "baseline": ("none", "-", "less mean"),
}


def draw_cut(curves: pd.DataFrame) -> Figure:
    """Error of each term's expected gradient against the mass that the sampler cuts off."""
    titles = ("near the reference", "farther away")
    figure, panels = style.subplots(1, len(titles), sharey=True, height=3.9)
    for axes, title, distance in zip(panels, titles, curves.distance.unique(), strict=True):
        for name, (colour, dashes, label) in CUT_TERMS.items():
            curve = curves[(curves.distance == distance) & (curves.name == name)]
            look = {"color": style.COLOURS[colour], "linestyle": dashes, "label": label}
            axes.plot(curve.missing, curve["median"], **look)
        axes.set(title=title, xlim=(0, curves.missing.max()))
    panels[0].set_ylim(-0.02, None)
    panels[0].set_ylabel("relative error of the\nKL's expected gradient")
    style.label_line_ends(panels[-1])
    figure.supxlabel("policy's mass that the sampler cuts off", fontsize="medium")
    return figure
