"""SmolLM2 on sums that it works out: answers of sixty tokens, a verified reward, new questions.

The packaged model solves one of 48 sums of seven terms. So it first learns right answers, worked
step by step, and runs begin at what comes out and are held to it. Committed before the first run;
on a GPU, after the step that chooses how long the start learns::

    python -m benchmarks.gpu start sweep:smollm2_worked_sums:1of5 sweep:smollm2_worked_sums:2of5
"""

from __future__ import annotations

from pydantic import PositiveInt

from analysis.records.language import (
    ArithmeticTask,
    ForwardConfig,
    LanguageConfig,
    SupervisedStart,
)
from analysis.records.preset import Design, Pilot, Preset
from analysis.records.variants import Sampler, Truncation, Variant
from analysis.studies.presets.designed import OF_COMPLETIONS, design, prefix_ratio
from analysis.studies.presets.final_policies import BY_SEED
from analysis.studies.presets.language import LORA, model_of
from analysis.studies.presets.parts import NO_KL
from analysis.studies.presets.registry import fresh_seeds, preset
from kl_term.kl.choice import KLChoice

BETAS = (0.1, 0.4)
NUM_SEEDS = 10
#: Updates of the start at which it is read before the first run, and the accuracy that is wanted.
START_UPDATES = (25, 50, 100, 200, 400)
START_ACCURACY = 0.4
#: Outside of these no run is trained.
START_BETWEEN = (0.15, 0.75)
#: Of asynchronous samples: updates by which they lag.
LAG = 8
#: As chapter 6 advises for the ratio of a prefix: cap at four, and a window that policies remember.
BOUNDS = Truncation(cap=4.0, window=16)
BOUNDED = "k3_loss_attached_prefix_bounded"


@preset
def smollm2_worked_sums(*, weights: str = "packaged", start_updates: PositiveInt = 100) -> Preset:
    """Five KL terms at two coefficients, and none, on answers that are worked step by step."""
    choices = [KLChoice(estimator=name) for name in ("exact", "k2", "k3")]
    choices += [KLChoice(estimator="k1", placement="reward")]
    return _worked(
        _FRESH,
        [
            variant
            for beta in BETAS
            for variant in (
                *(Variant(kl=choice, beta=beta) for choice in choices),
                prefix_ratio(beta),
            )
        ],
        NO_KL,
        fresh_seeds(11_000, NUM_SEEDS),
        weights,
        start_updates,
    )


@preset
def smollm2_worked_sums_stale(
    *, weights: str = "packaged", start_updates: PositiveInt = 100
) -> Preset:
    """Weighted KL terms on samples eight updates old: the same answers, start and coefficients."""
    stale = Sampler(staleness=LAG)
    choices = [
        KLChoice(estimator="exact"),
        KLChoice(estimator="k3"),
        KLChoice(estimator="k3", weighting="attached"),
        KLChoice(estimator="k3", weighting="attached", ratio="prefix"),
    ]
    terms = [
        variant
        for beta in BETAS
        for variant in (
            *(Variant(kl=choice, beta=beta, sampler=stale) for choice in choices),
            Variant(label=BOUNDED, kl=choices[-1], beta=beta, sampler=stale, truncation=BOUNDS),
        )
    ]
    seeds = fresh_seeds(11_100, NUM_SEEDS)
    return _worked(_STALE, terms, Variant(sampler=stale), seeds, weights, start_updates)


def _worked(
    written: Design,
    terms: list[Variant],
    without: Variant,
    seeds: tuple[int, ...],
    weights: str,
    start_updates: int,
) -> Preset:
    return Preset(
        config=LanguageConfig(
            model=model_of(weights),
            task=ArithmeticTask(
                name="chain_sum",
                terms=7,
                pool=1000,
                held_out=400,
                shots=0,
                worked=True,
                completion_length=80,
            ),
            start=SupervisedStart(examples=3200, updates=start_updates),
            forward=ForwardConfig(attention="sdpa"),
            lora=LORA,
            updates=40,
            num_prompts=6,
            group_size=6,
            learning_rate=3e-4,
            log_every=4,
            final_answers=360,
        ),
        variants=(without, *terms),
        seeds=seeds,
        predictions=written.sentences,
        design=written,
    )


