"""When the attached prefix loss is the quieter one: own rows, shared rows, and counterexamples."""

from __future__ import annotations

import math

import pytest
import torch

from kl_term.kl.credit import sample_gradients, state_average, tie_states, weighted_moments
from kl_term.kl.full_vocabulary import full_vocabulary_gradients
from kl_term.kl.importance import importance_ratio
from kl_term.kl.prefix import prefix_coefficients
from kl_term.kl.returns import reward_to_go
from kl_term.kl.sequences import enumerate_sequences, sequence_kl, sequence_probability, token_logp
from tests.trees import draw

TIGHT = {"rtol": 1e-10, "atol": 1e-12}


def rows(*probabilities):
    return torch.tensor(probabilities, dtype=torch.float64).log()


class Shared:
    """Policy, reference and sampler whose states share rows of logits, on a tree."""

    def __init__(self, sequences, groups, logits, ref_logits, old_logits):
        self.sequences, self.groups = sequences, groups
        self.policy, self.reference, self.sampler = logits, ref_logits, old_logits
        tables = [x[groups] for x in (logits, ref_logits, old_logits)]
        self.tables = tables
        self.logp, self.ref_logp, self.old_logp = (token_logp(x, sequences) for x in tables)
        self.log_ratio = self.logp - self.ref_logp
        self.probability = sequence_probability(tables[2], sequences)
        self.prefix = importance_ratio(self.logp, self.old_logp, sequences.mask, level="prefix")

    def gradients(self, coefficient):
        """[N, rows * vocab] gradient of each sequence, by the shared rows."""
        each = sample_gradients(self.tables[0], self.sequences, coefficient)
        return tie_states(each, self.groups).flatten(1)

    def variance(self, coefficient):
        return weighted_moments(self.probability, self.gradients(coefficient)).trace_var

    @property
    def reward(self):
        return reward_to_go(self.prefix * self.log_ratio)

    @property
    def k3(self):
        return prefix_coefficients(self.logp, self.ref_logp, self.old_logp, self.sequences.mask)

    @property
    def times(self):
        """Variance of the k3 prefix loss over that of k1 in the reward."""
        return (self.variance(self.k3) / self.variance(self.reward)).item()


def end_or_go_on(length, drift, *, stale=0.0):
    """One row for every state, two tokens: 0 goes on, 1 ends."""
    sequences = enumerate_sequences(2, length, eos=1)
    policy = rows([0.8, 1 - 0.8])
    shift = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    groups = torch.zeros(sequences.num_states, dtype=torch.long)
    return Shared(sequences, groups, policy, policy - drift * shift, policy + stale * shift)


@pytest.mark.parametrize(("length", "times"), [(2, 1.498), (4, 7.82)])
def test_with_shared_parameters_near_the_reference_need_not_be_quieter(length, times):
    """The counterexample to "near the reference k3 is quieter", even in the limit."""
    for drift in (1e-4, -1e-4, 1e-6):
        world = end_or_go_on(length, drift)
        moments = [
            weighted_moments(world.probability, world.gradients(x))
            for x in (world.k3, world.reward)
        ]
        torch.testing.assert_close(moments[0].mean, moments[1].mean, rtol=0, atol=1e-13)
        assert world.times == pytest.approx(times, rel=2e-3)
    assert end_or_go_on(length, 1e-4, stale=0.3).times > 1.3
    # The same policies with a row for every prefix: there it is quieter.
    own = Shared(
        world.sequences,
        torch.arange(world.sequences.num_states),
        *(x.expand(world.sequences.num_states, 2) for x in (world.policy, world.reference)),
        world.policy.expand(world.sequences.num_states, 2),
    )
    assert own.times < 1


def gap_terms(world):
    """Sums [N] of the exact gap, and of its leading order, with shared parameters."""
    mask = world.sequences.mask
    owed = reward_to_go(world.log_ratio)
    action = state_average(owed, world.tables[0], world.sequences, by_action=True)
    to_come = action[world.sequences.states, world.sequences.tokens] - world.log_ratio  # V_{t+1}
    exact = leading = torch.zeros(len(mask), dtype=torch.float64)
    running = torch.zeros(len(mask), world.policy.numel(), dtype=torch.float64)
    for t in range(mask.shape[1]):
        only = torch.zeros_like(owed)
        only[:, t] = mask[:, t].double()
        score = world.gradients(only)
        # The gradient of the KL to come: its sampled gradients, averaged over what follows.
        later = world.gradients(torch.where(torch.arange(mask.shape[1]) > t, owed, 0.0) * mask)
        come = torch.zeros_like(later)
        chance = world.logp.sum(-1).exp()
        for n in range(len(mask)):
            same = (world.sequences.tokens[:, : t + 1] == world.sequences.tokens[n, : t + 1]).all(1)
            same &= mask[:, t]
            if mask[n, t]:
                come[n] = (chance[same, None] * later[same]).sum(0) / chance[same].sum()
        log_ratio, weight = world.log_ratio[:, t], world.prefix[:, t].square() * mask[:, t]
        variate = torch.expm1(-log_ratio)
        paid = (log_ratio + to_come[:, t]).unsqueeze(-1) * (running + score) + come
        square, cross = running.square().sum(-1), (running * score).sum(-1)
        exact = exact + weight * (variate**2 * square + 2 * variate * (running * paid).sum(-1))
        leading = leading - weight * (
            log_ratio**2 * (square + 2 * cross) + 2 * log_ratio * (running * come).sum(-1)
        )
        running = running + score
    return world.probability @ exact, world.probability @ leading


