"""A small GRPO run in numpy: an engine that samples, an old policy, a policy and a reference.

Weights are one table: a token's logits are the row of the token before it plus the row of its
prompt. Token 0 ends an answer. All log-probs are in nats; arrays are [completion, position].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

Array = np.ndarray
Columns = dict[str, Array]
END = 0
AFTER = "logp", "kl_term"  # what verl's batch does not hold before its updates


@dataclass(frozen=True)
class Rollout:
    """A batch of sampled answers; ``forced`` tokens are a prompt's or a tool's."""

    prompt: Array
    token: Array
    previous: Array
    alive: Array
    forced: Array
    sampler_logp: Array  # after temperature, top-k and top-p
    raw_logp: Array  # before them
    padding: Array


@dataclass(frozen=True)
class Update:
    """What a KL term may look at, at one optimizer step."""

    step: int
    ratio: Array
    clipped: Array


Term = Callable[[Array, Update], tuple[Array, Array]]


def log_softmax(logits: Array) -> Array:
    """Log-probs over the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def kl_term(estimator: str, beta: float) -> Term:
    """``beta`` times k1, k2 or k3 of logp - ref_logp, and its derivative by logp."""

    def term(log_ratio: Array, at: Update) -> tuple[Array, Array]:
        inverse = np.exp(-log_ratio)
        value, slope = {
            "k1": (log_ratio, np.ones_like(log_ratio)),
            "k2": (log_ratio**2 / 2, log_ratio),
            "k3": (inverse - 1 + log_ratio, 1 - inverse),
        }[estimator]
        return beta * value, beta * slope

    return term


def times(term: Term, factor: Callable[[Array, Update], Array | float]) -> Term:
    """``term`` times a factor that is not differentiated."""

    def product(log_ratio: Array, at: Update) -> tuple[Array, Array]:
        value, slope = term(log_ratio, at)
        return value * factor(log_ratio, at), slope * factor(log_ratio, at)

    return product


K3 = kl_term("k3", 0.04)


def latest(history: list[Array], lag: int) -> Array:
    """The weights of ``lag`` updates ago."""
    return history[max(len(history) - 1 - lag, 0)]


@dataclass(frozen=True)
class Settings:
    """A run; by default sound, on policy, with k3 in the loss."""

    seed: int = 0
    source: Literal["plain", "trl", "verl"] = "plain"
    vocabulary: int = 24
    prompts: int = 16
    prompts_per_batch: int = 8
    groups: tuple[int, ...] = (8,)  # sizes, in turn
    batches: int = 6
    updates: int = 2
    max_length: int = 32
    sharpness: float = 1.3  # of the policy's logits
    unevenness: float = 0.7  # of prompts
    end: float = 0.9  # the logit that ends an answer
    distance: float = 0.0  # of the first policy from the reference, in logits
    first_step: int = 0  # of a run that goes on
    learning_rate: float = 0.03
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    engine_noise: float = 0.0
    lag: int = 0
    sampler_column: bool = False
    lag_column: bool = False
    old_from_engine: bool = False
    old_again: bool = False  # scored anew at each update
    raw_logprobs: bool = False
    binary_reward: bool = False
    prompt_tokens: int = 0
    tool_tokens: int = 0
    counted: Literal["sampled", "forced", "all"] = "sampled"
    divisor: Literal["tokens", "completions", "constant"] = "tokens"
    scaled: bool = True  # advantages by the group's deviation
    reward_beta: float = 0.0  # k1 subtracted from the reward
    entropy_bonus: float = 0.0
    term: Term = K3
    engine: Callable[[list[Array], int], Array] = latest
    reference: Callable[[list[Array], Array], Array] = lambda history, reference: reference
    advantages: Callable[[Array, Rollout], Array] | None = None
    normalise: Callable[[Array], Array] | None = None  # logits to log-probs, policy and reference
    normalise_reference: Callable[[Array, Rollout], Array] | None = None

    def log_probs(self, logits: Array) -> Array:
        """The trainer's log-probs over the vocabulary."""
        return (self.normalise or (lambda z: log_softmax(z / self.temperature)))(logits)


def first_weights(s: Settings, rng: np.random.Generator) -> Array:
    """The reference: one row a previous token, one for the start, one a prompt."""
    transition = s.sharpness * rng.standard_normal((s.vocabulary + 1, s.vocabulary))
    prompt = s.unevenness * rng.standard_normal((s.prompts, s.vocabulary))
    transition[:, END] = s.end + 0.3 * transition[:, END]
    return np.concatenate([transition, prompt])


