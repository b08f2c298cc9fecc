"""The loss of one run from the definitions; the other half of :mod:`tests.training.naive`."""

from __future__ import annotations

import torch

from tests.training import naive


def clipped(ratio, advantage, objective):
    """The surrogate of PPO, to be minimised."""
    bounded = ratio.clamp(1 - objective.epsilon_low, 1 + objective.epsilon_high)
    return -torch.minimum(ratio * advantage, bounded * advantage)


def policy_views(run, completion):
    """Log-probs of the tokens taken, of the policy and of its sampler."""
    if not run.variant.correction.keep_sampling_mask:
        return completion.taken("policy"), completion.taken("old")
    logp = []
    for t, token in enumerate(completion.tokens):
        kept = [a for a, q in enumerate(completion.drawn[t]) if q > -torch.inf]
        logp.append(naive.restricted(completion.policy[t], kept)[token])
    return logp, completion.taken("drawn")


def policy_terms(run, completion, worth, outcome):
    """Policy term of each token of a completion."""
    variant, objective = run.variant, run.variant.objective
    logp, old = policy_views(run, completion)
    log_ratios = [x - o for x, o in zip(logp, old, strict=True)]
    ratios = [torch.exp(l) for l in log_ratios]
    count = len(ratios)
    if objective.kind == "sequence":
        whole = torch.exp(sum(log_ratios))
        terms = [clipped(whole, a, objective) for a in worth]
    elif objective.kind == "gspo":
        whole = torch.exp(sum(log_ratios) / count)
        token_form = [whole.detach() * torch.exp(x - x.detach()) for x in logp]
        same = all(a == worth[0] for a in worth)
        ratios = [whole] * count if same else token_form
        terms = [clipped(r, a, objective) for r, a in zip(ratios, worth, strict=True)]
    elif objective.kind == "cispo":
        bounds = (1 - objective.epsilon_low, 1 + objective.epsilon_high)
        weights = [r.detach().clamp(*bounds) for r in ratios]
        terms = [-w * a * x for w, a, x in zip(weights, worth, logp, strict=True)]
    elif objective.kind == "reinforce":
        terms = [-a * x for a, x in zip(worth, logp, strict=True)]
    else:
        if objective.kind == "grpo_off_policy" and variant.kl.estimator != "none":
            of = {"old": old, "detached": [x.detach() for x in logp], "attached": logp}
            pairs = zip(of[objective.reading], completion.taken("ref"), strict=True)
            kl = [x - y for x, y in pairs]
            worth = [a - variant.beta * k for a, k in zip(worth, kl, strict=True)]
        terms = [clipped(r, a, objective) for r, a in zip(ratios, worth, strict=True)]
    return [
        f * x for f, x in zip(factors(run, completion, log_ratios, outcome), terms, strict=True)
    ]


def factors(run, completion, log_ratios, outcome):
    """By what the corrections multiply each token's policy term."""
    how, count = run.variant.correction, len(log_ratios)
    if how.mask_truncated and not completion.finished:
        return [0.0] * count
    drift = -sum(log_ratios).item() / count
    if how.sequence_mask_delta is not None and outcome < 0 and drift > how.sequence_mask_delta:
        return [0.0] * count
    if how.mismatch == "none":
        return [1.0] * count
    old, drawn = completion.taken("old"), completion.taken("drawn")
    ratios = [torch.exp(o - d).item() for o, d in zip(old, drawn, strict=True)]
    if how.mismatch_level == "sequence":
        ratios = [torch.tensor(ratios, dtype=torch.float64).prod().item()] * count
    if how.mismatch == "truncated":
        return [min(r, how.bound) for r in ratios]
    return [r if 1 / how.bound <= r <= how.bound else 0.0 for r in ratios]


