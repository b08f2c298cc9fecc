"""What tables call the variants that learn from a teacher."""

from __future__ import annotations

#: Variant of any of the runs -> what tables call it.
NAMES = {
    "grpo": "GRPO",
    "opd_immediate": "distillation (one sample)",
    "opd_to_go": "distillation, credit to go",
    "k2_loss": "k₂ as a loss",
    "k3_loss": "k₃ as a loss",
    "reverse_exact": "exact reverse KL",
    "forward_exact": "exact forward KL",
    "forward_teacher": "exact forward KL, teacher's answers",
    "supervised": "supervised",
    "opd_and_grpo": "distillation + GRPO",
    "exact_and_grpo": "exact reverse KL + GRPO",
    "exact_annealed_to_grpo": "exact reverse KL, annealed to GRPO",
    "kdrl_k2": "GRPO + k₂",
    "kdrl_masked": "GRPO + k₂, masked",
    "kdrl_annealed": "GRPO + k₂, annealed",
    "kdrl_annealed_masked": "GRPO + k₂, annealed and masked",
    "kdrl_k3": "GRPO + k₃",
    "kdrl_k3_masked": "GRPO + k₃, masked",
    "teacher_only": "teacher only",
    "relative_reward": "relative reward 0.2",
    "relative_reward_strong": "relative reward 1",
    "linear_price": "price per token",
    "dpo": "DPO, tau 1",
    "dpo_low_tau": "DPO, tau 0.1",
    "shortest_rejection": "shortest right answer",
    "opd_short_teacher": "distillation, short teacher",
    "reverse_exact_short_teacher": "exact reverse KL, short teacher",
    "supervised_short_teacher": "supervised, short teacher",
}
