"""Runs that are rewarded by a model of the reward, against scores written token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from analysis.records.config import RewardModel, StartConfig, TrainConfig
from analysis.records.metrics import ENSEMBLE_METRICS, FINAL_METRICS, METRICS, PROXY_METRICS
from analysis.records.preset import Preset, predict
from analysis.records.variants import Advantage, Sampler, Shaping, Variant
from analysis.studies.presets import PRESETS, make_preset
from analysis.studies.presets.designed import design
from analysis.sweeps.store import run_key
from analysis.training.tiny import reward_model
from analysis.training.tiny.start import supervised_start, tiny_environment
from analysis.training.tiny.tasks import Sorting
from analysis.training.trainer import PopulationTrainer
from kl_term.kl.term import KLTerm
from tests.training import naive
from tests.training.conftest import runs_of, what_is_sampled

pytestmark = pytest.mark.slow

K2 = Variant(kl=KLTerm(estimator="k2"), beta=0.5)
STALE = Variant(label="stale", sampler=Sampler(staleness=2))
MODEL = RewardModel(labels=40, width=12, updates=8, batch_size=16, members=2)


@pytest.fixture
def config(small_config) -> TrainConfig:
    """Three starts, each with two small models."""
    changes = {
        "start": StartConfig(updates=10, batch_size=8, count=3, seed=4),
        "reward_model": MODEL,
        "updates": 4,
        "final_answers": 16,
        "learning_rate": 1e-2,
    }
    return small_config.model_copy(update=changes)


def of(config: TrainConfig, **changes) -> TrainConfig:
    """The same with another reward model."""
    return config.model_copy(update={"reward_model": RewardModel(**dict(MODEL) | changes)})


def score_of_each(network, weights, prompt, completion, length) -> float:
    """The logit of every counted token behind those before it, summed."""
    views = {name: part[0] for name, part in network.unflatten(weights.double()).items()}
    tokens = [*prompt, naive.SEPARATOR, *completion[: length - 1]]
    logits = naive.naive_logits(views, tokens)[len(prompt) :]
    return sum(logits[place, token].item() for place, token in enumerate(completion[:length]))


@pytest.mark.parametrize("ensemble", ["mean", "worst"])
def test_a_run_is_rewarded_by_the_models_of_its_start(config, ensemble, monkeypatch):
    monkeypatch.setattr(naive, "HEADS", 4)
    config = of(config, ensemble=ensemble).model_copy(update={"precision": "float64"})
    trainer = PopulationTrainer(config, runs_of([Variant()], (0, 2, 4)))
    sampled = trainer.rollout(0)
    task = trainer.samplers.environment.task
    truth = Sorting(config.task).score(sampled.rollout.prompts, sampled.rollout.completions)
    assert torch.equal(sampled.scores.gold, truth.rewards)
    assert torch.equal(sampled.scores.accuracy, truth.accuracy) and sampled.scores.steps is None
    for row, start in enumerate((0, 2, 1)):
        prompt = sampled.rollout.prompts[row, 1].tolist()
        completion = sampled.rollout.completions[row, 1, 2].tolist()
        length = int(sampled.rollout.mask[row, 1, 2].sum())
        by_member = [
            score_of_each(
                task.models.network,
                task.models.weights[start, [member]],
                prompt,
                completion,
                length,
            )
            for member in range(2)
        ]
        other = score_of_each(
            task.models.network, task.models.weights[1 - start, [0]], prompt, completion, 4
        )
        wanted = min(by_member) if ensemble == "worst" else sum(by_member) / 2
        assert sampled.scores.rewards[row, 1, 2].item() == pytest.approx(wanted, abs=1e-12)
        assert abs(by_member[0] - by_member[1]) > 1e-3 and abs(other - wanted) > 1e-3


def test_gold_and_proxy_are_logged_and_training_reads_the_proxy_alone(config, monkeypatch):
    runs = runs_of([Variant(), STALE], (0, 1))
    record = PopulationTrainer(config, runs).run()
    assert set(record.metrics) == {*METRICS, *PROXY_METRICS, *ENSEMBLE_METRICS}
    assert set(record.final) == {*FINAL_METRICS, "final_gold", "final_proxy"}
    np.testing.assert_array_equal(record.metrics["proxy"], record.metrics["reward"])
    assert (np.abs(record.metrics["gold"] - record.metrics["proxy"]) > 1e-3).any()

    exact = Sorting.score

    def upside_down(self, *given):
        scores = exact(self, *given)
        return scores._replace(rewards=1 - scores.rewards)

    flipped = PopulationTrainer(config, runs)
    monkeypatch.setattr(Sorting, "score", upside_down)
    again = flipped.run()
    np.testing.assert_allclose(again.metrics["gold"], 1 - record.metrics["gold"], atol=1e-6)
    for name in {*METRICS, "proxy"}:
        np.testing.assert_array_equal(again.metrics[name], record.metrics[name])


def test_gold_is_the_reward_of_the_answers_that_were_sampled(config):
    trainer = PopulationTrainer(config, runs_of([K2], (0, 1)))
    batches = what_is_sampled(trainer)
    record = trainer.run()
    expected = []
    for sampled in batches:
        rollout = sampled.rollout
        scores = Sorting(config.task).score(rollout.prompts, rollout.completions)
        expected.append(scores.rewards.flatten(1).mean(dim=1).numpy())
    windows = np.array(expected).reshape(2, 2, 2).mean(axis=1)
    np.testing.assert_allclose(record.metrics["gold"], windows, atol=1e-6)


def test_a_run_is_the_one_it_would_be_alone_or_in_any_company(config):
    runs = runs_of([Variant(), K2, STALE], (0, 1, 2, 5))
    whole = PopulationTrainer(config, runs).run()
    for size in (1, 3, 5):
        for first in range(0, len(runs), size):
            part = PopulationTrainer(config, runs[first : first + size]).run()
            for kind in ("metrics", "final"):
                for name, values in getattr(part, kind).items():
                    expected = getattr(whole, kind)[name][..., first : first + size]
                    np.testing.assert_array_equal(values, expected)


def test_a_run_that_is_resumed_goes_on_to_the_same_bits(config):
    runs = runs_of([K2, STALE], (0, 1))
    straight, resumed = PopulationTrainer(config, runs), PopulationTrainer(config, runs)
    for _ in range(config.updates):
        straight.advance()
        resumed.advance()
        state, resumed = resumed.state(), PopulationTrainer(config, runs)
        resumed.restore(state)
    assert torch.equal(resumed.weights, straight.weights)
    left, right = resumed.record(), straight.record()
    for name in {*METRICS, "gold", "proxy"}:
        assert left.metrics[name].tobytes() == right.metrics[name].tobytes()
    del state.tensors["logged.gold"]
    with pytest.raises(ValueError, match=r"lacks the tensor 'logged\.gold'"):
        PopulationTrainer(config, runs).restore(state)


def test_the_models_of_a_start_do_not_depend_on_the_other_starts(config):
    several = reward_model.fitted(config, supervised_start(config))
    assert several.shape[:2] == (3, 2)
    for place in range(3):
        alone = config.model_copy(
            update={"start": config.start.model_copy(update={"seed": 4 + place, "count": 1})}
        )
        found = reward_model.fitted(alone, supervised_start(alone))
        assert torch.equal(found[0], several[place])
    assert (several[0, 0] - several[0, 1]).norm() > 0.1, "members begin elsewhere"
    fewer = reward_model.fitted(of(config, members=1), supervised_start(config))
    assert torch.equal(fewer[:, 0], several[:, 0])


def test_more_labels_begin_with_the_fewer_and_carry_the_error_that_is_asked_for(config):
    start = supervised_start(config)
    few = reward_model.labelled(of(config, labels=30), start)
    many = reward_model.labelled(of(config, labels=2000), start)
    noisy = reward_model.labelled(of(config, labels=2000, noise=0.5), start)
    for less, more in zip(few, many, strict=True):
        assert torch.equal(less, more[:, :30])
    task = Sorting(config.task)
    assert torch.equal(many[2], task.score(*many[:2]).rewards)
    assert torch.equal(noisy[1], many[1])
    error = noisy[2] - many[2]
    assert error.mean().abs() < 0.03 and abs(error.std().item() - 0.5) < 0.03


def test_pairs_are_fitted_by_bradley_terry():
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(2, 5, 2, dtype=torch.float64, generator=generator) * 3
    labels = torch.tensor([[0.2, 0.7], [0.9, 0.1], [0.5, 0.5], [1.0, 0.0], [0.0, 0.3]])
    labels = labels.double().expand(2, 5, 2)
    found = reward_model.loss("pairs", scores, labels)
    for row in range(2):
        total = 0.0
        for (a, b), (x, y) in zip(scores[row].tolist(), labels[row].tolist(), strict=True):
            first = math.exp(a) / (math.exp(a) + math.exp(b))
            share = 1.0 if x > y else 0.0 if x < y else 0.5
            total -= share * math.log(first) + (1 - share) * math.log(1 - first)
        assert found[row].item() == pytest.approx(total / 5, abs=1e-12)
    flipped = reward_model.loss("pairs", scores, labels.flip(-1))
    assert (found - flipped).abs().min() > 0.1


@pytest.mark.parametrize("kind", ["scores", "pairs"])
def test_a_model_with_many_labels_tells_right_answers_from_wrong_ones(config, kind):
    """Of its own start's answers; with few labels and steps it cannot."""
    correlations = []
    for labels, updates in ((10, 2), (3000, 300)):
        model = {"kind": kind, "labels": labels, "updates": updates, "batch_size": 64, "width": 16}
        changed = of(config, members=1, **model)
        one = config.start.model_copy(update={"count": 1})
        changed = changed.model_copy(update={"start": one})
        environment = tiny_environment(changed)
        prompts, completions, rewards = reward_model.labelled(
            changed.model_copy(update={"reward_model": RewardModel(labels=500)}), environment.start
        )
        scores = environment.task.score(prompts, completions)
        both = torch.stack([scores.rewards[0].flatten(), rewards[0].flatten()])
        correlations.append(torch.corrcoef(both)[0, 1].item())
    assert correlations[0] < 0.4 < 0.6 < correlations[1]