@pytest.mark.parametrize("stale", [0.0, 0.5], ids=["fresh", "stale"])
@pytest.mark.parametrize("shape", [(2, 4, 1), (3, 3, None), (3, 3, 2)])
def test_the_gap_with_shared_parameters(shape, stale):
    """Two terms more than with own rows: later scores in the same rows, and what they pay."""
    vocab, length, eos = shape
    sequences = enumerate_sequences(vocab, length, eos=eos)
    groups = torch.arange(sequences.num_states) % 2
    reference, step, behind = draw(3, 2, vocab, seed=3)
    for size in (1.0, 1e-4):
        policy = reference + size * step
        world = Shared(sequences, groups, policy, reference, policy + stale * behind)
        exact, leading = gap_terms(world)
        difference = world.variance(world.k3) - world.variance(world.reward)
        torch.testing.assert_close(exact, difference, rtol=1e-8, atol=1e-16 if size < 1 else 1e-12)
    assert leading.item() == pytest.approx(exact.item(), rel=5e-3)


@pytest.mark.parametrize(
    ("first", "later", "kl", "times"),
    [(0.105, 0.94, 0.0035, 1.94), (0.1 * math.exp(0.5), None, 0.063, 36.6)],
)
def test_a_small_kl_is_not_near_enough(first, later, kl, times):
    """Own rows: few nats in all, and one token that the reference has six times as often."""
    later = 0.99 * math.exp(-0.5) if later is None else later
    sequences = enumerate_sequences(2, 2)
    policy = rows([0.1, 0.9], [0.99, 0.01], [0.99, 0.01])
    reference = rows([first, 1 - first], [later, 1 - later], [0.99, 0.01])
    world = Shared(sequences, torch.arange(3), policy, reference, policy)
    assert sequence_kl(policy, reference, sequences).item() == pytest.approx(kl, rel=0.03)
    assert world.times == pytest.approx(times, rel=1e-2)


def test_which_tokens_are_near_enough():
    """r < 1 always helps; r > 1 does where (r - 1) / 2 and the KL to come stay below log r."""
    log_ratio = torch.linspace(-3, 3, 601, dtype=torch.float64)
    variate = torch.expm1(-log_ratio)
    for to_come in (0.0, 0.05, 0.5, 3.0):
        bracket = variate.square() + 2 * variate * (log_ratio + to_come)
        assert (bracket[log_ratio > 0.005] < 0).all()
        rarer = log_ratio < -0.005
        helps = variate / 2 + to_come < -log_ratio
        assert torch.equal(bracket[rarer] < 0, helps[rarer])
    assert helps[rarer].sum() == 0  # three nats to come: no token is near enough


def test_the_last_bracket_has_the_mean_of_two_divergences_on_policy_only():
    policy, reference = rows([0.5, 0.3, 0.2], [0.2, 0.3, 0.5])
    log_ratio = policy - reference
    variate = torch.expm1(-log_ratio)
    bracket = variate.square() + 2 * variate * log_ratio
    chi2 = policy.exp() @ variate.square()
    both = (policy.exp() - reference.exp()) @ log_ratio
    torch.testing.assert_close(policy.exp() @ bracket, chi2 - 2 * both, **TIGHT)
    sampler = rows([0.1, 0.45, 0.45])[0]
    stale = (2 * policy - sampler).exp() @ bracket
    assert abs(stale / (chi2 - 2 * both)) > 2


def full_gradients(world, credit):
    each = full_vocabulary_gradients(*world.tables[:2], world.sequences, credit=credit)
    return tie_states(each, world.groups).flatten(1)


def test_the_full_vocabulary_can_be_noisier_with_shared_rows_or_credit_to_go():
    """The counterexample to "the full-vocabulary KL is quieter" (book/corrections.yaml)."""
    world = end_or_go_on(6, 0.01)
    for credit, sampled in (("immediate", world.log_ratio), ("to_go", world.reward)):
        full = weighted_moments(world.probability, full_gradients(world, credit))
        one = weighted_moments(world.probability, world.gradients(sampled))
        torch.testing.assert_close(full.mean, one.mean, **TIGHT)
        assert full.trace_var > 2 * one.trace_var
    e = math.e
    policy = rows([0.1, 0.9], [0.99, 0.01], [0.99, 0.01])
    reference = rows([0.1 * e, 1 - 0.1 * e], [0.99 / e, 1 - 0.99 / e], [0.99, 0.01])
    own = Shared(enumerate_sequences(2, 2), torch.arange(3), policy, reference, policy)
    full = weighted_moments(own.probability, full_gradients(own, "to_go"))
    assert full.trace_var / own.variance(own.reward) == pytest.approx(1.72, rel=0.01)
