"""The frozen Llama against a naive one, transformers, and itself without padding."""

from __future__ import annotations

import cmath
import math

import pytest
import torch

from analysis.records.language import ForwardConfig, LlamaConfig, LoraConfig
from analysis.training.pretrained.llama import PAD, LlamaPolicy
from analysis.training.pretrained.weights import load_llama, projections, random_llama, save_llama
from analysis.training.rollout import completion_inputs

from .conftest import llama

VOCAB, LAYERS = 37, 2
RUNS, PROMPTS, GROUP, STEPS, LENGTH = 2, 3, 4, 5, 6
ATTENTIONS = ("explicit", "sdpa")


def llama_config(kv_heads: int = 2, *, tied: bool = False) -> LlamaConfig:
    sizes = {"vocab_size": VOCAB, "width": 20, "inner": 28, "num_layers": LAYERS, "head_dim": 6}
    return llama(**sizes, num_heads=4, num_kv_heads=kv_heads, tied=tied)


def llama_policy(config: LlamaConfig, attention: str, *, shared: int = 0) -> LlamaPolicy:
    forward = ForwardConfig(attention=attention)
    return LlamaPolicy(random_llama(config, 3, torch.float64), LoraConfig(rank=2), forward, shared)


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of 3 to 6 tokens, left-padded, and completion inputs."""
    prompts = tokens(RUNS, PROMPTS, LENGTH)
    prompts[0, 0, :2] = PAD
    prompts[1, 0, :3] = PAD
    prompts[1, 2, :1] = PAD
    return prompts, tokens(RUNS, PROMPTS, GROUP, STEPS, seed=1)


def runs_apart(policy: LlamaPolicy, runs: int) -> torch.Tensor:
    """Weights [M, N] whose adapters do something, each run's something else."""
    weights = policy.start().repeat(runs, 1)
    generator = torch.Generator().manual_seed(0)
    return weights + 0.2 * torch.randn(weights.shape, generator=generator, dtype=weights.dtype)


def naive_norm(x, gain):
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + 1e-5) * gain


def naive_turn(x, position, theta):
    """Rotary position of one head of one token, pair by pair as complex numbers."""
    half = x.shape[-1] // 2
    angles = [position * theta ** (-i / half) for i in range(half)]
    pairs = [complex(x[i], x[i + half]) for i in range(half)]
    turned = [pair * cmath.exp(1j * angle) for pair, angle in zip(pairs, angles, strict=True)]
    return torch.tensor([z.real for z in turned] + [z.imag for z in turned], dtype=x.dtype)


