"""Which KL restrains: fronts over beta, and every level, credit and order of one estimator."""

from __future__ import annotations

from pydantic import NonNegativeFloat

from analysis.experiments.ablations.presets import (
    CONFIG,
    FULL,
    NO_KL,
    Preset,
    fresh_seeds,
    kl_arms,
    train_config,
)
from analysis.kl.term import KLTerm
from analysis.training.arms import Advantage, Arm


def figure2(
    *, beta: NonNegativeFloat = 0.04, num_seeds: int = 10, updates: int = CONFIG.updates
) -> Preset:
    """Figure 2 of "Rethinking KL Divergence in RLHF": 12 prompts, groups of 6, beta 0.04."""
    return Preset(
        name="figure2",
        config=train_config(updates=updates, num_prompts=12, group_size=6, log_every=5),
        arms=(NO_KL, *kl_arms(beta)),
        seeds=fresh_seeds(200, num_seeds),
        predictions=(
            "At this beta no arm differs from that without a KL term in accuracy.",
            "k3 as a loss fluctuates no more than k2 as a loss, in gradient norm and in KL.",
        ),
    )


def beta_front(
    *,
    betas: tuple[NonNegativeFloat, ...] = (0.03, 3.0),
    num_seeds: int = len(FULL.seeds),
    updates: int = CONFIG.updates,
) -> Preset:
    """The betas on either side of the full preset's, on its seeds: fronts of reward against KL."""
    return Preset(
        name="beta_front",
        config=train_config(updates=updates, log_every=10),
        arms=tuple(arm for beta in betas for arm in kl_arms(beta)),
        seeds=fresh_seeds(FULL.seeds[0], num_seeds),
        predictions=(
            "At equal exact reverse KL, k2 as a loss, k1 in the reward and the exact KL agree "
            "in accuracy.",
            "At no beta does k1 as a loss end nearer to the reference than no KL term.",
        ),
    )


def kl_axes(
    *, beta: NonNegativeFloat = 0.3, num_seeds: int = 10, updates: int = CONFIG.updates
) -> Preset:
    """One estimator each, over level, credit, order and value: the axes that names hide."""

    def in_reward(label: str, advantage: Advantage = Advantage(), **axes: str) -> Arm:  # noqa: B008
        kl = KLTerm(estimator="k1", placement="reward", **axes)
        return Arm(label=label, kl=kl, beta=beta, advantage=advantage)

    before = Advantage(kl_order="before")
    leave_one_out = Advantage(kl_order="before", baseline="leave_one_out")
    return Preset(
        name="kl_axes",
        config=train_config(updates=updates, log_every=10),
        arms=(
            NO_KL,
            Arm(kl=KLTerm(estimator="exact"), beta=beta),
            Arm(kl=KLTerm(estimator="forward"), beta=beta),
            Arm(kl=KLTerm(estimator="minimax01"), beta=beta),
            Arm(kl=KLTerm(estimator="k3_clip"), beta=beta),
            Arm(label="k2_loss_shows_k3", kl=KLTerm(estimator="k2", value="k3"), beta=beta),
            Arm(label="k2_loss_sequence", kl=KLTerm(estimator="k2", level="sequence"), beta=beta),
            in_reward("k1_reward_to_go"),
            in_reward("k1_reward_immediate", credit="immediate"),
            in_reward("k1_reward_sequence", level="sequence"),
            in_reward("k1_reward_before_std", before),
            in_reward("k1_reward_before_loo", leave_one_out),
        ),
        seeds=fresh_seeds(400, num_seeds),
        predictions=(
            "A loss that shows k3 and has the gradient of k2 trains as k2 does, to the bit.",
            "k1 in the reward holds the policy at every credit, level and order.",
            "The k2 loss of the whole sequence ends as k1 in the reward at that level does: sample "
            "by sample it has its gradient.",
            "MiniMax-01's surrogate holds the policy less than k2 does at the same beta.",
        ),
    )
