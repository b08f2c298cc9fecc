r"""Samplers that cut the tail off: top-k, top-p and temperature, and what they do to ratios."""

from __future__ import annotations

import torch
from torch import Tensor

from kl_term.checks import at_least_float32, check_float, check_same_shape, checked
from kl_term.kl.divergences import log_softmaxes
from kl_term.plain_checks import check_positive
from kl_term.shapes import Kept, Logits


@checked(nan="refused", half="kept")
def keep_top(logits: Logits, *, top_k: int | None = None, top_p: float = 1.0) -> Tensor:
    """The sampling mask [..., V]: which tokens top-k and top-p leave to the sampler.

    Top-p keeps the smallest set of likeliest tokens whose probability reaches ``top_p``; among
    equal logits the lower index comes first. At least one token is always kept. At ``top_p`` 1 all
    are, whatever their probability: forbidden ones (``-inf``) too, and a sum that rounds to one
    drops none.
    """
    check_float("logits", logits)
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k!r}")
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p must be in (0, 1], got {top_p!r}")
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probability = at_least_float32(ordered).softmax(-1)
    kept = probability.cumsum(-1) - probability < top_p  # what comes before has not reached it
    kept |= bool(top_p == 1.0)
    if top_k is not None:
        kept &= torch.arange(logits.shape[-1], device=logits.device) < top_k
    return torch.zeros_like(kept).scatter(-1, order, kept)


@checked(half="kept")
def masked_logits(logits: Logits, keep: Kept) -> Tensor:
    r"""The policy restricted to the kept tokens, and renormalised by the softmax.

    .. math:: \tilde\pi(a) = \frac{\pi(a)\, [a \in K]}{\sum_{b \in K} \pi(b)}

    With the *sampler's* mask on both sides of the ratio the supports agree, and
    :math:`\mathbb{E}_{\tilde\mu}[\tilde\pi/\tilde\mu\, f] = \mathbb{E}_{\tilde\pi}[f]`.

    Equation: ``masked_logits``
    Source: DeepSeek-AI (2025), DeepSeek-V3.2, "keep sampling mask".

    Args:
        logits: [..., V].
        keep: [..., V] bool, from :func:`keep_top` on the *sampler's* logits.

    Returns:
        [..., V], ``-inf`` where not kept.
    """
    check_same_shape("logits", logits, "keep", keep)
    return torch.where(keep, logits, -torch.inf)


@checked
def covered_kl(logits: Logits, ref_logits: Logits, keep: Kept) -> Tensor:
    r"""The part of the reverse KL that lies on the kept tokens, as a divergence of its own.

    .. math:: D_K(\pi_\theta \Vert \pi_{\mathrm{ref}}) = \sum_{a \in K} \Big( \pi_\theta(a)
        \log \frac{\pi_\theta(a)}{\pi_{\mathrm{ref}}(a)} - \pi_\theta(a) + \pi_{\mathrm{ref}}(a)
        \Big) \ge 0

    Over a set of tokens and its complement the two parts sum to the KL. It vanishes if and only if
    the two policies agree on the kept tokens. It is the mean of k3 with the ratio, under a sampler
    that draws the kept tokens only, if the policy allows them all.

    Equation: ``covered_kl``
    Source: the KL of measures that need not sum to one, Csiszar (1991).

    Args:
        logits, ref_logits: [..., V].
        keep: [..., V] bool.

    Returns:
        [...], nats, with gradient; ``inf`` where the policy allows a kept token that the reference
        forbids.
    """
    logp, ref_logp = log_softmaxes(logits, ref_logits)
    check_same_shape("logits", logp, "keep", keep)
    allowed = keep & (logp != -torch.inf)
    log_ratio = torch.where(allowed, logp, 0.0) - torch.where(allowed, ref_logp, 0.0)
    terms = torch.where(allowed, logp.exp(), 0.0) * (log_ratio - 1)
    return torch.where(keep, terms + ref_logp.exp(), 0.0).sum(-1)


@checked(half="kept")
def tempered(logits: Logits, temperature: float) -> Tensor:
    r"""The logits a sampler uses at a temperature.

    .. math:: \mu(a) \propto \pi(a)^{1/\tau}

    Equation: ``tempered``
    """
    check_positive("temperature", temperature)
    return logits / temperature
