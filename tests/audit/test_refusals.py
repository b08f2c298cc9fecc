"""What cannot be audited is refused in one line that names it."""

from __future__ import annotations

import itertools

import pytest
import torch

from kl_term.audit import audit
from kl_term.audit.readings import read
from kl_term.errors import UserError


def k2(logp, ref_logp):
    return 0.5 * (logp - ref_logp) ** 2


def draws(logp, ref_logp):
    return k2(logp, ref_logp) * torch.rand(())


CALLS = itertools.count()


def remembers(logp, ref_logp):
    return k2(logp, ref_logp) * (1 + next(CALLS))


def needs_cuda(logp, ref_logp):
    return k2(logp, ref_logp).to("cuda")


def is_nan(logp, ref_logp):
    return k2(logp, ref_logp) * torch.nan


def counts(logp, ref_logp):
    return (logp > ref_logp).sum()


def lists(logp, ref_logp):
    return k2(logp, ref_logp).tolist()


def nothing(logp, ref_logp):
    k2(logp, ref_logp)


def unknown(logp, ref_logp, frobnication):
    return k2(logp, ref_logp) * frobnication


def calls_a_model(policy_model, input_ids, ref_logp):
    return k2(policy_model(input_ids).logits, ref_logp)


def calls_a_policy(policy, ref_logp):
    return k2(policy(ref_logp), ref_logp)


def of_pairs(policy_w_logps, policy_l_logps, ref_w_logps, ref_l_logps, beta=0.1):
    gap = (policy_w_logps - policy_l_logps) - (ref_w_logps - ref_l_logps)
    return torch.nn.functional.softplus(-beta * gap)


class Loss(torch.nn.Module):
    __name__ = "Loss"

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(2, 2)

    def forward(self, hidden, ref_logp):
        return k2(self.head(hidden).log_softmax(-1), ref_logp)


def without_policy(ref_logp, mask):
    return (ref_logp * mask).sum()


def raises(logp, ref_logp):
    raise NotImplementedError("one day")


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (draws, "draws random numbers"),
        (remembers, "keeps state"),
        (needs_cuda, "needs CUDA"),
        (is_nan, "returns nan"),
        (counts, "returns integers"),
        (lists, "returns a list"),
        (nothing, "returns nothing"),
        (unknown, "cannot tell what argument 'frobnication' is"),
        (calls_a_model, "takes a model ('policy_model')"),
        (calls_a_policy, "calls an argument as one calls a model"),
        (of_pairs, "two arguments look like the policy's log-probs"),
        (Loss, "is a class: pass an object of it"),
        (Loss(), "is a module with weights"),
        (without_policy, "no argument is the log-probs of the policy"),
        (raises, "cannot be called: NotImplementedError: one day"),
    ],
)
def test_a_refusal_is_one_line_that_names_it(loss, says):
    with pytest.raises(UserError) as refusal:
        read(loss)
    assert says in str(refusal.value)
    assert loss.__name__ in str(refusal.value)
    assert "\n" not in str(refusal.value)


def codes(loss, **how):
    return {finding.code: finding.severity for finding in audit(loss, **how).findings}


def test_a_loss_that_modifies_its_arguments_is_told_so():
    def in_place(logp, ref_logp):
        return k2(logp.clamp_(max=-1e-3), ref_logp)

    assert codes(in_place)["modifies-arguments"] == "warning"


def test_a_beta_that_does_not_act_is_an_error():
    def ignored(logp, ref_logp, beta):
        return k2(logp, ref_logp)

    assert codes(ignored)["beta-does-nothing"] == "error"


def test_no_gradient_is_an_error_and_minimises_nothing():
    found = audit(lambda logp, ref_logp: k2(logp.detach(), ref_logp))
    assert found.findings[0].code == "no-gradient"
    assert found.term is None
    assert {name for of in found.minimises.values() for name in of.values()} == {"nothing"}


def test_the_generator_of_the_caller_is_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    audit(k2)
    assert torch.equal(torch.rand(2), expected)


def test_numbers_with_a_default_are_left_alone_but_for_the_coefficient():
    def loss(logp, ref_logp, kd_ratio=0.5, temperature=1.0):
        return kd_ratio * k2(logp, ref_logp / temperature)

    plan = read(loss).foreign.plan
    assert plan.roles == {"logp": "logp", "ref_logp": "ref_logp", "kd_ratio": "beta"}
