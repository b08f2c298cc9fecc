"""Counterexamples to statements whose page had dropped a condition (book/corrections.yaml)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from analysis.report.ledger import load_ledger
from analysis.report.project import Project
from kl_term.kl import enumeration
from kl_term.kl.enumeration import forward_kl_gradient, relative_error, reverse_kl_gradient
from kl_term.kl.estimators import k2, k3
from kl_term.kl.potentials import kl_potential
from kl_term.kl.ratio_objectives import ratio_objective
from kl_term.kl.sequences import enumerate_sequences, token_logp
from kl_term.kl.top_k import top_k_divergence
from kl_term.kl.truncation import keep_top
from kl_term.objectives.advantages import group_centre, group_normalise, leave_one_out
from kl_term.objectives.losses import policy_loss

EXACT = 1e-12
PROJECT = Project(Path(__file__).parents[2])


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_logged_by_completion_k1_and_k3_need_not_agree_on_fresh_samples():
    """By hand: an answer ends at its first token or has two; the policy goes on more often."""
    stop, ref_stop = 0.10, 0.15
    chance, ref = numbers(stop, 1 - stop), numbers(ref_stop, 1 - ref_stop)
    length, l = numbers(1, 2), (chance / ref).log()  # the second token is certain under both
    logs = {"k1": l, "k3": torch.expm1(-l) + l}
    total, tokens = (chance @ l).item(), (chance @ length).item()
    for values in logs.values():
        assert (chance @ values).item() / tokens == pytest.approx(total / tokens)
    by_completion = {name: (chance @ (values / length)).item() for name, values in logs.items()}
    assert by_completion["k1"] < 0 < total / tokens < 0.6 * by_completion["k3"]
    assert by_completion["k3"] - by_completion["k1"] == pytest.approx((ref_stop - stop) / 2)


def in_reward(policy, ref, penalty, flow):
    """d log-policy / dt under a penalty alone, along the ``natural`` flow or the ``plain`` one."""
    cost = penalty((policy / ref).log())
    advantage = (policy * cost).sum() - cost
    step = advantage if flow == "natural" else policy * advantage
    return step - (policy * step).sum()


@pytest.mark.parametrize("flow", ["natural", "plain"])
@pytest.mark.parametrize(
    "penalty", [lambda l: l.square() / 2, lambda l: torch.expm1(-l) + l], ids=["k2", "k3"]
)
def test_a_penalised_token_below_its_reference_can_rise(penalty, flow):
    """It falls where its penalty is above average, not wherever it is rarer than the reference."""
    policy, ref = numbers(0.55, 0.40, 0.05), numbers(0.60, 0.10, 0.30)
    rates = in_reward(policy, ref, penalty, flow)
    assert rates[0] > 0 > rates[2]
    assert (policy < ref).tolist() == [True, False, True]


def test_the_gap_of_two_tokens_below_lambda_ref_can_close_on_the_logits():
    """A control variate of weight one in the reward, integrated along both flows."""
    ref = numbers(0.03, 0.90, 0.07)
    gaps = {}
    for flow in ("natural", "plain"):
        logits = numbers(0.02, 0.55, 0.43).log()
        gaps[flow] = []
        for _ in range(1001):
            policy = logits.softmax(-1)
            assert (policy < ref)[:2].all() or flow == "natural"
            gaps[flow].append((policy / ref).log()[:2].diff().item())
            logits = logits + 1e-3 * in_reward(policy, ref, lambda l: torch.expm1(-l) + l, flow)
    assert gaps["natural"][-1] < gaps["natural"][0] < 0  # driven apart
    assert gaps["plain"][0] < 0 < gaps["plain"][-1]  # closed, and crossed


def late_costs(length, *, paid):
    """Variance of one answer's gradient, all binary answers of a length: the product with credit to
    go, and the prefix losses of k1 and k3. The policy is off its sampler at every state, and off
    its reference at the first one, or with ``paid`` at every state."""
    tree = enumerate_sequences(2, length)
    policy, old, ref = (numbers(-x, x).expand(tree.num_states, 2).clone() for x in (0.3, 0.0, 0.3))
    ref[0] = numbers(0.4, -0.4)
    if paid:
        ref = ref[:1].expand(tree.num_states, 2)
    logp, old_logp, ref_logp = (token_logp(x, tree) for x in (policy, old, ref))
    ratio, l = (logp - old_logp).cumsum(-1).exp(), logp - ref_logp

    def to_go(costs):
        return costs.flip(-1).cumsum(-1).flip(-1)

    ways = {"product": ratio[:, -1:] * to_go(l), "k1": ratio + to_go(ratio * l)}
    ways["k3"] = -ratio * torch.expm1(-l) + to_go(ratio * k3(logp, ref_logp))
    chance = old_logp.sum(-1).exp()
    states, tokens = (
        torch.nn.functional.one_hot(x, size).double()
        for x, size in ((tree.states, tree.num_states), (tree.tokens, 2))
    )
    scores = tokens - policy.softmax(-1)[tree.states]
    spread = {}
    for name, credit in ways.items():
        gradients = torch.einsum("nt,nts,nta->nsa", credit, states, scores)
        mean = torch.einsum("n,nsa->sa", chance, gradients)
        second = (chance * gradients.square().sum((1, 2))).sum()
        spread[name] = (second - mean.square().sum()).item()
    return spread


def test_the_prefix_loss_of_k3_pays_for_no_product_where_late_tokens_cost_nothing():
    """Old statement: either exact weight has a variance that grows exponentially as soon as policy
    and sampler differ in a state that recurs."""
    short, long = (late_costs(length, paid=False) for length in (3, 8))
    assert long["k3"] == pytest.approx(short["k3"], rel=1e-9)
    assert long["product"] > 1.3 * short["product"]
    assert long["k1"] > 1.3 * short["k1"]
    short, long = (late_costs(length, paid=True)["k3"] for length in (3, 8))
    assert long > 2 * short


def test_a_term_without_a_value_has_no_potential_in_the_reward():
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(0)).double()
    assert kl_potential(*logits, estimator="minimax01") > 0
    for fields in ({"placement": "reward"}, {"weighting": "attached"}):
        with pytest.raises(ValueError, match="no value"):
            kl_potential(*logits, estimator="minimax01", **fields)


def test_at_one_sampler_the_clipped_objective_has_a_bounded_gradient():
    """Old statement: with A < 0 and a large ratio the gradient has no bound in the ratio."""
    old = numbers(0.05, 0.25, 0.7)
    draws = 6 * torch.randn(20_000, 3, generator=torch.Generator().manual_seed(3)).double()
    policy = torch.cat([draws.softmax(-1), numbers(0.5, 0.5, 0.0).unsqueeze(0)])
    size = []
    for token in range(3):
        score = torch.eye(3).double()[token] - policy
        size.append(policy[:, token] / old[token] * score.norm(dim=-1))
        assert size[-1].max() <= 2**0.5 / 4 / old[token] + EXACT
    assert size[0].max() == pytest.approx(2**0.5 / 4 / 0.05)  # attained, and larger at rarer tokens
    nearly_sure = policy[:, 0] > 1 - 1e-6
    assert nearly_sure.any() and size[0][nearly_sure].max() < 1e-3  # though the ratio is twenty


def test_openrlhf_rloo_charges_less_than_beta():
    """It subtracts the KL after the baseline, which scales the reward alone by G / (G - 1)."""
    rewards, kl, beta = numbers(1, 0, 0, 1, 0), numbers(0.3, 0.9, 0.1, 0.2, 0.0), 0.2
    others = (rewards.sum() - rewards) / 4
    centred = rewards - rewards.mean()
    assert torch.allclose(rewards - others, 1.25 * centred)
    advantage = rewards - others - beta * kl  # in the order of its code
    price = -torch.linalg.lstsq(
        torch.stack([centred, kl, torch.ones(5).double()], -1), advantage.unsqueeze(-1)
    ).solution.flatten()
    assert price[1] / -price[0] == pytest.approx(beta * 4 / 5)


def test_an_advantage_of_zero_has_no_gradient_inside_the_clip_range():
    logp = numbers(-1.0).requires_grad_()
    loss = policy_loss(
        logp, old_logp=logp.detach(), advantages=numbers(0.0), mask=torch.ones(1) > 0
    ).loss
    assert torch.autograd.grad(loss, logp)[0] == 0


def test_a_baseline_beside_a_kl_loss_changes_what_beta_means():
    """One group: centred advantages and leave-one-out's are no longer one step, rescaled."""
    rewards, scores, of_kl = numbers(1, 0, 0), numbers(0.3, -0.8, 0.5), 0.4
    steps = [
        [(weights * scores).sum().item() - beta * of_kl for beta in (0.0, 1.0)]
        for weights in (group_centre(rewards), leave_one_out(rewards))
    ]
    (centred, with_kl), (left_out, left_out_with_kl) = steps
    assert left_out / centred == pytest.approx(3 / 2)
    assert abs(left_out_with_kl / with_kl - 3 / 2) > 0.1
    assert centred - 2 / 3 * of_kl == pytest.approx(left_out_with_kl * 2 / 3)