def test_several_starts_must_be_told_apart(config):
    task = tiny_environment(config).task
    with pytest.raises(ValueError, match="give starts: there are 3 reward models"):
        task.score(torch.zeros(2, 1, 3, dtype=torch.long), torch.zeros(2, 1, 1, 4).long())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"label": 100}, r"label\n.*Extra inputs"),
        ({"kind": "score"}, "kind\n.*'scores' or 'pairs'"),
        ({"ensemble": "worst"}, "give 2 members or more"),
        ({"labels": 1}, "labels\n.*greater than or equal to 2"),
        ({"width": 30}, "width\n.*multiple of 4"),
        ({"noise": -0.1}, "noise\n.*greater than or equal to 0"),
    ],
)
def test_a_reward_model_that_makes_no_sense_is_one_clear_error(changes, said):
    with pytest.raises(ValueError, match=f"1 validation error for RewardModel\n(.*){said}"):
        RewardModel(**changes)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ({"reward_modle": {}}, r"got 'reward_modle'; did you mean 'reward_model'\?"),
        ({"reward_model": {"label": 5}}, r"reward_model\.label: Extra inputs"),
        ({"reward_model": {"ensemble": "worst"}}, "reward_model: ensemble='worst' is of several"),
    ],
)
def test_a_slip_on_the_command_line_is_named(override, said):
    with pytest.raises(ValueError, match=said) as raised:
        make_preset("quick", override)
    assert len(str(raised.value).splitlines()) == 1
    made = make_preset("quick", {"reward_model": {"labels": 5}})
    assert made.config.reward_model == RewardModel(labels=5)