_OUTCOME = (
    "Accuracy of the final policy: the share of right final numbers among 360 fresh answers, six "
    "to each of sixty questions that no run trains on and the start did not learn. A seed's "
    "difference, averaged over the coefficients named, then a t interval over seeds; there is one "
    "language model and one start, and of others it says nothing. KLs, exact and on the same "
    "answers, are compared by their logarithm, with a margin of log 1.25. Equivalent: two "
    "one-sided tests at 0.05."
)
_STOPPING = (
    "Before the first run the start alone is trained, for "
    f"{START_UPDATES[-1]} updates, and read after {', '.join(map(str, START_UPDATES))} of them on "
    "360 answers to questions of the pool. Runs begin at the one whose accuracy is nearest to "
    f"{START_ACCURACY:g}, the shorter of two that are as near. If none lies between "
    f"{START_BETWEEN[0]:g} and {START_BETWEEN[1]:g}, no run is trained, and the start is designed "
    f"anew. {BY_SEED}"
)
_NONE = Pilot(
    tried=(
        "No run was trained: no GPU was at hand. Of a start, ten updates on eight examples each, "
        "at its step size. Known beforehand: the packaged model solves one of 48 sums of seven "
        "terms, and worked answers to 2,000 of them have 57 to 69 tokens, 62 on average."
    ),
    runs=0,
    seen=(
        "The mean log-prob of a token of right answers was -1.07 on the first of these batches and "
        "-0.33 on the tenth; what such a start answers was not read."
    ),
    chosen=(
        "80 tokens, so that an answer may go wrong by ten and still end. Rank, number of answers "
        "an update and coefficients are those of smollm2_proxy; the step size lies between its own "
        "and that of smollm2. 40 updates, because that is what ten minutes of a GPU hold for four "
        "seeds. The margin is that of smollm2_proxy. With a standard deviation of 0.06 over seeds "
        "ten of them show a difference of 0.06 with a power of 0.8, five one of 0.1."
    ),
)

_FRESH = design(
    question=(
        "When a language model reasons over sixty tokens and the reward is verified, what does "
        "each KL term cost in accuracy on new questions, and which of them keep the policy near "
        "its start?"
    ),
    outcome=_OUTCOME,
    margin=0.05,
    predictions={
        "exact_loss k2_loss k3_loss k1_reward k3_loss_attached_prefix < none: final_reverse_kl "
        "at 0.1 0.4": "it descends a KL",
        "k2_loss k3_loss = exact_loss: final_reverse_kl at 0.1 0.4": (
            "where right answers are certain a whole answer is about a nat from the start, a few "
            "hundredths a token, and there the gradients of both KLs are equal to first order"
        ),
        "k3_loss_attached_prefix = k1_reward: final_reverse_kl at 0.1": OF_COMPLETIONS,
        "exact_loss k2_loss k3_loss = none: final_accuracy at 0.1 0.4": (
            "a right answer lies two normalised rewards above a wrong one, so even at 0.4 the "
            "optimum makes it likelier by a factor of exp(5)"
        ),
        "k1_reward < exact_loss: final_accuracy at 0.4": (
            "a token pays for the log-ratios of sixty, and their noise is as large as the reward"
        ),
        "k3_loss_attached_prefix > k1_reward: final_accuracy at 0.4": (
            "it has the same expected gradient, and of later tokens k3 in place of k1"
        ),
    },
    stopping=_STOPPING,
    pilots=(_NONE,),
)

_STALE = design(
    question=(
        f"On answers of sixty tokens that are {LAG} updates old: does weighting k3 by the ratio of "
        "the token or of the prefix gain accuracy, and does the prefix ratio need its bounds?"
    ),
    outcome=_OUTCOME,
    margin=0.05,
    predictions={
        f"exact_loss k3_loss_attached k3_loss_attached_prefix {BOUNDED} < none: final_reverse_kl "
        "at 0.1 0.4": "it descends a KL",
        "k3_loss_attached = exact_loss: final_reverse_kl at 0.1 0.4": (
            "at the visited states both have the gradient of the reverse KL"
        ),
        "k3_loss_attached = exact_loss: final_accuracy at 0.1 0.4": "as for the KL",
        f"{BOUNDED} > k3_loss_attached_prefix: final_accuracy at 0.4": (
            "the second moment of a product of sixty ratios is a multiple of that of sixteen"
        ),
        "k3_loss_attached_prefix < exact_loss: final_accuracy at 0.4": "few weights carry it all",
        f"{BOUNDED} = k3_loss_attached: final_accuracy at 0.1 0.4": (
            "what it adds, the KL of the next sixteen tokens, depends little on a token"
        ),
        "k3_loss_attached > k3_loss: final_reverse_kl at 0.1 0.4": (
            "where the policy has left a token its stale ratio, and so the weight, is small: so it "
            "was on the tiny policy (stale_weighted_k3)"
        ),
        "k3_loss_attached = k3_loss: final_accuracy at 0.1": "at this coefficient little is felt",
    },
    stopping=_STOPPING,
    pilots=(_NONE,),
)
