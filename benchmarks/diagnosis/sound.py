"""Sound runs: what a diagnosis must stay silent on."""

from __future__ import annotations

from typing import Any

from benchmarks.diagnosis.tiny_runs import Case

SEEDS = (0, 1, 2)
LOSS_TYPES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "vespo", "sapo", "luspo")
GSPO = {"importance_sampling_level": "sequence", "loss_type": "grpo"}
#: Half of that of the faulty runs.
RATE = {"learning_rate": 5e-4}
LORA = {"r": 8, "lora_alpha": 16}

_OTHERS: dict[str, dict[str, Any]] = {
    "gspo": {"settings": GSPO | {"epsilon": 3e-4, "epsilon_high": 4e-4, "beta": 0.01}},
    "gspo, wide clip": {"settings": GSPO},
    "cispo, clip at 5": {"settings": {"loss_type": "cispo", "epsilon_high": 5.0}},
    "on policy": {"settings": {"num_iterations": 1}},
    "four updates a rollout": {"settings": {"num_iterations": 4, "max_steps": 16}},
    "eight updates a rollout": {
        "settings": {"num_iterations": 8, "max_steps": 32, "learning_rate": 1e-4}
    },
    "sixteen updates a rollout": {
        "settings": {"num_iterations": 16, "max_steps": 32, "learning_rate": 5e-5}
    },
    "off-policy minibatches": {
        "settings": {
            "per_device_train_batch_size": 16,
            "steps_per_generation": 4,
            "num_iterations": 1,
            "max_steps": 24,
        }
    },
    "minibatches twice": {
        "settings": {
            "per_device_train_batch_size": 16,
            "steps_per_generation": 4,
            "num_iterations": 2,
            "max_steps": 24,
        }
    },
    "gradient accumulation": {
        "settings": {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2}
    },
    "lora": {"lora": LORA, "settings": {"learning_rate": 5e-3}},
    "lora, on policy": {"lora": LORA, "settings": {"learning_rate": 5e-3, "num_iterations": 1}},
    "lora with a trained head": {
        "lora": LORA | {"modules_to_save": ["lm_head"]},
        "settings": {"learning_rate": 2e-3},
    },
    "bf16": {"settings": {"bf16": True}},
    "bf16, lora": {"settings": {"bf16": True, "learning_rate": 5e-3}, "lora": LORA},
    "long completions": {
        "settings": {"max_completion_length": 96, "per_device_train_batch_size": 16}
    },
    "temperature 0.7": {"settings": {"temperature": 0.7}},
    "temperature 1.3": {"settings": {"temperature": 1.3}},
    "rewards not scaled": {"settings": {"scale_rewards": "none"}},
    "rewards scaled by the batch": {"settings": {"scale_rewards": "batch"}},
    "truncated completions masked": {
        "settings": {"mask_truncated_completions": True, "max_completion_length": 24}
    },
    "sparse reward": {"reward": "correct", "settings": {"max_steps": 24}},
    "large beta": {"settings": {"beta": 0.5}},
    "tiny beta": {"settings": {"beta": 1e-3}},
    "eighty updates": {"settings": {"max_steps": 80}},
    "two updates": {"settings": {"max_steps": 2}},
    "padded prompts": {"prompts": (1, 9)},
    "gpt2": {"model": "gpt2"},
    "qwen2": {"model": "qwen2"},
    "a flat model": {"scale": 0.1},
    "a sharp model": {"scale": 0.6},
    "k2 in the loss": {"term": {"estimator": "k2"}},
    "k2, detached ratio": {"term": {"estimator": "k2", "weighting": "detached"}},
    "k3 without a ratio": {"term": {"estimator": "k3"}},
    "exact KL": {"term": {"estimator": "exact"}},
    "no KL term": {"term": {"estimator": "none"}, "settings": {"beta": 0.0}},
    "k1 in the reward": {"term": {"estimator": "k1", "placement": "reward"}},
    "k1 in the reward, on policy": {
        "term": {"estimator": "k1", "placement": "reward"},
        "settings": {"num_iterations": 1},
    },
}


def cases(seeds: tuple[int, ...] = SEEDS) -> list[Case]:
    """Every kind of sound run, under each seed."""
    kinds = {f"loss type {name}": {"settings": {"loss_type": name}} for name in LOSS_TYPES}
    return [
        Case(name=name, seed=seed, **kind | {"settings": RATE | kind.get("settings", {})})
        for name, kind in (kinds | _OTHERS).items()
        for seed in seeds
    ]