@pytest.mark.parametrize(
    ("variant", "part"),
    [
        (Variant(advantage=Advantage(level="process")), "level='process'"),
        (Variant(advantage=Advantage(baseline="shortest_right")), "baseline='shortest_right'"),
        (Variant(shaping=Shaping(length="relative", weight=0.1)), "length='relative'"),
    ],
)
def test_no_variant_of_such_runs_may_read_the_verifier(config, small_config, variant, part):
    with pytest.raises(ValueError, match=f"{part} reads the verifier"):
        PopulationTrainer(config, runs_of([variant]))
    PopulationTrainer(small_config, runs_of([variant]))


def test_gold_is_predicted_only_where_there_is_one(config, small_config):
    written = design(
        question="?",
        outcome="gold",
        margin=0.1,
        predictions={"k2_loss > none: gold at 0.5": "it stays near"},
        pilots=({"tried": "a", "runs": 1, "seen": "b", "chosen": "c"},),
    )
    assert written.predictions == predict({"k2_loss > none: gold at 0.5": "it stays near"})
    parts = {"variants": (Variant(), K2), "seeds": (0,), "predictions": (), "design": written}
    Preset(config=config, **parts)
    with pytest.raises(ValueError, match="there is no reward_model, so there is no metric"):
        Preset(config=small_config, **parts)


#: As they were before there were reward models, the first three.
KEYS = {
    "equal_kl": "1658af1d1827a899ccad52dd",
    "distillation": "5b042775f64043c0fb964284",
    "smollm2": "afcf936ec7ced032f8e17d27",
    # Before a variant could name its ensemble.
    "proxy_5k": "a6d60316942b0d0c785d568a",
    "proxy_controls": "247e12ec11cb88ed84e3e083",
}


def test_what_was_recorded_keeps_its_name(config):
    for name, key in KEYS.items():
        preset = PRESETS[name]()
        assert run_key(preset.config, preset.runs[-1]) == key
    without = config.model_copy(update={"reward_model": None})
    assert "reward_model" not in without.model_dump()
    assert TrainConfig(**without.model_dump()) == without
    keys = {run_key(c, runs_of([K2])[0]) for c in (config, without, of(config, labels=41))}
    assert len(keys) == 3
    assert TrainConfig.model_validate_json(config.model_dump_json()) == config