def cut(logits: Array, s: Settings) -> Array:
    """Logits without what top-k and top-p leave out."""
    descending = -np.sort(-logits, axis=-1)
    kept = np.full(len(logits), s.vocabulary)
    if s.top_k:
        kept = np.minimum(kept, s.top_k)
    if s.top_p < 1:
        mass = np.exp(log_softmax(descending)).cumsum(-1)
        kept = np.minimum(kept, 1 + (mass < s.top_p).sum(-1))
    least = np.take_along_axis(descending, kept[:, None] - 1, -1)
    return np.where(logits >= least, logits, -np.inf)


def sample(s: Settings, weights: Array, rng: np.random.Generator) -> Rollout:
    """Answers of the engine, group by group."""
    chosen = rng.choice(s.prompts, s.prompts_per_batch, replace=False)
    sizes = [s.groups[i % len(s.groups)] for i in range(s.prompts_per_batch)]
    prompt = np.repeat(chosen, sizes)
    rows = np.arange(len(prompt))
    shape = len(prompt), s.max_length
    position = np.arange(s.max_length)
    forced = np.tile(position < s.prompt_tokens, (len(prompt), 1))
    called = rng.random(len(prompt)) < 0.6
    forced |= called[:, None] & (position >= 4) & (position < 4 + s.tool_tokens)
    given = 1 + (7 * prompt[:, None] + 5 * position) % (s.vocabulary - 1)
    token, previous = np.zeros(shape, int), np.full(shape, s.vocabulary)
    alive, logp, raw = np.ones(shape, bool), np.zeros(shape), np.zeros(shape)
    for t in range(s.max_length):
        if t:
            previous[:, t] = token[:, t - 1]
            alive[:, t] = alive[:, t - 1] & (token[:, t - 1] != END)
        logits = weights[previous[:, t]] + weights[s.vocabulary + 1 + prompt]
        logits = logits + s.engine_noise * rng.standard_normal(logits.shape)
        processed = log_softmax(cut(logits / s.temperature, s))
        drawn = (processed + rng.gumbel(size=processed.shape)).argmax(-1)
        token[:, t] = np.where(forced[:, t], given[:, t], drawn) * alive[:, t]
        logp[:, t] = processed[rows, token[:, t]]
        raw[:, t] = log_softmax(logits)[rows, token[:, t]]
    return Rollout(prompt, token, previous, alive, forced, logp, raw, (5 * prompt) % 9)


def group_advantages(reward: Array, rollout: Rollout, scaled: bool) -> Array:
    """Rewards less their group's mean, over its deviation if ``scaled``."""
    advantage = np.zeros(len(reward))
    for prompt in np.unique(rollout.prompt):
        rows = rollout.prompt == prompt
        advantage[rows] = reward[rows] - reward[rows].mean()
        if scaled:
            advantage[rows] /= reward[rows].std(ddof=1) + 1e-4
    return advantage


def counted(s: Settings, rollout: Rollout) -> Array:
    """The loss mask."""
    if s.counted == "all":
        return np.ones_like(rollout.alive)
    return rollout.alive if s.counted == "forced" else rollout.alive & ~rollout.forced


def divisor(s: Settings, mask: Array) -> Array:
    """What a token's loss is divided by."""
    if s.divisor == "tokens":
        return mask.sum()
    if s.divisor == "constant":
        return np.asarray(mask.size)
    return len(mask) * np.maximum(mask.sum(-1, keepdims=True), 1)


def logits_of(weights: Array, rollout: Rollout, s: Settings) -> Array:
    """[completion, position, vocabulary]."""
    of_prompt = weights[s.vocabulary + 1 + rollout.prompt]
    return weights[rollout.previous] + of_prompt[:, None]


def taken(log_probs: Array, rollout: Rollout) -> Array:
    """Those of the tokens that were taken."""
    return np.take_along_axis(log_probs, rollout.token[..., None], -1)[..., 0]


