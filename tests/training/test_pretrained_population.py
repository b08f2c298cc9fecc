"""Adapters of a population: they start at the reference, stay apart, and train like any policy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from analysis.records import recording
from analysis.records.config import TrainConfig
from analysis.records.language import (
    ArithmeticTask,
    ForwardConfig,
    LanguageConfig,
    LlamaConfig,
    LoraConfig,
)
from analysis.records.metrics import METRICS, PARTIAL_METRICS
from analysis.records.variants import Variant
from analysis.studies.presets.language import llama_smoke, smollm2
from analysis.sweeps import in_process
from analysis.sweeps.provenance import source_of
from analysis.training.environment_of import environment_of
from analysis.training.pretrained.llama import LlamaPolicy
from analysis.training.pretrained.lora import Lora
from analysis.training.pretrained.tasks import pretrained_environment
from analysis.training.pretrained.weights import random_llama
from analysis.training.tiny.tasks import Sorting
from analysis.training.trainer import PopulationTrainer
from kl_term.kl.term import KLTerm
from tests.experiments.tiny import trained_alone
from tests.training.conftest import runs_of

CONFIG = llama_smoke().config


def trainer_of(runs, config=CONFIG):
    return PopulationTrainer(config, runs, environment_of(config))


@pytest.mark.parametrize("products", ["full", "bfloat16"])
@pytest.mark.parametrize("attention", ["explicit", "sdpa"])
def test_every_run_starts_as_the_reference_to_the_bit(products, attention):
    forward = ForwardConfig(products=products, attention=attention)
    config = CONFIG.model_copy(update={"forward": forward})
    trainer = trainer_of(runs_of(llama_smoke().variants[:3]), config)
    assert trainer.reference == {}
    sampled = trainer.rollout(0).rollout
    views = trainer.policy.unflatten(trainer.weights.detach())
    run = trainer.policy.logits(views, sampled.prompts, sampled.inputs)
    assert torch.equal(run, trainer.policy.logits({}, sampled.prompts, sampled.inputs))
    metrics = trainer.update(0)
    assert (metrics["reverse_kl"] == 0).all()
    assert (trainer.update(1)["reverse_kl"] > 1e-6).all()


def test_only_adapters_are_trained_and_the_frozen_weights_are_kept_once():
    trainer = trainer_of(runs_of(llama_smoke().variants))
    policy = trainer.policy
    ins_and_outs = 2 * (16 + 16) + 2 * (16 + 8) + 3 * (16 + 24)  # of the seven projections
    assert policy.lora.num_parameters == 2 * 2 * ins_and_outs  # rank 2, two blocks
    assert trainer.weights.shape == (len(llama_smoke().variants), policy.lora.num_parameters)


def test_targets_and_rank_say_what_is_adapted():
    model = LlamaConfig.model_validate(CONFIG.model.llama.model_dump())
    lora = Lora(LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "down_proj")), model)
    assert lora.scale == 2.0
    assert lora.shapes["down_proj.A"] == (24, 3)
    assert lora.shapes["q_proj.B"] == (3, 16)
    assert {name.split(".")[0] for name in lora.shapes} == {"q_proj", "down_proj"}
    weights = lora.initial_weights(torch.float64)
    views = lora.unflatten(weights)
    assert all((part == 0).all() == name.endswith("B") for name, part in views.items())
    bound = 24**-0.5
    sampled = views["down_proj.A"][0, 0]
    assert 0.8 * bound < sampled.abs().max() <= bound and sampled.std() > 0.4 * bound
    with pytest.raises(ValueError, match="names a projection twice"):
        LoraConfig(targets=("q_proj", "q_proj"))


def test_a_run_is_its_solo_run_to_rounding():
    """The large product sums the rows of all runs alike, but picks its kernel by their number.

    At this size it was the same kernel, and the runs equal to the bit, on the machine of writing.
    """
    update = {"precision": "float64", "updates": 5, "log_every": 1}
    config = CONFIG.model_copy(update=update)
    runs = runs_of(llama_smoke().variants, seeds=(0, 3))
    together = trainer_of(runs, config)
    record = together.run()
    assert not record.failures
    moved = (together.weights - together.policy.start()).abs().amax(dim=1)
    assert moved.min() > 1e-3
    for row in range(0, len(runs), 5):
        alone = trainer_of([runs[row]], config)
        solo = alone.run()
        assert torch.allclose(together.weights[row], alone.weights[0], rtol=0, atol=1e-10)
        for name in METRICS:
            np.testing.assert_allclose(
                record.metrics[name][:, row], solo.metrics[name][:, 0], rtol=0, atol=1e-9
            )
    assert (together.weights[0] - together.weights[1]).abs().max() > 1e-3


def test_the_gradient_is_that_of_finite_differences():
    config = CONFIG.model_copy(update={"precision": "float64"})
    variants = [Variant(kl=KLTerm(estimator=name), beta=0.5) for name in ("exact", "k3")]
    trainer = trainer_of(runs_of(variants), config)
    for update in range(2):  # away from the start, where B is zero
        trainer.update(update)
    sampled = trainer.rollout(2)
    generator = torch.Generator().manual_seed(0)
    shape = sampled.rollout.old_logp.shape
    advantages = torch.randn(shape, generator=generator, dtype=torch.float64)
    batch = trainer.batch(sampled)._replace(advantages=advantages)
    (gradient,) = torch.autograd.grad(trainer.losses(batch).losses.sum(), trainer.weights)
    direction = torch.randn(gradient.shape, generator=generator, dtype=torch.float64)
    start, step = trainer.weights.detach().clone(), 1e-6
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            trainer.weights.copy_(start + sign * step * direction)
        values.append(trainer.losses(batch).losses.detach())
    slope = (values[0] - values[1]) / (2 * step)
    expected = (gradient * direction).sum(dim=1)
    assert torch.allclose(slope, expected, rtol=1e-6, atol=1e-8)
    assert expected.abs().min() > 1e-3


def test_a_model_of_another_precision_is_refused():
    model = random_llama(CONFIG.model.llama, 0, torch.float64)
    with pytest.raises(ValueError, match=r"model is torch\.float64: load it as torch\.float32"):
        pretrained_environment(CONFIG, model, Sorting(CONFIG.task))


def test_the_smoke_preset_runs_all_variants_and_is_recorded(tmp_path):
    config = llama_smoke().config.model_copy(update={"updates": 4, "log_every": 2})
    result = in_process.run(llama_smoke().model_copy(update={"config": config}))
    assert not result.failures
    always = [name for name in METRICS if name not in PARTIAL_METRICS]
    assert np.isfinite(result.curves[always].to_numpy()).all()
    assert len(result.curves) == 2 * len(llama_smoke().variants)
    assert result.manifest["source"] == source_of(CONFIG) != source_of(TrainConfig())
    recording.save(result, tmp_path / "smoke")
    recorded = recording.load(tmp_path / "smoke")
    assert recorded.preset == result.preset and isinstance(recorded.preset.config, LanguageConfig)
    again = trained_alone(recorded, "k3_loss", 0.1, 0, windows=1)
    assert (again.loc[again["metric"].isin(always), "difference"] <= 1e-4).all()


def test_model_and_task_must_fit():
    with pytest.raises(ValueError, match="a random model has no tokenizer"):
        environment_of(CONFIG.model_copy(update={"task": ArithmeticTask()}))
    with pytest.raises(ValueError, match="SortTask is for a random model"):
        environment_of(smollm2().config.model_copy(update={"task": CONFIG.task}))


def test_the_policy_keeps_its_frozen_weights_as_they_were():
    model = random_llama(CONFIG.model.llama, 0, torch.float32)
    before = model.layers[0].groups["qkv"].clone()
    environment = pretrained_environment(CONFIG, model, Sorting(CONFIG.task))
    trainer = PopulationTrainer(CONFIG, runs_of(llama_smoke().variants[:2]), environment)
    trainer.update(0)
    assert isinstance(trainer.policy, LlamaPolicy)
    assert torch.equal(model.layers[0].groups["qkv"], before)
