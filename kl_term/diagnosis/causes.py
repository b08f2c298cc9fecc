"""What can be wrong with a run, most fundamental first, and what to change.

A wrong column makes every later number meaningless, a wrong sign makes tuning meaningless, and only
then do samples, tails and clamps matter. When each applies is decided, with thresholds and their
reasons, in :mod:`kl_term.diagnosis.conditions`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kl_term.diagnosis import groups, lags, packed, penalties, resets, terms
from kl_term.diagnosis.conditions import columns, estimates, policies, updates
from kl_term.diagnosis.schema import SEVERITIES, Finding, Measured, Severity, Shown
from kl_term.diagnosis.trainers import told
from kl_term.errors import UserError

#: One text, or one for each case; words in braces are filled in from the measurements.
Text = str | Mapping[str, str]


class Cause(NamedTuple):
    """What can be wrong, what shows it, what to change, and where that is explained."""

    when: Callable[[Measured], Shown | None]
    title: Text
    advice: Text
    chapter: str  #: notebook of the book, and ``#label`` inside it
    severity: Severity = "error"
    #: ``spoils``: the columns are not what they say, so that what follows from them is noise.
    #: ``data``: about the columns, or about one alone: is said where they are spoilt, too.
    kind: str = "run"

    @property
    def code(self) -> str:
        """What the finding is called: as its condition is."""
        return self.when.__name__.replace("_", "-")


CAUSES: tuple[Cause, ...] = (
    Cause(groups.sequence_sums, "All tokens of a sequence have one log-prob",
          "These are sums or means of sequences: dump the log-prob of each token.",
          "14_frameworks#ex-where-after", kind="spoils"),
    Cause(groups.duplicates,
          {"copies": "Completions stand more than once",
           "updates": "The same completions stand at several updates, and no step says at which"},
          {"copies": "The sampler returned one completion for several rows (a seed that each "
           "request repeats, greedy decoding), or rows were dumped twice or all under one step. "
           "Without a group column it may also be the prompt that is counted: its tokens make "
           "short answers that are alike look improbable.",
           "updates": "Their old_logp is one to every digit, their logp is not. Dump the number of "
           "the optimizer step, and not that of the rollout: without it each counts once an "
           "update, and intervals are too narrow."},
          "03_k3_counterexample#thm-underestimate", kind="data"),
    Cause(packed.packed_rows, "Rows seem to hold several sequences each",
          "Packed rows: say which sequence each token is of, by a list sequence_ids beside logp, "
          "or cu_seqlens beside tensors. Without, a row counts as one completion: intervals, "
          "groups, copies, ends, the KL to go and ratios of sequences are of rows. No fault where "
          "turns have advantages of their own.",
          "06_sequences#thm-first-order", severity="note", kind="data"),
    Cause(groups.counted_prompt, "Tokens of the prompt are counted",
          "Completions of one prompt begin with the same improbable tokens: the mask begins too "
          "early, or a template's opening is forced and counted.",
          "14_frameworks#ex-where-after", kind="spoils"),
    Cause(columns.counted_padding, "Padding is counted as text",
          "Dump the completion mask (1 = counted) and multiply nothing by it: select. In the "
          "trainer, check that the loss uses the same mask.",
          "14_frameworks#ex-where-after", kind="spoils"),
    Cause(columns.other_base, "{columns}: logarithms to base {base}, the others are natural ones",
          "Take the natural logarithm (torch.log, not log10 or log2), in the loss too if it read "
          "this column. Only if all columns are to one base no ratio shows it: then "
          "the entropy does.",
          "01_estimators#thm-unbiased", kind="spoils"),
    Cause(columns.misaligned, "The {column} log-probs are those of a neighbouring token",
          "Logits at position t predict token t+1: shift logits or ids by one, in exactly one of "
          "the two places.",
          "01_estimators#thm-unbiased", kind="spoils"),
    Cause(columns.other_tokens, "The {column} log-probs are not those of these tokens",
          "Look for rows in another order (a batch shuffled after scoring), another prompt or "
          "another model.",
          "01_estimators#thm-unbiased", kind="spoils"),
    Cause(columns.masked_when_scored, "Tokens are counted that were masked when they were scored",
          "The loss and the scoring pass use different masks: look for a mask shifted by one "
          "token, padding counted as text, or a token after the end of sequence.",
          "14_frameworks#ex-where-after", kind="spoils"),
    Cause(columns.unsampled_end, "The last counted tokens were not sampled",
          "The mask counts a token after the end of sequence (padding, a newline of the chat "
          "template), or is shifted by one token.",
          "14_frameworks#ex-where-after", kind="spoils"),
    Cause(columns.impossible_tokens, "Some counted tokens cannot have been sampled",
          "Look for prompt or tool tokens inside the mask, another tokenisation, or log-probs "
          "gathered with the wrong ids.",
          "06_sequences#thm-sampling-mask", kind="data"),
    Cause(policies.sampler_filled,
          "The engine's log-probs are missing at some tokens, and filled with {value}",
          "A ratio with a filler is no ratio. Leave such tokens out of every weight, or let them "
          "have the trainer's log-prob; dump them as NaN or null. Ask the engine for the log-prob "
          "of each sampled token.",
          "06_sequences#thm-two-factors", kind="data"),
    Cause(columns.identical_reference,
          {"of logp": "The reference is the policy itself",
           "of old_logp": "old_logp is ref_logp: one of them was not scored anew"},
          {"of logp": "Expected only before the first update, in the first step after a reset, "
           "or where nothing moves the policy. Otherwise the reference is synchronised at every "
           "step, or the adapter stays on when it is evaluated.",
           "of old_logp": "Score old_logp with the weights that sample and ref_logp with those "
           "that stay; here a column was copied, or kept from the start of the run."},
          "05_fixed_points#thm-reverse-optimum", kind="spoils"),
    Cause(policies.negative_kl,
          {"exchanged": "The KL is negative: the tokens are not the policy's, but the reference's",
           "other": "The KL is negative: the tokens are not the policy's"},
          {"exchanged": "Policy and reference are exchanged, in the dump or in the loss (that "
           "maximises the KL), or the engine still samples with the weights of the start.",
           "other": "A mean of log pi - log pi_ref below zero needs a sampler that is not pi: "
           "another checkpoint, temperature or prompt template. Or one of the two columns is to "
           "another base than e."},
          "01_estimators#thm-unbiased", kind="spoils"),
    Cause(policies.old_not_sampler,
          "The tokens were not drawn from the policy that old_logp belongs to",
          "Score old_logp with the weights that sample, at the sampling step. Values kept from "
          "an earlier step bias ratio, clip and every off-policy weight.",
          "02_gradients#thm-off-policy-weights", kind="spoils"),
    Cause(policies.other_sampler,
          {"unsampled": "The tokens were not drawn from this policy",
           "first": "The first tokens of completions were not drawn from this policy",
           "hotter": "The sampler is hotter than the policy that is trained",
           "colder": "The sampler is colder, or truncated further, than the policy that is "
           "trained"},
          {"unsampled": "The log-probs may all belong to neighbouring tokens, the mask may count "
           "tokens of the prompt or of a tool, or rows may be exchanged.",
           "first": "What stands before them is not what the sampler saw: the end of another "
           "sequence of a packed row, a template's last token (or its newline), a prompt that is "
           "cut, or an opening that is forced and counted.",
           "hotter": "It may be the temperature (divide the logits by it when scoring), a "
           "repetition penalty, log-probs to another base than e, an engine with older weights, "
           "dropout when scoring, other position ids for left-padded prompts, or tokens counted "
           "that nobody sampled.",
           "colder": "It may be the temperature (divide the logits by it when scoring), top-p, "
           "top-k, min-p or a repetition penalty that the trainer does not know, completions that "
           "were left out, log-probs to base 10, or an entropy in bits or at another temperature."},
          "06_sequences#thm-sampling-mask", kind="data"),
    Cause(groups.padded_positions,
          "Rows with left padding were scored at other positions than they were sampled at",
          "Give the scoring pass the position ids of the sampler, counted from the first token "
          "that is no padding; or pad no prompts.",
          "06_sequences#thm-sampling-mask", kind="data"),
    Cause(groups.scored_twice, "Two scores of one token differ, though no update lies between them",
          "Dropout is on when the policy is scored (of the model or of the adapter: set it to "
          "0), or old_logp was scored by other weights, another type or other kernels.",
          "14_frameworks#fig-cancellation", kind="data"),
    Cause(groups.missing_end, "Sequences end in many different tokens",
          "The end token is not counted, completions were cut, or the mask is that of another "
          "row. Expected only with stop strings. The end must be inside the mask, or length is "
          "not trained.",
          "06_sequences#thm-sampling-mask", severity="warning", kind="data"),
    Cause(policies.starts_away,
          {"far": "The policy differs from its reference before the first update",
           "noise": "Policy and reference are not scored alike: the KL cannot be read below that"},
          {"far": "Unless the run starts elsewhere on purpose: load both from the same weights, "
           "and score both with the same prompt, temperature, masks and precision, as natural "
           "logarithms.",
           "noise": "One of the two is scored in low precision, with other kernels, or in another "
           "batch. Score both in float32 from the logits on."},
          "05_fixed_points#thm-reverse-optimum", severity="warning", kind="data"),
    Cause(columns.coarse_logprobs, "The log-probs were rounded ({grid})",
          "Take log_softmax of float32 logits and keep the result in float32; dump at least six "
          "digits.",
          "14_frameworks#fig-cancellation", kind="data"),
    Cause(columns.clamped_values, "Log-ratios sit exactly at a clamp",
          "Dump the log-probs before any clamp. In training such tokens have no KL gradient.",
          "14_frameworks#prop-dead-zones", kind="data"),
    Cause(columns.ratio_mean, "The mean of {ratio} is not one",
          "Score with the sampling temperature (divide the logits by it), the same prompt "
          "template and position ids, and natural logarithms everywhere; below one, the sampler "
          "truncates (top-p, top-k). Or the engine has older weights, or only some of the new.",
          "06_sequences#thm-sampling-mask", severity="warning", kind="data"),
    Cause(updates.advantage_sign,
          {"all": "Advantages fall where rewards rise",
           "some": "Advantages fall where rewards rise, in some of the groups"},
          {"all": "Check the sign of the advantages before anything else.",
           "some": "Look for what these prompts have in common: a data source whose reward is a "
           "cost, or advantages that were negated twice."},
          "08_reward_side#thm-baseline", kind="data"),
    Cause(groups.advantage_unrelated, "Advantages do not follow the rewards of their group",
          "One of the two columns is in another order: look for a shuffle or a gather between "
          "reward, advantage and loss, or for a reward that is logged of another completion.",
          "08_reward_side#thm-baseline", kind="data"),
    Cause(groups.advantage_off_centre, "Advantages do not sum to zero in their group",
          {"rewards": "They are the rewards themselves: subtract the mean of the group.",
           "batch": "They are centred over the batch, not over the completions of a prompt: the "
           "baseline is the batch's, or groups are taken along the wrong axis (reshape to "
           "[prompts, completions]).",
           "length": "They are divided by the length of their completion: long answers count for "
           "less, and a loss that divides by the length does it a second time. Divide in one "
           "place, the same for all.",
           "longer": "They are multiplied by the length of their completion: long answers count "
           "for more, and a loss that sums over tokens does it a second time. Multiply in one "
           "place, or in none.",
           "constant": "A constant is left: subtract the mean of the group, after everything that "
           "is added."},
          "08_reward_side#thm-baseline", severity="warning", kind="data"),
    Cause(groups.groups_apart,
          {"apart": "The advantages of some groups are on another scale",
           "silenced": "The advantages of some groups are zero, though their rewards differ"},
          {"silenced": "These prompts teach nothing. Look for a mask or a weight of a data source, "
           "a group whose rewards come late, or rewards that are logged after a bonus.",
           "apart": "A few prompts decide every update. Look for a group whose rewards are not "
           "normalised, a division by a spread near zero, or a weight of a data source applied "
           "twice."},
          "08_reward_side#thm-baseline", severity="warning", kind="data"),
    Cause(policies.ratio_is_one,
          "The ratio to old_logp is one where a batch is trained on again: the clip cannot act",
          {"again": "old_logp is scored again at these steps, with the weights that are being "
           "trained. Keep what was scored before the first update on a rollout; in asynchronous "
           "training, what the sampler's weights gave.",
           "behind": "By design where a proximal policy is scored again before one update on it: "
           "the clip holds nothing, and a weight old/sampler has to do what it does not. Else "
           "take the engine's log-probs as old_logp."},
          "02_gradients#thm-off-policy-weights", severity="warning"),
    Cause(updates.advantage_opposed, "Updates move tokens against their advantages",
          "The policy loss has the wrong sign, or logp is exchanged with old_logp or ref_logp.",
          "08_reward_side#thm-baseline"),
    Cause(terms.kl_left_out, "The KL term is zero at every token",
          "The coefficient did not reach the loss, or the term is masked out.",
          "04_grpo_ablation#fig-ablation-trade-off"),
    Cause(terms.kl_negative, "The KL term has the wrong sign: {where} it pushes the policy away",
          "The term is added to a loss, and subtracted from a reward.",
          "02_gradients#thm-expected-gradients"),
    Cause(terms.other_term,
          {"all": "The KL term is {found}, not {named}",
           "tokens": "The KL term is missing at some of the tokens",
           "steps": "The KL term is missing at some of the steps",
           "jumps": "The coefficient of the KL term leaps from step to step",
           "reversed": "The coefficient of the KL term runs against the KL"},
          {"all": "Check the estimator that the trainer computes, which tokens it leaves out, "
           "which policy stands above in its ratio (r is reference over policy), and that logp is "
           "not old_logp.",
           "tokens": "Its mean hides it where a few tokens hold most of it. Look for a mask of its "
           "own, a clamp, or a condition on advantage, position or the sign of the log-ratio; the "
           "evidence says where most are missing.",
           "steps": "It vanishes, or comes and goes, while the run goes on: a schedule that ends "
           "at zero, a flag that is read once, a reference that is dropped or reset.",
           "jumps": "No schedule falls and rises at every other step. Look for a division by the "
           "number of micro-batches, of processes or of tokens that some steps lack, or for a term "
           "that is added once a rollout.",
           "reversed": "A controller raises the coefficient when the KL is above its target: check "
           "the sign of its error. Expected of a schedule, or while the KL is still on the other "
           "side of the target."},
          "01_estimators#thm-unbiased"),
    Cause(updates.kl_rewarded, "Advantages rise with the KL: it is maximised",
          "The penalty is subtracted from the reward: r - beta (log pi - log pi_ref).",
          "08_reward_side#thm-folded-reward"),
    Cause(updates.kl_maximised, "Updates push the policy away from its reference",
          "The reward may drive the drift, with a beta too small to hold it. If it does not "
          "rise, check the sign of the KL term: it is added to a loss, subtracted from a reward.",
          "02_gradients#thm-expected-gradients"),
    Cause(updates.k1_in_loss, "k1 as a loss has no expected gradient",
          "Move k1 to the reward, or use k2 in the loss: same value, a gradient that pulls.",
          "05_fixed_points#thm-k1-walk"),
    Cause(updates.penalty_in_reward, "{estimator} in the reward is the gradient of no KL",
          "In the reward use k1: this one loses tokens below the reference, k3 in the end all "
          "but one.",
          "05_fixed_points#thm-k3-plain-flow", severity="warning"),
    Cause(penalties.penalised_twice,
          {"twice": "A KL penalty is in the reward beside the term in the loss: it counts twice",
           "once": "The advantages hold a KL penalty that was taken from the reward"},
          {"twice": "The advantages are those of r - beta KL. Keep one of the two: k1 in the "
           "reward, or the term in the loss.",
           "once": "Meant with a KL in the reward: say so by --estimator and --placement. Beside a "
           "term in the loss it counts twice."},
          "08_reward_side#thm-folded-reward"),
    Cause(updates.uniform_push, "Every sampled token is pushed down, whatever its advantage",
          {"no pull": "That is what k1 as a loss does, and no pull towards the reference is seen: "
           "use k2 (or k3) in the loss, or k1 in the reward.",
           "pull": "Advantages may be off centre, or part of the KL term is k1 as a loss."},
          "05_fixed_points#thm-k1-walk"),
    Cause(policies.train_inference_mismatch,
          {"other": "The inference engine samples from another policy than the trainer believes",
           "start": "The inference engine still has the weights of the reference",
           "weights": "The inference engine has older weights, or only part of the new ones",
           "raw": "The inference engine reports log-probs of another policy than it samples from",
           "truncated": "The sampler truncates, and its log-probs are those of what it kept"},
          {"other": "Align first: same temperature, all weights synchronised before sampling, same "
           "precision and kernels. Then weigh by old/sampler, truncated.",
           "start": "New weights never reach it: check that the update is sent, to every replica, "
           "and under the names that the engine knows (adapters and merged layers have others).",
           "weights": "Training made the difference: it was not there at the first step, or it "
           "follows the advantages. Send all weights (tied and merged layers, adapters, every "
           "replica), and wait until they are loaded. "
           "In asynchronous training dump lag or version, and weigh by old/sampler, truncated.",
           "raw": "The tokens are those of old_logp, so only the report is wrong: raw log-probs in "
           "the place of processed ones, or the other way round (vLLM: logprobs_mode "
           "processed_logprobs), or log-probs divided by the temperature in the place of logits. "
           "Do not weigh by this ratio.",
           "truncated": "old/sampler is the mass that top-p, top-k or min-p kept, never above one. "
           "Sample without truncation, or ask the engine for raw log-probs (vLLM: logprobs_mode "
           "raw_logprobs). Do not weigh with this ratio: it carries the truncation's bias into the "
           "loss.",
           },
          "06_sequences#thm-two-factors"),
    Cause(lags.weights_behind, "The weights that sampled are up to {updates} updates behind",
          {"unweighted": "The KL term has no weight, so it follows the sampler: weigh it by "
           "policy/old, with old_logp of the weights that sampled, or sample with newer ones.",
           "weighted": "Meant, in asynchronous training. Is the ratio to the weights that sampled, "
           "or to a later policy that the trainer scored? Only the first corrects the sampler.",
           "unknown": "Meant, in asynchronous training; say by --estimator and --weighting which "
           "term it is.",
           "later": "old_logp is that of a later policy, so a ratio to it corrects nothing of what "
           "lies before: weigh by old/sampler, truncated, take the engine's log-probs as "
           "old_logp, or sample with newer weights."},
          "02_gradients#thm-off-policy-weights", severity="note"),
    Cause(policies.stale_samples,
          "The samples are stale: the policy has left the one that drew them",
          {"unweighted": "Fewer updates per batch, or a smaller learning rate. Weigh the KL term "
           "by policy/old: k3 with the ratio attached, k2 with it detached; unweighted, the loss "
           "follows the sampler.",
           "weighted": "Fewer updates per batch, or a smaller learning rate. The weight corrects "
           "the token, not the states before it."},
          "02_gradients#thm-off-policy-weights"),
    Cause(estimates.overflow, "k3 overflows in float32",
          "One such token makes the loss infinite, or NaN once a mask multiplies it. Look at the "
          "tokens (wrong ids or a lost mask, as a rule), and use k2.",
          "14_frameworks#sec-overflow"),
    Cause(estimates.heavy_tail,
          "k3's mean and its interval cannot be trusted: the ratio's tail is too heavy",
          "Read the KL from k1, train with k2 in the loss or k1 in the reward, or sum the KL "
          "over the vocabulary. More samples do not help.",
          "03_k3_counterexample#thm-ratio-tail", severity="warning"),
    Cause(estimates.unseen_mass,
          "k3 reads the KL too low: part of the reference lies where nothing is sampled",
          "Read the KL from k1, or sum it over the vocabulary. k3 has no bias, but what it lacks "
          "comes in rare tokens with huge values: expect spikes, not a drift. A sampler that "
          "truncates (top-p, top-k) looks the same.",
          "20_language_model#fig-readings", severity="warning"),
    Cause(estimates.dead_zone,
          {"known": "The clamp of {framework} silences the tokens that are farthest away",
           "unknown": "If the loss clamps as {framework} do, it silences the tokens that are "
           "farthest away"},
          "Where nothing is clamped say --framework plain, and read no further. Else remove the "
          "clamp of the value at 10 and clip the gradient norm instead, or take a term whose "
          "gradient is not clamped: any of TRL, verl's low_var_kl+ or mse, OpenRLHF's "
          "unbiased_gradient.",
          "14_frameworks#prop-dead-zones", severity="warning"),
    Cause(estimates.k3_gradient, "k3's gradient is far from that of the reverse KL",
          "k3 as a loss descends the forward KL. If the reverse KL is meant, use k2 in the loss "
          "(on stale samples with the detached ratio).",
          "02_gradients#thm-expected-gradients", severity="note"),
    Cause(policies.heavy_weights, "The importance weights cannot be trusted",
          "Truncate the weights and say so, or sample afresh.",
          "06_sequences#thm-product-variance", severity="warning"),
    Cause(estimates.concentrated, "A few sequences carry most of the KL",
          "Read these sequences: degenerate loops, another language and cut-off answers are the "
          "usual ones.",
          "03_k3_counterexample#thm-underestimate", severity="warning"),
    Cause(updates.kl_without_reward,
          {"flat": "The KL grows, the reward does not",
           "unknown": "The KL grows (too few rewards are dumped to say for what)"},
          "Check the sign and the size of beta, and that the KL term reaches the loss. Dump the "
          "step and the reward of each sequence.",
          "04_grpo_ablation#fig-ablation-trade-off", severity="warning"),
    Cause(resets.reference_reset,
          {"reset": "The reference was set to the policy during the run",
           "copied": "The reference's log-probs of a step are the policy's own",
           "kept": "From one step on the reference is the policy itself"},
          {"reset": "No fault in itself, if you meant it (sync_ref_model, a reset). The KL that is "
           "logged from here on is not the one from the first reference: keep that, and measure "
           "from it.",
           "copied": "The next step is as far from the reference as the one before, which no reset "
           "explains: look for a reference pass that was skipped or reads the policy's weights.",
           "kept": "After a reset the next update moves the policy away again. Here nothing does: "
           "the reference is synchronised at every step, its adapter stays on, or its pass is "
           "skipped."},
          "24_moving_reference#thm-unread", severity="note"),
    Cause(estimates.far_from_reference, "The policy is far from its reference",
          "No fault in itself. First-order arguments about the estimators no longer hold.",
          "04_grpo_ablation#fig-ablation-kl", severity="note"),
    Cause(updates.no_signal, "{most} sequences have advantage zero",
          "They still get the KL's gradient: the effective beta is larger than it looks. Filter "
          "such groups, change the difficulty of the prompts, or look for a reward that is "
          "constant.",
          "08_reward_side#equal-rewards", severity="note", kind="data"),
    Cause(estimates.few_sequences, "Few sequences: the intervals are too narrow",
          f"Dump at least {updates.FEWEST_SEQUENCES} sequences; a hundred are better.",
          "03_k3_counterexample#thm-underestimate", severity="note", kind="data"),
)  # fmt: skip


def find(measured: Measured) -> list[Finding]:
    """All findings: errors before warnings before notes, each group most fundamental first.

    Where a column is not what it says, only findings about the data are given.
    """
    shown = [(cause, found) for cause in CAUSES if (found := cause.when(measured)) is not None]
    if any(cause.kind == "spoils" for cause, _ in shown):
        shown = [(cause, found) for cause, found in shown if cause.kind != "run"]
    findings = [
        Finding(
            code=cause.code,
            severity=found.severity or cause.severity,
            title=_said(cause.title, found),
            evidence=found.evidence,
            advice=_said(cause.advice, found),
            chapter=cause.chapter,
            settings=told(cause.code, found.case, measured.settings.framework),
        )
        for cause, found in shown
    ]
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def _said(text: Text, shown: Shown) -> str:
    return (text if isinstance(text, str) else text[shown.case]).format(**shown.words)


def matching(
    findings: list[Finding], wanted: tuple[str, ...], *, option: str = "--fail-on"
) -> list[Finding]:
    """Findings whose code or severity is among ``wanted``, which the user gave as ``option``.

    Raises:
        UserError: a name that is neither.
    """
    known = [*(cause.code for cause in CAUSES), *SEVERITIES]
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"{option} {name}: no such code or severity{hint}")
    return [f for f in findings if f.code in wanted or f.severity in wanted]
