"""Claims about DPO and the KL-regularised optimum behind it."""

from __future__ import annotations

import itertools

import torch

from analysis.experiments.chapters import preference as study
from analysis.experiments.claims import Finding, decides, settle
from analysis.experiments.claims.recorded import difference, recorded
from analysis.kl.divergences import reverse_kl
from analysis.kl.fixed_points import reverse_kl_optimum
from analysis.objectives.mirror_descent import log_partition, mirror_descent_loss
from analysis.objectives.preference import dpo_gradient_weight, dpo_loss, implicit_reward

EXACT = 1e-12


@decides("S4-41")
def regularised_optimum() -> Finding:
    """2000 random policies against the identity; the optimum; Bradley and Terry's odds."""
    problem = study.random_preferences(8, beta=0.5, seed=0)
    generator = torch.Generator().manual_seed(1)
    policies = (2 * torch.randn(2000, 8, generator=generator, dtype=torch.float64)).log_softmax(-1)
    reference, optimum = problem.ref_logp.expand_as(policies), problem.optimum
    value = (policies.exp() * problem.rewards).sum(-1) - problem.beta * reverse_kl(
        policies, reference
    )
    normaliser = log_partition(problem.rewards, problem.ref_logp, tau=problem.beta)
    identity = -problem.beta * reverse_kl(policies, optimum.expand_as(policies)) + normaliser
    implied = implicit_reward(optimum, problem.ref_logp, beta=problem.beta)
    odds = (implied[:, None] - implied[None, :]).sigmoid()
    figures = {
        "identity_error": (value - identity).abs().max().item(),
        "smallest_loss": (study.objective(optimum, problem) - value).min().item(),
        "reward_error": (implied + normaliser - problem.rewards).abs().max().item(),
        "odds_error": (odds - study.bradley_terry(problem.rewards)).abs().max().item(),
        "flipped_identity_error": (value + identity).abs().max().item(),
    }
    errors = max(figures[k] for k in ("identity_error", "reward_error", "odds_error"))
    holds = errors < EXACT and figures["smallest_loss"] > 0
    return Finding(settle(holds, False), figures)


