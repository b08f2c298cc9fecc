r"""Where the mean of each estimator lies on a language model, by the probability of the token.

At a visited state an estimator's mean is a sum over the vocabulary, :math:`\sum_a \pi(a)\, k(a)`. A
token of probability p is sampled once in 1/p tokens: what rarer ones contribute is in the mean and
in no log. The sum is cut by decades of p here, after runs of the preset ``smollm2_short`` were
trained again. The recorded table of the book is made on one core in twenty minutes by::

    python -c "from analysis.studies.language import estimator_tail; estimator_tail.record()"
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from analysis.records.estimator_tail import NAMES, RECORDED, VARIANTS, After
from analysis.records.preset import Preset
from analysis.studies.presets.language import smollm2_short
from analysis.sweeps.record import record_tables
from analysis.training.environment_of import environment_of
from analysis.training.rollout import token_logp
from analysis.training.trainer import PopulationTrainer
from kl_term.kl.estimators import k1, k2, k3

#: After training, of each run.
ROLLOUTS = 10
#: Powers of ten at which the probabilities are cut; the lowest bin takes all that is below.
DECADES = np.arange(-12, 0)
ESTIMATORS = dict(zip(NAMES, (k1, k2, k3), strict=True))


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


def train_and_measure(preset: Preset, rollouts: int = ROLLOUTS) -> dict[str, After]:
    """Train each run of a preset, then let it sample without learning; by name of the variant.

    Raises:
        ValueError: the model cannot be had.
    """
    environment = environment_of(preset.config)
    measured: dict[str, After] = {}
    for run in preset.runs:
        trainer = PopulationTrainer(preset.config, [run], environment)
        trainer.run()
        first = preset.config.updates
        parts = [_measure(trainer, update) for update in range(first, first + rollouts)]
        states = np.array([len(part.dump) for part in parts])
        stacked = np.stack([part.tail.to_numpy() for part in parts])  # (rollouts, decades, columns)
        mean = np.einsum("r,rdc->dc", states / states.sum(), stacked)
        tail = pd.DataFrame(mean, columns=parts[0].tail.columns).assign(seed=run.seed)
        dump = pd.concat([part.dump for part in parts], ignore_index=True)
        before = measured.get(run.variant.name, After(pd.DataFrame(), dump))
        tails = pd.concat([before.tail, tail], ignore_index=True)
        measured[run.variant.name] = before._replace(tail=tails)
    return measured


@torch.no_grad()
def _measure(trainer: PopulationTrainer, update: int) -> After:
    drawn = trainer.rollout(update)
    batch, rollout = trainer.batch(drawn, update), drawn.rollout
    adapters = trainer.policy.unflatten(trainer.weights)
    logits = trainer.policy.logits(adapters, rollout.prompts, rollout.inputs)
    logits, mask = logits / trainer.config.temperature, rollout.mask
    tail = contributions(
        torch.log_softmax(logits[mask], dim=-1), torch.log_softmax(batch.ref_logits[mask], dim=-1)
    )
    sequences = mask[..., 0].numel()
    sequence = torch.arange(sequences).view(mask.shape[:-1]).unsqueeze(-1) + update * sequences
    position = torch.arange(mask.shape[-1])
    per_token = {
        "step": torch.full_like(sequence, update),
        "sequence": sequence,
        "position": position,
        "logp": token_logp(logits, rollout.completions, temperature=1.0),
        "old_logp": rollout.old_logp,
        "ref_logp": batch.ref_logp,
        "reward": drawn.scores.rewards.unsqueeze(-1),
        "advantage": batch.advantages,
    }
    columns = {name: value.expand(mask.shape)[mask].numpy() for name, value in per_token.items()}
    return After(tail, pd.DataFrame(columns))


def record() -> None:
    """Train and measure ``VARIANTS`` on one thread, and record the tables."""
    torch.set_num_threads(1)
    short, tables = smollm2_short(), {}
    for variant in short.variants:
        chosen = {"variants": (variant,), "seeds": short.seeds[: VARIANTS.get(variant.name, 0)]}
        for name, after in train_and_measure(short.model_copy(update=chosen)).items():
            tables |= {f"{name}_tail.csv": after.tail, f"{name}_dump.csv": after.dump}
    record_tables(
        RECORDED,
        tables,
        short.config,
        preset=f"{short.name}, tail",
        seeds=short.seeds,
        configuration=short.model_dump(mode="json"),
    )
