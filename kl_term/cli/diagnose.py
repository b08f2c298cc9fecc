"""``kl-term diagnose``: what is wrong with the KL term of a run, from its log-probs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from kl_term.diagnosis.causes import matching
from kl_term.diagnosis.dumping import SNIPPETS
from kl_term.diagnosis.measure import measure
from kl_term.diagnosis.page import html_page, lines
from kl_term.diagnosis.readers import read_rollouts, recorded_settings
from kl_term.diagnosis.reports import report
from kl_term.diagnosis.schema import Framework, Settings, described_term
from kl_term.errors import UserError
from kl_term.files import replace_file
from kl_term.kl.names import Estimator, Placement, Weighting

#: Exit status where --fail-on matches; 1 is a file that cannot be diagnosed.
FOUND = 3


def diagnose(
    file: Annotated[Path | None, tyro.conf.Positional] = None,
    /,
    page: Path | None = None,
    json: Path | None = None,
    fail_on: str = "",
    framework: Framework | None = None,
    estimator: Estimator | None = None,
    placement: Placement | None = None,
    weighting: Weighting | None = None,
    epsilon_low: float | None = None,
    epsilon_high: float | None = None,
    resamples: int | None = None,
    seed: int | None = None,
    how_to_dump: Literal["plain", "trl", "verl", "verl-updates", "openrlhf"] | None = None,
) -> None:
    """Measure the log-probs of a run and say what to change, in order.

    What the run was may be said by the options below; TRL's dump folder says it itself, and an
    option that is given takes precedence.
    Reads CSV, JSON lines (both also gzipped) and parquet, one row a token or one row a sequence;
    of a folder, all such files; and tensors by name in .npz or .pt, padded, with their mask. Packed
    rows need the sequence of each token (sequence_ids, or cu_seqlens beside tensors).
    Columns, also under the names of TRL, verl and OpenRLHF: logp, ref_logp, sequence; and as far as
    they are there old_logp, sampler_logp, mask, position, step, group, token, entropy, advantage,
    reward, kl_term, padding, lag, version. Log-probs are natural logarithms: another base in all
    columns may go unseen, and scales the KL.
    Ends with status 3 if --fail-on matches a finding.

    Args:
        file: the dump, or a folder of them; see --how-to-dump.
        page: write a page with plots here (HTML, one file).
        json: write the report here, for a machine.
        fail_on: codes or severities (error, warning, note), separated by commas.
        framework: whose clamps to assume; plain, a loop of one's own, clamps nothing.
        estimator: the KL estimator of the run; with it the two below.
        placement: whether it is differentiated (the default) or subtracted from the reward.
        weighting: the off-policy weight on it; by default none.
        epsilon_low: lower clip of the policy ratio; by default 0.2.
        epsilon_high: upper clip of the policy ratio; by default 0.2.
        resamples: of the bootstrap; by default 1000.
        seed: of the bootstrap; by default 0.
        how_to_dump: print what to add to a framework, and stop.
    """
    if how_to_dump is not None:
        print(SNIPPETS[how_to_dump])
        return
    if file is None:
        raise UserError("give the file to diagnose (how to make one: --how-to-dump plain)")
    wanted = tuple(name.strip() for name in fail_on.split(",") if name.strip())
    matching([], wanted)
    options = {
        "framework": framework,
        "kl": described_term(estimator, placement, weighting),
        "epsilon_low": epsilon_low,
        "epsilon_high": epsilon_high,
        "resamples": resamples,
        "seed": seed,
    }
    given = {name: value for name, value in options.items() if value is not None}
    try:
        settings = Settings(**recorded_settings(file).model_dump() | given)
    except ValueError as error:
        raise UserError(_settings_complaint(error)) from None
    rollouts = read_rollouts(file)
    found = report(measure(rollouts, settings), source=file.name)
    if json is not None:
        replace_file(json, found.model_dump_json(indent=2).encode() + b"\n")
    if page is not None:
        replace_file(page, html_page(found, rollouts).encode())
    print(lines(found))
    matches = matching(found.findings, wanted)
    if matches:
        raise SystemExit(FOUND)


def _settings_complaint(error: ValueError) -> str:
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return str(error)
    return "\n".join(
        f"--{str(problem['loc'][0]).replace('_', '-')}: {problem['msg']}, got {problem['input']!r}"
        for problem in error.errors()
    )
