"""From a dump to the document that says what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kl_term.diagnosis.causes import find
from kl_term.diagnosis.lags import updates_behind
from kl_term.diagnosis.measure import measure
from kl_term.diagnosis.readers import read_rollouts
from kl_term.diagnosis.schema import Measured, Report, Rollouts, Settings
from kl_term.diagnosis.updates import LAST_FIRST_STEP


def diagnose(path: str | Path, settings: Settings | None = None) -> Report:
    """Read a dump, measure it and judge it.

    Raises:
        UserError: the file cannot be diagnosed; one line says why.
    """
    return report(measure(read_rollouts(path), settings), source=Path(path).name)


def report(measured: Measured, *, source: str) -> Report:
    """Measurements and their findings as one document."""
    rollouts = measured.rollouts
    return Report(
        source=source,
        tokens=rollouts.tokens,
        rows=rollouts.rows,
        sequences=rollouts.sequences,
        steps=0 if rollouts.step is None else len(np.unique(rollouts.step)),
        ignored_columns=rollouts.ignored,
        measurements=measured.numbers,
        not_measured=not_measured(rollouts),
        findings=find(measured),
        **{name: got for name, got in measured._asdict().items() if name in Report.model_fields},
    )


#: What no dump of sampled tokens can say.
NEVER_MEASURED = {
    "exact KL": "needs the logits of the whole vocabulary at each token",
    "direction and cosine of the KL gradient": "needs the score vectors, that is the model; "
    "sampled tokens give only the coefficients that multiply them. A term may have the value of "
    "one estimator and the gradient of another",
    "KL at states that the sampler never visits": "no sample, no estimate",
    "a sampler that forbids or favours single tokens": "such tokens are too few to move a mean "
    "over some hundred completions; a sampler_logp column shows it at each of them, if it is that "
    "of the processed logits",
    "one completion under two names, or two under one": "rows are taken for what their sequence "
    "column says; ids of prompts, of completions and of the end token in the dump would show it",
}


#: Column -> what a dump without it cannot say, and why.
_UNMEASURED = {
    "sampler_logp": ("train-inference gap", "no sampler_logp column"),
    "entropy": ("whether the tokens are the policy's, by its entropy", "no entropy column"),
    "step": ("KL over steps", "no step column"),
    "advantage": ("advantage checks", "no advantage column"),
    "group": (
        "advantages against the rewards of their group, copies, counted prompts",
        "no group column",
    ),
    "token": ("whether the end token is counted", "no token column"),
    "kl_term": (
        "sign, estimator and coefficient of the KL term",
        "no kl_term column: the updates show them only where nothing else moves the policy",
    ),
    "padding": ("positions under left padding", "no padding column"),
}


def not_measured(rollouts: Rollouts) -> dict[str, str]:
    """What this dump, or any dump of sampled tokens, cannot say."""
    missing = dict(NEVER_MEASURED)
    if not rollouts.has_old_logp:
        missing["staleness, clip fraction, pull of the KL term"] = "no old_logp column"
    elif (rollouts.old_logp == rollouts.logp).all():
        missing["pull of the KL term"] = (
            "logp equals old_logp: dump logp after an update on the same tokens"
        )
    if rollouts.has_old_logp and (rollouts.old_logp == rollouts.logp).all():
        missing["whether two scores of one policy agree"] = (
            "no logp of the update itself, or one that is old_logp at every token"
        )
    elif rollouts.step is None or rollouts.step.min() > LAST_FIRST_STEP:
        missing["whether two scores of one policy agree"] = (
            "needs TRL's dump, or the run's first step, where no update lies between them"
        )
    if updates_behind(rollouts) is None:
        missing["how many updates the sampler's weights are behind"] = (
            "no lag column, nor version with step"
        )
    absent = (what for column, what in _UNMEASURED.items() if getattr(rollouts, column) is None)
    return missing | dict(absent)
