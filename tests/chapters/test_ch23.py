"""The theorems on top-k sums against brute force: random teachers, every k, ties, odd supports."""

from __future__ import annotations

import csv
import itertools
import math

import numpy as np
import pytest
import torch

from analysis.chapters.ch23_top_k import sums as study
from analysis.chapters.ch23_top_k import trained
from analysis.evidence.recorded import recorded_runs
from analysis.records.manifests import RESULTS
from kl_term.kl.divergences import forward_kl, reverse_kl
from kl_term.kl.top_k import support_divergence, top_k_divergence, top_k_tokens

EXACT = {"rtol": 0, "atol": 1e-12}


def drawn(vocab, seed, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(2, vocab, generator=generator, dtype=torch.float64)


def cases():
    for seed in range(16):
        vocab = 2 + seed % 8
        logits, ref_logits = drawn(vocab, seed)
        if seed % 3 == 0:  # ties among the teacher's likeliest
            ref_logits = ref_logits.round()
        for k in range(1, vocab):
            yield logits, ref_logits, k


def by_autograd(logits, ref_logits, **how):
    leaf = logits.clone().requires_grad_()
    return torch.autograd.grad(top_k_divergence(leaf, ref_logits, **how), leaf)[0]


def descended(name, logits, ref_logits, k, steps=4000, rate=0.5):
    """Plain gradient descent on the logits; derivatives by the log-probs of S, by hand."""
    z, q = logits.numpy().copy(), ref_logits.softmax(-1).numpy()
    tokens = top_k_tokens(ref_logits, k).numpy()
    q, mass = q[tokens], q[tokens].sum()
    for _ in range(steps):
        policy = np.exp(z - z.max())
        policy /= policy.sum()
        p = policy[tokens]
        log_ratio = np.log(p / q)
        if name == "plain reverse":
            by = p * (log_ratio + 1)
        elif name == "unnormalised":
            by = p * log_ratio
        elif name == "tail":
            by = p * (log_ratio - math.log((1 - p.sum()) / (1 - mass)))
        elif name == "renormalised":
            inside, gap = p / p.sum(), log_ratio - math.log(p.sum() / mass)
            by = inside * (gap - inside @ gap)
        else:
            by = -q
            if name == "clamped forward" and -q @ log_ratio < 0:
                break
        step = -policy * by.sum()
        step[tokens] += by
        z -= rate * step
    return torch.from_numpy(z)


def policies(vocab, count, seed):
    """Random policies, some with much on one token."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(count, 1, generator=generator, dtype=torch.float64) * 6
    return spread * torch.randn(count, vocab, generator=generator, dtype=torch.float64)


def test_plain_sums_are_a_kl_inside_and_a_term_of_the_masses():
    for logits, ref_logits, k in cases():
        parts = study.mass_parts(logits, ref_logits, top_k_tokens(ref_logits, k))
        for direction, part in parts.items():
            how = {"top_k": k, "direction": direction, "correction": "none"}
            value = top_k_divergence(logits, ref_logits, **how)
            torch.testing.assert_close(part.sum(), value, **EXACT)
            if part[1].abs() > 1e-3:
                assert abs(part[0] - part[1] - value) > 1e-3  # the other sign


def test_the_plain_reverse_sum_is_least_at_the_teacher_over_e():
    for seed in range(8):
        vocab = 3 + seed
        _, ref_logits = drawn(vocab, seed)
        k = 1 + seed % (vocab - 1)
        tokens = top_k_tokens(ref_logits, k)
        reference = ref_logits.softmax(-1)
        mass = reference[tokens].sum()
        end = torch.full_like(reference, (1 - mass / math.e) / (vocab - k))
        end[tokens] = reference[tokens] / math.e
        value = top_k_divergence(end.log(), ref_logits, top_k=k, correction="none")
        torch.testing.assert_close(value, -mass / math.e, **EXACT)
        assert study.slope("plain reverse", end.log(), ref_logits, k).abs().max() < 1e-15
        others = policies(vocab, 2000, seed)
        found = top_k_divergence(others, ref_logits.expand_as(others), top_k=k, correction="none")
        assert (found >= value).all()
        own = study.plain_end(mass.item())
        assert study.mass(end.log(), tokens).item() == pytest.approx(own["reverse"], abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_the_plain_reverse_flow_ends_there_from_far_starts(seed):
    vocab = 3 + seed
    logits, ref_logits = drawn(vocab, seed)
    k = 1 + seed % (vocab - 1)
    end = descended("plain reverse", -logits, ref_logits, k, steps=2000, rate=2.0)
    tokens = top_k_tokens(ref_logits, k)
    gap = end.log_softmax(-1)[tokens] - ref_logits.log_softmax(-1)[tokens]
    assert (gap + 1).abs().max() < 1e-3


def test_descent_ends_where_the_theorems_say():
    logits, ref_logits = drawn(6, 3, scale=1.0)
    tokens = top_k_tokens(ref_logits, 2)
    reference = study.mass(ref_logits, tokens).item()
    ends = {
        name: descended(name, logits, ref_logits, 2, steps=5000, rate=2.0) for name in study.FORMS
    }
    masses = {name: study.mass(end, tokens).item() for name, end in ends.items()}
    assert masses["plain reverse"] == pytest.approx(reference / math.e, abs=1e-6)
    assert masses["plain forward"] > 0.999
    assert masses["unnormalised"] == pytest.approx(reference, abs=1e-6)
    assert masses["tail"] == pytest.approx(reference, abs=1e-6)
    for name in ("renormalised", "plain forward"):
        inside = ends[name][tokens].log_softmax(-1) - ref_logits[tokens].log_softmax(-1)
        assert inside.abs().max() < 1e-3
    assert abs(masses["renormalised"] - reference) > 0.01
    assert abs(masses["clamped forward"] - reference) > 1e-3 and masses["clamped forward"] < 0.999


def test_the_clamped_sum_stops_short_of_the_teacher():
    """Wherever it stops, at the mass P exp(KL inside); the teacher itself keeps a gradient."""
    for seed in range(6):
        logits, ref_logits = drawn(5 + seed, seed, scale=1.0)
        tokens = top_k_tokens(ref_logits, 2)
        if study.form("clamped forward", logits, ref_logits, 2) <= 0:
            logits = -ref_logits
        end = descended("clamped forward", logits, ref_logits, 2, steps=20000, rate=0.02)
        assert study.slope("clamped forward", end, ref_logits, 2).abs().max() == 0
        reference = study.mass(ref_logits, tokens)
        inside = forward_kl(end[tokens], ref_logits[tokens])
        stop = reference * inside.exp()
        assert study.mass(end, tokens).item() == pytest.approx(stop.item(), abs=5e-3)
        assert inside <= -reference.log()
        at_teacher = study.slope("clamped forward", ref_logits, ref_logits, 2)
        if study.form("plain forward", ref_logits, ref_logits, 2) >= 0:
            assert at_teacher.abs().sum().item() == pytest.approx(
                (2 * reference * (1 - reference)).item(), abs=1e-12
            )


def test_a_plain_gradient_is_the_corrected_one_and_that_of_the_mass():
    for logits, ref_logits, k in cases():
        tokens = top_k_tokens(ref_logits, k)
        push = study.mass_slope(logits, tokens)
        m = study.mass(logits, tokens)
        torch.testing.assert_close(push.abs().sum(), 2 * m * (1 - m), **EXACT)
        for direction, sign in (("reverse", 1), ("forward", -1)):
            plain, corrected = (
                by_autograd(logits, ref_logits, top_k=k, direction=direction, correction=c)
                for c in ("none", "unnormalised")
            )
            torch.testing.assert_close(plain - corrected, sign * push, **EXACT)
            if m * (1 - m) > 1e-3:
                assert (plain - corrected + sign * push).abs().max() > 1e-4


def test_what_the_tail_leaves_out_lies_in_the_tail():
    for logits, ref_logits, k in cases():
        expected = study.lost_tail(logits, ref_logits, k)
        left = 1 - study.mass(ref_logits, top_k_tokens(ref_logits, k)).item()
        for direction, value in expected.items():
            found = study.lost(logits, ref_logits, k, direction, "tail")
            assert found == pytest.approx(value, abs=1e-11)
        assert expected["forward"] <= 2 * left + 1e-12


def test_the_forward_tail_has_the_full_gradient_on_the_support():
    for logits, ref_logits, k in cases():
        by = by_autograd(logits, ref_logits, top_k=k, direction="forward", correction="tail")
        full = logits.softmax(-1) - ref_logits.softmax(-1)
        tokens = top_k_tokens(ref_logits, k)
        torch.testing.assert_close(by[tokens], full[tokens], **EXACT)
        reverse = by_autograd(logits, ref_logits, top_k=k, direction="reverse", correction="tail")
        if 1 < k < len(logits) - 1:
            whole = by_autograd(logits, ref_logits, top_k=len(logits), direction="reverse")
            assert (reverse - whole)[tokens].abs().max() > 1e-9  # there the reverse one has not


def test_renormalised_forgets_the_mass():
    """Zero on a whole line of policies, always with one token, and no gradient outside."""
    _, ref_logits = drawn(7, 2)
    tokens = top_k_tokens(ref_logits, 3)
    for shift in (-3.0, 0.0, 2.0):
        policy = ref_logits.clone()
        policy[tokens] += shift
        how = {"top_k": 3, "correction": "renormalised"}
        assert top_k_divergence(policy, ref_logits, **how).abs() < 1e-15
    logits, _ = drawn(7, 3)
    slope = study.slope("renormalised", logits, ref_logits, 3)
    outside = torch.ones(7, dtype=torch.bool).index_fill(0, tokens, False)
    assert slope[outside].abs().max() < 1e-15 and slope[tokens].sum().abs() < 1e-15
    assert slope.abs().max() > 1e-2
    for direction in study.FULL:
        how = {"top_k": 1, "correction": "renormalised", "direction": direction}
        assert top_k_divergence(logits, ref_logits, **how) == 0


def test_the_own_top_k_has_zeros_away_from_the_teacher():
    """Every set of tokens in turn: such a zero exists exactly where the box says."""
    found = {True: 0, False: 0}
    for seed in range(12):
        vocab = 4 + seed % 3
        _, ref_logits = drawn(vocab, seed, scale=1.0)
        reference = ref_logits.softmax(-1)
        for k in (1, 2):
            for chosen in itertools.combinations(range(vocab), k):
                tokens = torch.tensor(chosen)
                policy = study.false_zero(ref_logits, tokens)
                room = (vocab - k) * reference[tokens].min() >= 1 - reference[tokens].sum()
                assert (policy is not None) == bool(room)
                found[policy is not None] += 1
                if policy is None:
                    continue
                assert policy.sum().item() == pytest.approx(1)
                assert set(policy.topk(k).indices.tolist()) == set(chosen)
                for correction in ("unnormalised", "tail"):
                    how = {"top_k": k, "support": "policy", "correction": correction}
                    assert top_k_divergence(policy.log(), ref_logits, **how).abs() < 1e-14
    assert min(found.values()) > 20
    false = study.false_zero(
        torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log(), torch.tensor([1])
    )
    assert false.argmax() == 1


def test_the_own_top_k_jumps_where_tokens_change_places():
    reference = torch.tensor([0.5, 0.2, 0.2, 0.1], dtype=torch.float64)
    at = 0.35

    def value(first):
        policy = torch.tensor([first, 0.7 - first, 0.2, 0.1], dtype=torch.float64)
        how = {"top_k": 1, "support": "policy", "correction": "unnormalised"}
        return top_k_divergence(policy.log(), reference.log(), **how).item()

    jump = value(at + 1e-9) - value(at - 1e-9)
    by_hand = at * math.log(0.2 / 0.5) - 0.2 + 0.5
    assert jump == pytest.approx(by_hand, abs=1e-6) and abs(jump) > 1e-2


def test_a_stale_set_is_a_fixed_set():
    """Any set, however chosen: both corrections have the teacher on it as their only zero."""
    for seed in range(6):
        logits, ref_logits = drawn(6, seed)
        tokens = top_k_tokens(drawn(6, seed + 50)[0], 3)  # of some policy that sampled
        logp, ref_logp = logits.log_softmax(-1)[tokens], ref_logits.log_softmax(-1)[tokens]
        for direction, correction in itertools.product(study.FULL, ("unnormalised", "tail")):
            how = {"direction": direction, "correction": correction}
            value = support_divergence(logp, ref_logp, **how)
            assert 0 < value <= study.FULL[direction](logits, ref_logits) + 1e-12
            assert support_divergence(ref_logp, ref_logp, **how).abs() < 1e-15


def test_one_sampled_token_with_a_tail():
    """Least at the teacher alone, whoever samples, and never above the KL."""
    for seed in range(10):
        vocab = 2 + seed % 5
        logits, ref_logits = drawn(vocab, seed, scale=1.0)
        for sampler in (logits.softmax(-1), drawn(vocab, seed + 9)[0].softmax(-1)):
            value = study.one_token_divergence(logits, ref_logits, sampler)
            by_hand = sum(
                sampler[y]
                * support_divergence(logits.log_softmax(-1)[[y]], ref_logits.log_softmax(-1)[[y]])
                for y in range(vocab)
            )
            torch.testing.assert_close(value, by_hand, rtol=0, atol=1e-10)
            assert 0 < value <= reverse_kl(logits, ref_logits) + 1e-12
            others = policies(vocab, 300, seed)
            values = torch.stack(
                [study.one_token_divergence(z, ref_logits, sampler) for z in others]
            )
            assert (values > 0).all()
            assert study.one_token_divergence(ref_logits, ref_logits, sampler).abs() < 1e-15


def test_the_page_trains_what_it_says():
    teacher, student = study.teacher_and_student(50, sharpness=2.0, seed=0)
    table = study.descend(teacher, student, 8, steps=64, rate=1.0)
    assert set(table.form) == set(study.FORMS) and table.step.max() == 64
    start = table[table.step == 0].mass
    assert start.max() - start.min() == 0
    assert study.draw(table, 0.8).axes
    losses = study.lost_table(teacher, student, [1, 4, 50])
    assert study.draw_lost(losses).axes
    at_all = losses[(losses.top_k == 50) & (losses.correction != "x")]
    assert (at_all.lost < 1e-10).all()


@pytest.mark.parametrize("correction", ["unnormalised", "tail"])
def test_what_a_corrected_sum_charges_for_the_mass(correction):
    for logits, ref_logits, k in cases():
        tokens = top_k_tokens(ref_logits, k)
        own, other = (study.mass(z, tokens) for z in (logits, ref_logits))
        inside = own * reverse_kl(logits[tokens], ref_logits[tokens])
        value = top_k_divergence(logits, ref_logits, top_k=k, correction=correction)
        held = study.mass_held(own, other, correction)
        torch.testing.assert_close(value - inside, held, **EXACT)
        if (own - other).abs() > 0.05:
            flipped = 2 * own * (own / other).log() - held
            assert abs(float(flipped - held)) > 1e-3
    for share in (0.1, 0.8, 0.95):
        teacher = torch.tensor(share, dtype=torch.float64)
        at = teacher.clone().requires_grad_()
        held = study.mass_held(at, teacher, correction)
        (slope,) = torch.autograd.grad(held, at, create_graph=True)
        (bend,) = torch.autograd.grad(slope, at)
        expected = {"unnormalised": 1 / share, "tail": 1 / (share * (1 - share))}[correction]
        assert abs(slope.item()) < 1e-12 and float(bend) == pytest.approx(expected, rel=1e-12)


# What was trained.


def test_ends_are_read_off_the_table():
    path = RESULTS / "top_k_cpu" / "final.csv"
    rows = list(csv.DictReader(path.open()))
    found = trained.ends(recorded_runs("top_k").finals)
    assert set(found.index.get_level_values("variant")) == set(trained.NAMES)
    for (variant, beta), row in found.iterrows():
        own = [r for r in rows if r["variant"] == variant and float(r["beta"]) == beta]
        assert len(own) == 10
        assert row.reward == pytest.approx(sum(float(r["final_reward"]) for r in own) / 10)
        logs = [math.log(float(r["final_reverse_kl"])) for r in own]
        assert row.kl == pytest.approx(math.exp(sum(logs) / 10), rel=1e-9)


def test_the_design_asks_what_the_theorems_say():
    """P = 0.95, the starts' mean: an end at P/e is as far as the design says."""
    own, teacher = torch.tensor([0.95 / math.e, 0.95], dtype=torch.float64)
    assert 1.3 < study.mass_held(own, teacher, "tail") < 1.33
    shares = [study.mass_held(teacher * 0.999, teacher, c) for c in ("tail", "unnormalised")]
    assert shares[0] / shares[1] == pytest.approx(20, rel=0.02)
