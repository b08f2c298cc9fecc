"""What the columns of a dump are called: our names, and each framework's."""

from __future__ import annotations

import difflib

from kl_term.errors import UserError

#: Canonical column -> the names frameworks use for it.
NAMES: dict[str, tuple[str, ...]] = {
    "sequence": ("sequence_id", "seq_id", "sample_id", "sequence_ids", "seq_ids"),
    "position": ("token_position", "pos", "t", "position_ids"),
    "logp": (
        "per_token_logps",
        "log_probs",
        "log_prob",
        "logprobs",
        "logps",
        "curr_logprobs",  # NeMo-RL
        "trainer_logprobs",  # prime-rl
    ),
    "old_logp": (
        "old_per_token_logps",
        "old_log_probs",
        "old_log_prob",
        "old_action_log_probs",
        "action_log_probs",
        "prev_logprobs",  # NeMo-RL
        "prox_logp",  # AReaL
    ),
    "ref_logp": (
        "ref_per_token_logps",
        "ref_log_prob",
        "ref_log_probs",
        "base_action_log_probs",
        "reference_policy_logprobs",  # NeMo-RL
    ),
    "sampler_logp": (
        "sampling_per_token_logps",
        "rollout_log_probs",
        "rollout_logprobs",
        "generation_logprobs",  # NeMo-RL
        "inference_logprobs",  # prime-rl
    ),
    "mask": ("completion_mask", "response_mask", "action_mask", "loss_mask", "token_mask"),
    "entropy": ("entropies", "entropys"),
    "advantage": ("advantages",),
    "reward": ("rewards", "score", "scores", "token_level_scores"),
    "step": ("global_step", "iteration"),
    "group": ("group_id", "prompt_id", "uid"),
    "token": ("token_id", "token_ids", "completion_ids"),
    "kl_term": ("kl_loss", "kl_penalty"),
    "padding": ("left_padding", "prompt_padding"),
    "lag": ("lags", "weights_behind", "weight_lag", "staleness", "off_policy_steps"),
    "version": (
        "versions",  # AReaL
        "weight_version",
        "weight_versions",
        "policy_version",
        "model_version",
        "param_version",
    ),
}
REQUIRED = ("logp", "ref_logp", "sequence")
#: Where the sequences of packed rows end: tensors are cut there, a table names its sequences.
ENDS = ("cu_seqlens", "cu_seq_lens", "cu_seqlens_q", "cu_seq_lens_q")
LOG_PROBS = ("logp", "old_logp", "ref_logp", "sampler_logp")
FLOATS = ("entropy", "advantage", "reward", "kl_term")
INTEGERS = ("step", "token", "padding", "lag", "version")
OPTIONAL = ("sampler_logp", *FLOATS, *INTEGERS, "group")

_KNOWN = {alias: name for name, aliases in NAMES.items() for alias in (name, *aliases)}


def is_known(column: str) -> bool:
    """Is this a name of a column that is read, ours or a framework's?"""
    return column.strip().lower() in _KNOWN


def canonical(columns: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Which column of a dump is which, and the unknown ones with the nearest known name.

    Raises:
        UserError: two columns mean the same, or a required one is missing.
    """
    chosen: dict[str, str] = {}
    ignored: dict[str, str] = {}
    known, given = _KNOWN, {column.strip().lower() for column in columns}
    if "old_action_log_probs" in given:
        known = known | {"action_log_probs": "logp"}  # as OpenRLHF calls the two
    if "prox_logp" in given:
        known = known | {"logprobs": "sampler_logp"}  # as AReaL calls what the engine reports
    for column in columns:
        if column.strip().lower() in ENDS:
            raise UserError(
                f"{column} says that rows hold several sequences: dump the sequence of each token "
                "instead, a column sequence_ids (kl_term.sequence_ids makes it)"
            )
        name = known.get(column.strip().lower())
        if name is None:
            near = difflib.get_close_matches(column.strip().lower(), _KNOWN, n=1)
            ignored[column] = near[0] if near else ""
        elif name in chosen:
            raise UserError(
                f"columns {chosen[name]!r} and {column!r} both mean {name}; drop or rename one"
            )
        else:
            chosen[name] = column
    if "logp" not in chosen and "old_logp" in chosen:
        chosen["logp"] = chosen["old_logp"]  # dumped before the update: the two are one
    for name in REQUIRED:
        if name not in chosen:
            hints = [column for column, near in ignored.items() if _KNOWN.get(near) == name]
            hint = f"; rename {hints[0]!r}?" if hints else ""
            aliases = ", ".join(NAMES[name])
            if name == "logp" and not hint:
                hint = "; a trainer's log has none: see kl-term diagnose --how-to-dump plain"
            raise UserError(f"column {name} is missing (also read: {aliases}){hint}")
    return chosen, ignored