def distillation_weight(run, reward):
    """Coefficient of the distillation on a completion of this reward."""
    how = run.variant.distillation
    if how is None or (how.only_below is not None and reward >= how.only_below):
        return 0.0
    end = how.weight if how.weight_end is None else how.weight_end
    share = min(run.update / how.anneal_updates, 1)
    return (1 - share) * how.weight + share * end


def aggregated(mode, rows, longest):
    """Completions' token terms as one number."""
    if mode == "token_mean":
        return sum(sum(row) for row in rows) / sum(len(row) for row in rows)
    divisors = {
        "seq_mean_token_mean": [len(row) for row in rows],
        "seq_mean_token_sum": [1] * len(rows),
        "seq_mean_token_sum_norm": [longest] * len(rows),
    }[mode]
    return sum(sum(row) / d for row, d in zip(rows, divisors, strict=True)) / len(rows)


def of_completions(run, completions, shaped):
    """Mirror descent or DPO on one group."""
    tau, kind = run.variant.objective.tau, run.variant.objective.kind
    views = [policy_views(run, completion) for completion in completions]
    log_ratio = [sum(logp) - sum(old) for logp, old in views]
    if kind == "mirror_descent":
        errors = [r - shaped.mean() - tau * l for r, l in zip(shaped, log_ratio, strict=True)]
        return sum(error**2 for error in errors) / len(errors)
    if shaped.max() == shaped.min():
        return torch.zeros((), dtype=torch.float64)
    implicit = [
        tau * (sum(logp) - sum(c.taken("ref")))
        for (logp, _), c in zip(views, completions, strict=True)
    ]
    ranked = shaped.tolist()
    margin = implicit[ranked.index(max(ranked))] - implicit[ranked.index(min(ranked))]
    return torch.log(1 + torch.exp(-margin))


def naive_loss(run):
    """The loss of a run, with gradient."""
    variant, lesson = run.variant, run.variant.distillation
    policy_rows, kl_rows, whole = [], [], []
    for p, completions in enumerate(naive.read(run)):
        shaped = naive.shaped_rewards(run, p, completions)
        if variant.advantage.drop_uniform_groups and shaped.max() == shaped.min():
            continue
        if variant.objective.kind in ("mirror_descent", "dpo"):
            whole.append(of_completions(run, completions, shaped))
        worth = naive.advantages(run, p, completions, shaped)
        for g, completion in enumerate(completions):
            tokens, taught = worth[g], distillation_weight(run, run.rewards[p, g])
            outcome, kl = worth[g][0], [torch.zeros((), dtype=torch.float64)] * len(tokens)
            merged = variant.objective.kind == "grpo_off_policy"
            if (
                variant.kl.placement == "reward"
                and variant.advantage.kl_order == "after"
                and not merged
            ):
                part = naive.owed(completion, "ref", variant.kl)
                tokens = [a - variant.beta * k for a, k in zip(tokens, part, strict=True)]
            if variant.kl.placement == "loss" and variant.kl.estimator != "none":
                part = naive.kl_losses(completion, "ref", variant.kl)
                kl = [x + variant.beta * k for x, k in zip(kl, part, strict=True)]
            if lesson is not None and lesson.kl.placement == "reward":
                part = naive.owed(completion, "teacher", lesson.kl)
                tokens = [a - taught * k for a, k in zip(tokens, part, strict=True)]
            if lesson is not None and lesson.kl.placement == "loss":
                part = naive.kl_losses(completion, "teacher", lesson.kl)
                kl = [x + taught * k for x, k in zip(kl, part, strict=True)]
            kl_rows.append(kl)
            policy_rows.append(policy_terms(run, completion, [a.detach() for a in tokens], outcome))
    if not kl_rows:
        return torch.zeros((), dtype=torch.float64)
    mode, longest = variant.objective.aggregation, run.completions.shape[-1]
    loss = aggregated(mode, kl_rows, longest)
    if whole:
        return loss + sum(whole) / len(whole)
    return loss + aggregated(mode, policy_rows, longest)
