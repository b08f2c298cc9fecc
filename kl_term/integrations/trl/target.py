"""A coefficient that follows the KL: how much it is may be chosen, and not what it costs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from kl_term.errors import UserError
from kl_term.files import replace_file
from kl_term.objectives.controllers import proportional_step

#: The file beside a checkpoint that holds the coefficient.
FILE = "kl_beta.json"


@dataclass(frozen=True)
class TargetKL:
    r"""Raises beta while the KL is above a target, lowers it while it is below.

    .. math:: \beta \leftarrow \beta\,\Big(1 + \frac{1}{h}\,
        \mathrm{clip}\Big(\frac{\mathrm{KL}}{\mathrm{target}} - 1,\; \pm c\Big)\Big)

    after each optimizer step, with the mean of k1 over its tokens.

    Source: Ziegler et al. (2019), section 2.2, with steps in place of samples.

    Raises:
        UserError: a number that is not positive, or a step so large that beta might turn negative.
    """

    kl: float  #: target, nats per token
    horizon: float = 10.0  #: h, in steps: how slowly beta follows
    clip: float = 0.2  #: c: bounds the relative error

    def __post_init__(self) -> None:
        if not (self.kl > 0 and self.horizon > 0 and self.clip > 0):
            raise UserError(f"{self}: kl, horizon and clip must be positive")
        if self.clip >= self.horizon:
            raise UserError(f"{self}: clip must be below horizon, or beta may turn negative")

    def updated(self, beta: float, kl: float) -> float:
        """The coefficient after a step at which this KL was measured."""
        return proportional_step(beta, kl, target=self.kl, horizon=self.horizon, clip=self.clip)


class FollowTarget(TrainerCallback):
    """Sets ``trainer.beta`` after each step, and keeps it beside each checkpoint."""

    def __init__(self, trainer: Any, target: TargetKL) -> None:
        self._trainer, self._target = trainer, target
        self._kls: list[tuple[float, float]] = []

    def measured(self, kl: float, tokens: float) -> None:
        """The mean of k1 of a micro-batch over the tokens of all processes."""
        self._kls.append((kl * tokens, tokens))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._kls = []
        resumed = self._trainer.resumed_from
        if resumed is not None and (resumed / FILE).is_file():
            self._trainer.beta = json.loads((resumed / FILE).read_text())["beta"]

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        sums, self._kls = self._kls, []
        tokens = sum(count for _, count in sums)
        if tokens:
            mean = sum(value for value, _ in sums) / tokens
            self._trainer.beta = self._target.updated(self._trainer.beta, mean)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            replace_file(folder / FILE, json.dumps({"beta": self._trainer.beta}).encode())