@decides("S4-43")
def dpo_loss_and_gradient() -> Finding:
    """Autograd through the loss against the printed gradient, by the logits of 200 policies."""
    generator = torch.Generator().manual_seed(0)
    logits, ref_logits = torch.randn(2, 200, 6, generator=generator, dtype=torch.float64)
    ref_logp, beta = ref_logits.log_softmax(-1), 0.3

    def pair(z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logp = z.log_softmax(-1)
        return logp[:, 0], logp[:, 1], ref_logp[:, 0], ref_logp[:, 1]

    by_autograd = study.gradient_of(lambda z: dpo_loss(*pair(z), beta=beta).sum(), logits)
    policy, basis = logits.softmax(-1), torch.eye(6, dtype=torch.float64)
    scores = [basis[i] - policy for i in (0, 1)]
    weight = dpo_gradient_weight(*pair(logits), beta=beta).unsqueeze(-1)
    printed = -weight * (scores[0] - scores[1])
    margin = beta * ((logits - ref_logits)[:, 0] - (logits - ref_logits)[:, 1])
    value = torch.log1p((-margin).exp())
    figures = {
        "value_error": (dpo_loss(*pair(logits), beta=beta) - value).abs().max().item(),
        "gradient_error": (by_autograd - printed).abs().max().item(),
        "flipped_error": (by_autograd + printed).abs().max().item(),
    }
    exact = max(figures["value_error"], figures["gradient_error"]) < EXACT
    return Finding(settle(exact, False), figures)


@decides("S4-44")
def dpo_needs_no_samples_of_the_policy() -> Finding:
    """Minimiser of the population loss under six pair distributions; few parameters; few pairs."""
    problem = study.random_preferences(6, beta=0.5, seed=0)
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(6, 2, generator=generator, dtype=torch.float64)
    table = study.data_table(problem, features).set_index("pairs")
    connected = table.drop("two islands")
    figures = {
        "largest_kl_connected": connected.kl.max(),
        "kl_two_islands": table.kl["two islands"],
        "limited_objective_reference": table.objective_limited["the reference's samples"],
        "limited_objective_avoided": table.objective_limited["what the reference avoids"],
        "limited_objective_optimum": table.objective_limited["the optimum's own samples"],
    }
    names = {"near": "the optimum's own samples", "far": "what the reference avoids"}
    data = study.finite_data_curves(problem, [2000], names=names.values(), seeds=5)
    data = data.set_index("pairs")["median"]
    figures |= {f"kl_2000_pairs_{key}": data[name] for key, name in names.items()}
    needed = figures["largest_kl_connected"] > EXACT
    return Finding(settle(needed, False), figures)


@decides("S3-26")
def mirror_descent_step() -> Finding:
    """The surrogate's zero and gradient, enumerated; the step's length; the mean as a stand-in; and
    recorded runs against GRPO, four steps on each rollout."""
    problem = study.random_preferences(6, beta=0.5, seed=3)
    start, rewards = problem.ref_logp, problem.rewards
    policy = start.exp()

    def loss(logits: torch.Tensor, baseline: torch.Tensor, tau: float) -> torch.Tensor:
        per_sample = mirror_descent_loss(
            logits.log_softmax(-1), start, rewards, baseline.expand_as(rewards), tau=tau
        )
        return policy @ per_sample

    tau = 0.5
    baseline = log_partition(rewards, start, tau=tau)
    optimum = reverse_kl_optimum(rewards, start, beta=tau)
    at_start = study.gradient_of(lambda z: loss(z, baseline, tau), start)
    exact = policy * (rewards - policy @ rewards)
    mean = policy @ rewards
    lengths = [
        reverse_kl(reverse_kl_optimum(rewards, start, beta=t), start).item()
        for t in (0.25, 0.5, 1.0, 2.0)
    ]
    figures = {
        "loss_at_optimum": loss(optimum, baseline, tau).item(),
        "gradient_error": (at_start + 2 * tau * exact).abs().max().item(),
        "step_kl_tau_025": lengths[0],
        "step_kl_tau_2": lengths[-1],
        "mean_stand_in_gradient": study.gradient_of(lambda z: loss(z, mean, tau), optimum)
        .norm()
        .item(),
    }
    finals = recorded("objectives").finals
    for metric in ("accuracy", "reverse_kl"):
        gain = difference(finals, "mirror_descent", "grpo", metric)
        figures |= gain.figures(f"trained_{metric}")
    identities = max(figures["loss_at_optimum"], figures["gradient_error"]) < EXACT
    conservative = all(a > b for a, b in itertools.pairwise(lengths))
    return Finding(settle(identities and conservative, identities), figures)


@decides("S4-xa")
def chosen_and_rejected_fall_together() -> Finding:
    """Gradient descent on one pair, the same data throughout, with and without a bystander."""
    paths = {
        overlap: study.pair_path(study.bystander(overlap), beta=0.5, rate=0.5, steps=60)
        for overlap in (0.0, 2.0)
    }
    figures = {
        "chosen_no_overlap": paths[0.0].chosen.iloc[-1],
        "chosen_overlap": paths[2.0].chosen.iloc[-1],
        "rejected_overlap": paths[2.0].rejected.iloc[-1],
        "slope_no_overlap": study.chosen_slope(study.bystander(0.0)),
        "slope_overlap": study.chosen_slope(study.bystander(2.0)),
    }
    depends_on_sampler_only = figures["chosen_no_overlap"] * figures["chosen_overlap"] > 0
    both = figures["chosen_overlap"] < 0 < figures["chosen_no_overlap"]
    return Finding(settle(depends_on_sampler_only, both), figures)


@decides("S4-xc")
def sft_term_as_a_remedy() -> Finding:
    """Minimiser with an SFT term on the preferred answers, for pairs from near and from far."""
    problem = study.random_preferences(6, beta=0.5, seed=0)
    pairs = study.pair_distributions(problem)
    near, far = (
        study.labelled(pairs[name], problem.rewards)
        for name in ("the optimum's own samples", "what the reference avoids")
    )

    def distance(policy: torch.Tensor) -> float:
        return reverse_kl(policy, problem.optimum).item()

    figures = {
        "kl_without": max(distance(study.fit(problem, counts)) for counts in (near, far)),
        "kl_near": distance(study.fit_with_sft(problem, near, weight=0.1)),
        "kl_far": distance(study.fit_with_sft(problem, far, weight=0.1)),
    }
    stays = max(figures["kl_near"], figures["kl_far"]) < 1e-6
    return Finding(settle(stays, False), figures)
