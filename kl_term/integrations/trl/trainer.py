"""TRL's GRPOTrainer, whose KL term is any of ours: TRL's own loss without KL, plus the term."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import trl
from torch import Tensor
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer

from kl_term.checks import per_token_advantages
from kl_term.diagnosis.dumping import Dump
from kl_term.diagnosis.readers import record_settings
from kl_term.errors import UserError
from kl_term.integrations.measurements import Sampled, Totals, totals
from kl_term.integrations.trl import capture, hidden_states
from kl_term.integrations.trl.aggregation import LOSS_TYPES, loss_weights
from kl_term.integrations.trl.fitted_control import FollowControl
from kl_term.integrations.trl.target import FollowTarget, TargetKL
from kl_term.kl.chunked import reverse_kl_from_hidden
from kl_term.kl.chunked_top_k import top_k_divergence_from_hidden
from kl_term.kl.term import KLTerm

#: What this was written against: the methods it extends are no public interface of TRL.
TRL_VERSION = "1.16.0"
#: What only the population trainer has.
UNSUPPORTED = ("forward", "cross_entropy")
#: ``k3_clip`` caps the ratio here.
MAX_RATIO = 10.0


class KLGRPOTrainer(GRPOTrainer):
    """GRPO with a choice of KL term, measured at every step.

    Everything but the KL term is TRL's, its options included. The coefficient is
    ``GRPOConfig.beta``. The term is weighed, masked and aggregated as TRL's own, which it
    replaces; without a choice it *is* TRL's own, by TRL's own options. The coefficient is read at
    every step from ``trainer.beta``, so that a callback may change it.

    In the reward, the KL of the policy that sampled is subtracted from the advantages after their
    normalisation.

    UserError, each with one line: a negative ``beta``; a term with ``beta=0``, which is TRL's
    default; ``beta`` with ``estimator='none'``, which measures only; a choice of term that
    contradicts ``use_bias_correction_kl=False``; a
    ``loss_type`` that this does not know; and, with ``estimator='exact'`` or a ``top_k``,
    DeepSpeed, FSDP and models with scaled or capped logits.

    Args:
        model, reward_funcs, args, others: as TRL's.
        kl_term: which term. Left out, it is TRL's own: k3 in the loss, weighed by the attached
            ratio if ``use_bias_correction_kl``.
        dump_rollouts: folder for the log-probs of every training step, as ``kl-term diagnose``
            reads them, or a :class:`~kl_term.diagnosis.dumping.Dump` that says how much of them.
            A new run needs a new one; a run resumed from a checkpoint goes on in it.
        target_kl: lets the coefficient follow the KL, from ``GRPOConfig.beta`` on. It is kept
            beside each checkpoint, and logged as ``kl_term/beta``.
        kl_loss_type: aggregates the term in the loss as TRL does under this ``loss_type``; left
            out, as the policy loss.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        *others: Any,
        kl_term: KLTerm | None = None,
        dump_rollouts: str | Path | Dump | None = None,
        target_kl: TargetKL | None = None,
        kl_loss_type: str | None = None,
        **named: Any,
    ) -> None:
        args = GRPOConfig() if args is None else args
        self.kl_term = chosen_term(kl_term, args)
        self.kl_loss_type = _chosen_aggregation(self.kl_term, kl_loss_type) or args.loss_type
        if target_kl is not None and (self.kl_term.estimator == "none" or args.beta == 0):
            raise UserError("target_kl has no coefficient to move: set GRPOConfig.beta and a term")
        self._scored = self._entropies = self._rewards = self._hidden = self._head = None
        # TRL loads and evaluates a reference where beta is not zero.
        beta = 1.0 if self.kl_term.estimator == "none" else args.beta
        if dump_rollouts is not None and beta == 0:
            raise UserError(
                "dump_rollouts needs a reference: set GRPOConfig.beta, or give "
                "kl_term=KLTerm(estimator='none') to measure without a KL term"
            )
        with _replaced(args, beta=beta):
            super().__init__(model, reward_funcs, args, *others, **named)
        if self._exact:
            self._refuse_sharding()
            hidden_states.refuse_nonlinear_heads(self._unwrapped(self.model))
        self.dump = Dump.of(dump_rollouts, self.accelerator.process_index)
        self._dumped = False
        self.resumed_from: Path | None = None
        self._target = None if target_kl is None else FollowTarget(self, target_kl)
        self._counted: dict[str, Totals] = {}  #: in training and in evaluation
        if self._target is not None:
            self.add_callback(self._target)
        self._control = FollowControl(self) if self.kl_term.control == "fitted" else None
        if self._control is not None:
            self.add_callback(self._control)

    @property
    def kl_beta(self) -> float:
        """The coefficient now."""
        return 0.0 if self.kl_term.estimator == "none" else self.beta

    @property
    def _exact(self) -> bool:
        return self.kl_term.reads_logits

    def _has_term(self, placement: str) -> bool:
        term = self.kl_term
        return term.estimator != "none" and term.placement == placement and self.kl_beta != 0

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self._control is not None and self.model.training:
            self._control.advance()
        in_reward = self._has_term("reward")
        with ExitStack() as stack:
            if in_reward:  # TRL drops the sampler's log-probs where one update follows a rollout
                later = self.args.gradient_accumulation_steps + 1
                stack.enter_context(_replaced(self, num_iterations=later))
            output = super()._generate_and_score_completions(inputs)
        output["rewards"] = self._rewards
        output["group"] = capture.own_groups(self, len(self._rewards))
        if self._exact:
            output["ref_hidden"] = self._hidden  # the reference is what TRL scores last
            self._ref_head = self._head
        if in_reward:
            self._penalise(output)
        self._scored = self._entropies = self._hidden = None
        return output

    def _penalise(self, output: dict[str, Any]) -> None:
        """Subtract the KL of the policy that sampled from the advantages, in place."""
        logp, mask = output["old_per_token_logps"], capture.loss_mask(output)
        owed = self.kl_term.penalty(logp, output["ref_per_token_logps"], mask=mask)
        output["kl_penalties"] = self.kl_beta * owed
        without = per_token_advantages(output["advantages"], "old_per_token_logps", logp)
        output["advantages"] = torch.where(mask, without - output["kl_penalties"], 0.0)

    def _calculate_rewards(self, inputs: Any, prompts: Any, *others: Any) -> Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, *others)
        self._rewards = capture.own_rewards(self, rewards, len(prompts))
        return rewards

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, length: int, *others, **named
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        scored = super()._get_per_token_logps_and_entropies
        if not self._exact:
            found = scored(model, input_ids, attention_mask, length, *others, **named)
        else:
            with hidden_states.last_hidden_states(self._unwrapped(model)) as seen:
                found = scored(model, input_ids, attention_mask, length, *others, **named)
                # Under an adapter that is off, the head is the reference's.
                self._head = hidden_states.head_of(self._unwrapped(model), self.temperature)
            self._hidden = hidden_states.before_completion(seen, length)
        self._scored, self._entropies = found[:2]
        return found

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if not self.kl_beta >= 0:
            raise UserError(f"trainer.beta={self.beta} rewards divergence: it must be >= 0")
        with _replaced(self, beta=0.0):
            loss = super()._compute_loss(model, inputs)
        logp, entropies, hidden = self._scored, self._entropies, self._hidden
        self._scored = self._entropies = self._hidden = None
        sampled = Sampled(
            logp=logp,
            old_logp=inputs.get("old_per_token_logps", logp.detach()),
            mask=capture.loss_mask(inputs),
            ref_logp=inputs.get("ref_per_token_logps"),
            sampler_logp=inputs.get("sampling_per_token_logps"),
            entropy=entropies.detach(),
        )
        terms = None
        if sampled.ref_logp is None:
            pass  # scored while beta was zero
        elif self._exact:
            terms = self._exact_terms(model, hidden, inputs["ref_hidden"], sampled.mask)
        elif self._has_term("loss"):
            terms = self.kl_term.loss(
                logp,
                sampled.ref_logp,
                old_logp=sampled.old_logp,
                mask=sampled.mask,
                control=None if self._control is None else self._control.weight,
            )
            if self._control is not None and self.model.training:
                self._control.add(sampled)
        added = torch.zeros_like(loss)
        if terms is not None:
            weights = self._loss_weights(sampled.mask, inputs)
            added = self.kl_beta * (weights * terms).sum()
        self._log_measurements(sampled, inputs, terms, added.detach())
        if self.dump is not None and self.model.training:
            self._dump_batch(inputs, logp, entropies, terms)
        return loss + added

    def _exact_terms(self, model: Any, hidden: Tensor, ref_hidden: Tensor, mask: Tensor) -> Tensor:
        head = hidden_states.head_of(self._unwrapped(model), self.temperature)
        states = (hidden, head, ref_hidden, self._ref_head)
        if self.kl_term.top_k is not None:
            return top_k_divergence_from_hidden(*states, **self.kl_term.of_top_k, mask=mask)
        return reverse_kl_from_hidden(*states, mask=mask)

    def _loss_weights(self, mask: Tensor, inputs: dict[str, Any]) -> Tensor:
        training = self.model.training
        accumulation = self.current_gradient_accumulation_steps if training else 1
        num_items = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        if training:  # counted over all steps of a generation: scaled to one accumulation window
            num_items = num_items * accumulation / self.args.steps_per_generation
        return loss_weights(
            mask,
            self.kl_loss_type,
            accumulation=accumulation,
            max_length=self.max_completion_length,
            num_items=num_items,
        )

    def _log_measurements(
        self, sampled: Sampled, inputs: dict[str, Any], terms: Tensor | None, added: Tensor
    ) -> None:
        counted = totals(
            sampled,
            max_ratio=MAX_RATIO if self.kl_term.estimator == "k3_clip" else None,
            terms=None if terms is None else terms.detach(),
            total=self._total,
            penalties=inputs.get("kl_penalties"),
            gather=lambda x: self.accelerator.gather(
                self.accelerator.pad_across_processes(x, dim=0, pad_index=float("nan"))
            ),
        )
        mode = "train" if self.model.training else "eval"
        metrics, found = self._metrics[mode], counted.measured()
        if terms is not None:
            steps = self.current_gradient_accumulation_steps if self.model.training else 1
            mean = self.accelerator.gather(added).mean().item()
            metrics["kl_term/loss"].append(steps * mean)
        if self._target is not None:
            metrics["kl_term/beta"].append(self.kl_beta)
            if self.model.training and "k1" in found:
                self._target.measured(found["k1"], found["tokens"])
        if self._control is not None:
            metrics["kl_term/control"].append(self._control.weight.item())
        if "term" in found:
            metrics["kl"].append(found["term"])  # TRL's name for it, and its mean of micro-batches
        if "kl_term/tokens" in metrics:  # since the last log, which empties them
            counted = self._counted[mode].plus(counted)
        self._counted[mode] = counted
        for name, value in counted.measured().items():
            metrics[f"kl_term/{name}"] = [value]

    def _total(self, values: Tensor) -> Tensor:
        return self.accelerator.reduce(values, reduction="sum")

    def train(self, resume_from_checkpoint: Any = None, *others: Any, **named: Any) -> Any:
        """As TRL's; a new run is refused a folder that holds another's rollouts."""
        resumed = resume_from_checkpoint or self.args.resume_from_checkpoint
        if resumed is True:
            resumed = get_last_checkpoint(self.args.output_dir)
        self.resumed_from = Path(resumed) if resumed else None
        if self.dump is not None:
            self.dump.begin(resumed=bool(resumed) or self._dumped)
            if self.accelerator.is_main_process:
                record_settings(self.dump.folder, capture.settings(self, self.kl_term))
        return super().train(resume_from_checkpoint, *others, **named)

    def _dump_batch(
        self, inputs: dict[str, Any], logp: Tensor, entropy: Tensor, terms: Tensor | None
    ) -> None:
        if not self._dumped:  # the steps after its checkpoint are made again by a resumed run
            self.dump.forget_from(self.state.global_step)
        self._dumped = True
        owed = inputs.get("kl_penalties") if terms is None else self.kl_beta * terms
        self.dump.write(
            step=self.state.global_step,
            generation=capture.generation(self),
            **capture.fields(inputs, logp, entropy, owed),
        )

    def _unwrapped(self, model: Any) -> Any:
        return self.accelerator.unwrap_model(model)

    def _refuse_sharding(self) -> None:
        for name, sharded in (
            ("DeepSpeed", self.is_deepspeed_enabled),
            ("FSDP", self.is_fsdp_enabled),
        ):
            if sharded:
                raise UserError(
                    f"estimator='exact' does not run under {name}, which shards the head: "
                    "use k2 in the loss"
                )


