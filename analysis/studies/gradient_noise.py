r"""How noisy an update's KL gradient is along a trained run: by the theory, and as sampled.

One run of a policy so small that all its prompts and completions can be listed. At checkpoints the
noise of each KL term's gradient by the *weights* is found twice. By the theory: the credit that
:mod:`kl_term.kl` gives each token, times its score, over every prompt and completion. By the
trainer: the gradient of its own loss, the KL term alone, on many batches.

Recorded in minutes of one core by::

    python -c "from analysis.studies import gradient_noise; gradient_noise.record()"
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor

from analysis.records.config import (
    NUM_DIGIT_TOKENS,
    SEPARATOR,
    VOCAB_SIZE,
    PolicyConfig,
    Run,
    SortTask,
    StartConfig,
    TrainConfig,
)
from analysis.records.gradient_noise import BATCHES, RECORDED, TABLE
from analysis.records.variants import Advantage, Variant
from analysis.studies.presets.parts import NO_KL
from analysis.sweeps.record import record_tables
from analysis.training.environment import Environment
from analysis.training.rollout import completion_inputs, token_logp
from analysis.training.tiny.start import tiny_environment
from analysis.training.trainer import PopulationTrainer
from kl_term.kl.credit import weighted_moments
from kl_term.kl.divergences import reverse_kl
from kl_term.kl.enumeration import reverse_kl_gradient
from kl_term.kl.estimators import k1
from kl_term.kl.returns import reward_to_go
from kl_term.kl.surrogates import gradient_coefficient
from kl_term.kl.term import KLTerm

#: A hundred prompts, each with 256 completions.
CONFIG = TrainConfig(
    task=SortTask(num_digits=2, reward="graded"),
    policy=PolicyConfig(width=16, num_layers=1, num_heads=2),
    start=StartConfig(updates=60),
    precision="float64",
    updates=400,
    learning_rate=2e-3,
)
CHECKPOINTS = (3, 5, 8, 12, 20, 30, 50, 80, 120, 200, 300, 400)
SEED = 0

#: Of the trainer's loss they leave the KL term alone, with coefficient one.
TERMS: dict[str, Variant] = {
    term.name: Variant(kl=term, beta=1.0, advantage=Advantage(baseline="zero"))
    for term in (
        KLTerm(estimator="exact"),
        KLTerm(estimator="k2"),
        KLTerm(estimator="k3"),
        KLTerm(estimator="k1", placement="reward"),
    )
}


class Noise(NamedTuple):
    """Of one update's gradient by the weights [N]."""

    mean: Tensor  #: [N], expected
    variance: Tensor  #: scalar, trace of the covariance


