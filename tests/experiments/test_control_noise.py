"""The noise of the prefix loss by its control variate, on a transformer of a thousand weights."""

from __future__ import annotations

import pytest
import torch

from analysis.records import control_noise
from analysis.records.config import PolicyConfig, Run, StartConfig
from analysis.records.variants import Advantage, Variant
from analysis.studies import control_noise as study
from analysis.training.tiny.start import tiny_environment
from analysis.training.trainer import PopulationTrainer
from kl_term.kl.choice import KLChoice
from kl_term.kl.control import ControlFit, fitted_control_of_gradients, weight_of

SMALL = {
    "policy": PolicyConfig(width=8, num_layers=1, num_heads=2),
    "start": StartConfig(updates=15, batch_size=16),
    "precision": "float64",
}


@pytest.fixture(scope="module")
def drawn():
    """Twenty stale batches far from the reference, and what they were drawn with."""
    config = study.config_of(8, **SMALL)
    environment = tiny_environment(config)
    generator = torch.Generator().manual_seed(0)
    start = environment.start
    near, far = (start + s * torch.randn(start.shape, generator=generator) for s in (0.05, 0.2))
    given = (config, environment, far.to(start), near.to(start))
    return given, study.sampled(*given, batches=20, together=7)


def test_the_gradient_is_linear_in_the_weight(drawn):
    """At a weight in between, by the trainer; and fewer batches at a time are the same."""
    (config, environment, policy, sampler), found = drawn
    kl = KLChoice(estimator="k3", weighting="attached", ratio="prefix", control=0.3)
    variant = Variant(kl=kl, beta=1.0, advantage=Advantage(baseline="zero"))
    trainer = PopulationTrainer(config, [Run(variant=variant, seed=3)], environment)
    with torch.no_grad():
        trainer.weights.copy_(sampler)
        rollout = trainer.rollout(0)
        trainer.weights.copy_(policy)
    gradient = trainer.gradient(trainer.batch(rollout))[1][0]
    expected = 0.7 * found.plain[3] + 0.3 * found.quiet[3]
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)
    assert (gradient - found.quiet[3]).norm() > 1e-3 * gradient.norm()
    apart = study.sampled(config, environment, policy, sampler, batches=2, first=3, together=1)
    torch.testing.assert_close(apart.exact, found.exact[3:5], rtol=1e-9, atol=1e-12)


def test_variances_are_those_of_the_gradients_at_the_weight(drawn):
    _, found = drawn
    judged = study.judged(found)

    def variance(weight):
        return (found.plain + weight * (found.quiet - found.plain)).var(0).sum()

    scale = variance(0.0)
    assert judged["k3"] == pytest.approx((variance(1.0) / scale).item(), rel=1e-9)
    best = variance(judged["best_weight"]) / scale
    assert judged["best"] == pytest.approx(best.item(), rel=1e-9)
    for off in (-0.1, 0.1):
        assert variance(judged["best_weight"] + off) / scale > judged["best"]
    halves = (slice(0, 10), slice(10, 20))
    weights = [weight_of(found.sums[half].sum(0)) for half in halves]
    assert judged["tokens"] == pytest.approx(sum(variance(w) / scale for w in weights).item() / 2)
    exact = [fitted_control_of_gradients(found.plain[h], found.quiet[h]) for h in halves]
    assert judged["gradients_weight"] == pytest.approx(sum(exact).item() / 2)
    assert judged["exact"] == pytest.approx((found.exact.var(0).sum() / scale).item(), rel=1e-9)


def test_the_sums_are_those_that_a_run_fits(drawn):
    _, found = drawn
    fit = ControlFit()
    fit.add(found.sums[0])
    fit.advance()
    assert fit.weight == pytest.approx(weight_of(found.sums[0]).item(), abs=1e-3)


def test_a_table_has_a_row_of_each_age():
    table = study.along_run(8, (1, 2), batches=study.FIT, **SMALL)
    assert table[["update", "lag"]].values.tolist() == [[1, 0], [1, 1], [2, 0], [2, 2]]
    assert (table.best <= table.k3 + 1e-9).all() and (table.best <= 1 + 1e-9).all()
    assert (table.reverse_kl > 0).all()


def test_what_was_expected_before_it_was_recorded():
    noise = control_noise.recorded()
    assert set(noise.tokens_of_answer) == set(study.LENGTHS) and {0, study.LAG} <= set(noise.lag)
    assert noise.tokens.max() < 1.05 < noise.k3.max()
    assert (noise.exact < noise.best).all()