def test_the_term_of_the_sequence_kind_differs_between_tokens_of_other_advantages():
    logp, old_logp = numbers(-1.0, -2.0), numbers(-1.1, -1.9)
    mask = torch.ones(2) > 0
    terms = [
        policy_loss(
            logp, old_logp=old_logp, advantages=advantages, mask=mask, kind="sequence"
        ).per_token
        for advantages in (numbers(1.0, 1.0), numbers(1.0, 2.0))
    ]
    assert terms[0][0] == terms[0][1]
    assert terms[1][0] != terms[1][1]


def test_a_token_on_which_policy_and_sampler_agree_adds_no_variance_to_the_product():
    policy, old = numbers(0.2, 0.8), numbers(0.5, 0.5)
    of_first = (policy.square() / old).sum()
    for second, grows in ((policy, False), (old, True)):
        moment = of_first * (policy.square() / second).sum()
        assert (moment - of_first > EXACT) == grows


def test_with_an_epsilon_the_division_need_not_amplify():
    rewards = numbers(1, 0)
    size = {eps: group_normalise(rewards, eps=eps)[0] / 0.5 for eps in (0.0, 0.29, 0.3, 0.5)}
    assert size[0.0] == pytest.approx(2**0.5)
    assert size[0.29] > 1 > size[0.3] > size[0.5]
    assert size[0.5] == pytest.approx(0.83, abs=0.005)


