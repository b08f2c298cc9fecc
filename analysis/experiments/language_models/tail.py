r"""Where the mean of each estimator lies on a language model, by the probability of the token.

At a visited state an estimator's mean is a sum over the vocabulary, :math:`\sum_a \pi(a)\, k(a)`. A
token of probability p is sampled once in 1/p tokens: what rarer ones contribute is in the mean and
in no log. The sum is cut by decades of p here, after members of the preset ``smollm2_short`` were
trained again. The recorded table of the book is made on one core in some minutes by::

    python -c "from analysis.experiments.language_models import tail; tail.record()"
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

import analysis
from analysis.experiments.ablations.folders import read_manifest, write_folder
from analysis.experiments.ablations.presets import Preset
from analysis.experiments.ablations.settings import setting_of
from analysis.experiments.ablations.stamp import current_stamp
from analysis.experiments.language_models.presets import SHORT
from analysis.kl.estimators import k1, k2, k3
from analysis.training.trainer import PopulationTrainer

RECORDED = Path(analysis.__path__[0]).parent / "results" / "smollm2_tail_cpu"
TABLE = "tail.csv"
#: Powers of ten at which the probabilities are cut; the lowest bin takes all that is below.
DECADES = np.arange(-12, 0)
ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
ARMS = ("none", "k3_loss")


def contributions(logp: Tensor, ref_logp: Tensor) -> pd.DataFrame:
    """What tokens of each decade of probability add to the estimators' first two moments.

    Args:
        logp: [N, V], log-probs of the policy at N states (nats).
        ref_logp: [N, V], of the reference.

    Returns:
        One row per decade, from the rarest: ``decade`` (its lower end, as a power of ten; -inf for
        the lowest), and means over states of ``mass``, the policy's probability in it, and of
        ``k1``, ``k2``, ``k3`` and their squares ``k1_squared``, ... The columns' sums are the
        means over the whole vocabulary; those of ``k1`` and ``k3`` are both the exact reverse KL.
    """
    logp, ref_logp = logp.double(), ref_logp.double()
    probs = logp.exp()
    edges = torch.from_numpy(DECADES * np.log(10.0))
    place = torch.bucketize(logp, edges, right=True)
    weights = {"mass": torch.ones_like(logp)}
    for name, estimator in ESTIMATORS.items():
        value = estimator(logp, ref_logp)
        weights |= {name: value, f"{name}_squared": value.square()}
    columns = {}
    for name, value in weights.items():
        sums = torch.zeros(len(DECADES) + 1, dtype=torch.float64)
        sums.scatter_add_(0, place.flatten(), (probs * value).flatten())
        columns[name] = sums.numpy() / len(logp)
    return pd.DataFrame({"decade": [-np.inf, *map(float, DECADES)], **columns})


def measure(preset: Preset) -> pd.DataFrame:
    """Train the members of a preset; :func:`contributions` of each at what it then samples.

    Raises:
        ValueError: the model cannot be had.
    """
    config, members = preset.config, preset.members
    setting = setting_of(config)
    tables = []
    for member in members:
        trainer = PopulationTrainer(config, [member], setting)
        trainer.run()
        drawn = trainer.rollout(config.updates)
        batch, rollout = trainer.batch(drawn), drawn.rollout
        with torch.no_grad():
            adapters = trainer.policy.unflatten(trainer.weights)
            logits = trainer.policy.logits(adapters, rollout.prompts, rollout.inputs)
        mask = rollout.mask
        table = contributions(
            torch.log_softmax(logits[mask] / config.temperature, dim=-1),
            torch.log_softmax(batch.ref_logits[mask], dim=-1),
        )
        fields = {"arm": member.arm.name, "seed": member.seed, "states": int(mask.sum())}
        tables.append(table.assign(**fields))
    return pd.concat(tables, ignore_index=True)


def record() -> None:
    """Measure the first seed of ``ARMS`` on one thread, and seal the table."""
    torch.set_num_threads(1)
    arms = tuple(arm for arm in SHORT.arms if arm.name in ARMS)
    chosen = {"arms": arms, "seeds": SHORT.seeds[:1]}
    preset = Preset.model_validate(SHORT.model_dump() | chosen)
    stamp = current_stamp(preset.config)
    fields = {
        "preset": f"{preset.name}, tail",
        "seeds": list(preset.seeds),
        "device": stamp.device,
        "versions": stamp.versions,
        "source": stamp.source,
        "configuration": preset.model_dump(mode="json"),
    }
    write_folder(RECORDED, {TABLE: measure(preset)}, fields)


def recorded() -> pd.DataFrame:
    """The recorded table, after checking it against its manifest.

    Raises:
        ValueError: it is missing or is not the one that was recorded.
    """
    read_manifest(RECORDED)
    return pd.read_csv(RECORDED / TABLE)
