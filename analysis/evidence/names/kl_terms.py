"""What tables call the KL terms."""

from __future__ import annotations

#: Variant -> what tables call it.
NAMES = {
    "none": "no KL term",
    "k1_loss": "k₁ as a loss",
    "k2_loss": "k₂ as a loss",
    "k3_loss": "k₃ as a loss",
    "exact_loss": "exact KL",
    "k1_reward": "k₁ in the reward",
    "k2_reward": "k₂ in the reward",
    "k3_reward": "k₃ in the reward",
    "k3_loss_attached_prefix": "k₃, prefix ratio",
    "forward_loss": "exact forward KL",
    "minimax01_loss": "MiniMax-01",
    "k3_clip_loss": "k₃, clipped",
    "k2_loss_shows_k3": "k₂, logged as k₃",
    "k2_loss_sequence": "k₂, whole sequence",
    "k1_reward_to_go": "k₁ in the reward, credit to go",
    "k1_reward_immediate": "k₁ in the reward, immediate",
    "k1_reward_sequence": "k₁ in the reward, whole sequence",
    "k1_reward_before_std": "k₁ in the reward, then std",
    "k1_reward_before_loo": "k₁ in the reward, then leave-one-out",
}