def test_with_the_sign_mended_equation_7_still_counts_a_probability_twice():
    """Sampled from the sampler, with the factor of the sampler that eq (7) prints."""
    old, ref = numbers(0.6, 0.3, 0.1), numbers(0.2, 0.3, 0.5)
    score = torch.eye(3).double() - old
    cost = (old / ref).log()
    exact, printed = (((w * cost).unsqueeze(-1) * score).sum(0) for w in (old, old.square()))
    assert (exact - reverse_kl_gradient(old.log(), ref.log())).norm() < EXACT
    assert torch.linalg.matrix_rank(torch.stack([exact, printed]), rtol=1e-3) == 2


def test_source_d_is_credited_with_what_our_copy_says():
    rows = {row.id: row for row in load_ledger(PROJECT)}
    assert "telescope" not in rows["S3-19"].statement
    assert "telescope" in rows["S3-19"].condition
    assert "log" not in rows["S3-25"].statement
    assert "MiniMax-M1" in rows["S3-25"].condition


def test_what_four_docstrings_left_out():
    """Where the sampler cannot draw, at top_p one, at an advantage of zero, at no gradient."""
    tree = enumerate_sequences(2, 1)
    policy, old, returns = numbers(0.5, 0.5), numbers(1.0, 0.0), numbers(0.0, 1.0)
    value = ratio_objective(policy.log().unsqueeze(0), old.log().unsqueeze(0), tree, returns)
    assert value == 0 < (policy * returns).sum()
    assert keep_top(numbers(0.0, -torch.inf), top_p=1.0).all()
    loss = policy_loss(
        numbers(-0.1).requires_grad_(),
        old_logp=numbers(-2.0),
        advantages=numbers(0.0),
        mask=torch.ones(1) > 0,
        kind="cispo",
    )
    assert loss.clipped.all() and loss.loss == 0
    nothing = numbers(0, 0)
    assert relative_error(nothing, nothing).isnan() and relative_error(old, nothing).isinf()


