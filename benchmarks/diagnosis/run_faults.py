"""Faults planted in the trainer: the run that follows is broken, not only its dump."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Output = dict[str, Any]
REF, OLD = "ref_per_token_logps", "old_per_token_logps"


def _after(name: str, change: Callable[[Any, Any], Any]) -> Callable[[Any], None]:
    """Plants ``change(trainer, what the method returned)`` behind a method."""

    def plant(trainer: Any) -> None:
        method = getattr(trainer, name)
        setattr(trainer, name, lambda *a, **k: change(trainer, method(*a, **k)))

    return plant


def _in_rollouts(change: Callable[[Any, Output], None]) -> Callable[[Any], None]:
    def changed(trainer: Any, output: Output) -> Output:
        change(trainer, output)
        return output

    return _after("_generate_and_score_completions", changed)


def _state(model: Any) -> dict[str, Tensor]:
    return {name: weights.detach().clone() for name, weights in model.state_dict().items()}


def _perturbed(state: dict[str, Tensor], size: float) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {n: w + size * torch.randn(w.shape, generator=generator) for n, w in state.items()}


def _hotter(state: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    """The same model with its logits divided by a factor."""
    return state | {"lm_head.weight": state["lm_head.weight"] / factor}


@contextmanager
def _weights(model: Any, state: dict[str, Tensor]) -> Iterator[None]:
    """The model with other weights, for a while."""
    own = _state(model)
    model.load_state_dict(state)
    try:
        yield
    finally:
        model.load_state_dict(own)


def _scored(trainer: Any, state: dict[str, Tensor], output: Output) -> Tensor:
    """[B, T]: log-probs of the completions under other weights, at the sampling temperature."""
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
    score = type(trainer)._get_per_token_logps_and_entropies
    with torch.no_grad(), _weights(trainer.model, state):
        return score(trainer, trainer.model, ids, mask, output["completion_ids"].shape[1])[0]


def _generates_with(trainer: Any, state_of: Callable[[Any], dict[str, Tensor]]) -> None:
    """The completions are drawn with other weights than the trained ones."""
    single = trainer._generate_single_turn

    def generate(*positional: Any, **named: Any) -> Any:
        with _weights(trainer.model, state_of(trainer)):
            return single(*positional, **named)

    trainer._generate_single_turn = generate


# The reference.


def another_reference(trainer: Any) -> None:
    trainer.ref_model.load_state_dict(_perturbed(_state(trainer.ref_model), 0.03))


@_in_rollouts
def reference_is_the_policy(trainer: Any, output: Output) -> None:
    """Synchronised at every step, or an adapter that stays on."""
    output[REF] = _scored(trainer, _state(trainer.model), output)


def reference_at_another_temperature(trainer: Any) -> None:
    trainer.ref_model.load_state_dict(_hotter(_state(trainer.ref_model), 1.5))


@_in_rollouts
def reference_rows_of_others(trainer: Any, output: Output) -> None:
    output[REF] = output[REF].roll(1, 0)


@_in_rollouts
def reference_without_the_prompt(trainer: Any, output: Output) -> None:
    mask = output["prompt_mask"].clone()
    output["prompt_mask"] = torch.zeros_like(mask)
    output["prompt_mask"][:, -1] = 1
    output[REF] = _scored(trainer, _state(trainer.ref_model), output)
    output["prompt_mask"] = mask


@_in_rollouts
def reference_with_dropout(trainer: Any, output: Output) -> None:
    noise = torch.randn(output[REF].shape, generator=torch.Generator().manual_seed(7))
    output[REF] = (output[REF] + 0.15 * noise).clamp(max=0.0)


def _with_another_token(output: Output) -> Output:
    """The rollouts with one more token at the end of each prompt."""
    ids, mask = output["prompt_ids"], output["prompt_mask"]
    token, one = torch.full_like(ids[:, :1], 20), torch.ones_like(mask[:, :1])
    longer = {"prompt_ids": torch.cat([ids, token], 1), "prompt_mask": torch.cat([mask, one], 1)}
    return output | longer


@_in_rollouts
def reference_after_another_token(trainer: Any, output: Output) -> None:
    output[REF] = _scored(trainer, _state(trainer.ref_model), _with_another_token(output))


@_in_rollouts
def scored_after_another_token(trainer: Any, output: Output) -> None:
    """All policies are scored under a template that the sampler did not have."""
    output.update(_with_another_token(output))
    output[OLD] = _scored(trainer, _state(trainer.model), output)
    output[REF] = _scored(trainer, _state(trainer.ref_model), output)


@_in_rollouts
def scored_under_other_prompts(trainer: Any, output: Output) -> None:
    for name in ("prompt_ids", "prompt_mask"):
        output[name] = output[name].roll(trainer.num_generations, 0)
    output[OLD] = _scored(trainer, _state(trainer.model), output)
    output[REF] = _scored(trainer, _state(trainer.ref_model), output)


@_in_rollouts
def reference_of_the_completion(trainer: Any, output: Output) -> None:
    """The mean over the completion, at each of its tokens."""
    mask = output["completion_mask"].float()
    means = (output[REF] * mask).sum(1) / mask.sum(1)
    output[REF] = means[:, None].expand_as(output[REF]).clone()


def reference_in_4_bits(trainer: Any) -> None:
    """Each matrix rounded to sixteen levels of its largest weight."""

    def rounded(weights: Tensor) -> Tensor:
        step = weights.abs().max().clamp(min=1e-12) / 8
        return (weights / step).round() * step if weights.dim() > 1 else weights

    state = _state(trainer.ref_model)
    trainer.ref_model.load_state_dict({name: rounded(weights) for name, weights in state.items()})


# What old_logp is.


@_in_rollouts
def old_from_the_start(trainer: Any, output: Output) -> None:
    output[OLD] = output[REF].clone()


def old_from_earlier(trainer: Any) -> None:
    """Scored by the policy of four rollouts ago."""
    kept: list[Any] = []

    def change(trainer: Any, output: Output) -> Output:
        kept.append(_state(trainer.model))
        output[OLD] = _scored(trainer, kept[max(0, len(kept) - 5)], output)
        return output

    _after("_generate_and_score_completions", change)(trainer)


@_in_rollouts
def old_before_the_temperature(trainer: Any, output: Output) -> None:
    output[OLD] = _scored(trainer, _hotter(_state(trainer.model), 1 / trainer.temperature), output)


@_in_rollouts
def old_rows_of_others(trainer: Any, output: Output) -> None:
    output[OLD] = output[OLD].roll(1, 0)


@_in_rollouts
def old_in_bfloat16(trainer: Any, output: Output) -> None:
    output[OLD], output[REF] = (output[name].bfloat16().float() for name in (OLD, REF))


def dropout_when_scoring(trainer: Any) -> None:
    """Dropout of 0.1 behind the last block, in both passes of the policy."""
    drop = torch.nn.Dropout(0.1)
    inner = getattr(trainer.model, "base_model", trainer.model)
    inner.register_forward_hook(_dropped(drop, trainer))


def _dropped(drop: torch.nn.Module, trainer: Any) -> Callable[..., Any]:
    def hook(module: Any, inputs: Any, output: Any) -> Any:
        if output.last_hidden_state.shape[1] > 1 and not trainer.sampling:
            output.last_hidden_state = drop(output.last_hidden_state)
        return output

    single = trainer._generate_single_turn
    trainer.sampling = False

    def generate(*positional: Any, **named: Any) -> Any:
        trainer.sampling = True
        try:
            return single(*positional, **named)
        finally:
            trainer.sampling = False

    trainer._generate_single_turn = generate
    return hook


# The sampler.


def _sampling(**options: Any) -> Callable[[Any], None]:
    def plant(trainer: Any) -> None:
        for name, value in options.items():
            setattr(trainer.generation_config, name, value)
            trainer.generation_kwargs[name] = value

    return plant


samples_hotter = _sampling(temperature=1.4)
samples_colder = _sampling(temperature=0.7)
samples_top_k = _sampling(top_k=6)
samples_top_p = _sampling(top_p=0.8)
samples_min_p = _sampling(min_p=0.1)
repetition_penalty = _sampling(repetition_penalty=1.3)
greedy = _sampling(do_sample=False)
no_repeated_pairs = _sampling(no_repeat_ngram_size=2)
typical = _sampling(typical_p=0.8)
token_suppressed = _sampling(suppress_tokens=[2])
no_early_end = _sampling(min_new_tokens=8)
no_end = _sampling(suppress_tokens=[11])
one_token_favoured = _sampling(sequence_bias=[[[4], 2.0]])


def stale_weights(trainer: Any) -> None:
    """The engine's weights are those of the start."""
    first = _state(trainer.model)
    _generates_with(trainer, lambda trainer: first)


