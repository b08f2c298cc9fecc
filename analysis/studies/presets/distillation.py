"""Learning from a teacher: on whose samples, by which divergence, beside which reward."""

from __future__ import annotations

from typing import Any

from analysis.records.config import SortTask, StartConfig, TeacherConfig
from analysis.records.preset import Design, Preset
from analysis.records.variants import Advantage, Distillation, Objective, Sampler, Shaping, Variant
from analysis.studies.presets.designed import AT_END_OF_TRAINING, designed, on_ten_starts
from analysis.studies.presets.registry import fresh_seeds, preset
from kl_term.kl.choice import KLChoice

#: Six digits and an end token, behind up to six fillers that the reward does not see.
FILLERS = SortTask(num_digits=6, end_token=True, max_fillers=6)

GRPO = Variant(label="grpo")
#: On-policy distillation as it is usually written: of each token its own k1 in the reward.
OPD = Distillation().kl

#: Accuracies whose cost the chapter compares, by preset; chosen with the settings. The ten easy
#: starts are right up to 0.58 of the time.
THRESHOLDS = {"distillation": (0.6, 0.65, 0.7), "distillation_sparse": (0.04, 0.06, 0.1)}


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
    taught("opd_to_go", kl=KLChoice(estimator="k1", placement="reward")),
    taught("k2_loss", kl=KLChoice(estimator="k2")),
    taught("k3_loss", kl=KLChoice(estimator="k3")),
    taught("reverse_exact", kl=KLChoice(estimator="exact")),
    taught("forward_exact", kl=KLChoice(estimator="forward")),
    taught("forward_teacher", kl=KLChoice(estimator="forward"), by="teacher"),
    taught("supervised", kl=KLChoice(estimator="cross_entropy"), by="teacher"),
)