def test_numbered_steps_of_a_derivation_have_no_function():
    functions = {name for name in vars(enumeration) if not name.startswith("_")}
    text = (PROJECT.root / "notebooks" / "02_gradients.ipynb").read_text()
    steps = re.findall(r"\$\$ \(([\w-]+)\)", text)
    assert steps and not functions & set(steps)
    assert {step.partition("-")[0] for step in steps} <= functions


def test_the_kl_in_the_reward_of_a_language_model_is_credited_to_ziegler():
    page = (PROJECT.root / "notebooks" / "08_reward_side.ipynb").read_text()
    cited = re.findall(
        r"ziegler2019finetuning|stiennon2020summarize", page.partition("What is known")[2]
    )
    assert cited == ["ziegler2019finetuning", "stiennon2020summarize"]


def test_backpropagated_without_a_score_term_k3_is_the_forward_kl():
    """As verl distils, and as NeMo-RL's KL was until June 2026: fresh samples, a weight of one."""
    logits, ref = 1.5 * torch.randn(2, 6, generator=torch.Generator().manual_seed(4)).double()
    leaf = logits.clone().requires_grad_()
    logp, ref_logp = leaf.log_softmax(-1), ref.log_softmax(-1)
    live = (logp - logp.detach()).exp()

    def descended(term):
        return torch.autograd.grad(logits.softmax(-1) @ term, leaf, retain_graph=True)[0]

    reverse, forward = reverse_kl_gradient(logits, ref), forward_kl_gradient(logits, ref)
    before = {name: descended(k(logp, ref_logp)) for name, k in (("k2", k2), ("k3", k3))}
    after = {name: descended(live * k(logp, ref_logp)) for name, k in (("k2", k2), ("k3", k3))}
    assert (before["k3"] - forward).norm() < EXACT > (before["k2"] - reverse).norm()
    assert (after["k3"] - reverse).norm() < EXACT < 0.1 < (after["k2"] - reverse).norm()


def test_chapter_2_is_about_sums_over_tokens_that_the_sampler_can_draw():
    """k1 averaged within completions on fresh samples; the prefix ratio where the sampler cuts."""
    tree = enumerate_sequences(2, 3, eos=1)
    policy, ref = torch.randn(
        2, tree.num_states, 2, generator=torch.Generator().manual_seed(6)
    ).double()
    policy.requires_grad_()
    logp, ref_logp = token_logp(policy, tree), token_logp(ref, tree)
    chance, length = logp.sum(-1).exp(), tree.mask.sum(-1).double()

    def slope(value):
        return torch.autograd.grad(value, policy, retain_graph=True)[0]

    by_completion = slope(chance.detach() @ ((logp - ref_logp).sum(-1) / length))
    assert (by_completion * slope(chance @ length)).sum() < -1e-3  # descended, answers grow
    assert slope(chance.detach() @ (logp - ref_logp).sum(-1)).norm() < EXACT
    exact = slope(chance @ (logp - ref_logp).sum(-1))
    for forbidden in (False, True):
        old = policy.detach().clone()
        old[0] = numbers(0.4, -torch.inf if forbidden else -0.4)
        old_logp = token_logp(old, tree)
        drawn = old_logp.sum(-1) > -torch.inf
        prefix = (logp - old_logp)[drawn].cumsum(-1).exp() * tree.mask[drawn]
        mean = old_logp[drawn].sum(-1).exp() @ (prefix * k3(logp, ref_logp)[drawn]).sum(-1)
        assert ((slope(mean) - exact).norm() < EXACT) != forbidden


def test_a_student_right_on_the_teachers_top_k_may_prefer_another_token():
    teacher, student = numbers(0.4, 0.3, 0.2, 0.1), numbers(0.4, 0.02, 0.56, 0.02)
    assert student.argmax() != teacher.argmax()
    for direction in ("reverse", "forward"):
        for correction in ("unnormalised", "tail"):
            how = {"top_k": 1, "direction": direction, "correction": correction}
            assert top_k_divergence(student.log(), teacher.log(), **how).abs() < EXACT
            wrong_there = numbers(0.25, 0.3, 0.25, 0.2)  # of which the student's own top 1 is right
            assert top_k_divergence(wrong_there.log(), teacher.log(), **how) > 1e-2
            own = how | {"support": "policy"}
            assert top_k_divergence(wrong_there.log(), teacher.log(), **own).abs() < EXACT