def _reports(trainer: Any, state_of: Callable[[Any], dict[str, Tensor]]) -> None:
    """The engine samples with this state, and reports its own log-probs."""
    used: list[dict[str, Tensor]] = []

    def engine(trainer: Any) -> dict[str, Tensor]:
        used[:] = [state_of(trainer)]
        return used[0]

    _generates_with(trainer, engine)

    def change(trainer: Any, output: Output) -> Output:
        output["sampling_per_token_logps"] = _scored(trainer, used[0], output)
        return output

    _after("_generate_and_score_completions", change)(trainer)


def mismatched_engine(trainer: Any) -> None:
    """An engine with other numerics, whose log-probs are kept."""
    _reports(trainer, lambda trainer: _perturbed(_state(trainer.model), 0.015))


@_in_rollouts
def engine_reports_less(trainer: Any, output: Output) -> None:
    """Log-probs a fifth too near to zero, such as of a truncated distribution."""
    output["sampling_per_token_logps"] = 0.8 * output[OLD]


def stale_engine_that_reports(trainer: Any) -> None:
    """The engine keeps the weights of the start, and reports its log-probs."""
    first = _state(trainer.model)
    _reports(trainer, lambda trainer: first)


def part_of_the_weights_synchronised(trainer: Any) -> None:
    """The engine's head follows the trainer, the rest keeps the weights of the start."""
    first = _state(trainer.model)
    _reports(
        trainer,
        lambda trainer: first | {n: w for n, w in _state(trainer.model).items() if "lm_head" in n},
    )


