"""The presets, one module a subject: importing this package registers them all."""

from analysis.studies.presets import (
    control_variate,
    controls,
    designed,
    distillation,
    ensembles,
    final_policies,
    kl_terms,
    language,
    larger,
    moving,
    objectives,
    off_policy,
    proxies,
    rewards,
    three_ways,
    top_k,
)
from analysis.studies.presets.registry import FIRST_SEED, PRESETS, make_preset

__all__ = [
    "FIRST_SEED",
    "PRESETS",
    "control_variate",
    "controls",
    "designed",
    "distillation",
    "ensembles",
    "final_policies",
    "kl_terms",
    "language",
    "larger",
    "make_preset",
    "moving",
    "objectives",
    "off_policy",
    "proxies",
    "rewards",
    "three_ways",
    "top_k",
]
