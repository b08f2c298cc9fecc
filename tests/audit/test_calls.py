"""How foreign losses are called: lists, groups of a size, packs, rows of a prompt, names."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kl_term.audit import audit
from kl_term.audit.idle_clips import idle_clips
from kl_term.audit.readings import read
from kl_term.errors import UserError

pytestmark = pytest.mark.slow


def codes(loss, **how) -> list[str]:
    """Of findings above a note."""
    return [f.code for f in audit(loss, **how).findings if f.severity != "note"]


def averaged(terms, mask):
    return torch.where(mask.bool(), terms, 0.0).sum() / mask.sum()


# What a list holds -----------------------------------------------------------------------------


def paid_by_answer(scores, logprobs, ref_logprobs, masks, kl_coef):
    """A list with the returns of each answer."""
    paid = []
    for score, logp, ref, mask in zip(scores, logprobs, ref_logprobs, masks, strict=True):
        price = -kl_coef * torch.where(mask.bool(), (logp - ref).detach(), 0.0)
        price[int(mask.nonzero()[-1])] += float(score)
        paid.append(price.flip(0).cumsum(0).flip(0) * mask)
    return paid


def test_a_list_holds_an_entry_an_answer():
    found = audit(paid_by_answer)
    assert found.kind == "reward"
    assert found.minimises["fresh"] == {"state": "reverse KL", "sequence": "reverse KL"}
    assert codes(paid_by_answer) == []


def test_a_list_of_other_things_is_refused():
    with pytest.raises(UserError, match="returns a list"):
        audit(lambda logp, ref_logp: ["loss"])


# Groups ----------------------------------------------------------------------------------------


@dataclass
class Settings:
    answers_per_group: int = 4
    group_size: int = 4
    beta: float = 0.05


def centred(rewards, size, across=False):
    groups = rewards.view(-1, size)
    return (groups - groups.mean(0 if across else 1, keepdim=True)).view(-1, 1)


def of_settings(logp, ref_logp, rewards, mask, config=Settings()):  # noqa: B008
    gain = centred(rewards, config.group_size) * logp
    return averaged(config.beta * 0.5 * (logp - ref_logp) ** 2 - gain, mask)


def in_fours(logp, ref_logp, rewards, mask, beta=0.05):
    gain = centred(rewards, 4) * logp
    return averaged(beta * 0.5 * (logp - ref_logp) ** 2 - gain, mask)


def summed_in_fours(logp, ref_logp, rewards, mask, beta=0.05):
    gain = centred(rewards, 4) * logp
    terms = beta * 0.5 * (logp - ref_logp) ** 2 - gain
    return torch.where(mask.bool(), terms, 0.0).sum()


def of_other_groups(logp, ref_logp, rewards, mask, group_size, beta=0.05):
    gain = centred(rewards, group_size, across=True) * logp
    return averaged(beta * 0.5 * (logp - ref_logp) ** 2 - gain, mask)


def test_a_batch_is_a_group_of_whatever_size_a_configuration_says():
    reading = read(of_settings)
    assert reading.foreign.group_paths == {"config": ["group_size"]}
    assert reading.foreign.multiple == 1


@pytest.mark.parametrize(("loss", "summed"), [(in_fours, False), (summed_in_fours, True)])
def test_a_size_that_nobody_can_say_is_met_by_copies(loss, summed):
    found = audit(loss)
    assert read(loss).foreign.multiple == 4
    assert read(loss).foreign.summed == summed
    assert found.term.name == "k2_loss"
    assert found.scale == pytest.approx(1.0)


def test_an_answer_is_compared_with_its_own_group():
    assert codes(of_other_groups)[0] == "policy-axis"


# One position before ---------------------------------------------------------------------------


def k3(logp, ref_logp):
    return torch.exp(ref_logp - logp) - (ref_logp - logp) - 1


def shorter(logps, ref_logps, labels_mask, advantages, beta=0.1):
    """Log-probs [B, T - 1] beside a mask and advantages [B, T]."""
    mask, worth = labels_mask[:, 1:], advantages[:, 1:]
    return averaged(beta * k3(logps, ref_logps) - logps * worth, mask)


def moved_left(x):
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1)


def of_next(logps, ref_logps, batch, beta=0.1):
    """All that is recorded of a token is moved to where it is predicted."""
    mask = moved_left(batch["loss_mask"])
    ratio = (logps - moved_left(batch["old_logps"])).exp()
    return averaged(beta * k3(logps, ref_logps) - ratio * moved_left(batch["advantages"]), mask)


def of_next_but_the_reference(logps, ref_logps, batch, beta=0.1):
    mask = moved_left(batch["loss_mask"])
    ratio = (logps - moved_left(batch["old_logps"])).exp()
    kl = k3(logps, moved_left(ref_logps))
    return averaged(beta * kl - ratio * moved_left(batch["advantages"]), mask)


@pytest.mark.parametrize("loss", [shorter, of_next])
def test_what_predicts_the_next_token_is_met_where_it_stands(loss):
    found = audit(loss)
    assert found.term.name == "k3_loss"
    assert found.aggregation == "token_mean"
    assert codes(loss) == []


def test_one_that_is_not_moved_with_the_others_is_a_fault():
    assert "shifted-reference" in codes(of_next_but_the_reference)


# Packs -----------------------------------------------------------------------------------------


def in_one_row(logps, ref_logps, advantages, segment_ids, loss_mask, beta=0.1):
    """[1, N], with one advantage an answer."""
    ids, count = segment_ids.squeeze(0), len(advantages)
    terms = beta * 0.5 * (logps - ref_logps).squeeze(0) ** 2 - logps.squeeze(0) * advantages[ids]
    terms = terms * loss_mask.squeeze(0)
    return torch.zeros(count, dtype=terms.dtype).index_add(0, ids, terms).mean()


def test_a_pack_may_have_a_first_axis_and_one_advantage_an_answer():
    layout = read(in_one_row).foreign.layout
    assert layout.one_row
    assert layout.advantages == "column"


# Names -----------------------------------------------------------------------------------------


def unusual(batch, beta):
    gap = batch["p"] - batch["q"]
    return averaged(beta * 0.5 * gap**2, batch["loss_mask"])


def test_names_reach_into_a_batch():
    assert read(unusual, names={"p": "logp", "q": "ref_logp"}).foreign.bag_roles == {
        "p": "logp",
        "q": "ref_logp",
        "loss_mask": "mask",
    }
    with pytest.raises(UserError, match="reads no 'r'"):
        read(unusual, names={"p": "logp", "q": "ref_logp", "r": "mask"})


def optional(logp, ref_logp, mask, reward_buffer=None, beta=0.1):
    if reward_buffer:
        raise AssertionError
    return averaged(beta * 0.5 * (logp - ref_logp) ** 2, mask)


def test_an_optional_argument_that_fails_is_left_alone():
    assert "reward_buffer" not in read(optional).foreign.plan.roles


# Ratios and clips that do nothing --------------------------------------------------------------


def surrogate(clipped, of_sampler):
    def loss(logp, ref_logp, old_logp, advantages, mask, beta=0.1, epsilon=0.2):
        ratio = (logp - (old_logp if of_sampler else logp.detach())).exp()
        worth = advantages.unsqueeze(-1)
        limited = ratio.clamp(1 - epsilon, 1 + epsilon) if clipped else ratio
        gain = torch.min(ratio * worth, limited * worth)
        return averaged(beta * 0.5 * (logp - ref_logp) ** 2 - gain, mask)

    return loss


def test_a_clip_that_changes_nothing_is_named():
    assert idle_clips(read(surrogate(clipped=True, of_sampler=True))) == ()
    assert idle_clips(read(surrogate(clipped=False, of_sampler=True))) == ("epsilon",)
    assert codes(surrogate(clipped=False, of_sampler=True)) == ["policy-clip"]


class Held:
    def __init__(self, beta=0.1, epsilon=0.2):
        self.beta, self.epsilon = beta, epsilon

    def __call__(self, logp, ref_logp, old_logp, advantages, mask):
        loss = surrogate(clipped=False, of_sampler=True)
        return loss(logp, ref_logp, old_logp, advantages, mask, self.beta, self.epsilon)


def test_a_clip_is_found_where_the_object_holds_it():
    assert idle_clips(read(Held())) == ("self.epsilon",)


def test_a_ratio_to_itself_is_none_to_the_sampler():
    assert codes(surrogate(clipped=True, of_sampler=False)) == ["policy-ratio"]


def test_a_loss_without_a_kl_is_told_so():
    def loss(logp, old_logp, advantages, mask):
        gain = (logp - old_logp).exp() * advantages.unsqueeze(-1)
        return averaged(-gain, mask)

    assert codes(loss) == []
    assert "no-kl" in [finding.code for finding in audit(loss).findings]


# Temperatures and sizes ------------------------------------------------------------------------


@dataclass
class Cold:
    temperature: float = 0.5
    kl_coef: float = 0.1


def distilled(batch, config, alike):
    logp = (batch["logits"] / config.temperature).log_softmax(-1)
    ref = (batch["ref_logits"] / (config.temperature if alike else 1.0)).log_softmax(-1)
    chosen = logp.gather(-1, batch["actions"].unsqueeze(-1)).squeeze(-1)
    gain = (chosen - batch["old_logprobs"]).exp() * batch["advantages"]
    kl = (logp.exp() * (logp - ref)).sum(-1)
    return averaged(config.kl_coef * kl - gain, batch["mask"])


def both_cold(batch, config=Cold()):  # noqa: B008
    return distilled(batch, config, alike=True)


def one_cold(batch, config=Cold()):  # noqa: B008
    return distilled(batch, config, alike=False)


def test_a_temperature_on_one_side_is_found_inside_a_batch():
    assert codes(one_cold) == ["not-zero-at-reference"]
    assert codes(both_cold) == []


def test_a_divergence_as_good_as_none_is_a_matter_of_scale():
    def loss(logits, ref_logits, mask, beta=1.0):
        p, r = logits.log_softmax(-1), ref_logits.log_softmax(-1)
        share = torch.tensor(2e-3).double().log()
        middle = torch.logaddexp(p, r + share) - torch.log1p(share.exp())
        return beta * averaged((p.exp() * (p - middle)).sum(-1), mask)

    assert codes(loss) == ["scale"]


def test_what_is_compiled_runs_as_it_was_written():
    """Compiled once more for each type and shape, an audit of a second took a minute."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    def loss(logp, ref_logp):
        return 0.5 * (logp - ref_logp) ** 2

    assert audit(torch.compile(loss, backend=backend)).to_dict()["term"] == "k2_loss"
    assert not compiled
