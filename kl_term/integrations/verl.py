"""Any KL term of this book in the loss of verl's actor, under a name for ``actor.kl_loss_type``.

None of verl's registries can carry one. A policy loss (``register_policy_loss``) is not given the
log-probs of the reference; ``kl_penalty``, which is, has a chain of names in place of a registry
and is not given those of the sampler. ``ppo_loss`` of ``verl.workers.utils.losses`` has both: it
is extended here, as of verl 0.9.1. verl is imported by a call, not with this module.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor

from kl_term.errors import UserError
from kl_term.kl.term import KLTerm

__all__ = ["KLTerm", "register_kl_term"]


def register_kl_term(name: str, term: KLTerm) -> None:
    """Make ``actor.kl_loss_type=name`` this term; every other name stays verl's.

    Call it in a module named in ``actor_rollout_ref.model.external_lib``, which verl imports in
    every worker. Coefficient, aggregation and metrics remain verl's: ``kl_loss_coef``,
    ``loss_agg_mode``, ``kl_loss``. A weighting takes ``old_log_probs`` for the sampler's.

    Args:
        name: for ``actor.kl_loss_type``. In a process that has not called this, verl refuses it.
        term: a term in the loss that reads log-probs of the sampled tokens only.

    Raises:
        UserError: the term is another, or verl itself has an estimator of this name.
    """
    if term.placement != "loss" or term.estimator == "none":
        raise UserError(f"{term.name} is no term of the loss: leave placement at 'loss'")
    if term.reads_logits:
        raise UserError(
            f"estimator={term.estimator!r} reads logits, which verl's loss is not given: use 'k2', "
            "or 'k3' with weighting='attached'"
        )
    if term.control == "fitted":
        raise UserError("control='fitted' goes from batch to batch: give verl a number")
    from verl.trainer.distillation import losses as distillation
    from verl.workers import engine_workers
    from verl.workers.utils import losses

    if _is_own(losses, name):
        raise UserError(f"{name!r} is an estimator of verl's own: choose another name")
    if not hasattr(losses.ppo_loss, "kl_terms"):
        extended = _extended(losses)
        for module in (losses, engine_workers, distillation):  # each has a name of its own for it
            module.ppo_loss = extended
    losses.ppo_loss.kl_terms[name] = term


def _is_own(losses: Any, name: str) -> bool:
    try:
        losses.kl_penalty(torch.zeros(1), torch.zeros(1), name)
    except NotImplementedError:
        return False
    return True


def _extended(losses: Any) -> Any:
    """verl's ``ppo_loss``, its estimator replaced where a registered term is asked for."""
    verls = losses.ppo_loss
    terms: dict[str, KLTerm] = {}

    @wraps(verls)
    def ppo_loss(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        term = terms.get(config.kl_loss_type)
        if term is None:
            return verls(config, model_output, data, dp_group)
        read = data.select("old_log_probs", "response_mask").to_padded_tensor()
        old_logp, mask = read["old_log_probs"], read["response_mask"].bool()

        def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
            return term.loss(logprob, ref_logprob, old_logp=old_logp, mask=mask)

        own, losses.kl_penalty = losses.kl_penalty, kl_penalty
        try:
            return verls(config, model_output, data, dp_group)
        finally:
            losses.kl_penalty = own

    ppo_loss.kl_terms = terms  # type: ignore[attr-defined]
    return ppo_loss