def engine_three_rollouts_behind(trainer: Any) -> None:
    """Asynchronous: the engine samples with earlier weights, and reports its log-probs."""
    kept: list[dict[str, Tensor]] = []

    def engine(trainer: Any) -> dict[str, Tensor]:
        kept.append(_state(trainer.model))
        return kept[max(0, len(kept) - 4)]

    _reports(trainer, engine)


def hotter_engine_that_reports(trainer: Any) -> None:
    """The engine samples at another temperature, and reports those log-probs."""
    _reports(trainer, lambda trainer: _hotter(_state(trainer.model), 1.4))


@_in_rollouts
def sampler_before_temperature(trainer: Any, output: Output) -> None:
    """The engine reports log-probs at temperature one, but samples at the run's."""
    plain = _hotter(_state(trainer.model), 1 / trainer.temperature)
    output["sampling_per_token_logps"] = _scored(trainer, plain, output)


# Masks.


@_in_rollouts
def counts_padding(trainer: Any, output: Output) -> None:
    output["completion_mask"] = torch.ones_like(output["completion_mask"])


@_in_rollouts
def mask_shifted(trainer: Any, output: Output) -> None:
    mask = output["completion_mask"]
    output["completion_mask"] = torch.cat([torch.zeros_like(mask[:, :1]), mask[:, :-1]], 1)


@_in_rollouts
def end_not_counted(trainer: Any, output: Output) -> None:
    mask = output["completion_mask"]
    ended = output["completion_ids"] == trainer.processing_class.eos_token_id
    output["completion_mask"] = mask * ~ended


@_in_rollouts
def completions_cut(trainer: Any, output: Output) -> None:
    """At a random place of each."""
    mask = output["completion_mask"]
    kept = (mask.sum(1) * torch.rand(len(mask))).long() + 1
    output["completion_mask"] = mask * (torch.arange(mask.shape[1]) < kept[:, None])


@_in_rollouts
def mask_of_another_row(trainer: Any, output: Output) -> None:
    output["completion_mask"] = output["completion_mask"].roll(1, 0)


@_in_rollouts
def first_half_counted(trainer: Any, output: Output) -> None:
    mask = output["completion_mask"]
    kept = (mask.sum(1) + 1) // 2
    output["completion_mask"] = mask * (torch.arange(mask.shape[1]) < kept[:, None])


# Rewards and advantages.


@_in_rollouts
def advantages_flipped(trainer: Any, output: Output) -> None:
    output["advantages"] = -output["advantages"]


@_in_rollouts
def only_positive_advantages(trainer: Any, output: Output) -> None:
    output["advantages"] = output["advantages"].clamp(min=0)


@_in_rollouts
def advantages_of_the_next_group(trainer: Any, output: Output) -> None:
    output["advantages"] = output["advantages"].roll(trainer.num_generations, 0)


def policy_loss_flipped(trainer: Any) -> None:
    """The whole loss is maximised."""
    _after("_compute_loss", lambda trainer, loss: -loss)(trainer)


@_in_rollouts
def advantages_shuffled(trainer: Any, output: Output) -> None:
    order = torch.randperm(len(output["advantages"]))
    output["advantages"] = output["advantages"][order]


