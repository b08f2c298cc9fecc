r"""How noisy the prefix loss of a trained policy is, by the weight of its control variate.

One run without a KL term for each length of answers. At checkpoints, fresh and stale, many batches
are drawn and the gradient of the KL term alone by the *weights* of the transformer is taken at both
ends of the control variate. It is linear in between, so the variance is a parabola that two ends
give, and every way to choose a weight can be judged by it. The parameters are shared by all
prefixes, which the rule that reads log-probs alone leaves out.

Expected before it was recorded, after a trial of twenty batches at two other updates of these very
runs, on 8 and 32 tokens (KLs of 0.11 to 0.29 a token; k3 at 0.6 to 1.5 of k1's variance, fitted
weights at 0.6 to 1.04, the full vocabulary at 0.01 to 0.6): the weight that log-probs fit stays
within a twentieth of k1 or below it everywhere, where k3 does not, and the full vocabulary is
quieter than every weight.

Recorded in minutes of one core by::

    python -c "from analysis.studies import control_noise; control_noise.record()"
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from analysis.records.config import Run, SortTask, StartConfig, TrainConfig
from analysis.records.control_noise import BATCHES, FIT, RECORDED, TABLE
from analysis.records.variants import Advantage, Variant
from analysis.studies.presets.parts import NO_KL
from analysis.sweeps.record import record_tables
from analysis.training.environment import Environment
from analysis.training.tiny.start import tiny_environment
from analysis.training.trainer import PopulationTrainer
from kl_term.kl.choice import KLChoice
from kl_term.kl.control import fitted_control_of_gradients, weight_of

#: Most tokens of an answer -> its task, what its policy starts from, and how it is trained.
LENGTHS: dict[int, dict[str, Any]] = {
    8: {
        "task": SortTask(reward="graded"),
        "start": StartConfig(updates=90),
        "learning_rate": 2e-3,
    },
    32: {
        "task": SortTask(num_digits=32, reward="graded"),
        "start": StartConfig(updates=80, batch_size=64),
        "learning_rate": 4e-3,
    },
    128: {
        "task": SortTask(num_digits=63, end_token=True, max_fillers=64, reward="graded"),
        "start": StartConfig(updates=80, batch_size=32),
        "learning_rate": 2e-3,
        "num_prompts": 2,
    },
}
#: Updates of the run without a KL term at which is measured; of the longest answers the second.
CHECKPOINTS = (2, 8, 32)
#: Updates by which samples are old; at most all there were.
LAG = 4
SEED = 0

_PREFIX = {"estimator": "k3", "weighting": "attached", "ratio": "prefix"}
#: The gradients: both ends of the control variate, and the full vocabulary at visited states. The
#: weight of the second is 1 until a batch has been added, and it alone tells the sums of the fit.
TERMS = (
    KLChoice(**_PREFIX, control=0.0),
    KLChoice(**_PREFIX, control="fitted"),
    KLChoice(estimator="exact"),
)


class Sampled(NamedTuple):
    """Gradients of the KL term [batches, N] each, and what the batches say of the weight."""

    plain: Tensor
    quiet: Tensor
    exact: Tensor
    sums: Tensor  #: [batches, 2]
    reverse_kl: float  #: exact, nats per token, at the visited states


def config_of(length: int, **changes: Any) -> TrainConfig:
    """What the run of a length and the batches share."""
    shared = {"num_prompts": 4, "group_size": 6, "updates": max(CHECKPOINTS)}
    return TrainConfig(**shared | LENGTHS[length] | changes)


def sampled(
    config: TrainConfig,
    environment: Environment,
    policy: Tensor,
    sampler: Tensor,
    *,
    batches: int,
    first: int = 0,
    together: int = 5,
) -> Sampled:
    """Batches drawn by one set of weights [1, N], differentiated at another.

    Args:
        first: seed of the first batch.
        together: batches in memory at a time.
    """
    parts = []
    for begin in range(first, first + batches, together):
        seeds = range(begin, min(begin + together, first + batches))
        variants = [Variant(kl=kl, beta=1.0, advantage=Advantage(baseline="zero")) for kl in TERMS]
        runs = [Run(variant=variant, seed=seed) for variant in variants for seed in seeds]
        trainer = PopulationTrainer(config, runs, environment)
        with torch.no_grad():
            trainer.weights.copy_(sampler.expand_as(trainer.weights))
            drawn = trainer.rollout(0)
            trainer.weights.copy_(policy.expand_as(trainer.weights))
        output, gradients = trainer.gradient(trainer.batch(drawn), measure=True)
        of_terms = gradients.unflatten(0, (len(TERMS), len(seeds)))
        sums = output.control_sums.unflatten(0, (len(TERMS), len(seeds)))[1]
        parts.append((*of_terms, sums, output.metrics["reverse_kl"][: len(seeds)]))
    joined = [torch.cat(column).double() for column in zip(*parts, strict=True)]
    return Sampled(*joined[:4], joined[4].mean().item())


def judged(drawn: Sampled) -> dict[str, float]:
    """Variances over that of k1 to go, of every way to choose the weight.

    Weights that are fitted, each on :data:`~analysis.records.control_noise.FIT` batches, are means
    over all such parts.
    """
    plain = drawn.plain - drawn.plain.mean(0)
    step = drawn.quiet - drawn.plain
    step = step - step.mean(0)
    scale = plain.square().sum()
    slope, curvature = (plain * step).sum() / scale, step.square().sum() / scale

    def variance(weight: Tensor) -> Tensor:
        return 1 + (2 * slope + curvature * weight) * weight

    folds = range(0, len(plain) - FIT + 1, FIT)
    tokens = torch.stack([weight_of(drawn.sums[i : i + FIT].sum(0)) for i in folds])
    ends = [(drawn.plain[i : i + FIT], drawn.quiet[i : i + FIT]) for i in folds]
    gradients = torch.stack([fitted_control_of_gradients(*pair) for pair in ends])
    exact = (drawn.exact - drawn.exact.mean(0)).square().sum() / scale
    found = {
        "k3": variance(torch.ones_like(slope)),
        "best": variance(-slope / curvature),
        "tokens": variance(tokens).mean(),
        "gradients": variance(gradients).mean(),
        "exact": exact,
        "best_weight": -slope / curvature,
        "tokens_weight": tokens.mean(),
        "gradients_weight": gradients.mean(),
    }
    return {name: number.item() for name, number in found.items()}


def along_run(
    length: int, checkpoints: tuple[int, ...] = CHECKPOINTS, *, batches: int = BATCHES, **sizes: Any
) -> pd.DataFrame:
    """One row per checkpoint and age of the samples: :func:`judged`, beside ``tokens_of_answer``,
    ``update``, ``lag`` and ``reverse_kl``."""
    config = config_of(length, **sizes)
    environment = tiny_environment(config)
    trained = PopulationTrainer(config, [Run(variant=NO_KL, seed=SEED)], environment)
    past: deque[Tensor] = deque(maxlen=LAG)
    rows = []
    for update in range(1, max(checkpoints) + 1):
        past.append(trained.weights.detach().clone())
        trained.advance()
        if update not in checkpoints:
            continue
        weights = trained.weights.detach()
        for lag, sampler in ((0, weights), (len(past), past[0])):
            drawn = sampled(config, environment, weights, sampler, batches=batches, first=1)
            row = {"tokens_of_answer": length, "update": update, "lag": lag}
            rows.append(row | {"reverse_kl": drawn.reverse_kl} | judged(drawn))
    return pd.DataFrame(rows)


def record() -> None:
    """Compute the table on one thread and record it."""
    torch.set_num_threads(1)
    config = config_of(max(LENGTHS))
    of_all = {str(length): config_of(length).model_dump(mode="json") for length in LENGTHS}
    fields = {"batches": BATCHES, "configuration": {"configs": of_all}}
    checkpoints = {length: CHECKPOINTS[1:2] if length == 128 else CHECKPOINTS for length in LENGTHS}
    parts = [along_run(length, updates) for length, updates in checkpoints.items()]
    tables = {TABLE: pd.concat(parts, ignore_index=True)}
    record_tables(RECORDED, tables, config, preset="control_noise", seeds=[SEED], **fields)
