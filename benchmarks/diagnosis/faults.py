"""Every kind of fault: how it is planted, and what a diagnosis should say first."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.diagnosis import dump_faults as dumps
from benchmarks.diagnosis import run_faults as runs

LOG_PROBS = dumps.LOG_PROBS


class Fault(NamedTuple):
    """One kind. ``first`` names it; ``symptom`` lists it among what else it may be."""

    name: str
    where: str  #: what is at fault
    first: tuple[str, ...] = ()
    symptom: tuple[str, ...] = ()
    column: str | None = None  #: without which it cannot be told; the report must say so
    run: Mapping[str, Any] = MappingProxyType(
        {}
    )  #: of the case: ``fault`` and whatever else it needs
    dump: dumps.Change | None = None


def _run(name: str, where: str, plant: Any, *first: str, **others: Any) -> Fault:
    own = ("symptom", "column", "dump")
    rest = {key: others.pop(key) for key in own if key in others}
    return Fault(name, where, first, run={"fault": plant} | others, **rest)


def _dump(name: str, where: str, change: dumps.Change, *first: str, **others: Any) -> Fault:
    own = ("symptom", "column")
    rest = {key: others.pop(key) for key in own if key in others}
    return Fault(name, where, first, run=others, dump=change, **rest)


ON_POLICY = {"num_iterations": 1}
K1_REWARD = {"estimator": "k1", "placement": "reward"}
K3 = {"estimator": "k3", "weighting": "attached"}
OTHER = ("other-sampler",)

FAULTS: tuple[Fault, ...] = (
    # The reference.
    _run("another reference model", "reference", runs.another_reference, "starts-away"),
    _run("reference at another temperature", "reference", runs.reference_at_another_temperature,
         "starts-away"),
    _run("reference scored without its prompt", "reference", runs.reference_without_the_prompt,
         "starts-away", "other-tokens"),
    _run("reference synchronised at every step", "reference", runs.reference_is_the_policy,
         "identical-reference"),
    _run("adapter on when the reference is scored", "reference", runs.reference_is_the_policy,
         "identical-reference", lora={"r": 8}, settings={"learning_rate": 5e-3}),
    _run("reference rows of other completions", "reference", runs.reference_rows_of_others,
         "other-tokens"),
    _run("reference scored with dropout", "reference", runs.reference_with_dropout, "starts-away"),
    _dump("reference shifted by a token", "reference", dumps.shifted("ref_logp"), "misaligned"),
    _dump("reference is a copy of old_logp", "reference", dumps.reference_is_old,
          "identical-reference"),
    _dump("policy and reference exchanged", "reference", dumps.exchanged, "negative-kl"),
    _dump("reference scored under a shifted mask", "reference", dumps.unscored_mask,
          "masked-when-scored"),
    _dump("mask's fill value in the reference", "reference", dumps.filled(-1e9), "refused"),
    _dump("infinities in the reference", "reference", dumps.filled(-float("inf")), "refused"),
    _dump("NaN in the reference", "reference", dumps.filled(float("nan")), "refused"),
    # What old_logp is.
    _run("old_logp from the start of the run", "old policy", runs.old_from_the_start,
         "identical-reference"),
    _run("old_logp from four rollouts ago", "old policy", runs.old_from_earlier, "old-not-sampler",
         "scored-twice", settings={"learning_rate": 2e-3}),
    _run("old_logp of other rows", "old policy", runs.old_rows_of_others, "other-tokens"),
    _dump("old_logp shifted by a token", "old policy", dumps.shifted("old_logp"), "misaligned"),
    _dump("logp and old_logp exchanged", "old policy", dumps.policies_exchanged,
          "advantage-opposed", symptom=("other-term",)),
    _run("dropout when the policy is scored", "old policy", runs.dropout_when_scoring,
         "scored-twice"),
    _run("dropout of the adapter", "old policy", None, "scored-twice",
         lora={"r": 8, "lora_alpha": 32, "lora_dropout": 0.2},
         settings={"learning_rate": 5e-3, "max_steps": 24}),
    _run("dropout, one update a rollout", "old policy", runs.dropout_when_scoring,
         symptom=("starts-away", *OTHER), settings=ON_POLICY),
    # The sampler.
    _run("sampler hotter", "sampler", runs.samples_hotter, *OTHER),
    _run("sampler colder", "sampler", runs.samples_colder, *OTHER),
    _run("top-k that the trainer does not know", "sampler", runs.samples_top_k, *OTHER),
    _run("top-p that the trainer does not know", "sampler", runs.samples_top_p, *OTHER),
    _run("min-p that the trainer does not know", "sampler", runs.samples_min_p, *OTHER),
    _run("repetition penalty", "sampler", runs.repetition_penalty, *OTHER),
    _run("sampler hotter, one update a rollout", "sampler", runs.samples_hotter, *OTHER,
         settings=ON_POLICY),
    _run("sampler hotter, no entropy column", "sampler", runs.samples_hotter, column="entropy",
         symptom=("ratio-mean",), dump=dumps.without("entropy")),
    _run("greedy sampler", "sampler", runs.greedy, "duplicates"),
    _run("one completion for a whole group", "sampler", runs.one_completion_a_group, "duplicates"),
    _run("engine with the weights of the start", "sampler", runs.stale_weights,
         "old-not-sampler", symptom=(*OTHER, "ratio-mean", "negative-kl"),
         settings={"max_steps": 24, "learning_rate": 2e-3}),
    _run("engine with the weights of the start, reporting", "sampler",
         runs.stale_engine_that_reports, "train-inference-mismatch", symptom=("negative-kl",),
         settings={"max_steps": 24, "learning_rate": 2e-3}),
    _run("engine with other numerics, reporting", "sampler", runs.mismatched_engine,
         "train-inference-mismatch"),
    _run("engine's log-probs before the temperature", "sampler", runs.sampler_before_temperature,
         "train-inference-mismatch", "ratio-mean", settings={"temperature": 0.7}),
    _run("absolute positions under left padding", "sampler", None, "padded-positions",
         model="gpt2", prompts=(1, 9)),
    _dump("engine's column shifted by a token", "sampler", dumps.sampler_is("shifted"),
          "misaligned"),
    _dump("engine's column in bfloat16", "sampler", dumps.sampler_is("rounded"),
          "coarse-logprobs"),
    # Masks.
    _run("padding counted", "mask", runs.counts_padding, "counted-padding", "masked-when-scored"),
    _run("mask shifted by a token", "mask", runs.mask_shifted, "masked-when-scored",
         "unsampled-end"),
    _run("end not counted", "mask", runs.end_not_counted, "missing-end"),
    _run("end not counted, no token column", "mask", runs.end_not_counted, column="token",
         dump=dumps.without("token")),
    _run("completions cut at random", "mask", runs.completions_cut, "missing-end"),
    _run("mask of another row", "mask", runs.mask_of_another_row, "masked-when-scored",
         "unsampled-end", "missing-end", "counted-padding"),
    _dump("prompt counted", "mask", dumps.prompt_counted, "counted-prompt"),
    _dump("prompt counted, no group column", "mask", dumps.prompt_counted_without_groups,
          symptom=("impossible-tokens", "duplicates", *OTHER)),
    _dump("a tool's tokens counted", "mask", dumps.tool_tokens_counted, "impossible-tokens",
          symptom=OTHER),
    _dump("token after the end counted", "mask", dumps.token_after_the_end, "unsampled-end",
          symptom=OTHER),
    _dump("all columns shifted by a token", "mask", dumps.shifted(*LOG_PROBS, "kl_term"),
          "misaligned"),
    # Rewards and advantages.
    _run("advantages with the wrong sign", "advantage", runs.advantages_flipped, "advantage-sign"),
    _run("policy loss with the wrong sign", "advantage", runs.policy_loss_flipped,
         "advantage-opposed"),
    _run("advantages shuffled", "advantage", runs.advantages_shuffled, "advantage-unrelated"),
    _run("advantages of the next row", "advantage", runs.advantages_of_the_next_row,
         "advantage-unrelated"),
    _dump("rewards of other completions", "advantage", dumps.rewards_of_others,
          "advantage-unrelated"),
    _run("advantages are the rewards", "advantage", runs.advantages_are_rewards,
         "advantage-off-centre"),
    _run("baseline of the whole batch", "advantage", runs.baseline_of_the_batch,
         "advantage-off-centre"),
    _run("groups along the wrong axis", "advantage", runs.wrong_group_axis,
         "advantage-off-centre"),
    _run("a constant added to the advantages", "advantage", runs.advantages_off_centre,
         "advantage-off-centre"),
    _run("advantages shuffled, no group column", "advantage", runs.advantages_shuffled,
         "advantage-unrelated", column="group", dump=dumps.without("group")),
    _run("all rewards equal", "advantage", None, "no-signal", reward="constant"),
    _run("advantages all zero", "advantage", runs.advantages_are_zero, "no-signal"),
    _run("KL added to the advantages", "advantage", runs.kl_added_to_advantages, "kl-negative",
         "kl-rewarded", term=K1_REWARD),
    _run("KL added to the advantages, no term column", "advantage", runs.kl_added_to_advantages,
         "kl-rewarded", column="kl_term", term=K1_REWARD, settings={"beta": 0.5},
         dump=dumps.without("kl_term")),
    # The KL term.
    _run("KL subtracted from the loss", "KL term", runs.kl_subtracted, "kl-negative", term=K3),
    _run("KL subtracted, one update a rollout", "KL term", runs.kl_subtracted, "kl-negative",
         term=K3, settings=ON_POLICY),
    _run("KL subtracted, no term column", "KL term", runs.kl_subtracted, "kl-maximised",
         column="kl_term", term=K3, dump=dumps.without("kl_term")),
    _run("beta never applied", "KL term", runs.kl_left_out, "kl-left-out", term=K3),
    _run("beta never applied, no term column", "KL term", runs.kl_left_out, column="kl_term",
         term=K3, dump=dumps.without("kl_term")),
    _run("k1 in the place of k3", "KL term", runs.k1_in_its_place, "other-term", term=K3),
    _run("absolute log-ratio in the place of k3", "KL term", runs.absolute_in_its_place,
         "other-term", term=K3),
    _run("k3 of the inverted ratio", "KL term", runs.swapped_in_k3, "other-term", term=K3),
    _run("KL term on the first half of the tokens", "KL term", runs.kl_on_the_first_half,
         "other-term", term=K3),
    _run("KL term where it is small", "KL term", runs.kl_where_it_is_small, "other-term", term=K3),
    _run("KL term averaged over the completion", "KL term", runs.kl_of_the_completion,
         "other-term", term=K3),
    _run("k1 as a loss", "KL term", None, "k1-in-loss", term={"estimator": "k1"}),
    _run("k3 in the reward", "KL term", None, "penalty-in-reward",
         term={"estimator": "k3", "placement": "reward"}),
    _run("k2 in the reward", "KL term", None, "penalty-in-reward",
         term={"estimator": "k2", "placement": "reward"}),
    _run("k3's value with k2's gradient", "KL term", runs.gradient_of_k2, column="gradient",
         term={"estimator": "k3"}),
    _dump("KL term missing in the second half of the run", "KL term", dumps.term_missing("late"),
          "other-term", term=K3),
    _dump("KL term missing at negative advantages", "KL term", dumps.term_missing("negative"),
          "other-term", term=K3),
    _dump("coefficient that decays while the KL grows", "KL term", dumps.term_missing("decays"),
          "other-term", term=K3),
    _dump("engine's gaps filled with -9999", "sampler", dumps.engine_filled(-9999.0),
          "sampler-filled"),
    _dump("engine's gaps filled with 0", "sampler", dumps.engine_filled(0.0), "sampler-filled"),
    _dump("engine reports what top-p kept", "sampler", dumps.kept_mass,
          "train-inference-mismatch"),
    _dump("old_logp scored again at every update", "old policy", dumps.old_is_new,
          "ratio-is-one", symptom=("other-term",), settings={"num_iterations": 4}),
    _dump("advantages of one group times sixty", "advantage", dumps.one_group_apart,
          "groups-apart"),
    # Numbers.
    _run("old_logp and ref_logp in bfloat16", "numbers", runs.old_in_bfloat16, "coarse-logprobs"),
    _dump("log-probs in bfloat16", "numbers", dumps.rounded("bfloat16", *LOG_PROBS),
          "coarse-logprobs"),
    _dump("log-probs in float16", "numbers", dumps.rounded("float16", *LOG_PROBS),
          "coarse-logprobs"),
    _dump("log-probs of two decimals", "numbers", dumps.rounded("2", *LOG_PROBS),
          "coarse-logprobs"),
    _dump("log-ratios clamped", "numbers", dumps.clamped, "clamped-values"),
    _dump("sums of sequences", "numbers", dumps.of_sequences("sum"), "sequence-sums"),
    _dump("means of sequences", "numbers", dumps.of_sequences("mean"), "sequence-sums"),
    _dump("probabilities", "numbers", dumps.probabilities, "refused"),
    _dump("sign dropped", "numbers", dumps.sign_dropped, "refused"),
    _dump("log-probs in bits", "numbers", dumps.in_bits, symptom=OTHER),
    _dump("entropy in bits", "numbers", dumps.entropy_in_bits, symptom=OTHER),
    # The run.
    _run("sixteen updates a rollout", "run", None, "stale-samples",
         settings={"num_iterations": 16, "max_steps": 32, "learning_rate": 2e-3}),
    _run("learning rate thirty times too high", "run", None, "stale-samples",
         symptom=("heavy-weights", "heavy-tail", "concentrated", "kl-without-reward"),
         settings={"learning_rate": 3e-2}),
    _dump("a few completions far off", "run", dumps.a_few_far, "concentrated",
          settings={"learning_rate": 3e-4}),
    _dump("rows dumped twice", "run", dumps.twice, "duplicates"),
    _dump("all rows under one step", "run", dumps.one_step, symptom=("duplicates",)),
)  # fmt: skip

#: Kinds that no threshold was set by, each written down with what should be found before it was
#: first run. None may be changed, or looked at when something is tuned: then it is none of these.
HELD_OUT: tuple[Fault, ...] = (
    _run("reference in 4 bits", "reference", runs.reference_in_4_bits, "starts-away"),
    _dump("reference permuted within completions", "reference", dumps.permuted("ref_logp"),
          "other-tokens", "misaligned"),
    _run("n-grams that repeat are forbidden", "sampler", runs.no_repeated_pairs, *OTHER),
    _run("typical sampling", "sampler", runs.typical, *OTHER),
    _run("a token that is never sampled", "sampler", runs.token_suppressed, *OTHER),
    _run("no end before the eighth token", "sampler", runs.no_early_end, *OTHER),
    _run("engine at another temperature, reporting", "sampler", runs.hotter_engine_that_reports,
         "train-inference-mismatch"),
    _dump("engine's column of other rows", "sampler", dumps.sampler_of_others, "other-tokens",
          "misaligned", "train-inference-mismatch"),
    _run("only the first half counted", "mask", runs.first_half_counted, "missing-end"),
    _run("advantages of the batch before", "advantage", runs.advantages_of_the_batch_before,
         "advantage-unrelated"),
    _run("advantages with the wrong sign in half of the groups", "advantage",
         runs.half_of_the_advantages_flipped, "advantage-unrelated", "advantage-sign"),
    _run("rewards divided by their deviation, not centred", "advantage",
         runs.advantages_not_centred, "advantage-off-centre"),
    _run("k2 in the place of k3", "KL term", runs.k2_in_its_place, "other-term", term=K3),
    _dump("old_logp in float16", "numbers", dumps.rounded("float16", "old_logp"),
          "coarse-logprobs"),
    _dump("log-probs of three decimals", "numbers", dumps.rounded("3", *LOG_PROBS),
          "coarse-logprobs"),
    _dump("log-probs to base ten", "numbers", dumps.to_base_ten, symptom=OTHER),
    _dump("entropy of other rows", "numbers", dumps.entropy_of_others, symptom=("misaligned",)),
    _run("reference with a token more in its prompt", "reference",
         runs.reference_after_another_token, "starts-away", "other-tokens"),
    _run("reference's mean over the completion", "reference", runs.reference_of_the_completion,
         "other-tokens", "sequence-sums", symptom=("starts-away", "misaligned")),
    _dump("reference reversed in each completion", "reference",
          dumps.reversed_in_each("ref_logp"), "other-tokens", "misaligned"),
    _run("old_logp before the temperature", "old policy", runs.old_before_the_temperature,
         "scored-twice", "stale-samples", settings={"temperature": 0.7}),
    _run("scored under the prompts of another group", "sampler", runs.scored_under_other_prompts,
         *OTHER),
    _run("scored with a token more in the prompt", "sampler", runs.scored_after_another_token,
         *OTHER),
    _run("one token favoured", "sampler", runs.one_token_favoured, *OTHER),
    _run("no end is ever sampled", "sampler", runs.no_end, *OTHER),
    _run("engine's log-probs a fifth too near to zero", "sampler", runs.engine_reports_less,
         "train-inference-mismatch"),
    _dump("end counted twice", "mask", dumps.end_twice, "unsampled-end"),
    _dump("two completions under one name", "mask", dumps.two_under_one_name),
    _run("only positive advantages", "advantage", runs.only_positive_advantages,
         "advantage-off-centre"),
    _run("advantages of the next group", "advantage", runs.advantages_of_the_next_group,
         "advantage-unrelated"),
    _dump("rewards negated", "advantage", dumps.rewards_negated, "advantage-sign"),
    _dump("groups of every eighth row", "advantage", dumps.groups_of_every_eighth,
          "advantage-unrelated", "advantage-off-centre"),
    _dump("entropy reversed in each completion", "numbers", dumps.reversed_in_each("entropy"),
          symptom=("misaligned",)),
)  # fmt: skip
