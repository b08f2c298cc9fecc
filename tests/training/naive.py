"""One run written from the definitions, token by token; it shares no code with the trainer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

END, SEPARATOR = 11, 10
HEADS = 3


def naive_logits(weights, tokens):
    """A causal transformer over one sequence of token ids, position by position."""
    x = weights["token_embedding"][tokens] + weights["position_embedding"][: len(tokens)]
    layers = sum(name.endswith("mlp_in") for name in weights)
    for layer in range(layers):
        part = {n.split(".")[1]: w for n, w in weights.items() if n.startswith(f"block{layer}.")}
        q, k, v = (naive_norm(x) @ part["attention_in"]).chunk(3, dim=-1)
        size = q.shape[-1] // HEADS
        rows = []
        for t in range(len(tokens)):
            heads = []
            for head in range(HEADS):
                channels = slice(head * size, (head + 1) * size)
                scores = k[: t + 1, channels] @ q[t, channels] / math.sqrt(size)
                heads.append(torch.softmax(scores, dim=0) @ v[: t + 1, channels])
            rows.append(torch.cat(heads))
        x = x + torch.stack(rows) @ part["attention_out"]
        x = x + torch.relu(naive_norm(x) @ part["mlp_in"]) @ part["mlp_out"]
    return naive_norm(x) @ weights["head"]


def naive_logp(weights, prompt, completion, temperature=1.0):
    """[T]: log-probs of the tokens of a completion."""
    logits = naive_logits(weights, [*prompt, SEPARATOR, *completion[:-1]])[len(prompt) :]
    return torch.log_softmax(logits / temperature, -1)[range(len(completion)), completion]


def naive_norm(x):
    centred = x - x.mean(dim=-1, keepdim=True)
    return centred / torch.sqrt(centred.pow(2).mean(dim=-1, keepdim=True) + 1e-5)


@dataclass(frozen=True)
class NaiveRun:
    """Everything one run's loss depends on. P prompts, G completions, T tokens."""

    variant: Any
    temperature: float
    weights: dict  #: of the policy, with gradient
    reference: dict
    sampled_by: dict  #: weights that sampled
    teacher: dict | None
    prompts: Any  #: [P, L]
    completions: Any  #: [P, G, T]
    rewards: Any  #: [P, G], of the task
    accuracy: Any  #: [P, G]
    steps: Any  #: [P, G, T]
    noise: Any = None  #: [P, G] in [0, 1)
    update: int = 0


class Completion(NamedTuple):
    """Log-probs over the vocabulary at each counted token: lists of [V]."""

    tokens: list
    policy: list
    old: list
    ref: list
    teacher: list
    drawn: list  #: of the distribution that was drawn from; -inf where it cannot go
    finished: bool

    def taken(self, which):
        """Log-probs of the tokens taken."""
        return [row[token] for row, token in zip(getattr(self, which), self.tokens, strict=True)]


def read(run):
    """[P][G] completions."""
    return [
        [_completion(run, run.prompts[p].tolist(), row.tolist()) for row in run.completions[p]]
        for p in range(len(run.prompts))
    ]


def _completion(run, prompt, row):
    length = row.index(END) + 1 if END in row else len(row)
    cut = first_loop(
        row[:length], run.variant.sampler.repeat_period, run.variant.sampler.repeat_times
    )
    length, finished = (length, END in row) if cut is None else (cut + 1, False)
    tokens = [*prompt, SEPARATOR, *row[:-1]]

    def logp(weights, over=1.0):
        logits = naive_logits(weights, tokens)[len(prompt) :] / run.temperature / over
        return list(torch.log_softmax(logits, -1)[:length])

    sampler = run.variant.sampler
    return Completion(
        row[:length],
        logp(run.weights),
        logp(run.sampled_by),
        logp(run.reference),
        [] if run.teacher is None else logp(run.teacher),
        [nucleus(p, sampler.top_p) for p in logp(run.sampled_by, sampler.temperature)],
        finished,
    )


def first_loop(tokens, period, times):
    """The position where a block has just stood ``times`` times in a row; None = nowhere."""
    for t in range(len(tokens)):
        for block in range(1, period + 1):
            first = t + 1 - block * times
            if (
                times
                and first >= 0
                and tokens[first : t + 1] == tokens[first : first + block] * times
            ):
                return t
    return None


def nucleus(logp, top_p):
    """Log-probs restricted to the smallest set of likeliest tokens that reaches ``top_p``."""
    total, kept = 0.0, []
    for token in sorted(range(len(logp)), key=lambda a: -logp[a].item()):
        if total < top_p:
            kept.append(token)
        total += logp[token].exp().item()
    return restricted(logp, kept)


def restricted(logp, kept):
    """Renormalised over the kept tokens."""
    norm = torch.logsumexp(torch.stack([logp[a] for a in kept]), 0)
    return [logp[a] - norm if a in kept else torch.tensor(-math.inf) for a in range(len(logp))]


def estimate(name, l):
    """An estimator of the KL from the log-ratio, as printed."""
    r = torch.exp(-l)
    return {
        "k1": l,
        "k2": l**2 / 2,
        "k3": r - 1 - torch.log(r),
        "k3_clip": torch.clamp(r, max=10.0) - 1 - torch.log(r),
        "k4": r - 1 - torch.log(r),
    }[name]


