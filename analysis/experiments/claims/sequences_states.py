"""Claims on exact sums: the vocabulary, the sequences, and the states they visit."""

from __future__ import annotations

import torch
from torch import Tensor

from analysis.experiments.chapters.gradients import drifted_logits, random_tables
from analysis.experiments.chapters.sequences import EXACT, SPREAD, flat_error, quantile
from analysis.experiments.claims import Finding, decides, settle
from analysis.kl.credit import credit_moments, last_token_groups, weighted_moments
from analysis.kl.enumeration import reverse_kl_gradient
from analysis.kl.full_vocabulary import full_vocabulary_gradients, markov_kl, visited_kl
from analysis.kl.sequences import (
    enumerate_sequences,
    sequence_kl,
    sequence_kl_gradient,
    sequence_probability,
    state_visits,
    token_logp,
    visited_kl_gradient,
)


@decides("S4-14")
def full_vocabulary() -> Finding:
    """The full-vocabulary loss at one state, over sequences, at stale states, and as printed."""
    sequences = enumerate_sequences(3, 4, eos=2)
    tables = random_tables(sequences, 3, 20, spread=SPREAD, seed=31)
    state_error, visited, printed, sequence_error = [], [], [], []
    noise, noise_sampled, stale = [], [], []
    for seed, (logits, ref) in enumerate(zip(*tables, strict=True)):
        leaf = logits.clone().requires_grad_(True)
        log_ratio = leaf.log_softmax(-1) - ref.log_softmax(-1)
        (by_autograd,) = torch.autograd.grad((leaf.softmax(-1) * log_ratio).sum(), leaf)
        state_error.append(flat_error(reverse_kl_gradient(logits, ref), by_autograd))
        old = drifted_logits(logits, torch.tensor([0.3]), seed=seed)[0]
        printed.append(flat_error(_printed_gradient(logits, ref, old), by_autograd))
        probability = sequence_probability(logits, sequences)
        full = weighted_moments(probability, full_vocabulary_gradients(logits, ref, sequences))
        costs = token_logp(logits, sequences) - token_logp(ref, sequences)
        sampled = credit_moments(logits, sequences, costs)
        sequence_error.append(flat_error(full.mean, sequence_kl_gradient(logits, ref, sequences)))
        noise.append((full.trace_var / full.mean.square().sum()).item())
        noise_sampled.append((sampled.trace_var / full.mean.square().sum()).item())
        visited.append(flat_error(full.mean, visited_kl_gradient(logits, ref, sequences)))
        at_stale_states = visited_kl_gradient(logits, ref, sequences, old)
        stale.append(flat_error(at_stale_states, full.mean))
    figures = {
        "state_error": max(state_error),
        "visited_error": max(visited),
        "printed_stale_error": quantile(printed),
        "sequence_error": quantile(sequence_error),
        "stale_states_error": quantile(stale),
        "noise": quantile(noise),
        "noise_sampled": quantile(noise_sampled),
    }
    one_state = max(figures["state_error"], figures["visited_error"]) < EXACT
    everything = max(figures[k] for k in figures if k != "noise_sampled") < EXACT
    return Finding(settle(everything, one_state), figures)


def _printed_gradient(logits: Tensor, ref: Tensor, old: Tensor) -> Tensor:
    """Equation 22 as printed: the sampler's probabilities and log-ratio, the policy's score."""
    old_logp = old.log_softmax(-1)
    weight = old_logp.exp() * (old_logp - ref.log_softmax(-1))
    return weight - logits.softmax(-1) * weight.sum(-1, keepdim=True)


@decides("S1-14")
def exact_kl_of_sequences() -> Finding:
    """Sequence KL over sequences, prefixes and Markov states, and the variance that is left."""
    sequences = enumerate_sequences(3, 5)
    groups = last_token_groups(sequences, 3)
    generator = torch.Generator().manual_seed(41)
    prefix_error, markov_error, sampled_error, variance_left = [], [], [], []
    for _ in range(10):
        shared, shared_ref = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)
        logits, ref = shared[groups], shared_ref[groups]
        exact = sequence_kl(logits, ref, sequences)
        probability = sequence_probability(logits, sequences)
        full = visited_kl(logits, ref, sequences).sum(-1)
        k1 = (token_logp(logits, sequences) - token_logp(ref, sequences)).sum(-1)
        prefix_error.append((probability @ full - exact).abs().item())
        sampled_error.append((probability @ k1 - exact).abs().item())
        markov_error.append((markov_kl(shared, shared_ref, 5) - exact).abs().item())
        left = probability @ (full - exact).square() / (probability @ (k1 - exact).square())
        variance_left.append(left.item())
    figures = {
        "prefix_error": max(prefix_error),
        "sampled_error": max(sampled_error),
        "markov_error": max(markov_error),
        "variance_left": quantile(variance_left),
        "prefixes": float(sequences.num_states),
        "markov_states": float(len(shared)),
    }
    sampling_works = figures["sampled_error"] < EXACT
    computed_exactly = max(figures["prefix_error"], figures["markov_error"]) < EXACT
    return Finding(settle(sampling_works and not computed_exactly, sampling_works), figures)


@decides("S4-3")
def state_distribution() -> Finding:
    """Total mass of the printed state distribution, and the actions drawn as printed."""
    sequences = enumerate_sequences(3, 4, eos=2)
    logits = random_tables(sequences, 3, 1, spread=SPREAD, seed=51).logits[0]
    visits = state_visits(logits, sequences)
    mean_length = sequence_probability(logits, sequences) @ sequences.mask.double().sum(-1)
    policy = logits.softmax(-1)
    distance = (policy - policy[0]).abs().sum(-1) / 2  # pi(.|s) against pi(.|x), x the empty prefix
    action_distance = (visits @ distance / visits.sum()).item()
    figures = {
        "mass": visits.sum().item(),
        "mean_length": mean_length.item(),
        "length_error": (visits.sum() - mean_length).abs().item(),
        "action_distance": action_distance,
    }
    is_distribution = abs(figures["mass"] - 1) < EXACT
    return Finding(settle(is_distribution and action_distance < EXACT, is_distribution), figures)