def score_batch(
    s: Settings, rollout: Rollout, policy: Array, reference: Array, wanted: Array
) -> Columns:
    """Columns of a batch that its updates share."""
    answered = rollout.alive & ~rollout.forced
    mask = counted(s, rollout)
    hits = (wanted[rollout.prompt[:, None], rollout.token] & answered).sum(-1)
    reward = hits / np.maximum(answered.sum(-1), 1)
    if s.binary_reward:
        reward = (reward > 0.45).astype(float)
    ref_logits = logits_of(reference, rollout, s)
    normalise = s.normalise_reference or (lambda logits, _: s.log_probs(logits))
    ref_logp = taken(normalise(ref_logits, rollout), rollout)
    engine_logp = rollout.raw_logp if s.raw_logprobs else rollout.sampler_logp
    own = taken(s.log_probs(logits_of(policy, rollout, s)), rollout)
    old_logp = engine_logp if s.old_from_engine else own
    paid = reward - s.reward_beta * ((old_logp - ref_logp) * mask).sum(-1)
    advantages = s.advantages or (lambda paid, of: group_advantages(paid, of, s.scaled))
    columns = {
        "old_logp": old_logp,
        "ref_logp": ref_logp,
        "mask": mask.astype(int),
        "token": rollout.token,
        "group": rollout.prompt,
        "reward": reward,
        "advantage": advantages(paid, rollout),
    }
    if s.source == "trl":
        columns["padding"] = rollout.padding
    return columns | ({"sampler_logp": engine_logp} if s.sampler_column else {})


def update(
    s: Settings, rollout: Rollout, batch: Columns, policy: Array, step: int
) -> tuple[Columns, Array]:
    """One optimizer step: its columns with the batch's, and its loss' gradient by the weights."""
    log_probs = s.log_probs(logits_of(policy, rollout, s))
    logp, probs = taken(log_probs, rollout), np.exp(log_softmax(log_probs))
    entropy = -(np.exp(log_probs) * log_probs).sum(-1)
    old_logp = logp if s.old_again else batch["old_logp"]
    ratio = np.exp(np.clip(logp - old_logp, -20, 20))
    advantage = np.broadcast_to(batch["advantage"][:, None], ratio.shape)
    clipped = (advantage > 0) & (ratio > 1 + s.epsilon_high)
    clipped |= (advantage < 0) & (ratio < 1 - s.epsilon_low)
    value, slope = s.term(logp - batch["ref_logp"], Update(step, ratio, clipped))
    share = batch["mask"] / divisor(s, batch["mask"])
    by_logp = (slope - advantage * ratio * ~clipped) * share
    by_logits = by_logp[..., None] * (np.eye(s.vocabulary)[rollout.token] - probs)
    surprise = (log_probs + entropy[..., None]) * probs  # minus the entropy's derivative
    by_logits += s.entropy_bonus * surprise * share[..., None]
    gradient = np.zeros_like(policy)
    np.add.at(gradient, rollout.previous, by_logits)
    np.add.at(gradient, s.vocabulary + 1 + rollout.prompt, by_logits.sum(1))
    own = {"logp": logp, "old_logp": old_logp, "entropy": entropy, "kl_term": value}
    return batch | own, gradient


def run(s: Settings) -> list[Columns]:
    """Train; the columns of each optimizer step (for verl of each batch, before its updates)."""
    rng = np.random.default_rng(s.seed)
    first = first_weights(s, rng)
    policy = first + s.distance * rng.standard_normal(first.shape)
    wanted = rng.random((s.prompts, s.vocabulary)) < 0.3
    history, moments, steps = [policy], [np.zeros_like(policy)] * 2, []
    for batch in range(s.batches):
        rollout = sample(s, s.engine(history, s.lag), rng)
        shared = score_batch(s, rollout, policy, s.reference(history, first), wanted)
        for again in range(s.updates):
            step = len(history) - 1
            behind = min(s.lag, step - again)
            columns, gradient = update(s, rollout, shared, policy, step)
            policy = policy - s.learning_rate * adam(gradient, moments, step + 1)
            history.append(policy)
            rows = np.ones(len(rollout.prompt), int)
            columns["step"] = s.first_step + step * rows
            if s.lag_column:
                columns["lag"] = (behind + again) * rows
            if s.source != "verl":
                steps.append(columns)
            elif again == 0:
                columns["step"] = s.first_step + batch * rows
                if s.lag_column:
                    columns["lag"] = behind // s.updates * rows
                steps.append({k: v for k, v in columns.items() if k not in AFTER})
    return steps


def adam(gradient: Array, moments: list[Array], count: int) -> Array:
    """Adam's direction (0.9, 0.99); ``moments`` are brought up to date."""
    moments[0] = 0.9 * moments[0] + 0.1 * gradient
    moments[1] = 0.99 * moments[1] + 0.01 * gradient**2
    mean, square = moments[0] / (1 - 0.9**count), moments[1] / (1 - 0.99**count)
    return mean / (np.sqrt(square) + 1e-8)