def supervised(
    start: int,
    teacher: int,
    *,
    fillers: tuple[int, int] | None = None,
    teacher_fillers: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """The policies' starts and their one teacher: so many supervised updates each."""
    return {
        "start": {"updates": start, "fillers": fillers},
        "teacher": TeacherConfig(start=StartConfig(updates=teacher, fillers=teacher_fillers)),
        "log_every": 20,
    }


def _lessons(written: Design, first_seed: int, *, start: int) -> Preset:
    """GRPO and all lessons of a good teacher, from starts of so many updates."""
    return designed(
        written,
        (GRPO, *LESSONS),
        fresh_seeds(first_seed, 20),
        **supervised(start, 300),
        learning_rate=1e-3,
        updates=300,
    )


@preset
def distillation() -> Preset:
    """Starts that are right half of the time, and a good teacher of their own size."""
    return _lessons(_EASY, 7000, start=150)


#: Primary outcomes of both starts.
OF_COSTS = (
    f"Accuracy of the policy's own answers. {AT_END_OF_TRAINING} What GRPO spends over what "
    "distillation spends until that accuracy first reaches each of three values: the mean "
    "logarithm of the ratio, over starts; a run that never gets there is charged with all of it."
)
_EASY = on_ten_starts(
    90,
    "Against one-sample distillation: the exact reverse KL +0.068, supervised +0.021, credit to go "
    "-0.024, k3 as a loss below k2 by 0.019. GRPO needed 1.2 times the updates to 0.6.",
    chosen="Accuracies of 0.6, 0.65 and 0.7 in place of 0.55, 0.6 and 0.65, as starts vary.",
    question="From a start that is right half of the time, which form of distillation learns most?",
    outcome=OF_COSTS,
    predictions={
        "k2_loss = opd_immediate: own_accuracy": "sample by sample they have one gradient",
        "reverse_exact > opd_immediate: own_accuracy": "it has no noise of a sampled token",
        "opd_to_go < opd_immediate: own_accuracy": "it is noisier",
        "opd_to_go > opd_immediate: teacher_kl": "so it was in the pilot",
        "supervised = opd_immediate: own_accuracy": "over eight tokens errors hardly compound",
        "forward_teacher = supervised: own_accuracy": "one gradient, without the token's noise",
        "k3_loss < k2_loss: own_accuracy": "it descends the forward KL by one noisy token",
        "forward_exact < reverse_exact: own_accuracy": "there is one right answer to find",
        "forward_exact > reverse_exact: entropy": "it covers what the teacher might say",
        "opd_immediate > grpo: own_accuracy": "each token is told, not each answer",
    },
)


@preset
def distillation_sparse() -> Preset:
    """The same from starts that are right about twice in a hundred tries: a sparse reward."""
    return _lessons(_SPARSE, 7100, start=60)


_SPARSE = on_ten_starts(
    90,
    "Against one-sample distillation: the exact reverse KL +0.067, supervised +0.004, GRPO -0.125; "
    "credit to go ended 0.074 below GRPO. GRPO needed 2.7 times the updates to 0.06.",
    question="And from a start that is right twice in a hundred tries?",
    outcome=OF_COSTS,
    predictions={
        "opd_immediate > grpo: own_accuracy": "where no answer is right the reward says nothing",
        "reverse_exact > opd_immediate: own_accuracy": "it has no noise of a sampled token",
        "opd_to_go < grpo: own_accuracy": "it walks to states where the teacher is sure",
        "opd_to_go > opd_immediate: teacher_kl": "so it was in the pilot",
        "supervised = opd_immediate: own_accuracy": "over eight tokens errors hardly compound",
        "k3_loss < k2_loss: own_accuracy": "it descends the forward KL by one noisy token",
        "forward_exact < reverse_exact: own_accuracy": "there is one right answer to find",
        "forward_exact > reverse_exact: entropy": "it covers what the teacher might say",
    },
)


@preset
def weak_teacher(*, weight: float = 0.3, updates: int = 400) -> Preset:
    """A teacher that reinforcement learning can pass: who stops there?"""
    exact = {"kl": KLChoice(estimator="exact"), "reward": True}
    return designed(
        _WEAK,
        (
            GRPO,
            taught("opd_immediate", kl=OPD),
            taught("reverse_exact", kl=KLChoice(estimator="exact")),
            taught("supervised", kl=KLChoice(estimator="cross_entropy"), by="teacher"),
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
        fresh_seeds(7200, 20),
        **supervised(120, 150),
        learning_rate=1e-3,
        updates=updates,
    )


_WEAK = on_ten_starts(
    70,
    "GRPO ended 0.063 above one-sample distillation, which ended near the teacher; with the "
    "reward and the teacher together 0.036 to 0.070 above GRPO.",
    question="Does a policy pass a weak teacher, and does that teacher help the reward along?",
    outcome=f"Accuracy of the policy's own answers. {AT_END_OF_TRAINING}",
    predictions={
        "grpo > opd_immediate: own_accuracy": "a student stops near its teacher",
        "grpo > reverse_exact: own_accuracy": "a student stops near its teacher",
        "grpo > supervised: own_accuracy": "a student stops near its teacher",
        "opd_and_grpo > grpo: own_accuracy": "the teacher tells each token at first",
        "exact_and_grpo > grpo: own_accuracy": "the teacher tells each token at first",
        "exact_annealed_to_grpo > grpo: own_accuracy": "and does not pull back later",
        "supervised < opd_immediate: own_accuracy": "so it was in the pilot",
        "reverse_exact > opd_immediate: own_accuracy": "it has no noise of a sampled token",
    },
)


@preset
def kdrl(*, weight: float = 0.3, updates: int = 300) -> Preset:
    """GRPO beside a teacher that is better but wordier: estimators, annealing, masking."""
    annealed = {"weight_end": 0.0, "anneal_updates": max(1, updates // 2)}
    wrong_only = {"only_below": 0.5}

    def both(label: str, **parts: Any) -> Variant:
        return taught(label, reward=True, weight=weight, **parts)

    return designed(
        _KDRL,
        (
            GRPO,
            taught("teacher_only", kl=KLChoice(estimator="k2")),
            both("kdrl_k2", kl=KLChoice(estimator="k2")),
            both("kdrl_k3", kl=KLChoice(estimator="k3")),
            both("kdrl_annealed", kl=KLChoice(estimator="k2"), **annealed),
            both("kdrl_masked", kl=KLChoice(estimator="k2"), **wrong_only),
            both("kdrl_annealed_masked", kl=KLChoice(estimator="k2"), **annealed, **wrong_only),
            both("kdrl_k3_masked", kl=KLChoice(estimator="k3"), **wrong_only),
        ),
        fresh_seeds(7300, 20),
        **supervised(130, 280, fillers=(0, 2)),
        task=FILLERS,
        learning_rate=1e-3,
        updates=updates,
    )


_KDRL = on_ten_starts(
    160,
    "On twice ten seeds of one start, against the constant weight: masking +0.07 of accuracy and "
    "no change in length, annealing +0.11 and -0.2 tokens, masked k3 -0.2 tokens beside k3; k3 "
    "0.08 below k2; none above GRPO alone.",
    question="Beside GRPO and a wordier teacher: what do estimator, annealing and a mask change?",
    outcome=f"Accuracy and length (tokens) of the policy's own answers. {AT_END_OF_TRAINING}",
    predictions={
        "kdrl_k2 > grpo: own_length": "answers move towards the teacher's length",
        "kdrl_masked kdrl_annealed kdrl_annealed_masked > kdrl_k2: own_accuracy": (
            "the reward has more of a say"
        ),
        "kdrl_annealed kdrl_annealed_masked < kdrl_k2: own_length": (
            "the teacher's length is let go of"
        ),
        "kdrl_masked < kdrl_k2: own_length": "as reported: right answers are left alone",
        "kdrl_k3_masked < kdrl_k3: own_length": "as reported: right answers are left alone",
        "kdrl_k3_masked > kdrl_k3: own_accuracy": "the reward has more of a say",
        "kdrl_k3 < kdrl_k2: own_accuracy": "it descends the forward KL by one noisy token",
        "kdrl_k2 kdrl_annealed kdrl_annealed_masked < grpo: own_accuracy": (
            "so it was in the pilot"
        ),
    },
)


@preset
def long_to_short(*, weight: float = 0.2) -> Preset:
    """Starts that open with any number of fillers; methods that make their answers short."""

    def relative(strength: float) -> Shaping:
        return Shaping(length="relative", weight=strength)

    return designed(
        _SHORT,
        (
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
            taught("reverse_exact_short_teacher", kl=KLChoice(estimator="exact")),
            taught(
                "supervised_short_teacher", kl=KLChoice(estimator="cross_entropy"), by="teacher"
            ),
        ),
        fresh_seeds(7400, 20),
        **supervised(200, 270, teacher_fillers=(0, 1)),
        task=FILLERS,
        learning_rate=1e-3,
        updates=200,
    )


_SHORT = on_ten_starts(
    100,
    "Against GRPO: the shortest right answer +0.06 of accuracy, the exact KL to a short teacher "
    "+0.05, DPO -0.06, the relative reward -0.06, the price per token -0.22 with some seeds lost "
    "outright; the strong relative reward and DPO at a low tau lost every seed.",
    question="Which way of making long answers short keeps them right?",
    outcome=f"Accuracy and length (tokens) of the policy's own answers. {AT_END_OF_TRAINING}",
    predictions={
        "relative_reward linear_price dpo < grpo: own_length": "they are paid for it",
        "relative_reward linear_price dpo < grpo: own_accuracy": (
            "short and wrong is paid for where a whole group is wrong"
        ),
        "relative_reward_strong dpo_low_tau < grpo: own_accuracy": (
            "short and wrong beats long and wrong"
        ),
        "shortest_rejection > grpo: own_accuracy": "only right answers are imitated",
        "shortest_rejection > relative_reward: own_accuracy": "only right answers are imitated",
        "reverse_exact_short_teacher > grpo: own_accuracy": "each token is told",
        "opd_short_teacher supervised_short_teacher = grpo: own_accuracy": "so it was in the pilot",
    },
)
