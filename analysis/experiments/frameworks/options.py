"""Which frameworks and options chapter 14 audits, where each was read and when."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor

from analysis.experiments.frameworks import losses
from analysis.kl.term import KLTerm

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Source(NamedTuple):
    """A framework as it was read."""

    framework: str
    repository: str
    file: str
    version: str  #: release, or commit
    date: str  #: of the commit, or when the release was read


class Option(NamedTuple):
    """One setting of a framework's KL term in the loss."""

    framework: str
    setting: str
    loss: Loss
    default: bool = False  #: what the framework uses once its KL loss is on
    #: The term of ours with the same gradient where no clamp binds; None = there is none.
    term: KLTerm | None = None
    reference_is_sampler: bool = False


SOURCES = (
    Source("TRL", "huggingface/trl", "trl/trainer/grpo_trainer.py", "1.16.0", "2026-11-20"),
    Source(
        "Liger",
        "linkedin/Liger-Kernel",
        "liger_kernel/chunked_loss/grpo_loss.py",
        "0.8.5",
        "2026-11-20",
    ),
    Source("verl", "verl-project/verl", "verl/trainer/ppo/core_algos.py", "0.9.1", "2026-11-20"),
    Source("OpenRLHF", "OpenRLHF/OpenRLHF", "openrlhf/models/utils.py", "0.11.2", "2026-11-20"),
    Source("NeMo-RL", "NVIDIA-NeMo/RL", "nemo_rl/algorithms/utils.py", "7ea279a", "2026-08-22"),
    Source("slime", "THUDM/slime", "slime/utils/ppo_utils.py", "624b824", "2026-08-21"),
    Source(
        "open-instruct",
        "allenai/open-instruct",
        "open_instruct/model_utils.py",
        "e6c3044",
        "2026-08-20",
    ),
    Source(
        "prime-rl",
        "PrimeIntellect-ai/prime-rl",
        "src/prime_rl/trainer/rl/loss.py",
        "559b447",
        "2026-08-21",
    ),
    Source(
        "RPG", "complex-reasoning/RPG", "verl/trainer/ppo/core_algos.py", "ec8e30b", "2026-06-14"
    ),
    Source(
        "rlhf-book",
        "natolambert/rlhf-book",
        "code/policy_gradients/loss.py",
        "a66b0bf",
        "2026-08-21",
    ),
)


def _options() -> tuple[Option, ...]:
    def term(estimator: str, weighting: str = "none") -> KLTerm:
        return KLTerm(estimator=estimator, weighting=weighting)

    trl, verl, openrlhf, nemo = losses.trl_grpo, losses.verl, losses.openrlhf, losses.nemo_rl
    slime, rpg = losses.slime, losses.rpg
    return (
        Option(
            "TRL",
            "use_bias_correction_kl",
            partial(trl, bias_correction=True),
            True,
            term=term("k3", "attached"),
        ),
        Option("TRL", "without", partial(trl, bias_correction=False), term=term("k3")),
        Option("Liger", "default", partial(trl, bias_correction=False), True, term=term("k3")),
        Option("verl", "low_var_kl", partial(verl, kind="low_var_kl"), True, term=term("k3")),
        Option("verl", "low_var_kl+", partial(verl, kind="low_var_kl+"), term=term("k2")),
        Option("verl", "kl", partial(verl, kind="kl"), term=term("k1")),
        Option("verl", "abs", partial(verl, kind="abs")),
        Option("verl", "mse", partial(verl, kind="mse"), term=term("k2")),
        Option("OpenRLHF", "k1", partial(openrlhf, estimator="k1"), True, term=term("k1")),
        Option("OpenRLHF", "k2", partial(openrlhf, estimator="k2"), term=term("k2")),
        Option("OpenRLHF", "k3", partial(openrlhf, estimator="k3"), term=term("k3")),
        Option(
            "OpenRLHF",
            "k3, unbiased_gradient",
            partial(openrlhf, estimator="k3", unbiased_gradient=True),
            term=term("k2", "detached"),
        ),
        Option("NeMo-RL", "k3", partial(nemo, kind="k3"), True, term=term("k2")),
        Option(
            "NeMo-RL",
            "k3, use_on_policy_kl_approximation",
            partial(nemo, kind="k3", on_policy_approximation=True),
            term=term("k3", "attached"),
        ),
        Option("NeMo-RL", "k1", partial(nemo, kind="k1")),
        Option("NeMo-RL", "k2", partial(nemo, kind="k2")),
        Option("slime", "k1", partial(slime, kind="k1"), True, term=term("k1")),
        Option(
            "slime",
            "k1, use-unbiased-kl",
            partial(slime, kind="k1", unbiased=True),
            term=term("k1", "attached"),
        ),
        Option("slime", "k2", partial(slime, kind="k2"), term=term("k2")),
        Option(
            "slime",
            "k2, use-unbiased-kl",
            partial(slime, kind="k2", unbiased=True),
            term=term("k2", "attached"),
        ),
        Option("slime", "low_var_kl", partial(slime, kind="low_var_kl"), term=term("k3")),
        Option(
            "slime",
            "low_var_kl, use-unbiased-kl",
            partial(slime, kind="low_var_kl", unbiased=True),
            term=term("k3", "attached"),
        ),
        Option(
            "open-instruct", "2", partial(losses.open_instruct, estimator=2), True, term=term("k3")
        ),
        Option(
            "open-instruct",
            "3",
            partial(losses.open_instruct, estimator=3),
            term=term("k1", "attached"),
        ),
        Option(
            "prime-rl", "rl", partial(losses.prime_rl, kind="rl"), True, reference_is_sampler=True
        ),
        Option(
            "prime-rl",
            "ref_kl",
            partial(losses.prime_rl, kind="ref_kl"),
        ),
        *(
            Option("RPG", kind, partial(rpg, kind=kind), reference_is_sampler=True)
            for kind in ("rpg_fkl", "rpg_rkl", "rpg_ufkl", "rpg_urkl", "rpg_js", "rpg_ujs")
        ),
        Option("rlhf-book", "kl1", partial(losses.rlhf_book, kind="kl1")),
        Option("rlhf-book", "kl2", partial(losses.rlhf_book, kind="kl2"), term=term("k2")),
        Option("rlhf-book", "kl3", partial(losses.rlhf_book, kind="kl3"), True),
    )


OPTIONS = _options()