@_in_rollouts
def advantages_of_the_next_row(trainer: Any, output: Output) -> None:
    output["advantages"] = output["advantages"].roll(1, 0)


def advantages_of_the_batch_before(trainer: Any) -> None:
    kept: list[Tensor] = []

    def change(trainer: Any, output: Output) -> Output:
        kept.append(output["advantages"])
        output["advantages"] = kept[max(0, len(kept) - 2)]
        return output

    _after("_generate_and_score_completions", change)(trainer)


@_in_rollouts
def half_of_the_advantages_flipped(trainer: Any, output: Output) -> None:
    """Of every second group."""
    group = torch.arange(len(output["advantages"])) // trainer.num_generations
    output["advantages"] = output["advantages"] * (1 - 2 * (group % 2))


@_in_rollouts
def advantages_not_centred(trainer: Any, output: Output) -> None:
    groups = output["rewards"].view(-1, trainer.num_generations)
    output["advantages"] = (groups / (groups.std(1, keepdim=True) + 1e-4)).flatten()


@_in_rollouts
def advantages_are_rewards(trainer: Any, output: Output) -> None:
    output["advantages"] = output["rewards"].clone()


@_in_rollouts
def baseline_of_the_batch(trainer: Any, output: Output) -> None:
    rewards = output["rewards"]
    output["advantages"] = (rewards - rewards.mean()) / (rewards.std() + 1e-4)


@_in_rollouts
def wrong_group_axis(trainer: Any, output: Output) -> None:
    """Groups taken across prompts: row i belongs to group i modulo their number."""
    rewards = output["rewards"].view(trainer.num_generations, -1)
    centred = (rewards - rewards.mean(0)) / (rewards.std(0) + 1e-4)
    output["advantages"] = centred.flatten()


@_in_rollouts
def advantages_off_centre(trainer: Any, output: Output) -> None:
    output["advantages"] = output["advantages"] + 0.5


@_in_rollouts
def advantages_are_zero(trainer: Any, output: Output) -> None:
    output["advantages"] = torch.zeros_like(output["advantages"])


@_in_rollouts
def kl_added_to_advantages(trainer: Any, output: Output) -> None:
    output["advantages"] = output["advantages"] + 2 * output["kl_penalties"]
    output["kl_penalties"] = -output["kl_penalties"]


@_in_rollouts
def one_completion_a_group(trainer: Any, output: Output) -> None:
    """The engine returns the same completion for every member of a group."""
    first = torch.arange(len(output["completion_ids"]))
    first = first // trainer.num_generations * trainer.num_generations
    for name in ("completion_ids", "completion_mask", OLD, REF):
        output[name] = output[name][first]


# The KL term.


def _term(change: Callable[[Any, Any], Tensor]) -> Callable[[Any], None]:
    """The loss uses another term than the one that is named."""

    def plant(trainer: Any) -> None:
        named, compute = trainer.kl_term, trainer._compute_loss

        class Other:
            def __getattr__(self, name: str) -> Any:
                return getattr(named, name)

            def loss(self, logp: Tensor, ref_logp: Tensor, **others: Any) -> Tensor:
                return change(named.loss(logp, ref_logp, **others), logp - ref_logp)

        def wrapped(*positional: Any, **others: Any) -> Tensor:
            trainer.kl_term = Other()
            try:
                return compute(*positional, **others)
            finally:
                trainer.kl_term = named

        trainer._compute_loss = wrapped

    return plant


kl_subtracted = _term(lambda term, log_ratio: -term)
kl_left_out = _term(lambda term, log_ratio: 0 * term)
k1_in_its_place = _term(lambda term, log_ratio: log_ratio)
gradient_of_k2 = _term(
    lambda term, log_ratio: term.detach() + log_ratio**2 / 2 - (log_ratio**2 / 2).detach()
)
absolute_in_its_place = _term(lambda term, log_ratio: log_ratio.abs())
k2_in_its_place = _term(lambda term, log_ratio: log_ratio**2 / 2)
kl_on_the_first_half = _term(
    lambda term, log_ratio: term * (torch.arange(term.shape[1]) < term.shape[1] // 2)
)
kl_where_it_is_small = _term(lambda term, log_ratio: term * (log_ratio.abs() < 0.05))
kl_of_the_completion = _term(lambda term, log_ratio: term.mean(1, keepdim=True).expand_as(term))
swapped_in_k3 = _term(lambda term, log_ratio: log_ratio.exp() - 1 - log_ratio)
