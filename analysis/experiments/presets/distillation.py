"""Learning from a teacher: on whose samples, by which divergence, beside which reward."""

from __future__ import annotations

from typing import Any

from analysis.experiments.preset import Preset, fresh_seeds, population, preset
from analysis.kl.term import KLTerm
from analysis.training.config import StartConfig, TeacherConfig
from analysis.training.tiny.tasks import SortTask
from analysis.training.variants import Advantage, Distillation, Objective, Sampler, Shaping, Variant

#: Six digits and an end token, behind up to six fillers that the reward does not see.
FILLERS = SortTask(num_digits=6, end_token=True, max_fillers=6)

GRPO = Variant(label="grpo")
#: On-policy distillation as it is usually written: of each token its own k1 in the reward.
OPD = Distillation().kl

#: Accuracies whose cost the chapter compares, by preset; chosen with the settings.
THRESHOLDS = {"distillation": (0.55, 0.6, 0.65), "distillation_sparse": (0.04, 0.06, 0.1)}


def taught(label: str, *, reward: bool = False, by: str = "policy", **distillation: Any) -> Variant:
    """A variant that learns from the teacher, with the reward of the task or without."""
    return Variant(
        label=label,
        advantage=Advantage() if reward else Advantage(baseline="zero"),
        sampler=Sampler(by=by),
        distillation=Distillation(**distillation),
    )


#: From the teacher alone. In the reward, k1 is on-policy distillation as it is usually written.
LESSONS = (
    taught("opd_immediate", kl=OPD),
    taught("opd_to_go", kl=KLTerm(estimator="k1", placement="reward")),
    taught("k2_loss", kl=KLTerm(estimator="k2")),
    taught("k3_loss", kl=KLTerm(estimator="k3")),
    taught("reverse_exact", kl=KLTerm(estimator="exact")),
    taught("forward_exact", kl=KLTerm(estimator="forward")),
    taught("forward_teacher", kl=KLTerm(estimator="forward"), by="teacher"),
    taught("supervised", kl=KLTerm(estimator="cross_entropy"), by="teacher"),
)


