"""What a trainer logs: each measurement by its definition, and independent of how tokens lie."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from kl_term.diagnosis.columns import assemble
from kl_term.diagnosis.divergence import coefficient_gap
from kl_term.integrations.measurements import MEASUREMENTS, Sampled, Totals, totals
from kl_term.kl.importance import effective_sample_size

PAGE = Path(__file__).parents[2] / "book" / "trl.md"


def measure(sampled: Sampled, **others) -> dict[str, float]:
    """Of one micro-batch."""
    return totals(sampled, **others).measured()


@pytest.fixture
def sampled() -> Sampled:
    torch.manual_seed(0)
    logp, old, ref, sampler = -torch.rand(4, 6, 50, dtype=torch.float64) * 3
    mask = torch.arange(50) < torch.tensor([50, 30, 1, 0, 12, 49]).unsqueeze(-1)
    return Sampled(logp, old, mask, ref, sampler, torch.rand(6, 50, dtype=torch.float64))


def test_means_are_over_counted_tokens(sampled):
    found = measure(sampled)
    l = (sampled.logp - sampled.ref_logp)[sampled.mask]
    assert found["k1"] == pytest.approx(l.mean().item(), rel=1e-12)
    assert found["k2"] == pytest.approx((l**2).mean().item() / 2, rel=1e-12)
    assert found["k3"] == pytest.approx((torch.exp(-l) - 1 + l).mean().item(), rel=1e-12)
    assert found["max_abs_log_ratio"] == pytest.approx(l.abs().max().item(), rel=1e-12)
    assert found["k1"] != pytest.approx(-l.mean().item(), rel=0.1)


def test_weights_are_those_to_what_sampled(sampled):
    share = measure(sampled)["ess"]
    logp, sampler = sampled.logp[sampled.mask], sampled.sampler_logp[sampled.mask]
    everything = torch.ones_like(logp, dtype=torch.bool)
    assert share == pytest.approx(effective_sample_size(logp, sampler, everything).item())
    engineless = measure(sampled._replace(sampler_logp=None))["ess"]
    old = sampled.old_logp[sampled.mask]
    assert engineless == pytest.approx(effective_sample_size(logp, old, everything).item())
    unscored = sampled.sampler_logp.masked_fill(torch.ones_like(sampled.mask), float("nan"))
    assert measure(sampled._replace(sampler_logp=unscored))["ess"] == engineless


def test_surprise_is_the_entropy_of_the_sampler_alone():
    """Ten thousand tokens of one policy: no gap; at another temperature a gap of either sign."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(10_000, 30, dtype=torch.float64)
    logp = logits.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    gaps = {}
    for temperature in (0.8, 1.0, 1.25):
        token = torch.multinomial((logits / temperature).softmax(-1), 1)
        taken = logp.gather(-1, token).T
        mask = torch.ones_like(taken, dtype=torch.bool)
        drawn = Sampled(taken, taken, mask, entropy=entropy.unsqueeze(0))
        gaps[temperature] = measure(drawn)["surprise_gap"]
    assert abs(gaps[1.0]) < 0.03
    assert gaps[0.8] < -0.2 and gaps[1.25] > 0.2


def test_gap_is_that_of_the_diagnosis(sampled):
    rows, columns = sampled.mask.nonzero(as_tuple=True)
    table = {"sequence": rows.numpy(), "position": columns.numpy()}
    names = {"logp": "logp", "old_logp": "old_logp", "ref_logp": "ref_logp"}
    for name, field in (names | {"sampler_logp": "sampler_logp"}).items():
        table[name] = getattr(sampled, field)[sampled.mask].numpy()
    expected = coefficient_gap(assemble(table, "here"))["k3_gradient_gap"]
    assert measure(sampled)["k3_gradient_gap"] == pytest.approx(expected, rel=1e-9)


