"""Runs that are rewarded by several reward models, and KL terms that act where these disagree."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch

from analysis.records.config import RewardModel, StartConfig, TrainConfig
from analysis.records.metrics import ENSEMBLE_METRICS, METRICS, PROXY_METRICS
from analysis.records.preset import Preset
from analysis.records.variants import Ensemble, Variant
from analysis.studies.presets.designed import design
from analysis.training.ensembles import PENALTY, bounds, combined, spread
from analysis.training.sampling import without
from analysis.training.trainer import PopulationTrainer
from kl_term.kl.term import KLTerm
from tests.training.conftest import runs_of, what_is_sampled

KINDS: tuple[Ensemble, ...] = ("first", "mean", "worst", "penalised")
K2 = {"kl": KLTerm(estimator="k2"), "beta": 0.5}
IN_REWARD = {"kl": KLTerm(estimator="k1", placement="reward"), "beta": 0.5}
PLACES = ("all", "growing", "beyond")
VARIANTS = [
    *(Variant(label=kind, ensemble=kind) for kind in KINDS),
    *(Variant(label=f"k2_{place}", kl_on=place, **K2) for place in PLACES),
    *(Variant(label=f"reward_{place}", kl_on=place, **IN_REWARD) for place in PLACES),
]


@pytest.fixture
def config(small_config) -> TrainConfig:
    """Two starts, each with three small models."""
    model = RewardModel(labels=40, width=12, updates=8, batch_size=16, members=3)
    changes = {
        "start": StartConfig(updates=10, batch_size=8, count=2, seed=4),
        "reward_model": model,
        "updates": 4,
        "final_answers": 16,
        "learning_rate": 1e-2,
    }
    return small_config.model_copy(update=changes)


def of(config: TrainConfig, **changes) -> TrainConfig:
    """The same with another reward model."""
    model = RewardModel(**dict(config.reward_model) | changes)
    return config.model_copy(update={"reward_model": model})


def test_an_ensemble_is_the_numbers_of_its_members():
    generator = torch.Generator().manual_seed(5)
    members = 3 * torch.randn(7, 4, dtype=torch.float64, generator=generator)
    for row, scores in enumerate(members.tolist()):
        apart = statistics.stdev(scores)
        wanted = {
            "first": scores[0],
            "mean": statistics.mean(scores),
            "worst": min(scores),
            "penalised": statistics.mean(scores) - PENALTY * apart,
        }
        assert spread(members)[row].item() == pytest.approx(apart, abs=1e-12)
        for kind in KINDS:
            assert combined(kind, members)[row].item() == pytest.approx(wanted[kind], abs=1e-12)


def test_bounds_are_the_mean_and_what_one_answer_in_twenty_exceeds():
    spreads = torch.stack([torch.arange(100.0).flip(0), torch.zeros(100)]).double()
    assert bounds(spreads).tolist() == [[49.5, 94.0], [0.0, 0.0]]


@pytest.mark.slow
def test_each_run_is_rewarded_as_its_variant_says(config):
    trainer = PopulationTrainer(config, runs_of(VARIANTS, (0, 1)))
    batches = what_is_sampled(trainer)
    record = trainer.run()
    assert set(record.metrics) == {*METRICS, *PROXY_METRICS, *ENSEMBLE_METRICS}
    for sampled in batches:
        scores = sampled.scores
        for row, run in enumerate(trainer.runs):
            wanted = combined(run.variant.ensemble or "mean", scores.members[row])
            assert torch.equal(scores.rewards[row], wanted)
        assert torch.equal(scores.spread, spread(scores.members))
    assert (record.metrics["all_members"] != record.metrics["proxy"])[:, :2].all()
    np.testing.assert_allclose(
        record.metrics["all_members"][:, 8:], record.metrics["proxy"][:, 8:], atol=1e-6
    )
    means = [b.scores.spread.flatten(1).mean(dim=1) for b in batches]
    windows = torch.stack(means).view(2, 2, -1).mean(dim=1)
    np.testing.assert_allclose(record.metrics["spread"], windows, rtol=1e-5)
    worst, mean = record.final["final_proxy"][4], record.final["final_proxy"][2]
    assert worst < mean, "answers after the last update are rewarded so too"


@pytest.mark.slow
def test_the_first_member_rewards_as_a_model_alone_does(config):
    """To the bit: a run on one of several is the run that was recorded with one."""
    first = Variant(label="none", ensemble="first")
    several = PopulationTrainer(config, runs_of([first, VARIANTS[2]], (0, 1))).run()
    alone = PopulationTrainer(of(config, members=1), runs_of([Variant(label="none")], (0, 1))).run()
    for name in {*METRICS, *PROXY_METRICS}:
        np.testing.assert_array_equal(several.metrics[name][:, :2], alone.metrics[name])
    for name, values in alone.final.items():
        np.testing.assert_array_equal(several.final[name][:2], values)
    assert (several.metrics["proxy"][:, 2:] != alone.metrics["proxy"]).all()


@pytest.mark.slow
def test_a_run_is_the_one_it_would_be_alone_and_goes_on_to_the_same_bits(config):
    runs = runs_of(VARIANTS, (0, 1))
    whole = PopulationTrainer(config, runs).run()
    for rows in ([13], [2, 3, 11], [19, 4]):
        trainer = PopulationTrainer(config, [runs[row] for row in rows])
        trainer.advance()
        state, trainer = trainer.state(), PopulationTrainer(config, trainer.runs)
        trainer.restore(state)
        part = trainer.run()
        for name, values in part.metrics.items():
            np.testing.assert_array_equal(values, whole.metrics[name][:, rows])
        for name, values in part.final.items():
            np.testing.assert_array_equal(values, whole.final[name][rows])


@pytest.mark.slow
@pytest.mark.parametrize("grown", [False, True])
def test_a_term_acts_on_the_answers_that_it_is_for_and_on_no_other(config, grown):
    trainer = PopulationTrainer(config, runs_of(VARIANTS))
    with torch.no_grad():
        size = trainer.weights.shape[1]  # off the reference, alike in all runs
        trainer.weights += 0.1 * torch.randn(size, generator=torch.Generator().manual_seed(1))
    ensembles = trainer.samplers.ensembles
    sampled = trainer.rollout(0)
    at = {run.variant.name: row for row, run in enumerate(trainer.runs)}
    middle = sampled.scores.spread[0].median()
    ensembles.bounds[:, 1] = middle
    ensembles.bounds[:, 0] = sampled.scores.spread[0].mean() + (-1e-3 if grown else 1e-3)
    scores = ensembles.of_runs(sampled.scores)
    batch = trainer.batch(sampled._replace(scores=scores))
    losses = trainer.losses(batch).tensors["KL loss"]
    beyond = (scores.spread[0] > middle).unsqueeze(-1)
    assert 0 < beyond.sum() < beyond.numel()
    held = {"all": torch.ones_like(beyond), "growing": torch.full_like(beyond, grown)}
    held["beyond"] = beyond
    everywhere = losses[at["k2_all"]]
    charged = batch.advantages[at["mean"]] - batch.advantages[at["reward_all"]]
    assert (everywhere.abs().sum(dim=-1) > 0).all() and (charged != 0).any()
    for place, on in held.items():
        wanted = torch.where(on, everywhere, 0.0)
        assert torch.equal(losses[at[f"k2_{place}"]], wanted)
        found = batch.advantages[at["mean"]] - batch.advantages[at[f"reward_{place}"]]
        torch.testing.assert_close(found, torch.where(on, charged, 0.0), atol=1e-6, rtol=0)
    assert (losses[at["mean"]] == 0).all()


@pytest.mark.slow
def test_bounds_are_of_the_start_and_what_is_cut_has_no_spread(config):
    trainer = PopulationTrainer(config, runs_of([VARIANTS[0]], (0, 1, 2)))
    found = trainer.samplers.ensembles.bounds
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])
    assert (found[:, 0] > 0).all() and (found[:, 1] > found[:, 0]).all()
    scores = trainer.rollout(0).scores
    shares = scores.beyond.flatten(1).mean(dim=1)
    assert (shares < 0.4).all(), "about one answer in twenty of a start lies beyond"
    cut = torch.zeros_like(scores.rewards, dtype=torch.bool)
    cut[0, 0, 0] = True
    left = without(scores, cut)
    assert left.spread[0, 0, 0] == left.beyond[0, 0, 0] == 0
    assert (left.members[0, 0, 0] == 0).all()
    assert torch.equal(left.spread[1:], scores.spread[1:])


@pytest.mark.parametrize(
    ("members", "variant", "said"),
    [
        (0, Variant(ensemble="worst"), "ensemble='worst' reads several .* there is none"),
        (1, Variant(kl_on="beyond", **K2), "kl_on='beyond' reads several .* there is one"),
    ],
)
def test_what_reads_several_models_needs_them(config, members, variant, said):
    changed = of(config, members=1) if members else config.model_copy(update={"reward_model": None})
    with pytest.raises(ValueError, match=f"{said}: set reward_model with 2 members or more"):
        PopulationTrainer(changed, runs_of([variant]))


def test_a_place_for_a_term_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="kl_on='growing' chooses where a KL term acts: there is"):
        Variant(kl_on="growing")
    with pytest.raises(ValueError, match=r"kl_on\n.*'all', 'growing' or 'beyond'"):
        Variant(kl_on="some", **K2)


def test_a_spread_is_predicted_only_where_there_is_one(config):
    pilot = {"tried": "a", "runs": 1, "seen": "b", "chosen": "c"}
    written = design(
        question="?",
        outcome="gold",
        margin=0.1,
        predictions={"k2_loss > none: spread_gold at 0.5": "it stays near"},
        pilots=(pilot,),
    )
    parts = {"seeds": (0,), "predictions": (), "design": written}
    parts["variants"] = (Variant(), Variant(**K2))
    Preset(config=config, **parts)
    with pytest.raises(ValueError, match="reward_model has no 2 members, so there is no metric"):
        Preset(config=of(config, members=1), **parts)