def kl_losses(completion, anchor, term):
    """KL loss of each token to ``anchor`` ("ref" or "teacher")."""
    logp, old = completion.taken("policy"), completion.taken("old")
    other = completion.taken(anchor)
    estimator = term.estimator
    if estimator in ("exact", "forward"):
        pairs = zip(completion.policy, getattr(completion, anchor), strict=True)
        if estimator == "exact":
            return [(p.exp() * (p - q)).sum() for p, q in pairs]
        return [(q.exp() * (q - p)).sum() for p, q in pairs]
    if estimator == "cross_entropy":
        return [-x for x in logp]
    count = len(logp)
    if term.level == "sequence":
        logp, old, other = ([sum(part)] for part in (logp, old, other))
    steps, losses = [x - o for x, o in zip(logp, old, strict=True)], []
    for t, (x, y) in enumerate(zip(logp, other, strict=True)):
        span = {
            "token": steps[t],
            "prefix": sum(steps[: t + 1]),
            "sequence": sum(steps),
            "geometric": sum(steps) / len(steps),
        }
        ratio = torch.exp(span[term.ratio])
        weight = {"none": 1.0, "attached": ratio, "detached": ratio.detach()}[term.weighting]
        if estimator == "minimax01":
            losses.append(weight * (x.exp() - y.exp()).detach() * x)
            continue
        loss = weight * estimate(estimator, x - y)
        if term.value is not None:
            shown = (weight * estimate(term.value, x - y)).detach()
            loss = loss - loss.detach() + shown
        losses.append(loss)
    return losses if term.level == "token" else [losses[0] / count] * count


def owed(completion, anchor, term):
    """What each token owes of a KL in the reward, at the weights that sampled."""
    own = [x - y for x, y in zip(completion.taken("old"), completion.taken(anchor), strict=True)]
    if term.level == "sequence":
        return [estimate(term.estimator, sum(own))] * len(own)
    own = [estimate(term.estimator, l) for l in own]
    first = {"to_go": lambda t: own[t:], "immediate": lambda t: own[t : t + 1]}
    spans = first | {"whole": lambda t: own}
    return [sum(spans[term.credit](t)) for t in range(len(own))]


def shaped_rewards(run, p, completions):
    """Rewards of the group with what the variant adds to them."""
    variant, shaping = run.variant, run.variant.shaping
    lengths = [len(c.tokens) for c in completions]
    longest = run.completions.shape[-1]
    shaped = []
    for g, length in enumerate(lengths):
        reward = run.rewards[p, g]
        if shaping.length == "linear":
            reward = reward - shaping.weight * length
        if shaping.length == "relative" and max(lengths) > min(lengths):
            bonus = 0.5 - (length - min(lengths)) / (max(lengths) - min(lengths))
            bonus = bonus if run.accuracy[p, g] == 1 else min(bonus, 0.0)
            reward = reward + shaping.weight * bonus
        if shaping.length == "soft_overlong":
            over = length - (longest - shaping.buffer)
            reward = reward - shaping.weight * min(max(over, 0) / shaping.buffer, 1)
        if shaping.noise:
            reward = reward + shaping.noise * run.noise[p, g]
        if variant.kl.placement == "reward" and variant.advantage.kl_order == "before":
            whole = variant.kl.level == "sequence" or variant.kl.credit == "whole"
            own = variant.kl if whole else variant.kl.model_copy(update={"credit": "immediate"})
            kl = owed(completions[g], "ref", own)
            reward = reward - variant.beta * (kl[0] if whole else sum(kl))
        shaped.append(reward)
    return torch.stack(shaped)


def baselined(advantage, values):
    """Values of a group [G] against each other."""
    if values.max() == values.min():
        return 0 * values
    count, mean = len(values), values.sum() / len(values)
    if advantage.baseline == "zero":
        return 0 * values
    if advantage.baseline == "group_centre":
        return values - mean
    if advantage.baseline == "leave_one_out":
        return torch.stack([x - (values.sum() - x) / (count - 1) for x in values])
    std = torch.sqrt(((values - mean) ** 2).sum() / (count - advantage.ddof))
    std = std if advantage.std_min is None else std.clamp(min=advantage.std_min)
    std = std if advantage.std_max is None else std.clamp(max=advantage.std_max)
    return (values - mean) / (std + advantage.eps)


def advantages(run, p, completions, shaped):
    """[G][T] of a group, before any KL that comes after the baseline."""
    how = run.variant.advantage
    if how.level == "outcome":
        of_completion = baselined(how, shaped)
        if how.baseline == "shortest_right":
            right = [g for g in range(len(completions)) if run.accuracy[p, g] == 1]
            chosen = min(right, key=lambda g: len(completions[g].tokens), default=None)
            of_completion = [torch.tensor(float(g == chosen)) for g in range(len(completions))]
        return [[of_completion[g]] * len(c.tokens) for g, c in enumerate(completions)]
    steps = [list(run.steps[p, g, : len(c.tokens)]) for g, c in enumerate(completions)]
    if how.level == "process":
        flat = iter(baselined(how, torch.stack([r for row in steps for r in row])))
        normal = [[next(flat) for _ in row] for row in steps]
        return [[sum(row[t:]) for t in range(len(row))] for row in normal]
    longest = run.completions.shape[-1]
    later = torch.zeros(len(steps), longest, dtype=torch.float64)
    for g, row in enumerate(steps):
        for t in range(len(row)):
            later[g, t] = sum(row[t:]) / longest
    worth = torch.stack([baselined(how, later[:, t]) for t in range(longest)], dim=1)
    return [[worth[g, t] for t in range(len(row))] for g, row in enumerate(steps)]