def test_processes_add_up(sampled):
    """Two processes with different numbers of tokens log what one with all of them does."""
    halves = [Sampled(*(x[rows] for x in sampled)) for rows in (slice(0, 2), slice(2, 6))]
    sums: list[torch.Tensor] = []
    tails: list[torch.Tensor] = []
    for half in halves:
        measure(half, total=lambda x: sums.append(x) or x, gather=lambda x: tails.append(x) or x)
    padded = torch.cat([*tails, torch.full((3,), float("nan"), dtype=torch.float64)])
    found = measure(halves[0], total=lambda _: sum(sums), gather=lambda _: padded)
    assert found == pytest.approx(measure(sampled), rel=1e-9)


def test_micro_batches_add_up(sampled):
    """As one batch of all rows: the mean of the micro-batches' own ratios is another number."""
    parts = [totals(Sampled(*(x[rows] for x in sampled))) for rows in ([0], [1], [2], [4, 5], [3])]
    pooled = Totals()
    for part in parts:
        pooled = pooled.plus(part)
    whole, found = measure(sampled), pooled.measured()
    whole.pop("tail_index", None)  # fitted to each micro-batch of a hundred tokens
    assert found == pytest.approx(whole, rel=1e-9)
    ratios = [part.measured()["k1"] for part in parts[:-1]]
    assert sum(ratios) / len(ratios) != pytest.approx(whole["k1"], rel=0.05)
    assert Totals().measured() == {} == parts[-1].measured()


def test_pooled_sums_have_no_bias_where_answers_are_ragged():
    """Answers are long where the policy departs: each micro-batch's ratio is far too low."""
    torch.manual_seed(0)
    # a first token that the policy prefers ends the answer with log-ratio .4, one that it avoids
    # goes on for nine tokens of log-ratio 0: the KL per token is known
    policy, ref = torch.tensor([0.5, 0.5]).double(), torch.tensor([0.2, 0.8]).double()
    draws = torch.multinomial(policy, 20_000, replacement=True)
    first = (policy / ref).log()[draws]
    lengths = torch.where(draws == 1, 10, 1)
    mask = torch.arange(10) < lengths.unsqueeze(-1)
    logp = torch.zeros(20_000, 10, dtype=torch.float64)
    ref_logp = logp.clone()
    ref_logp[:, 0] = -first
    exact = (policy * (policy / ref).log()).sum() / (policy @ torch.tensor([1.0, 10.0]).double())
    pooled, ratios = Totals(), []
    for rows in torch.arange(20_000).split(2):
        part = totals(Sampled(logp[rows], logp[rows], mask[rows], ref_logp[rows]))
        pooled = pooled.plus(part)
        ratios.append(part.measured()["k1"])
    assert pooled.measured()["k1"] == pytest.approx(exact.item(), abs=4e-3)
    assert abs(sum(ratios) / len(ratios) - exact.item()) > 0.1


def test_terms_penalties_and_caps(sampled):
    terms = torch.arange(300.0).view(6, 50)
    found = measure(sampled, terms=terms, penalties=-terms, max_ratio=2.0)
    assert found["term"] == pytest.approx(terms[sampled.mask].mean().item())
    assert found["penalty"] == -found["term"]
    over = (sampled.ref_logp - sampled.logp)[sampled.mask] > math.log(2)
    assert found["capped"] == pytest.approx(over.double().mean().item())
    assert 0 < found["capped"] < 1


def test_nothing_is_said_about_no_tokens(sampled):
    assert measure(sampled._replace(mask=torch.zeros_like(sampled.mask))) == {}
    without = measure(sampled._replace(ref_logp=None))
    assert set(without) == {"tokens", "ess", "surprise_gap"}


def test_the_page_defines_what_is_logged():
    rows = dict(
        line.strip("| ").split(" | ", 1)
        for line in PAGE.read_text().splitlines()
        if line.startswith("| `") and line.count("|") == 3
    )
    assert rows == {f"`{name}`": meaning for name, meaning in MEASUREMENTS.items()}
