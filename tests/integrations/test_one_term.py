"""One KL term, two trainers: ours and TRL's differentiate it alike on the same tensors."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from analysis.records.config import Run, TrainConfig
from analysis.records.variants import Objective, Variant
from analysis.training.loss import Terms, compute_step
from analysis.training.rollout import Batch, Rollout, token_logp
from kl_term.kl.term import KLTerm
from tests.integrations import tiny_trl

pytest.importorskip("trl", reason="the extra trl is not installed: make test-full")
pytestmark = pytest.mark.peers

from kl_term.integrations.trl import KLGRPOTrainer  # noqa: E402
from kl_term.integrations.trl import hidden_states as trl_hidden  # noqa: E402
from kl_term.integrations.trl.trainer import UNSUPPORTED  # noqa: E402
from kl_term.kl.chunked import Head  # noqa: E402

PROMPTS, GROUP, LENGTH, VOCAB = tiny_trl.PROMPTS, tiny_trl.GROUP, tiny_trl.LENGTH, 5
BETA = 0.7
#: The aggregations that both know: TRL's loss type, and our mode.
AGGREGATIONS = {
    "grpo": "seq_mean_token_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "dr_grpo": "seq_mean_token_sum_norm",
}


def fields_of(name: str) -> st.SearchStrategy:
    return st.sampled_from(KLTerm.model_fields[name].annotation.__args__)


@st.composite
def terms(draw) -> KLTerm:
    """Every term that is not refused."""
    chosen = {
        name: draw(fields_of(name))
        for name in ("estimator", "placement", "level", "weighting", "ratio", "credit")
    }
    chosen["value"] = draw(st.sampled_from([None, "k1", "k3"]))
    assume(chosen["estimator"] not in ("none", *UNSUPPORTED))
    for name in draw(st.sets(st.sampled_from([*chosen][2:]))) | {"value"}:
        chosen[name] = KLTerm.model_fields[name].default if draw(st.booleans()) else chosen[name]
    try:
        return KLTerm(**chosen)
    except ValueError:
        assume(False)


@cache
def trl_trainer(loss_type: str, folder: str) -> KLGRPOTrainer:
    model = tiny_trl.save_model(Path(folder) / "model", seed=3)
    given = tiny_trl.arguments(model, Path(folder), beta=BETA, loss_type=loss_type)
    return KLGRPOTrainer(**given, kl_term=KLTerm())


def sampled(seed: int) -> SimpleNamespace:
    """Ragged completions of a policy, its reference and its sampler, all far from each other."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, PROMPTS, GROUP, LENGTH)
    logits, ref, old = torch.randn(3, *shape, VOCAB, generator=generator, dtype=torch.float64)
    tokens = torch.randint(VOCAB, shape, generator=generator)
    lengths = torch.randint(1, LENGTH + 1, shape[:-1], generator=generator)
    lengths[..., 0] = LENGTH
    mask = torch.arange(LENGTH) < lengths.unsqueeze(-1)
    advantages = torch.randn(shape[:-1], generator=generator, dtype=torch.float64)
    return SimpleNamespace(
        logits=logits, ref=ref, old=old, tokens=tokens, mask=mask, advantages=advantages
    )


