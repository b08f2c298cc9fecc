"""Which variants there are: names, and the combinations that are refused, in one line."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from analysis.records.variants import (
    Advantage,
    Correction,
    Distillation,
    Objective,
    Sampler,
    Shaping,
    Variant,
)
from kl_term.kl.term import KLTerm
from tests.training.method_variants import (
    KEPT,
    TRUNCATED,
    ZERO,
    advantage,
    correction,
    kl,
    objective,
    sampler,
    shaping,
)

REWARD = kl("k1", 0.1, placement="reward")
MERGED = kl("k1", 0.1, placement="reward", credit="immediate") | objective("grpo_off_policy")
MIRROR, DPO = objective("mirror_descent"), objective("dpo")
HOT, NUCLEUS = sampler(temperature=1.2), sampler(top_p=0.9)
CURRENT = sampler(budget=2, train_on="current")
WEIGHED, MASKED = correction(mismatch="truncated"), correction(mismatch="masked")
DISTILLED = {"distillation": Distillation()}

#: A part that is refused, a message, and the same with one field changed, which is not. What a KL
#: term refuses by itself is tested with it.
REFUSED = {
    "no KL, but a beta": ({"beta": 0.1}, "name an estimator", {}),
    "cross entropy to the reference": (
        kl("cross_entropy", 0.0),
        "is for distillation",
        kl("forward", 0.0),
    ),
    "merged loss": (MERGED | kl("k1", 0.1), "holds its KL as k1 in the reward", MERGED),
    "merged to go": (MERGED | REWARD, "of each token its own", MERGED),
    "merged sequence": (
        MERGED | kl("k1", 0.1, placement="reward", level="sequence"),
        "of each token its own",
        MERGED,
    ),
    "a completion of which a part is trained": (
        kl("k2", 0.0, level="sequence") | CURRENT,
        "train_on='current' leaves out tokens",
        kl("k2", 0.0) | CURRENT,
    ),
    "merged before": (MERGED | advantage(kl_order="before"), "charges tokens", MERGED),
    "mask kept without top-p": (KEPT, "needs a sampler with top_p < 1", KEPT | NUCLEUS),
    "mask kept at another temperature": (
        KEPT | sampler(top_p=0.9, temperature=1.1),
        "and temperature 1",
        KEPT | NUCLEUS,
    ),
    "nothing to correct": (
        WEIGHED,
        "needs a sampler whose temperature or top_p differs",
        WEIGHED | HOT,
    ),
    "corrected twice": (
        correction(mismatch="masked", keep_sampling_mask=True) | NUCLEUS,
        "leaves no mismatch to correct",
        MASKED | NUCLEUS,
    ),
    "shaped steps": (
        advantage(level="process") | shaping(noise=0.1),
        "reads step rewards",
        advantage(level="process"),
    ),
    "KL before steps": (
        REWARD | advantage(level="marginal", kl_order="before"),
        "this advantage reads none",
        REWARD | advantage(level="marginal"),
    ),
    "KL before nothing": (
        REWARD | advantage(baseline="zero", kl_order="before"),
        "this advantage reads none",
        REWARD | ZERO,
    ),
    "DPO with a penalty after": (
        REWARD | DPO,
        "reads rewards, no advantages: set kl_order='before'",
        REWARD | DPO | advantage(kl_order="before"),
    ),
    "mirror descent distilled in the reward": (
        MIRROR | DISTILLED,
        "distil with placement='loss'",
        MIRROR | {"distillation": Distillation(kl=KLTerm())},
    ),
    "mirror descent of steps": (MIRROR | advantage(level="process"), "leave level alone", MIRROR),
    "DPO masked": (
        DPO | TRUNCATED,
        "of correction it takes only keep_sampling_mask",
        TRUNCATED,
    ),
    "mirror descent weighted": (
        MIRROR | HOT | WEIGHED,
        "of correction it takes only keep_sampling_mask",
        MIRROR | HOT,
    ),
}

#: The same for parts on their own.
PARTS = {
    "own baseline": (
        lambda: Advantage(level="process", baseline="leave_one_out"),
        "brings its own baseline",
    ),
    "bounds in order": (lambda: Advantage(std_min=0.5, std_max=0.1), "std_min=0.5 exceeds"),
    "eps": (lambda: Advantage(eps=-1.0), "eps"),
    "ddof": (lambda: Advantage(ddof=2), "ddof"),
    "epsilon_low": (lambda: Objective(epsilon_low=1.5), "epsilon_low"),
    "kind": (lambda: Objective(kind="ppo"), "kind"),
    "tau": (lambda: Objective(tau=0.0), "tau"),
    "weight": (lambda: Shaping(length="linear", weight=-0.1), "weight"),
    "one repeat": (lambda: Sampler(repeat_times=1), "would stop every completion"),
    "stale teacher": (lambda: Sampler(by="teacher", staleness=1), "staleness is the policy's"),
    "top_p": (lambda: Sampler(top_p=0.0), "top_p"),
    "budget of a stale sampler": (lambda: Sampler(budget=2, staleness=1), "budget is for"),
    "current of no budget": (lambda: Sampler(train_on="current"), "give a budget"),
    "bound": (lambda: Correction(mismatch="masked", bound=0.5), "bound"),
    "NaN": (lambda: Correction(bound=float("nan")), "bound"),
    "no lesson": (lambda: Distillation(kl=KLTerm(estimator="none")), "leave distillation out"),
    "beta": (lambda: Variant(kl=KLTerm(estimator="k1"), beta=float("inf")), "beta"),
    "unknown field": (lambda: Sampler(top_k=3), "top_k"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_variant_whose_parts_do_not_fit_is_refused_in_one_line(case):
    fields, message, fitting = REFUSED[case]
    Variant(**fitting)
    with pytest.raises(ValidationError) as refused:
        Variant(**fields)
    (error,) = refused.value.errors()
    assert message in error["msg"] and "\n" not in error["msg"]


@pytest.mark.parametrize("case", PARTS)
def test_a_part_that_is_none_is_refused(case):
    make, message = PARTS[case]
    with pytest.raises(ValidationError, match=message):
        make()


def test_an_variant_is_named_by_its_label_or_by_how_its_kl_enters():
    assert Variant().name == "none"
    assert Variant(kl=KLTerm(estimator="k3"), beta=0.1).name == "k3_loss"
    assert Variant(kl=KLTerm(weighting="attached"), beta=0.1).name == "k3_loss_attached"
    assert Variant(**REWARD).name == "k1_reward"
    assert Variant(label="clip_higher").name == "clip_higher"
