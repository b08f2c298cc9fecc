"""The policy loss beside a KL, whom a reward reaches, and where a coefficient is found."""

from __future__ import annotations

import functools

import pytest
import torch

from kl_term.audit import audit
from kl_term.audit.policy_part import policy_part
from kl_term.audit.policy_rules import _of_weights
from kl_term.audit.policy_weights import PolicyWeights, policy_weights
from kl_term.audit.readings import read

pytestmark = pytest.mark.slow


def averaged(per_token, mask):
    return torch.where(mask.bool(), per_token, 0.0).sum() / mask.sum()


def beside_k2(surrogate):
    """A loss of k2 and of minus a surrogate of ratio, advantage and log-prob."""

    def loss(logp, old_logp, ref_logp, advantages, mask, beta=0.1):
        gain = surrogate((logp - old_logp).exp(), advantages.unsqueeze(-1), logp)
        return averaged(beta * 0.5 * (logp - ref_logp) ** 2 - gain, mask)

    return read(loss)


def simple_policy(ratio, worth, logp):
    """Its slope falls with the distance, for either sign in its own way."""
    return ratio * worth - worth.abs() * (ratio - 1) ** 2 / 0.4


#: Surrogate -> the power of the ratio, the gradients by probability and by size of the advantage.
RIGHT = {
    "grpo": (lambda r, a, p: torch.min(r * a, r.clamp(0.8, 1.2) * a), 1.0),
    "reinforce": (lambda r, a, p: p * a, 0.0),
    "cispo": (lambda r, a, p: r.clamp(max=1.28).detach() * a * p, 1.0),
    "only positive": (lambda r, a, p: p * a.clamp(min=0), 0.0),
    "capped at one": (lambda r, a, p: r.clamp(max=1.0).detach() * a * p, None),
    "simple policy": (simple_policy, None),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_surrogate_has_one_weight_whatever_the_token(name):
    surrogate, power = RIGHT[name]
    found = policy_weights(beside_k2(surrogate))
    assert found.power == (None if power is None else pytest.approx(power, abs=0.02))
    assert found.by_probability == pytest.approx(1.0, abs=1e-6)
    assert found.by_size == pytest.approx(2.0, abs=1e-6)
    assert [*_of_weights(found)] == []


@pytest.mark.parametrize(
    ("surrogate", "power", "code"),
    [
        (lambda r, a, p: r * r.clamp(max=2.0) * a, 2.0, "policy-ratio"),
        (lambda r, a, p: r.sqrt() * a, 0.5, "policy-ratio"),
        (lambda r, a, p: p.exp() * a, 0.0, "policy-weight"),
        (lambda r, a, p: r * p * a, 1.0, "policy-weight"),
        (lambda r, a, p: r * a * a.abs(), 1.0, "policy-weight"),
        (lambda r, a, p: r * a.abs(), 1.0, "policy-sign"),
    ],
)
def test_a_wrong_one_is_told_by_how_it_goes(surrogate, power, code):
    found = policy_weights(beside_k2(surrogate))
    assert found.power == pytest.approx(power, abs=0.05)
    assert [finding.code for finding in _of_weights(found)] == [code]


def test_the_probability_of_a_token_is_told_exactly():
    """Of tokens at -0.4 and -3 nats: a weight of the token's own probability, e to 2.6."""
    found = policy_weights(beside_k2(lambda r, a, p: p.exp() * a))
    assert found.by_probability == pytest.approx(torch.tensor(2.6).double().exp().item())
    assert PolicyWeights().by_probability is None


def test_a_weight_that_reads_probabilities_is_a_warning_of_the_audit():
    def loss(logp, old_logp, ref_logp, advantages, mask, beta=0.1):
        gain = logp.exp() * advantages.unsqueeze(-1)
        return averaged(beta * 0.5 * (logp - ref_logp) ** 2 - gain, mask)

    (found,) = [f for f in audit(loss).findings if f.severity != "note"]
    assert found.code == "policy-weight"


@pytest.mark.parametrize(
    ("surrogate", "sized"),
    [
        (lambda r, a, p: torch.min(r * a, r.clamp(0.8, 1.2) * a), False),
        (lambda r, a, p: torch.min(r * a, r.clamp(1 - 3e-4, 1 + 4e-4) * a), False),
        (lambda r, a, p: torch.min(r * a, (r * a).clamp(0.8, 1.2)), True),
    ],
)
def test_a_clip_of_the_product_moves_with_the_advantage(surrogate, sized):
    assert policy_part(beside_k2(surrogate)).sized_clip is sized


def test_a_clip_that_leaves_out_the_ratio_of_one():
    def loss(logp, old_logp, ref_logp, advantages, mask, beta=0.1):
        ratio, worth = (logp - old_logp).exp(), advantages.unsqueeze(-1)
        gain = torch.min(ratio * worth, ratio.clamp(-0.2, 0.2) * worth)
        return averaged(beta * 0.5 * (logp - ref_logp) ** 2 - gain, mask)

    (found,) = [f for f in audit(loss).findings if f.severity != "note"]
    assert (found.code, "at the ratio of one" in found.says) == ("policy-clip", True)


def by_branch(logp, old_logp, ref_logp, advantages, mask, beta=0.1):
    ratio = (logp - (ref_logp if beta else old_logp)).exp()
    return averaged(beta * 0.5 * (logp - ref_logp) ** 2 - ratio * advantages.unsqueeze(-1), mask)


def without_branch(logp, old_logp, ref_logp, advantages, mask, beta=0.1):
    ratio = (logp - old_logp).exp()
    penalty = beta * 0.5 * (logp - ref_logp) ** 2 if beta else 0.0
    return averaged(penalty - ratio * advantages.unsqueeze(-1), mask)


def test_the_policy_loss_is_read_where_the_coefficient_is_on():
    assert policy_part(read(by_branch)).kind == "ratio to the reference"
    assert read(by_branch).switches
    assert policy_part(read(without_branch)).kind == "grpo"
    assert not read(without_branch).switches


def with_price(pay):
    def shaped(rewards, logprobs, ref_logprobs, mask, kl_coef=0.1):
        owed = kl_coef * torch.where(mask, logprobs - ref_logprobs, 0.0)
        return torch.where(mask, pay(rewards.unsqueeze(-1), mask) - owed, 0.0)

    return read(shaped)


def at(position):
    return lambda rewards, mask: rewards * (torch.arange(mask.shape[1]) == position)


def at_last(rewards, mask):
    return rewards * (torch.arange(mask.shape[1]) == mask.sum(-1, keepdim=True) - 1)


@pytest.mark.parametrize(
    ("pay", "unpaid", "early"),
    [
        (at_last, 0, False),
        (lambda rewards, mask: rewards.clamp(-1, 1) * at_last(1.0, mask), 0, False),
        (lambda rewards, mask: rewards.expand(mask.shape), 0, False),
        (at(0), 0, True),
        (at(3), 2, False),  # the last column, which one answer of three reaches
        (lambda rewards, mask: rewards * ~mask, 3, False),
    ],
)
def test_whom_a_reward_reaches(pay, unpaid, early):
    found = with_price(pay)
    assert found.kind == "reward"
    assert (len(found.payment.unpaid), found.payment.early) == (unpaid, early)


def test_a_price_by_logits_is_read_by_tokens():
    def shaped(rewards, logits, ref_logits, mask, kl_coef=0.1):
        gap = logits.log_softmax(-1) - ref_logits.log_softmax(-1)
        price = (logits.softmax(-1) * gap).sum(-1).detach()
        return (rewards.unsqueeze(-1) - kl_coef * price) * mask

    found = audit(shaped)
    assert found.kind == "reward"
    assert found.findings[0].code == "minimises-nothing"


def test_the_only_log_probs_are_those_of_the_policy():
    """Whatever they are called, unless a function pays rewards: there the sampler's are meant."""

    def loss(gen_log_probs, ref_log_probs, mask, kl_coef=0.1):
        return kl_coef * averaged(0.5 * (gen_log_probs - ref_log_probs) ** 2, mask)

    def shaped(rewards, gen_log_probs, ref_log_probs, mask, kl_coef=0.1):
        owed = torch.where(mask, gen_log_probs - ref_log_probs, 0.0)
        return rewards - kl_coef * owed.sum(-1)

    def role(function) -> str:
        return read(function).foreign.plan.guessed["gen_log_probs"]

    assert (role(loss), role(shaped)) == ("logp", "old_logp")


@pytest.mark.parametrize("counted", [True, False])
def test_a_padding_mask_is_settled_where_nothing_has_a_gradient(counted):
    def shaped(rewards, logprobs, ref_logprobs, padding_mask, kl_coef=0.1):
        mask = padding_mask.bool() if counted else ~padding_mask.bool()
        owed = torch.where(mask, logprobs - ref_logprobs, 0.0).detach()
        return (at_last(rewards.unsqueeze(-1), mask) - kl_coef * owed) * mask

    found = read(shaped)
    assert found.foreign.plan.roles["padding_mask"] == ("mask" if counted else "padding")
    assert (found.kind, found.payment.unpaid) == ("reward", ())


class Holds:
    """A loss with its coefficient inside."""

    def __init__(self, kl_coeff=0.1):
        self.kl_coeff = kl_coeff

    def __call__(self, logp, ref_logp, mask):
        return self.kl_coeff * averaged(0.5 * (logp - ref_logp) ** 2, mask)

    def step(self, logp, old_logp, ref_logp, advantages, mask):
        ratio = (logp - old_logp).exp()
        return self(logp, ref_logp, mask) - averaged(ratio * advantages.unsqueeze(-1), mask)


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.beta = 0.04

    def forward(self, logp, ref_logp, mask):
        return self.beta * averaged(0.5 * (logp - ref_logp) ** 2, mask)


@pytest.mark.parametrize("loss", [Holds(), Holds().step, Module()])
def test_an_object_has_its_own_coefficient_set_on_a_copy(loss):
    found = audit(loss)
    held = getattr(loss, "__self__", loss)
    assert getattr(held, "kl_coeff", None) == 0.1 or held.beta == 0.04
    assert (found.term.name, found.scale) == ("k2_loss", pytest.approx(1.0))
    assert "beta" in found.guessed.values()


def test_a_coefficient_inside_a_whole_loss_is_no_wrong_scale():
    """Of the bare KL it is: a squared difference, without its half, is twice k2."""

    def whole(logp, old_logp, ref_logp, advantages, mask):
        return without_branch(logp, old_logp, ref_logp, advantages, mask, 0.04)

    def bare(logp, ref_logp, mask):
        return averaged((logp - ref_logp) ** 2, mask)

    def severity(loss, **how) -> str:
        return next(f.severity for f in audit(loss, **how).findings if f.code == "scale")

    assert (severity(whole), severity(bare)) == ("note", "warning")
    assert severity(whole, beta=0.1) == "warning"


def distilled(student_logits, teacher_logits, mask, kd_coef=1.0, temperature=2.0, both=True):
    student = (student_logits / temperature).log_softmax(-1)
    teacher = (teacher_logits / (temperature if both else 1.0)).log_softmax(-1).detach()
    kl = torch.nn.functional.kl_div(student, teacher, log_target=True, reduction="none")
    return kd_coef * temperature**2 * averaged(kl.sum(-1), mask)


def test_a_default_temperature_is_read_at_one_unless_it_is_on_one_side():
    found = audit(distilled)
    assert found.minimises["fresh"]["state"] == "forward KL"
    assert "tempered" in [f.code for f in found.findings]
    one_sided = functools.partial(distilled, both=False)
    assert audit(one_sided).findings[0].code == "not-zero-at-reference"


@pytest.mark.parametrize(("weight", "codes"), [(0.5, []), (1.0, []), (0.25, ["scale"])])
def test_weights_of_two_kls_add_up(weight, codes):
    def symmetric(logits, ref_logits, mask, beta=0.1):
        policy, reference = logits.log_softmax(-1), ref_logits.log_softmax(-1).detach()
        gap = (policy.exp() - reference.exp()) * (policy - reference)
        return beta * averaged(weight * gap.sum(-1), mask)

    found = audit(symmetric)
    assert found.minimises["fresh"]["state"] == "reverse + forward"
    assert [f.code for f in found.findings if f.severity != "note"] == codes


def test_a_sequence_ratio_is_not_compared_with_how_the_kl_is_summed():
    def loss(logp, old_logp, ref_logp, advantages, mask, beta=0.1):
        ratio = torch.where(mask, logp - old_logp, 0.0).sum(-1).exp()
        kl = torch.where(mask, 0.5 * (logp - ref_logp) ** 2, 0.0).sum(-1)
        return (beta * kl - ratio * advantages).mean()

    found = audit(loss)
    assert (found.policy.kind, found.aggregation) == ("sequence", "seq_mean_token_sum")
    assert [f.code for f in found.findings if f.severity != "note"] == []


def test_a_batch_of_everything_is_paid_too():
    def shaped(data, kl_coef=0.1):
        mask = data["response_mask"]
        owed = torch.where(mask, data["old_log_probs"] - data["ref_log_prob"], 0.0)
        return at_last(data["rewards"].unsqueeze(-1), mask) - kl_coef * owed

    found = audit(shaped)
    assert (found.kind, found.term.name) == ("reward", "k1_reward")
    assert [f.code for f in found.findings if f.severity != "note"] == []


def test_the_token_of_a_state_may_be_the_one_left_out():
    """Nothing is said of states then: it is the first token that has no KL, not the KL."""

    def loss(logp, ref_logp, mask, beta=0.1):
        return beta * averaged(0.5 * (logp[:, 1:] - ref_logp[:, 1:]) ** 2, mask[:, 1:])

    assert [f.code for f in audit(loss).findings if f.severity != "note"] == ["tokens-left-out"]


def test_a_divisor_that_the_kl_has_not_is_a_price():
    def of(divisor, kl_divisor):
        def loss(logp, old_logp, ref_logp, advantages, mask, beta=0.1):
            gain = averaged((logp - old_logp).exp() * advantages.unsqueeze(-1), mask)
            return beta * averaged(0.5 * (logp - ref_logp) ** 2, mask) / kl_divisor - gain / divisor

        return [(f.code, f.severity) for f in audit(loss).findings if f.code == "scale"]

    assert of(1, 1) == []
    assert of(4, 4) == [("scale", "note")]
    assert of(4, 1) == of(1, 4) == [("scale", "warning")]


def whitened(logp, old_logp, ref_logp, advantages, mask, beta=0.1):
    """Over the counted tokens of the batch; the ratio is not bounded."""
    mean = averaged(advantages, mask)
    spread = averaged((advantages - mean) ** 2, mask)
    worth = (advantages - mean) * torch.rsqrt(spread + 1e-8)
    gain = (logp - old_logp).exp() * worth
    return averaged(beta * 0.5 * (logp - ref_logp) ** 2 - gain, mask)


def rolled(logp, old_logp, ref_logp, advantages, mask, beta=0.1):
    gain = (logp - old_logp).exp() * advantages.roll(1, 0).unsqueeze(-1)
    return averaged(beta * 0.5 * (logp - ref_logp) ** 2 - gain, mask)


def test_whitened_advantages_are_read_by_no_wrong_axis():
    assert [f.code for f in audit(whitened).findings if f.severity != "note"] == []
    assert policy_part(read(rolled)).reads_other_advantages