def ours(term: KLTerm, aggregation: str, data: SimpleNamespace, beta: float) -> torch.Tensor:
    """Gradient by the logits of the population trainer's loss."""
    variant = Variant(kl=term if beta else KLTerm(estimator="none"), beta=beta)
    variant = variant.model_copy(
        update={"objective": Objective(kind="reinforce", aggregation=aggregation)}
    )
    config = TrainConfig(num_prompts=PROMPTS, group_size=GROUP, precision="float64")
    made = Terms(config, [Run(variant=variant, seed=0)], torch.device("cpu"), has_teacher=False)
    logits = data.logits.clone().requires_grad_()
    ref_logp, old_logp = (token_logp(x, data.tokens, 1.0) for x in (data.ref, data.old))
    rollout = Rollout(
        prompts=data.tokens[:, :, 0],
        inputs=data.tokens,
        completions=data.tokens,
        old_logp=old_logp,
        mask=data.mask,
        sampler_logp=old_logp,
        keep=torch.ones_like(data.mask).unsqueeze(-1),
    )
    advantages = data.advantages.unsqueeze(-1) - made.kl.penalty(old_logp, ref_logp, data.mask)
    batch = Batch(
        rollout=rollout,
        ref_logits=data.ref,
        ref_logp=ref_logp,
        rewards=data.advantages,
        outcomes=data.advantages,
        advantages=advantages,
        kept=torch.ones(1, PROMPTS, dtype=torch.bool),
        trained=torch.ones_like(data.mask),
        finished=torch.ones_like(data.mask[..., 0]),
    )
    loss = compute_step(logits, made, batch, measure=False).losses.sum()
    return torch.autograd.grad(loss, logits)[0].flatten(0, 2)


def theirs(trainer, term: KLTerm, data: SimpleNamespace, beta: float, monkeypatch) -> torch.Tensor:
    """Gradient by the logits of the loss of TRL's trainer with our term."""
    logits, ref, old = (x.flatten(0, 2).clone() for x in (data.logits, data.ref, data.old))
    logits.requires_grad_()
    tokens, mask = data.tokens.flatten(0, 2), data.mask.flatten(0, 2)
    entropy = torch.zeros_like(mask, dtype=torch.float64)

    def scored(self, *_, **__):
        self._scored, self._entropies, self._hidden = (
            token_logp(logits, tokens, 1.0),
            entropy,
            logits,
        )
        return self._scored, entropy, None

    monkeypatch.setattr(KLGRPOTrainer, "_get_per_token_logps_and_entropies", scored)
    head = Head(torch.eye(VOCAB, dtype=torch.float64), None, 1.0)
    monkeypatch.setattr(trl_hidden, "head_of", lambda *_: head)
    trainer.kl_term, trainer.beta, trainer._ref_head = term, beta, head
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = {
        "prompt_ids": torch.zeros(len(tokens), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(tokens), 1, dtype=torch.long),
        "completion_ids": tokens,
        "completion_mask": mask.long(),
        "advantages": data.advantages.flatten(),
        "num_items_in_batch": mask.sum(),
        "old_per_token_logps": token_logp(old, tokens, 1.0),
        "ref_per_token_logps": token_logp(ref, tokens, 1.0),
        "ref_hidden": ref,
    }
    if trainer._has_term("reward"):
        trainer._penalise(inputs)
        # REINFORCE, whose gradient no ratio weighs or clips: TRL's ratio is one at the sampler.
        inputs["old_per_token_logps"] = token_logp(logits, tokens, 1.0).detach()
    loss = trainer._compute_loss(trainer.model, inputs)
    return torch.autograd.grad(loss, logits)[0]


@settings(
    deadline=None,
    max_examples=150,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.filter_too_much,  # most fields have no meaning for most terms
    ],
)
@given(term=terms(), loss_type=st.sampled_from(sorted(AGGREGATIONS)), seed=st.integers(0, 50))
def test_both_trainers_have_one_gradient(term, loss_type, seed, monkeypatch, tmp_path_factory):
    with monkeypatch.context() as patch:
        trainer = trl_trainer(loss_type, str(tmp_path_factory.getbasetemp() / loss_type))
        data = sampled(seed)
        found = theirs(trainer, term, data, BETA, patch)
        without = theirs(trainer, term, data, 0.0, patch)
    expected = ours(term, AGGREGATIONS[loss_type], data, BETA)
    nothing = ours(term, AGGREGATIONS[loss_type], data, 0.0)
    if term.placement == "loss":  # the policy term differs: ours is REINFORCE here
        found, expected = found - without, expected - nothing
    scale = expected.abs().max()
    assert scale > 0
    assert (found - expected).abs().max() <= 2e-6 * scale  # TRL weighs tokens in float32
    assert (found + expected).abs().max() > 1e-3 * scale
