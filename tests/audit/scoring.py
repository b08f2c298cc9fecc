"""How the audit does on the corpus: which fault it names first, and what it says of right losses.

``python -m tests.audit.scoring --record`` audits every loss and writes ``results/audit_corpus``,
from which the book makes its table; without ``--record`` it prints what would be written. ``--set``
takes another set of :mod:`analysis.report.audit_sets`.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from analysis.freshness import code_sha256, import_closure
from analysis.records.manifests import write_folder
from analysis.report.audit_sets import SEEN, SETS
from analysis.sweeps.provenance import provenance_here
from kl_term.audit import Audit, audit
from kl_term.errors import UserError
from tests.audit.corpus import Entry, read

RESULTS = Path(__file__).parents[2] / "results"
RECORDED = RESULTS / SEEN.folder
#: The codes that name each kind of fault. ``expectation`` is that what the loss claims to minimise
#: is not what it does, ``raises`` that it cannot be called, in the words of the error.
NAMES: dict[str, set[str]] = {
    "kl without gradient": {"no-gradient"},
    "no gradient": {"no-gradient"},
    "policy without gradient": {"policy-no-gradient"},
    "beta does not act": {"beta-does-nothing"},
    "another divergence": {"another-divergence", "score-term", "expectation"},
    "scale": {"scale"},
    "minimises nothing": {"minimises-nothing"},
    "exchanged": {"exchanged"},
    "sign": {"sign"},
    "ratio of another level": {"ratio-of-another-level"},
    "reference not read": {"reference-not-read", "to-the-sampler"},
    "no known divergence": {"no-known-divergence", "pointwise-kl-div", "positive-part"},
    "reads masked positions": {"reads-padding"},
    "depends on padding width": {"padding-width"},
    "masked values leak": {"poisoned-padding"},
    "divisor": {"divisor"},
    "micro-batches": {"micro-batches", "row-order"},
    "policy ratio": {"policy-ratio", "policy-switched"},
    "policy sign": {"policy-sign"},
    "policy clip": {"policy-clip"},
    "policy weight": {"policy-weight", "policy-ratio"},
    "policy axis": {"policy-axis", "raises"},
    "estimator in the reward": {"estimator-in-reward"},
    "credit": {"credit"},
    "inside the std": {"inside-the-std"},
    "counted twice": {"counted-twice"},
    "not zero at the reference": {"not-zero-at-reference"},
    "wrong axis": {"wrong-axis"},
    "dead zone": {"dead-zone"},
    "overflow": {"overflow", "filter"},
    "raises": {"raises"},
    "rows": {"reads-other-answers", "row-order"},
    "shifted": {"shifted-reference"},
    "empty rows": {"empty-answers"},
    "sum over the batch": {"sum-over-batch", "divisor"},
    "unequal supports": {"unequal-supports"},
    "reward not paid": {"reward-not-paid", "policy-no-gradient", "credit", "kl-not-paid"},
}
#: Faults that two findings name as well, by the loss.
ALSO = {
    "reference_minus_current": {"sign"},
    "prior_minus_policy": {"sign"},
    "centred_by_column": {"policy-axis"},
    "mean_over_the_vocabulary": {"wrong-axis"},
    "jsd_of_mixed_logs": {"scale"},
    "shadowed_log_ratio": {"policy-sign"},
    "squared_in_the_coefficient": {"no-known-divergence", "another-divergence"},
    "coeff_loss": {"no-known-divergence", "another-divergence"},
    "packed_gspo": {"reads-other-answers"},
    "policy_loss_dual": {"policy-no-gradient"},
    "variant_loss": {"reads-other-answers"},
    "prime_rl_loss": {"not-zero-at-reference"},
    "grpo_flat": {"policy-axis"},
    "grpo_clip_kl": {"policy-ratio"},
    "positive_part": {"estimator-in-reward"},
    "minimax_step": {"policy-sign"},
    "engine_correction": {"scale"},
    "flat_grpo": {"policy-axis"},
    "causal_pg": {"tokens-left-out"},
    "nano_loop": {"not-zero-at-reference"},
    "reward_shaping": {"scale"},
    "reinforce_returns": {"reward-not-paid"},
    "topk_opd": {"not-zero-at-reference"},
}
OUTCOMES = {
    "named": "the first finding names the fault",
    "noted": "the first finding does, and is a note, as right losses have them too",
    "among three": "one of the first three does",
    "missed": "none of them does",
    "clean": "a right loss with nothing above a note",
    "false alarm": "a right loss with a warning or an error",
}


class Scored(NamedTuple):
    """One row of the table."""

    name: str
    source: str
    what: str  #: what is wrong with it, or what it is
    kind: str  #: of the finding that must come first; empty for a right loss
    codes: str  #: found, the worst first; notes only where there is nothing else
    outcome: str


_AUDITED: dict[str, Audit] = {}


def audited(entry: Entry) -> Audit:
    """The audit of a loss as its author would ask for it, once for all who look at it."""
    if entry.name not in _AUDITED:
        _AUDITED[entry.name] = _audit(entry)
    return _AUDITED[entry.name]


def _audit(entry: Entry) -> Audit:
    """Names only where none can be guessed, or where its author would say them."""
    how: dict = {"factory": entry.factory, "given": entry.values()}
    if entry.names:
        how["names"] = entry.names
    if entry.unusual or entry.factory or "beta" in entry.said:
        how["beta_name"] = entry.beta
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return audit(entry.function, **how)


def codes_of(entry: Entry) -> list[str]:
    """Codes above a note, or the notes where there are none."""
    try:
        found = audited(entry)
    except UserError as refusal:
        return ["raises" if "Error" in str(refusal) else "refused"]
    loud = [finding.code for finding in found.findings if finding.severity != "note"]
    claimed = (entry.claims or {}).get("minimises")
    if claimed and claimed != found.minimises["fresh"]["state"]:
        loud.insert(0, "expectation")
    return loud or [f"({finding.code})" for finding in found.findings]


def scored(entry: Entry) -> Scored:
    codes = codes_of(entry)
    if entry.want is None:
        outcome = "clean" if all(code.startswith("(") for code in codes) else "false alarm"
        return Scored(entry.name, "", entry.title, "", " ".join(codes), outcome)
    wanted = NAMES[entry.want["kind"]] | ALSO.get(entry.name, set())
    where = [i for i, code in enumerate(codes) if code.strip("()") in wanted]
    outcome = "missed" if not where or where[0] > 2 else "among three" if where[0] else "named"
    if outcome == "named" and codes[0].startswith("("):
        outcome = "noted"
    return Scored(
        entry.name,
        entry.source or "",
        entry.wrong or "",
        entry.want["kind"],
        " ".join(codes[:3]),
        outcome,
    )


def table(entries: list[Entry]) -> pd.DataFrame:
    return pd.DataFrame([scored(entry) for entry in entries])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only these losses")
    parser.add_argument("--record", action="store_true", help="write the recorded table")
    parser.add_argument("--set", choices=list(SETS), default=SEEN.name, help="which losses")
    chosen = parser.parse_args()
    began = time.perf_counter()
    losses = SETS[chosen.set]
    folder = RESULTS / losses.folder
    entries = [e for e in read(*losses.sections) if e.name in chosen.names or not chosen.names]
    found = table(entries)
    with pd.option_context("display.max_rows", None, "display.width", 200):
        print(found[["name", "kind", "codes", "outcome"]].to_string(index=False))
    print(found["outcome"].value_counts().to_dict())
    if chosen.record and not chosen.names:
        closure = import_closure(["tests/audit/scoring.py"])
        fields = provenance_here(code_sha256(closure)).model_dump()
        fields |= {
            "preset": folder.name,
            "seeds": [],
            "configuration": {"losses": len(found)},
            "seconds": round(time.perf_counter() - began),
        }
        write_folder(folder, {"losses.csv": found}, fields)
        print(f"written to {folder}")


if __name__ == "__main__":
    main()
