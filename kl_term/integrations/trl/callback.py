"""The diagnosis while a run trains: a callback for TRL's own GRPO trainer, without a subclass."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from kl_term.diagnosis.causes import find, matching
from kl_term.diagnosis.columns import assemble
from kl_term.diagnosis.dumping import Dump
from kl_term.diagnosis.measure import measure
from kl_term.diagnosis.readers import record_settings
from kl_term.diagnosis.schema import Finding
from kl_term.errors import UserError
from kl_term.integrations.trl import capture
from kl_term.integrations.trl.trainer import chosen_term

logger = logging.getLogger(__name__)
#: Of the bootstrap, at each check: intervals are wanted to a tenth of their length.
RESAMPLES = 200


class DiagnosisCallback(TrainerCallback):
    """Diagnoses the last steps of a run again and again, and says each finding once.

    ``trainer.add_callback(DiagnosisCallback(trainer))``. At each check it logs
    ``diagnosis/errors``, ``diagnosis/warnings`` and the KL by k1 and k3 where the run logs, each a
    mean over all tokens checked in one division, and warns of each new finding in one line. Every
    process checks its own tokens; one that must stop stops all.

    Looks are many, so intervals are wider than those of a single diagnosis: the j-th look's err
    with probability :math:`0.05 \\cdot 6 / (\\pi j)^2`, those of all looks together, however many
    there are, with 0.05 at most. Findings ask for twice the length of such an interval.

    Args:
        trainer: a ``GRPOTrainer`` with a reference, that is with ``beta`` above zero.
        every: least number of steps between checks. Rollouts are checked whole, with all steps that
            are trained on them.
        tokens: where so many are held, no further rollout is, until the next check.
        stop_on: codes or severities that end the training, such as ``("error",)``.
        dump: folder for the rollouts as well, or a :class:`~kl_term.diagnosis.dumping.Dump`.

    Raises:
        UserError: a number below one, a name that is no code or severity, or no reference.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        every: int = 10,
        tokens: int = 50_000,
        stop_on: tuple[str, ...] = (),
        dump: str | Path | Dump | None = None,
    ) -> None:
        if every < 1 or tokens < 1:
            raise UserError(f"every={every} and tokens={tokens} must be at least 1")
        if isinstance(stop_on, str):
            raise UserError(f"stop_on={stop_on!r}: give a tuple, ({stop_on!r},)")
        matching([], tuple(stop_on), option="stop_on")
        own = getattr(trainer, "kl_term", None)
        if own is None and trainer.beta == 0:
            raise UserError("the diagnosis needs a reference: GRPOConfig.beta is 0")
        self._term = own or chosen_term(None, trainer.args)
        self.findings: dict[str, Finding] = {}  #: of all checks, by code
        self._trainer, self._every, self._tokens = trainer, every, tokens
        self._stop_on = tuple(stop_on)
        self._window: list[dict[str, np.ndarray]] = []
        self._held = self._rows = self._checked = self._looks = 0
        self._rollout = -1  #: number of the present one
        self._full = False  #: is there no room for the present one?
        self._dump = Dump.of(dump, trainer.accelerator.process_index)
        capture.Capture(trainer, self._batch)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._dump is None:
            return
        self._dump.begin(resumed=state.global_step > 0)
        self._dump.forget_from(state.global_step)
        if state.is_world_process_zero:
            record_settings(self._dump.folder, capture.settings(self._trainer, self._term))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        ended = capture.generation(self._trainer) != self._rollout
        if not ended or state.global_step - self._checked < self._every:
            return
        self._checked = state.global_step
        stop = torch.tensor([float(self._check(state.global_step))])
        total = self._trainer.accelerator.reduce(stop.to(args.device), reduction="sum")
        if total.item() > 0:
            control.should_training_stop = True

    def _batch(self, fields: capture.Fields) -> None:
        step, rollout = self._trainer.state.global_step, capture.generation(self._trainer)
        if self._dump is not None:
            self._dump.write(step=step, generation=rollout, **fields)
        if rollout != self._rollout:
            self._rollout, self._full = rollout, self._held >= self._tokens
        if self._full:
            return
        self._window.append(_flat(fields, step, self._rows))
        self._held += len(self._window[-1]["logp"])
        self._rows += len(fields["logp"])

    def _check(self, step: int) -> bool:
        """Diagnose what is held and forget it; True if the run must stop."""
        held, self._window, self._held = self._window, [], 0
        if not sum(len(part["logp"]) for part in held):
            return False
        table = {name: np.concatenate([part[name] for part in held]) for name in held[0]}
        settings = capture.settings(self._trainer, self._term)
        self._looks += 1
        settings = settings.model_copy(update={"resamples": RESAMPLES, "look": self._looks})
        measured = measure(assemble(table, f"step {step}"), settings)
        found = find(measured)
        metrics = self._trainer._metrics["train"]
        for severity in ("error", "warning"):
            count = sum(finding.severity == severity for finding in found)
            metrics[f"diagnosis/{severity}s"].append(float(count))
        for name in ("k1", "k3"):
            metrics[f"diagnosis/{name}"].append(measured.estimate(name).value)
        for finding in found:
            if finding.code not in self.findings and finding.severity != "note":
                logger.warning(
                    "step %d, %s %s: %s. %s",
                    *(step, finding.severity, finding.code, finding.title, finding.advice),
                )
            self.findings.setdefault(finding.code, finding)
        return bool(matching(found, self._stop_on))


def _flat(fields: capture.Fields, step: int, rows: int) -> dict[str, np.ndarray]:
    """One row a counted token."""
    mask = fields["mask"].bool().cpu()
    count = mask.sum(1)
    found = {
        "step": np.full(int(mask.sum()), step),
        "sequence": torch.repeat_interleave(torch.arange(len(mask)) + rows, count).numpy(),
    }
    for name, values in fields.items():
        if values is None or name == "mask":
            continue
        values = values.detach().cpu()
        values = values.double() if values.is_floating_point() else values
        flat = values[mask] if values.dim() == 2 else torch.repeat_interleave(values, count)
        found[name] = flat.numpy()
    return found
