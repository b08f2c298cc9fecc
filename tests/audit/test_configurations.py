"""A coefficient in a configuration: of an object, of an argument, or only known by its path."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from kl_term.audit.batches import random_batch
from kl_term.audit.holding import changed, path_in
from kl_term.audit.readings import read
from kl_term.errors import UserError


class Penalty(NamedTuple):
    coef: float = 0.1
    kind: str = "k2"


@dataclass(frozen=True)
class Algorithm:
    kl: Penalty = Penalty()  # noqa: RUF009
    clip: float = 0.2


@dataclass
class Settings:
    algorithm: Algorithm = field(default_factory=Algorithm)
    shuffle: bool = True


def k2(logp, ref_logp, mask, coefficient):
    return coefficient * (0.5 * (logp - ref_logp) ** 2 * mask).sum() / mask.sum()


def annotated(logp, ref_logp, mask, settings: Settings):
    return k2(logp, ref_logp, mask, settings.algorithm.kl.coef)


def by_default(logp, ref_logp, mask, settings=Settings()):  # noqa: B008
    return k2(logp, ref_logp, mask, settings.algorithm.kl.coef)


def by_attributes(logp, ref_logp, mask, config):
    return k2(logp, ref_logp, mask, config.worker.kl_ctrl.kl_coef)


def by_keys(logp, ref_logp, mask, cfg):
    return k2(logp, ref_logp, mask, cfg["worker"]["kl"]["coef"])


def with_a_switch(logp, ref_logp, mask, config):
    return k2(logp, ref_logp, mask, config.worker.kl_coef if config.worker.use_kl else 0.0)


class Module(torch.nn.Module):
    def __init__(self, settings):
        super().__init__()
        self.settings = settings

    def forward(self, logp, ref_logp, mask):
        return k2(logp, ref_logp, mask, self.settings.algorithm.kl.coef)


class Trainer:
    def __init__(self):
        self.args = {"actor": {"kl_loss_coef": 0.1, "clip_ratio": 0.2}}

    def actor_loss(self, logp, ref_logp, mask):
        return k2(logp, ref_logp, mask, self.args["actor"]["kl_loss_coef"])


@pytest.mark.parametrize(
    ("loss", "how"),
    [
        (annotated, {}),
        (by_default, {}),
        (by_attributes, {}),
        (by_keys, {}),
        (Module(Settings()), {}),
        (Trainer().actor_loss, {}),
        (Trainer().actor_loss, {"beta_name": "args.actor.kl_loss_coef"}),
        (Trainer().actor_loss, {"beta_name": "kl_loss_coef"}),
        (
            with_a_switch,
            {"given": {"config": SimpleNamespace(worker=SimpleNamespace(kl_coef=1, use_kl=True))}},
        ),
        (
            functools.partial(annotated, settings=Settings()),
            {"beta_name": "settings.algorithm.kl.coef"},
        ),
    ],
)
def test_a_coefficient_is_found_however_deep_it_lies(loss, how):
    reading = read(loss, **how)
    assert reading.foreign.has_beta
    batch_values = [float(reading.foreign.call(batch(), beta).value) for beta in (0.5, 1.0)]
    assert batch_values[1] == pytest.approx(2 * batch_values[0]) != 0


def batch():
    return random_batch(
        rows=2, width=3, vocab_size=4, distance=0.5, staleness=0.1, ragged=True, seed=3
    )


def test_the_object_of_the_caller_keeps_its_coefficient():
    settings = Settings()
    read(Module(settings))
    assert settings == Settings()
    other = changed({"kl": {"coef": 0.1}, "n": 2}, "kl.coef", 0.3)
    assert other == {"kl": {"coef": 0.3}, "n": 2}


def test_a_switch_that_nobody_explained_is_refused_in_one_line():
    with pytest.raises(UserError, match=r"reads 'worker.use_kl' of its configuration") as refusal:
        read(with_a_switch)
    assert str(refusal.value).count("\n") == 0
    assert "given={ARGUMENT: OBJECT}" in str(refusal.value)


def test_two_coefficients_of_one_depth_are_not_guessed():
    assert path_in(SimpleNamespace(a=Penalty(), kl=Penalty())) == "kl.coef"
    assert path_in({"kl_coef": 0.1, "beta": 0.2}) is None
    assert path_in({"kl_coef": 0.1, "inner": {"beta": 0.2}}) == "kl_coef"
    assert path_in({"reward": {"coef": 0.1}}) is None
    assert path_in({"use_kl": True}) is None