def chosen_term(kl_term: KLTerm | None, args: GRPOConfig) -> KLTerm:
    """The term that is asked for, or the one that TRL's own options describe.

    Raises:
        UserError: the options contradict each other, or are not supported.
    """
    if not trl.__version__.startswith(TRL_VERSION.rpartition(".")[0] + "."):
        warnings.warn(
            f"KLGRPOTrainer extends methods of TRL {TRL_VERSION}; this is {trl.__version__}",
            stacklevel=3,
        )
    if args.loss_type not in LOSS_TYPES:
        raise UserError(
            f"loss_type={args.loss_type!r} is not supported; use one of {', '.join(LOSS_TYPES)}"
        )
    if not args.beta >= 0:
        raise UserError(f"GRPOConfig.beta={args.beta} rewards divergence: it must be >= 0")
    if kl_term is None:
        if not args.use_bias_correction_kl:
            return KLTerm()
        by_level = {"token": "token", "sequence": "geometric"}
        return KLTerm(weighting="attached", ratio=by_level[args.importance_sampling_level])
    if not isinstance(kl_term, KLTerm):
        raise UserError(f"kl_term={kl_term!r} is no KLTerm: give KLTerm(estimator='k2'), say")
    if kl_term.estimator in UNSUPPORTED and kl_term.top_k is None:
        raise UserError(f"estimator={kl_term.estimator!r} is not supported here: use 'exact'")
    if kl_term.estimator == "none" and args.beta != 0:
        raise UserError(f"estimator='none' measures only: set GRPOConfig.beta={args.beta} to 0")
    if kl_term.estimator != "none" and args.beta == 0:
        raise UserError(
            f"kl_term={kl_term.name} has no effect at GRPOConfig.beta=0, TRL's default: set beta, "
            "or measure only with KLTerm(estimator='none')"
        )
    if kl_term.weighting != "none" and not args.use_bias_correction_kl:
        raise UserError(
            f"weighting={kl_term.weighting!r} contradicts use_bias_correction_kl=False: "
            "leave TRL's option at its default"
        )
    return kl_term


def _chosen_aggregation(term: KLTerm, kl_loss_type: str | None) -> str | None:
    """Raises: UserError: an aggregation that is not known, or of a term that is not in the loss."""
    if kl_loss_type is not None and kl_loss_type not in LOSS_TYPES:
        raise UserError(f"kl_loss_type={kl_loss_type!r}: use one of {', '.join(LOSS_TYPES)}")
    if kl_loss_type is not None and (term.placement != "loss" or term.estimator == "none"):
        raise UserError(f"kl_loss_type aggregates a term in the loss, and {term.name} is none")
    return kl_loss_type


@contextmanager
def _replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes of an object, replaced for a while."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
