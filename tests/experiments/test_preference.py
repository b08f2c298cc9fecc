"""The numbers of chapter 10 against plain optimisers, simulation and quadrature."""

from __future__ import annotations

import pytest
import torch

from analysis.experiments.chapters import imitation, projection, routing
from analysis.experiments.chapters import preference as study
from analysis.kl.divergences import reverse_kl


@pytest.fixture(scope="module")
def problem():
    return study.random_preferences(5, beta=0.7, seed=4)


@pytest.fixture(scope="module")
def features():
    return torch.randn(5, 2, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def test_pair_distributions_are_distributions(problem):
    for pairs in study.pair_distributions(problem).values():
        assert pairs.sum().item() == pytest.approx(1.0)
        assert torch.allclose(pairs, pairs.T) and (pairs.diagonal() == 0).all()


def test_fit_is_stationary_for_the_loss_it_minimises(problem, features):
    for pairs in study.pair_distributions(problem).values():
        counts = study.labelled(pairs, -problem.rewards)  # not the problem's own labels
        for basis in (torch.eye(5, dtype=torch.float64), features):
            fitted = study.fit(problem, counts, features=basis)
            slope = study.gradient_of(
                lambda z: study.population_loss(z.log_softmax(-1), problem, counts),  # noqa: B023
                fitted,
            )
            assert (slope @ basis).abs().max() < 1e-9
            assert reverse_kl(fitted, problem.optimum) > 1e-3


def test_only_islands_miss_the_optimum(problem, features):
    table = study.data_table(problem, features).set_index("pairs")
    assert table.kl.drop("two islands").max() < 1e-12 < table.kl["two islands"]
    best = study.best_limited(problem, features)
    assert (table.objective_limited <= best + 1e-9).all()
    assert best < study.objective(problem.optimum, problem)


def test_more_comparisons_bring_the_fit_closer(problem):
    curves = study.finite_data_curves(problem, [100, 10_000], names=["uniform"], seeds=8)
    few, many = curves["median"]
    assert many < few / 10


def test_sampled_labels_follow_the_model(problem):
    pairs = study.pair_distributions(problem)["uniform"]
    generator = torch.Generator().manual_seed(0)
    counts = study.sample_counts(pairs, problem.rewards, 400_000, generator=generator)
    assert torch.allclose(counts, study.labelled(pairs, problem.rewards), atol=1e-3)


def test_chosen_slope_is_the_derivative_of_the_path():
    model = study.bystander(2.0)
    path = study.pair_path(model, beta=1.0, rate=1e-6, steps=2)
    # The step is rate * sigma(0) * beta along the pair's difference.
    assert path.chosen.iloc[1] / (1e-6 * 0.5) == pytest.approx(study.chosen_slope(model), rel=1e-4)


def test_costs_have_the_slopes_of_the_text():
    curves = imitation.cost_curves(1e-4, [10, 20], (0.0, 0.9999)).set_index(["recovery", "horizon"])
    assert curves.cost[0.0, 20] / curves.cost[0.0, 10] == pytest.approx(210 / 55, rel=1e-2)
    assert curves.cost[0.9999, 20] / curves.cost[0.9999, 10] == pytest.approx(2.0)


def test_steps_to_success_are_found_by_the_same_gradient_by_autograd():
    logits, steps = torch.zeros(3, dtype=torch.float64), 0
    while logits.softmax(-1)[0] ** 2 < 0.9:
        leaf = logits.clone().requires_grad_(True)
        success = leaf.softmax(-1)[0] * logits.softmax(-1)[0]  # one of two positions
        logits = logits + 0.5 * torch.autograd.grad(success, leaf)[0]
        steps += 1
    assert imitation.steps_to_success(2, 3, dense=False) == steps
    assert imitation.steps_to_success(2, 3, dense=True) < steps


def test_density_curves_integrate_to_one_and_pick_the_lower_minimum():
    mixture = projection.Mixture()
    curves = projection.density_curves(
        mixture, projection.fits(mixture, starts=(-2.0, 2.0)), limit=9
    )
    spacing = curves.x[1] - curves.x[0]
    for name in ("mixture", "forward", "reverse"):
        assert curves[name].sum() * spacing == pytest.approx(1.0, abs=1e-4)
    assert curves.x[curves.reverse.idxmax()] == pytest.approx(-2.0, abs=0.05)


def test_routing_drift_grows_linearly_when_replayed():
    table = routing.routing_drift([1e-5, 1e-4], seeds=3)
    assert table.replayed[1] / table.replayed[0] == pytest.approx(10, rel=0.05)
    far = routing.routing_drift([1e-2], seeds=3).iloc[0]
    assert far.recomputed > 10 * far.replayed and 0 < far.flipped < 0.1
