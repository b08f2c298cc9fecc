"""Claims on which estimator to take, and where."""

from __future__ import annotations

import torch

from analysis.chapters.ch02_gradients.expected_gradients import one_state_table
from analysis.evidence.claims import EXACT, Finding, claim, error_of, judge, largest, median, share
from analysis.evidence.far_policies import error_to, stale, typical, worst
from analysis.evidence.noise_ratio import noise_ratio
from analysis.evidence.policies import pairs
from kl_term.kl.enumeration import exact_kl_gradient, gradient_moments
from kl_term.kl.scores import expected_score


@claim("S4-2")
def the_placement_table() -> Finding:
    """All eight cells of the table at one state on fresh samples, and the k2 cell on stale ones."""
    table = one_state_table(pairs()).set_index(["estimator", "placement"]).optimises
    kl_terms = {("k1", "reward"), ("k2", "loss")}
    right = sum((cell in kl_terms) == (of == "reverse") for cell, of in table.items())
    # 1 - r as a penalty is the k3 loss; differentiated as a loss its coefficient is r itself.
    logp, ref_logp = (x.log_softmax(-1) for x in pairs())
    as_penalty = expected_score(logp, -logp.exp() * torch.expm1(ref_logp - logp))
    as_loss = ref_logp.exp() - logp.exp()
    exact = {d: exact_kl_gradient(*pairs(), direction=d) for d in ("reverse", "forward")}
    right += sum(error_of(x, exact["reverse"], worst=True) > EXACT for x in (as_penalty, as_loss))
    figures = {
        "cells_right": float(right),
        "transferred_k3_to_forward": error_of(as_penalty, exact["forward"], worst=True),
        "stale_k2_loss": typical("k2", stale()),
        "stale_k1_reward": typical("k1", stale(), placement="reward"),
    }
    always = max(figures["stale_k2_loss"], figures["stale_k1_reward"]) < EXACT
    return Finding(judge(always, right == 8), figures)


@claim("S3-6")
def kl_as_a_separate_loss() -> Finding:
    """The three ways to differentiate the separate KL term, against the exact gradient."""
    figures = {
        "whole_vocabulary": worst("k1", weighting="attached"),
        "k2_sampled": worst("k2"),
        "k3_sampled": typical("k3"),
    }
    right = max(figures["whole_vocabulary"], figures["k2_sampled"]) < EXACT
    return Finding(judge(right and figures["k3_sampled"] < EXACT, right), figures)


@claim("S3-11")
def which_estimator_goes_where() -> Finding:
    """Each row of the table against the exact gradient; one-sample noise of the three variants."""
    ratio = noise_ratio(*pairs())
    reward = gradient_moments(*pairs(), estimator="k1", placement="reward").trace_var
    loss = gradient_moments(*pairs(), estimator="k2").trace_var
    figures = {
        "k1_reward": worst("k1", placement="reward"),
        "k2_loss": worst("k2"),
        "k3_loss": typical("k3"),
        "k3_noisier_share": share(ratio > 1),
        "k3_over_k2_noise": median(ratio),
        "k2_loss_over_k1_reward_noise": median(loss / reward),
    }
    rows = max(figures["k1_reward"], figures["k2_loss"]) < EXACT
    recommended = figures["k3_loss"] < EXACT and figures["k3_noisier_share"] == 0
    return Finding(judge(rows and recommended, rows), figures)


@claim("S4-21")
def k3_loss_is_not_better() -> Finding:
    """k3 against k2 as losses: distance of the mean from the KL gradient, noise of one sample."""
    k2, k3 = error_to("reverse", "k2"), error_to("reverse", "k3")
    better = share(k3 < k2)
    figures = {
        "k3_closer_share": better,
        "k2_error": largest(k2),
        "k3_error": median(k3),
        "k3_less_noisy_share": share(noise_ratio(*pairs()) < 1),
    }
    return Finding(judge(better == 1.0, better > 0), figures)