def naive_logits(model, adapters, scale, text):
    """Logits after each token of one text, token by token and head by head; adapters merged."""
    config = model.config
    x = model.embedding[text]
    for index, layer in enumerate(model.layers):
        w = {}
        for name, frozen in projections(config, layer).items():
            a, b = (adapters.get(f"{name}.{part}") for part in "AB")
            w[name] = frozen if a is None else frozen + scale * (a[index] @ b[index]).T
        normed = naive_norm(x, layer.attention_norm)
        q, k, v = (normed @ w[name].T for name in ("q_proj", "k_proj", "v_proj"))
        q, k, v = (part.view(len(text), -1, config.head_dim) for part in (q, k, v))
        gathered = torch.zeros_like(q)
        for head in range(config.num_heads):
            shared = head * config.num_kv_heads // config.num_heads
            keys = torch.stack(
                [naive_turn(k[t, shared], t, config.rope_theta) for t in range(len(text))]
            )
            for t in range(len(text)):
                query = naive_turn(q[t, head], t, config.rope_theta)
                scores = keys[: t + 1] @ query / math.sqrt(config.head_dim)
                gathered[t, head] = torch.softmax(scores, dim=0) @ v[: t + 1, shared]
        x = x + gathered.flatten(1) @ w["o_proj"].T
        normed = naive_norm(x, layer.mlp_norm)
        gate = normed @ w["gate_proj"].T
        x = x + (gate * torch.sigmoid(gate) * (normed @ w["up_proj"].T)) @ w["down_proj"].T
    return naive_norm(x, model.norm) @ model.head.T


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_logits_are_those_of_a_naive_llama_with_merged_adapters(kv_heads, tied, attention):
    config = llama_config(kv_heads, tied=tied)
    model = random_llama(config, 3, torch.float64)
    policy = llama_policy(config, attention)
    prompts, inputs = texts()
    adapters = policy.unflatten(runs_apart(policy, RUNS))
    for active, merged in (({}, [{}] * RUNS), (adapters, [])):
        merged = merged or [{n: part[m] for n, part in adapters.items()} for m in range(RUNS)]
        ours = policy.logits(active, prompts, inputs)
        for m, p, g in ((0, 0, 0), (0, 1, 3), (1, 0, 2), (1, 2, 1)):
            prompt = prompts[m, p][prompts[m, p] != PAD]
            text = torch.cat([prompt, inputs[m, p, g]])
            expected = naive_logits(model, merged[m], policy.lora.scale, text)[len(prompt) :]
            assert torch.allclose(ours[m, p, g], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_padding_changes_nothing_and_no_gradient_passes_it(attention):
    policy = llama_policy(llama_config(), attention)
    prompts, inputs = texts()
    weights = runs_apart(policy, RUNS).requires_grad_()
    padded = policy.logits(policy.unflatten(weights), prompts, inputs)[1, 0]
    short = prompts[1:, :1, 3:]
    alone = policy.logits(policy.unflatten(weights[1:]), short, inputs[1:, :1])[0, 0]
    assert torch.allclose(padded, alone, rtol=0, atol=1e-12)
    gradients = [
        torch.autograd.grad(x.square().sum(), weights, retain_graph=True)[0][1]
        for x in (padded, alone)
    ]
    assert torch.allclose(*gradients, rtol=1e-10, atol=1e-10)
    assert gradients[0].norm() > 1e-2
    treated_as_real = policy.logits(policy.unflatten(weights), prompts.clamp(min=0), inputs)[1, 0]
    assert (treated_as_real - padded).abs().max() > 1e-3


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_what_prompts_share_is_read_once_and_changes_neither_logits_nor_gradients(attention):
    shared = 2
    prompts, inputs = texts()
    for prompt in prompts.flatten(0, 1):  # all begin with 11, 5, behind their padding
        prompt[int((prompt == PAD).sum()) :][:shared] = torch.tensor([11, 5])
    every_token = llama_policy(llama_config(), attention)
    weights = runs_apart(every_token, RUNS).requires_grad_()
    results = []
    for known in (0, 1, shared):
        policy = llama_policy(llama_config(), attention, shared=known)
        logits = policy.logits(policy.unflatten(weights), prompts, inputs)
        results.append((logits, *torch.autograd.grad(logits.square().sum(), weights)))
    for logits, gradient in results[1:]:
        assert torch.allclose(logits, results[0][0], rtol=0, atol=1e-12)
        assert torch.allclose(gradient, results[0][1], rtol=1e-10, atol=1e-10)
    assert results[0][1].norm(dim=1).min() > 1e-2
    too_much = llama_policy(llama_config(), attention, shared=shared + 1)
    wrong = too_much.logits(too_much.unflatten(weights), prompts[:1].expand(2, -1, -1), inputs)
    right = every_token.logits(
        every_token.unflatten(weights), prompts[:1].expand(2, -1, -1), inputs
    )
    assert (wrong - right).abs().max() > 1e-3


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("steps", [1, 2])
def test_extending_a_cache_is_the_full_forward(attention, steps):
    policy = llama_policy(llama_config(), attention)
    prompts, inputs = texts()
    inputs = inputs[..., :4]
    adapters = policy.unflatten(runs_apart(policy, RUNS))
    prefix, cache = policy.prefill(adapters, prompts), policy.empty_cache(inputs)
    pieces = [
        policy.extend(adapters, prefix, inputs[..., t : t + steps], cache, t)
        for t in range(0, 4, steps)
    ]
    full = policy.logits(adapters, prompts, inputs)
    assert torch.allclose(torch.cat(pieces, dim=3), full, rtol=0, atol=1e-12)


def test_both_attentions_agree_in_bfloat16_up_to_its_rounding():
    config = llama_config()
    prompts, inputs = texts()
    model = random_llama(config, 3, torch.float32)
    exact = LlamaPolicy(model, LoraConfig(), ForwardConfig()).logits({}, prompts, inputs)
    for attention in ATTENTIONS:
        forward = ForwardConfig(products="bfloat16", attention=attention)
        rounded = LlamaPolicy(model, LoraConfig(), forward).logits({}, prompts, inputs)
        assert rounded.dtype == torch.float32
        error = (rounded - exact).abs().max()
        assert 1e-4 < error < 0.15, "the products are not in bfloat16, or more than they are"


@pytest.mark.peers
@pytest.mark.parametrize("kv_heads", [2, 4], ids=["grouped", "one-to-one"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_transformers_computes_the_same_logits_and_greedy_tokens(tmp_path, kv_heads, tied):
    transformers = pytest.importorskip("transformers", reason="the extra lm is not installed")
    save_llama(random_llama(llama_config(kv_heads, tied=tied), 5, torch.float32), tmp_path)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    policy = LlamaPolicy(load_llama(tmp_path, torch.float32), LoraConfig(), ForwardConfig())
    prompts, _ = texts()
    bos_token, sampled = 7, []
    prefix = policy.prefill({}, prompts)
    like = torch.zeros(RUNS, PROMPTS, 1, STEPS)
    cache, current = policy.empty_cache(like), torch.full_like(like[..., :1], bos_token).long()
    for step in range(STEPS):
        current = policy.extend({}, prefix, current, cache, step).argmax(dim=-1)
        sampled.append(current)
    greedy = torch.cat(sampled, dim=-1)
    logits = policy.logits({}, prompts, completion_inputs(greedy, bos_token))
    for m in range(RUNS):
        for p in range(PROMPTS):
            prompt = [*prompts[m, p][prompts[m, p] != PAD].tolist(), bos_token]
            text = torch.tensor([prompt + greedy[m, p, 0, :-1].tolist()])
            expected = theirs(text).logits[0, -STEPS:]
            assert torch.allclose(logits[m, p, 0], expected, rtol=0, atol=1e-4)
            generated = theirs.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=STEPS, eos_token_id=None
            )
            assert generated[0, len(prompt) :].tolist() == greedy[m, p, 0].tolist()
