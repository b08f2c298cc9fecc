"""The weight of the control variate, carried from one generation of answers to the next."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import TrainerCallback

from kl_term.files import replace_file
from kl_term.integrations.measurements import Sampled
from kl_term.kl.control import ControlFit, control_sums

#: The file beside a checkpoint that holds the sums of the fit.
FILE = "kl_control.json"


class FollowControl(TrainerCallback):
    """Fits the weight on the answers that were trained on, and keeps it beside each checkpoint.

    One generation of answers is one batch of :class:`~kl_term.kl.control.ControlFit`, in however
    many steps it is trained on.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._fit = ControlFit(device=trainer.accelerator.device)

    @property
    def weight(self) -> Tensor:
        """A scalar, for the answers that are being trained on; narrow, so that nothing widens."""
        return self._fit.weight.float()

    def add(self, sampled: Sampled) -> None:
        """The answers of a micro-batch, of all processes."""
        if sampled.ref_logp is None:
            return
        sums = control_sums(sampled.logp, sampled.ref_logp, sampled.old_logp, sampled.mask)
        self._fit.add(self._trainer.accelerator.reduce(sums.sum(0), reduction="sum"))

    def advance(self) -> None:
        """Other answers are trained on from now on."""
        self._fit.advance()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        resumed = self._trainer.resumed_from
        if resumed is not None and (resumed / FILE).is_file():
            kept = json.loads((resumed / FILE).read_text())
            for sums, numbers in ((self._fit.sums, kept["sums"]), (self._fit.pending, kept["now"])):
                sums.copy_(sums.new_tensor(numbers))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            kept = {"sums": self._fit.sums.tolist(), "now": self._fit.pending.tolist()}
            replace_file(folder / FILE, json.dumps(kept).encode())
