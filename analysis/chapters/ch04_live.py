"""The live run of chapter 4: eight variants at one beta, on the tiny policy or on SmolLM2."""

from __future__ import annotations

from typing import Any

import torch

from analysis.checks import check_choice
from analysis.experiments.language.model import LanguageConfig
from analysis.experiments.policy_names import POLICIES, TINY
from analysis.experiments.preset import NO_KL, Preset, kl_variants
from analysis.experiments.presets.kl_terms import quick
from analysis.experiments.presets.language import model_of, smollm2

#: On a CPU: minutes, to see it work. In the profile ``full`` it is the preset ``smollm2``.
QUICK_SMOLLM2 = {"updates": 10, "num_prompts": 4, "group_size": 4, "log_every": 1}
#: The least number of seeds of the tiny policy in the profile ``full``.
FULL_SEEDS = 10


def live_preset(
    policy: str,
    *,
    weights: str = "hub",
    profile: str = "quick",
    num_seeds: int | None = None,
    updates: int | None = None,
    beta: float | None = None,
    learning_rate: float | None = None,
) -> Preset:
    """What the chapter trains: ``tiny``, or ``smollm2-135m`` with adapters on questions of
    reasoning-gym; None is the policy's own value.

    ``weights`` are those of SmolLM2: ``hub``, ``packaged`` (from the extra ``smollm2``) or a local
    folder.
    """
    check_choice("policy", policy, POLICIES)
    check_choice("profile", profile, ("quick", "full"))
    given = {"num_seeds": num_seeds, "updates": updates, "beta": beta}
    given |= {"learning_rate": learning_rate}
    chosen = {name: value for name, value in given.items() if value is not None}
    if policy != TINY:
        return _smollm2(weights, profile, chosen)
    if weights != "hub":
        raise ValueError(f"weights={weights!r}: the policy {TINY!r} is trained from scratch")
    if profile == "full":
        chosen["num_seeds"] = max(chosen.get("num_seeds", 0), FULL_SEEDS)
    return quick(**chosen)


def _smollm2(weights: str, profile: str, chosen: dict[str, Any]) -> Preset:
    fields = smollm2().model_dump()
    fields["config"]["model"] = model_of(weights).model_dump()
    fields["config"] |= QUICK_SMOLLM2 if profile == "quick" else {}
    fields["config"] |= {n: chosen[n] for n in ("updates", "learning_rate") if n in chosen}
    if "beta" in chosen:
        fields["variants"] = (NO_KL, *kl_variants(chosen["beta"]))
    count = chosen.get("num_seeds", 1 if profile == "quick" else len(smollm2().seeds))
    return Preset.model_validate(fields | {"seeds": tuple(range(count))})


def device_of(preset: Preset) -> str:
    """The tiny policy trains on the CPU; a language model on a GPU where there is one."""
    language = isinstance(preset.config, LanguageConfig)
    return "cuda" if language and torch.cuda.is_available() else "cpu"


def described(preset: Preset) -> str:
    """One sentence on what is trained."""
    config = preset.config
    size = (
        f"{config.updates} updates of {config.num_prompts} × {config.group_size} completions; "
        f"variants: {len(preset.variants)}, seeds: {len(preset.seeds)}"
    )
    if not isinstance(config, LanguageConfig):
        return f"The live run: the tiny transformer that sorts digits; {size}."
    sources = {
        "hub": "SmolLM2-135M-Instruct from the hub",
        "packaged": (
            "SmolLM2-135M-Instruct from a package, in which four bits are kept of each weight: "
            "near the released weights, not the same"
        ),
        "folder": "the model in the folder that the parameter names",
    }
    return (
        f"The live run: {sources[config.model.kind]}; adapters of rank {config.lora.rank}, "
        f"questions of reasoning-gym ({config.task.name}); {size}. "
        "The text and the tables of this page are about the tiny transformer."
    )
