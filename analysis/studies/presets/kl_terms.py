"""KL terms at one beta: at two step sizes, and along every axis of one estimator."""

from __future__ import annotations

from pydantic import NonNegativeFloat

from analysis.records.preset import Preset
from analysis.records.variants import Advantage, Variant
from analysis.studies.presets.designed import (
    AT_END_OF_TRAINING,
    EXTENDED,
    NUM_SEEDS,
    designed,
    on_ten_starts,
)
from analysis.studies.presets.parts import CONFIG, NO_KL, kl_variants, train_config
from analysis.studies.presets.registry import fresh_seeds, preset
from kl_term.kl.choice import KLChoice

PREDICTIONS = (
    "k1 as a loss ends as far from the reference as no KL term: its expected gradient is zero.",
    "k2 as a loss ends at the exact reverse KL of the exact variant: on-policy it has its "
    "gradient.",
    "k1 in the reward ends near k2 as a loss: the same divergence, credited to earlier tokens too.",
    "k3 as a loss ends elsewhere than k2 as a loss: its expected gradient is the forward KL's.",
    "k2 and k3 in the reward do not keep the policy near it: theirs is no gradient of a KL.",
    "At this step size, a policy kept near the reference ends at the higher accuracy.",
)


@preset
def quick(
    *,
    beta: NonNegativeFloat = 0.3,
    learning_rate: float = CONFIG.learning_rate,
    updates: int = CONFIG.updates,
    num_seeds: int = 3,
) -> Preset:
    """Eight variants at one beta, half a minute on one core."""
    return Preset(
        config=train_config(learning_rate=learning_rate, updates=updates),
        variants=(NO_KL, *kl_variants(beta)),
        seeds=fresh_seeds(0, num_seeds),
        predictions=PREDICTIONS,
    )


@preset
def half_step() -> Preset:
    """Eight variants at one beta and half the step size: is a KL term still worth something?"""
    return designed(
        _HALF_STEP,
        (NO_KL, *kl_variants(0.3)),
        fresh_seeds(8900, NUM_SEEDS),
        learning_rate=CONFIG.learning_rate / 2,
        cosine_every=CONFIG.cosine_every,
    )


_HALF_STEP = on_ten_starts(
    80,
    "Accuracy 0.63 without a KL term, 0.62 to 0.64 with k2, k3 or the exact KL as a loss or k1 in "
    "the reward, 0.43 with k3 in the reward; reverse KL 0.08 without one, 0.04 to 0.06 with those "
    "four.",
    question="At half the step size, which terms keep the policy near, and does it pay?",
    outcome=f"Exact reverse KL, nats per token, and accuracy. {AT_END_OF_TRAINING}",
    at=(0.3,),
    predictions={
        "exact_loss k2_loss k3_loss k1_reward < none: reverse_kl": "it descends a KL",
        "k1_loss = none: reverse_kl": "its expected gradient is zero",
        "k2_loss = exact_loss: reverse_kl": (
            "on fresh samples it has the exact KL's expected gradient"
        ),
        "k3_reward > none: reverse_kl": "it pays for giving up tokens",
        "exact_loss k2_loss k3_loss k1_reward = none: accuracy": (
            "the smaller step limits the drift by itself"
        ),
        "k3_reward < none: accuracy": "what it drives away from is the task too",
    },
)


@preset
def kl_axes(*, beta: NonNegativeFloat = 0.3) -> Preset:
    """One estimator each, over level, credit, order and value: the axes that names hide."""

    def in_reward(label: str, advantage: Advantage = Advantage(), **axes: str) -> Variant:  # noqa: B008
        kl = KLChoice(estimator="k1", placement="reward", **axes)
        return Variant(label=label, kl=kl, beta=beta, advantage=advantage)

    before = Advantage(kl_order="before")
    leave_one_out = Advantage(kl_order="before", baseline="leave_one_out")
    return designed(
        _AXES.at(beta),
        (
            NO_KL,
            Variant(kl=KLChoice(estimator="exact"), beta=beta),
            Variant(kl=KLChoice(estimator="forward"), beta=beta),
            Variant(kl=KLChoice(estimator="minimax01"), beta=beta),
            Variant(kl=KLChoice(estimator="k3_clip"), beta=beta),
            Variant(label="k2_loss_shows_k3", kl=KLChoice(estimator="k2", value="k3"), beta=beta),
            Variant(
                label="k2_loss_sequence", kl=KLChoice(estimator="k2", level="sequence"), beta=beta
            ),
            in_reward("k1_reward_to_go"),
            in_reward("k1_reward_immediate", credit="immediate"),
            in_reward("k1_reward_sequence", level="sequence"),
            in_reward("k1_reward_before_std", before),
            in_reward("k1_reward_before_loo", leave_one_out),
        ),
        fresh_seeds(8700, NUM_SEEDS),
    )


_AXES = on_ten_starts(
    120,
    "A k2 loss that shows k3 trained as plain k2, to the bit. k1 in the reward ended at one KL at "
    "every credit and level. The k2 loss of the whole sequence was equivalent in accuracy to k1 in "
    "the reward at that level; MiniMax-01's surrogate ended between k2 and no KL term.",
    stopping=EXTENDED,
    question="What do level, credit, order and the value shown change, estimator and beta equal?",
    outcome=f"Exact reverse KL, nats per token, and accuracy. {AT_END_OF_TRAINING}",
    at=(0.3,),
    predictions={
        "k1_reward_immediate k1_reward_sequence = k1_reward_to_go: reverse_kl": (
            "on eight tokens little of the KL lies in the future"
        ),
        "k1_reward_before_std k1_reward_before_loo k1_reward_to_go < none: reverse_kl": (
            "in every order it is a penalty on the KL"
        ),
        "k2_loss_sequence = k1_reward_sequence: reverse_kl": "sample by sample one gradient",
        "k2_loss_sequence = k1_reward_sequence: accuracy": "sample by sample one gradient",
        "k2_loss_shows_k3 = exact_loss: reverse_kl": "it has the gradient of k2",
        "minimax01_loss > k2_loss_shows_k3: reverse_kl": (
            "it descends a distance of probabilities, which rare tokens hardly enter"
        ),
        "minimax01_loss < none: reverse_kl": "it descends a distance all the same",
        "k3_clip_loss < none: reverse_kl": "its ratio is rarely clipped here",
        "forward_loss < none: reverse_kl": "it keeps the reference's tokens alive",
    },
)