def surrogates(logits: Tensor, ref_logits: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    r"""Numbers [...], one a completion, whose gradients are what it adds to each term's.

    .. math:: \frac{1}{T} \sum_t c_t \log \pi_\theta(y_t | y_{<t}), \qquad
        c_t = l_t \;(k_2), \quad 1 - r_t \;(k_3), \quad \sum_{u \ge t} l_u \;(k_1
        \text{ in the reward})

    No gradient flows through :math:`c_t`. The exact KL has its gradient by the logits in place of
    :math:`c_t \nabla \log \pi_\theta`.

    Args:
        logits: [..., T, V], with gradient.
        ref_logits: [..., T, V].
        tokens: [..., T].
    """
    logp, ref_logp = (token_logp(z, tokens, temperature=1.0) for z in (logits, ref_logits))
    credit = {
        "k2_loss": gradient_coefficient(logp, ref_logp, estimator="k2"),
        "k3_loss": gradient_coefficient(logp, ref_logp, estimator="k3"),
        "k1_reward": reward_to_go(k1(logp, ref_logp)),
    }
    of_tokens = {name: number.detach() * logp for name, number in credit.items()}
    exact = reverse_kl_gradient(logits, ref_logits).detach() * logits
    of_tokens["exact_loss"] = exact.sum(dim=-1)
    return {name: values.mean(dim=-1) for name, values in of_tokens.items()}


def enumerated(
    config: TrainConfig, environment: Environment, weights: Tensor
) -> tuple[dict[str, Noise], float]:
    r"""The noise of one update's gradient, by summing over all prompts and completions.

    .. math:: \operatorname{tr} \operatorname{Cov} = \frac{1}{P} \Big( \operatorname{tr}
        \operatorname{Cov}_x\, \mathbb{E}[g | x] + \frac{1}{G}\, \mathbb{E}_x \operatorname{tr}
        \operatorname{Cov}[g | x] \Big)

    for :math:`P` prompts :math:`x` with :math:`G` completions each, all drawn independently.

    Args:
        weights: [1, N].

    Returns:
        The noise of each term in ``TERMS``, and the exact reverse KL per token, nats.
    """
    task = config.task
    listed = itertools.product(range(VOCAB_SIZE), repeat=task.completion_length)
    tokens = torch.tensor(list(listed))  # (Y, T)
    inputs = completion_inputs(tokens, SEPARATOR)[:, None, None]  # (Y, 1, 1, T)

    def logits_of(rows: Tensor, prompt: tuple[int, ...]) -> Tensor:  # (Y, T, V)
        prompts = torch.tensor(prompt).expand(len(tokens), 1, -1)
        views = environment.policy.unflatten(rows)
        return environment.policy.logits(views, prompts, inputs)[:, 0, 0]

    moments: dict[str, list] = {name: [] for name in TERMS}
    distances = []
    for prompt in itertools.product(range(NUM_DIGIT_TOKENS), repeat=task.prompt_length):
        # Weights of its own for each completion, as if each were a run.
        rows = weights.detach().repeat(len(tokens), 1).requires_grad_()
        logits = logits_of(rows, prompt)
        with torch.no_grad():
            ref_logits = logits_of(environment.start.expand(len(tokens), -1), prompt)
            probability = token_logp(logits, tokens, temperature=1.0).sum(dim=-1).exp()
            distances.append(probability @ reverse_kl(logits, ref_logits).mean(dim=-1))
        for name, values in surrogates(logits, ref_logits, tokens).items():
            (gradients,) = torch.autograd.grad(values.sum(), rows, retain_graph=True)
            moments[name].append(weighted_moments(probability, gradients))
    noise = {}
    for name, of_prompts in moments.items():
        means = torch.stack([each.mean for each in of_prompts])
        within = torch.stack([each.trace_var for each in of_prompts]).mean()
        between = means.var(dim=0, correction=0).sum()
        variance = (between + within / config.group_size) / config.num_prompts
        noise[name] = Noise(means.mean(dim=0), variance)
    return noise, torch.stack(distances).mean().item()


def sampled(
    config: TrainConfig, environment: Environment, weights: Tensor, term: str, batches: int
) -> Tensor:
    """Gradients [batches, N] of the trainer's loss at these weights [1, N], the term alone."""
    runs = [Run(variant=TERMS[term], seed=seed) for seed in range(batches)]
    trainer = PopulationTrainer(config, runs, environment)
    with torch.no_grad():
        trainer.weights.copy_(weights.expand_as(trainer.weights))
    batch = trainer.rollout(0)
    return trainer.gradient(trainer.batch(batch), batch.caches)[1]


def along_run(
    config: TrainConfig = CONFIG,
    checkpoints: tuple[int, ...] = CHECKPOINTS,
    *,
    batches: int = BATCHES,
) -> pd.DataFrame:
    """Relative noise of each term's gradient along a run without a KL term.

    Noise is the trace of the covariance of an update's gradient over the squared norm of the
    expected gradient of the exact term.

    Returns:
        One row per checkpoint and term: ``update``, ``reverse_kl`` (nats per token), ``term``,
        ``theory``, ``sampled``, ``standard_error`` of the latter, and ``bias``, the norm of the
        difference of the term's expected gradient from the exact one's, over the latter's norm.
    """
    environment = tiny_environment(config)
    trained = PopulationTrainer(config, [Run(variant=NO_KL, seed=SEED)], environment)
    rows = []
    for update in checkpoints:
        while trained.done < update:
            trained.advance()
        weights = trained.weights.detach()
        theory, distance = enumerated(config, environment, weights)
        exact = theory["exact_loss"].mean
        scale = exact.square().sum()
        for term in TERMS:
            gradients = sampled(config, environment, weights, term, batches)
            spread = (gradients - gradients.mean(dim=0)).square().sum(dim=1)
            spread = spread / scale * batches / (batches - 1)
            rows.append(
                {
                    "update": update,
                    "reverse_kl": distance,
                    "term": term,
                    "theory": (theory[term].variance / scale).item(),
                    "sampled": spread.mean().item(),
                    "standard_error": (spread.std() / batches**0.5).item(),
                    "bias": ((theory[term].mean - exact).norm() / scale.sqrt()).item(),
                }
            )
    return pd.DataFrame(rows)


def record() -> None:
    """Compute the table on one thread and record it."""
    torch.set_num_threads(1)
    fields = {"batches": BATCHES, "configuration": {"config": CONFIG.model_dump(mode="json")}}
    tables = {TABLE: along_run()}
    record_tables(RECORDED, tables, CONFIG, preset="gradient_noise", seeds=[SEED], **fields)