def supervised(
    start: int,
    teacher: int,
    *,
    fillers: tuple[int, int] | None = None,
    teacher_fillers: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """The policy's start and the teacher: so many supervised updates each."""
    return {
        "start": StartConfig(updates=start, fillers=fillers),
        "teacher": TeacherConfig(start=StartConfig(updates=teacher, fillers=teacher_fillers)),
        "log_every": 20,
    }


@preset
def distillation(*, learning_rate: float = 1e-3, num_seeds: int = 10, updates: int = 300) -> Preset:
    """A start that is right half of the time, and a good teacher of its own size."""
    return population(
        **supervised(150, 300),
        learning_rate=learning_rate,
        updates=updates,
        variants=(GRPO, *LESSONS),
        seeds=fresh_seeds(3000, num_seeds),
        predictions=(
            "With an easy start on-policy distillation saves GRPO less than half of its updates "
            "to any of the three accuracies: no factor of 7.",
            "k1 in the reward with immediate credit trains as the k2 loss does: no difference in "
            "accuracy.",
            "Summed over the vocabulary, the reverse KL ends more accurate than its one-sample "
            "form on the same samples.",
            "Credit to go, the gradient of the sequence KL, ends no more accurate than immediate "
            "credit: it is noisier.",
            "Supervised on the teacher's samples ends no less accurate than on-policy "
            "distillation by one sample: over eight tokens errors hardly compound.",
            "No lesson passes the teacher's accuracy.",
        ),
    )


@preset
def distillation_sparse(
    *, learning_rate: float = 1e-3, num_seeds: int = 10, updates: int = 300
) -> Preset:
    """The same from a start that is right about twice in a hundred tries: a sparse reward."""
    return population(
        **supervised(60, 300),
        learning_rate=learning_rate,
        updates=updates,
        variants=(GRPO, *LESSONS),
        seeds=fresh_seeds(3100, num_seeds),
        predictions=(
            "Where the reward is sparse, GRPO needs at least twice the updates of on-policy "
            "distillation to every accuracy that it reaches, and more than with the easy start.",
            "Credit to go ends below the start: it walks to states where the teacher is sure, "
            "right or wrong, and its entropy ends lowest of all.",
            "The exact reverse KL ends most accurate of the lessons on own samples.",
            "Supervised on the teacher's samples keeps up with on-policy distillation by one "
            "sample.",
        ),
    )


@preset
def weak_teacher(
    *, weight: float = 0.3, learning_rate: float = 1e-3, num_seeds: int = 10, updates: int = 400
) -> Preset:
    """A teacher that reinforcement learning can pass: who stops there?"""
    exact = {"kl": KLTerm(estimator="exact"), "reward": True}
    return population(
        **supervised(120, 150),
        learning_rate=learning_rate,
        updates=updates,
        variants=(
            GRPO,
            taught("opd_immediate", kl=OPD),
            taught("reverse_exact", kl=KLTerm(estimator="exact")),
            taught("supervised", kl=KLTerm(estimator="cross_entropy"), by="teacher"),
            taught("opd_and_grpo", kl=OPD, reward=True),
            taught("exact_and_grpo", weight=weight, **exact),
            taught(
                "exact_annealed_to_grpo",
                weight=1.0,
                weight_end=0.0,
                anneal_updates=max(1, updates // 2),
                **exact,
            ),
        ),
        seeds=fresh_seeds(3200, num_seeds),
        predictions=(
            "The three lessons without a reward end at the teacher's accuracy, give or take "
            "three points.",
            "GRPO starts slower and ends above them.",
            "Teacher and reward together end above GRPO alone.",
        ),
    )


@preset
def kdrl(
    *, weight: float = 0.3, learning_rate: float = 1e-3, num_seeds: int = 10, updates: int = 300
) -> Preset:
    """GRPO beside a teacher that is better but wordier: estimators, annealing, masking."""
    annealed = {"weight_end": 0.0, "anneal_updates": max(1, updates // 2)}
    wrong_only = {"only_below": 0.5}

    def both(label: str, **parts: Any) -> Variant:
        return taught(label, reward=True, weight=weight, **parts)

    return population(
        **supervised(130, 280, fillers=(0, 2)),
        task=FILLERS,
        learning_rate=learning_rate,
        updates=updates,
        variants=(
            GRPO,
            taught("teacher_only", kl=KLTerm(estimator="k2")),
            both("kdrl_k2", kl=KLTerm(estimator="k2")),
            both("kdrl_k3", kl=KLTerm(estimator="k3")),
            both("kdrl_annealed", kl=KLTerm(estimator="k2"), **annealed),
            both("kdrl_masked", kl=KLTerm(estimator="k2"), **wrong_only),
            both("kdrl_annealed_masked", kl=KLTerm(estimator="k2"), **annealed, **wrong_only),
            both("kdrl_k3_masked", kl=KLTerm(estimator="k3"), **wrong_only),
        ),
        seeds=fresh_seeds(3300, num_seeds),
        predictions=(
            "A constant weight makes the answers longer than GRPO's: they move towards the "
            "teacher's length.",
            "Masking by reward makes the answers of the constant weight shorter, by less than "
            "half a token, and no less accurate.",
            "Annealing makes them shorter too, and more accurate.",
            "None of them ends more accurate or shorter than GRPO alone.",
            "At equal weight k3 ends less accurate than k2.",
        ),
    )


@preset
def long_to_short(
    *, weight: float = 0.2, learning_rate: float = 1e-3, num_seeds: int = 10, updates: int = 200
) -> Preset:
    """A start that opens with any number of fillers; methods that make its answers short."""

    def relative(strength: float) -> Shaping:
        return Shaping(length="relative", weight=strength)

    return population(
        **supervised(200, 270, teacher_fillers=(0, 1)),
        task=FILLERS,
        learning_rate=learning_rate,
        updates=updates,
        variants=(
            GRPO,
            Variant(label="relative_reward", shaping=relative(weight)),
            Variant(label="relative_reward_strong", shaping=relative(1.0)),
            Variant(label="linear_price", shaping=Shaping(length="linear", weight=0.05)),
            Variant(label="dpo", shaping=relative(1.0), objective=Objective(kind="dpo", tau=1.0)),
            Variant(
                label="dpo_low_tau", shaping=relative(1.0), objective=Objective(kind="dpo", tau=0.1)
            ),
            Variant(
                label="shortest_rejection",
                objective=Objective(kind="reinforce"),
                advantage=Advantage(baseline="shortest_right"),
            ),
            taught("opd_short_teacher", kl=OPD),
            taught("reverse_exact_short_teacher", kl=KLTerm(estimator="exact")),
            taught("supervised_short_teacher", kl=KLTerm(estimator="cross_entropy"), by="teacher"),
        ),
        seeds=fresh_seeds(3400, num_seeds),
        predictions=(
            "GRPO alone already shortens the answers, without being paid for it.",
            "The relative length reward at weight 0.2, the linear price, and DPO at tau 1 end "
            "within half a token of the shortest right answer, no less accurate than GRPO.",
            "At weight 1 the relative reward ruins the policy: short and wrong beats long and "
            "wrong. So does DPO at tau 0.1.",
            "Shortest rejection sampling ends most accurate of all variants, at the shortest right "
            "length.",
            "Distillation ends at the short teacher's mean length, not below it, and no less "
            "accurate than GRPO.",
        ),
    )
