"""The role of an argument, by its name: the spellings of trainers, and of who writes like them.

The spellings are those of TRL, verl, OpenRLHF, NeMo-RL, open-instruct, slime and prime-rl. A name
is cut into words; which words it holds decides its role.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, get_args

Role = Literal[
    "logp",
    "ref_logp",
    "old_logp",
    "ref_log_ratio",
    "log_ratio",
    "ratio",
    "mask",
    "padding",
    "sample_mask",
    "advantages",
    "rewards",
    "token_rewards",
    "values",
    "beta",
    "tokens",
    "logits",
    "ref_logits",
    "old_logits",
    "topk_logp",
    "ref_topk_logp",
    "topk_ids",
    "cu_seqlens",
    "sequence_ids",
    "position_ids",
    "max_seqlen",
    "lengths",
    "total_lengths",
    "prompt_lengths",
    "prompt_length",
    "prompt_tokens",
    "prompt_mask",
    "pad_id",
    "ignore_index",
    "last",
    "count",
    "width",
    "group",
    "group_size",
    "clip",
    "temperature",
    "discount",
    "inputs",
    "config",
]
ROLES: tuple[Role, ...] = get_args(Role)
#: Roles that are passed only where the parameter has no default.
_OPTIONAL = (
    *("sample_mask", "count", "group", "clip", "temperature", "config", "discount"),
    "ignore_index",
)
#: The others: tensors, the coefficient, and the length that a constant divisor is.
ALWAYS = tuple(role for role in ROLES if role not in _OPTIONAL)
#: Roles that hold what the policy being trained says of a token: the gradient is by one of these.
OF_POLICY: tuple[Role, ...] = ("logp", "logits", "topk_logp", "ref_log_ratio", "log_ratio", "ratio")
#: Roles that are one number, which a configuration may hold.
NUMBERS = (
    *("beta", "clip", "temperature", "width", "count", "group_size", "max_seqlen"),
    *("prompt_length", "pad_id", "ignore_index", "discount"),
)
#: Roles that hold a length for each answer.
OF_LENGTHS: tuple[Role, ...] = ("lengths", "total_lengths", "prompt_lengths")
#: Roles of the prompt, of which an audit gives one token.
OF_PROMPT: tuple[Role, ...] = ("prompt_lengths", "prompt_length", "prompt_tokens", "prompt_mask")
#: Log-probs and ids [..., k] of the reference's likeliest tokens, those of the policy first.
OF_TOP_K: tuple[Role, ...] = ("topk_logp", "ref_topk_logp", "topk_ids")

_LOG_PROB = re.compile(r"(?:log_?p(?:rob(?:abilitie|ability)?|i)?s?|(?:(?<=_)|^)lps?)(?=_|$)")
_REFERENCE = {"ref", "reference", "base", "teacher", "init", "initial", "sft", "frozen", "anchor"}
_REFERENCE |= {"prior", "refs", "pretrained"}
_SAMPLER = {"old", "sampling", "sampler", "behavior", "behaviour", "inference", "rollout", "mu"}
_SAMPLER |= {"generation", "generator", "gen", "prev", "previous", "engine", "vllm", "sglang"}
_SAMPLER |= {"proximal", "prox", "sampled", "actor_old", "beh", "recorded", "collected"}
_MASKS = {"mask", "masks", "valid", "counted", "keep", "maskf"}
_ADVANTAGES = {"advantages", "advantage", "adv", "advs", "returns", "return"}
_REWARDS = {"rewards", "reward", "scores", "score", "rews", "rew"}
_COEFFICIENTS = {"coef", "coeff", "coefficient", "weight", "ctl", "lambda", "lam", "scale", "alpha"}
#: Of what holds the coefficient and changes it from step to step.
CONTROLLERS = {"ctl", "ctrl", "controller"}
_COEFFICIENTS |= {"penalty", "factor", "strength", "c", *CONTROLLERS}
_TOKENS = {"labels", "tokens", "ids", "actions", "targets", "responses", "token", "sequences"}
_BAGS = {"inputs", "batch", "data", "samples", "mb", "microbatch", "minibatch", "rollouts"}
_BAGS |= {"sample", "experience", "experiences", "example", "examples", "rollout_data"}
_BAGS |= {"model_output", "model_outputs", "output", "outputs"}
_BAGS |= {"rollout", "rollout_batch", "train_batch", "traj", "trajectory", "transitions"}
_BAGS |= {"td", "tensordict"}
#: Of which a name may be made that holds a batch.
_BAG_WORDS = {"batch", "data", "input", "inputs", "dict", "td", "micro", "mini", "train", "rollout"}
MODELS = {"model", "module", "actor", "network", "net", "transformer", "lm", "tokenizer"}
#: Names under which some pass advantages and some what a mask is: decided by what they do.
AMBIGUOUS = ("loss_weights", "weights")
_CONFIGS = {"config", "cfg", "args", "hparams", "settings", "options", "opts", "algo", "conf"}
_PER_PROMPT = {"generations", "samples", "rollouts", "responses", "completions"}
_SEQUENCES = {"sequence", "seq", "segment", "doc", "document", "row", "answer", "sample"}
_NUMBERS = {"id", "ids", "idx", "index"}
_INDEX = {"idx", "idxs", "index", "indices", "position", "positions"}
_IDS = {"id", "ids", "indices", "index", "indexes", "idx", "idxs", "tokens", "inds"}
_LENGTHS = {"lengths", "lens", "seqlens"}
_PROMPTS = {"prompt", "prompts", "query", "queries", "context"}
_LIMITS = {"eps", "epsilon", "clip", "cliprange", "clipping"}
#: A name with one of these says how something is done, and holds no tensor of it.
_SETTINGS = {"threshold", "range", "mode", "type", "fn", "func", "get", "use", "idx", "idxs"}
_SETTINGS |= {"indices", "rate", "norm", "scale", "name", "method", "estimator"}
#: Roles that such a name can have all the same.
_SETTABLE = {
    "beta",
    "clip",
    "temperature",
    "topk_ids",
    "sequence_ids",
    "last",
    "config",
    "group",
    "count",
    "pad_id",
    "ignore_index",
}


def words_of(name: str) -> set[str]:
    """The words of a name, ``perTokenLogps`` and ``per_token_logps`` alike."""
    return set(_snake(name).split("_"))


def _snake(name: str) -> str:
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_")
    return _LOG_PROB.sub("logp", snake)


def role_of(name: str) -> Role | None:
    """The role that a name is usually given, or None."""
    words = words_of(name)
    role = next((role for role, holds in _RULES if holds(words, _snake(name))), None)
    return None if words & _SETTINGS and role not in _SETTABLE else role


def role_inside(*path: str) -> Role | None:
    """The role of a name such as ``coef`` that only says what it is where it lies: ``kl.coef``."""
    return role_of("_".join(path[-2:])) if len(path) > 1 else None


def _whose(words: set[str]) -> str:
    if words & _SAMPLER:
        return "old_"
    return "ref_" if words & _REFERENCE else ""


def _is_beta(words: set[str], name: str) -> bool:
    if words & {"low", "high", "target", "type", "mode", "estimator", "reward", "loss"} - {"loss"}:
        return False
    named = "beta" in words or name in ("betas", "klcoef", "klcoeff", "klweight")
    return named or ("kl" in words and bool(words & _COEFFICIENTS))


def _is_a_kl(words: set[str], name: str) -> bool:
    """Such as ``per_token_kl``; ``ppo_kl`` is to the sampler."""
    return name.endswith("_kl") and not words & {"ppo", "target", "max", "mean", *_SAMPLER}


def _logs(kind: str, whose: str) -> Callable[[set[str], str], bool]:
    return lambda words, name: kind in words and _whose(words) == whose


def _are_prompts(words: set[str]) -> bool:
    return bool(words & _PROMPTS) and bool(words & {"tokens", "token", "tensors"})


def _is_a_batch(words: set[str]) -> bool:
    """Such as ``input_data``, or what a model puts out."""
    returned = bool(words & {"out", "output", "outputs"}) and bool(words & {*MODELS, "policy"})
    return returned or (len(words) > 1 and words <= _BAG_WORDS)


def _is_top_k(words: set[str], name: str) -> bool:
    return "topk" in words or "top_k" in name


def _is_topk_logp(whose: set[str]) -> Callable[[set[str], str], bool]:
    """Without an owner, what holds the top k's log-probs is the reference's."""
    return lambda w, n: _is_top_k(w, n) and bool(w & {"logp", "logits"}) and bool(w & whose)


_RULES: tuple[tuple[Role, Callable[[set[str], str], bool]], ...] = (
    ("topk_ids", lambda w, n: _is_top_k(w, n) and bool(w & _IDS)),
    ("topk_logp", _is_topk_logp({"student", "policy", "actor", "current", "new"})),
    ("ref_topk_logp", _is_topk_logp({"logp", "logits"})),
    ("beta", _is_beta),
    ("padding", lambda w, n: bool(w & {"pad", "padding"}) and bool(w & {"mask", "masks"})),
    ("ignore_index", lambda w, n: bool(w & {"ignore", "ignored"}) and bool(w & {"index", "id"})),
    ("ignore_index", lambda w, n: {"label", "pad"} <= w and "id" in w),
    ("pad_id", lambda w, n: bool(w & {"pad", "padding"}) and bool(w & {"id", "idx", "token"})),
    ("prompt_mask", lambda w, n: bool(w & _PROMPTS) and bool(w & _MASKS)),
    ("prompt_lengths", lambda w, n: bool(w & _PROMPTS) and bool(w & _LENGTHS)),
    ("prompt_length", lambda w, n: bool(w & _PROMPTS) and bool(w & {"length", "len"})),
    ("prompt_tokens", lambda w, n: n in ("queries", "query") or _are_prompts(w)),
    ("total_lengths", lambda w, n: bool(w & {"total", "full", "input"}) and bool(w & _LENGTHS)),
    ("last", lambda w, n: bool(w & _INDEX) and bool(w & {"score", "last", "eos", "end"})),
    ("sample_mask", lambda w, n: n in ("sample_mask", "sequence_mask", "row_mask")),
    ("count", lambda w, n: bool(w & {"global", "total", "num"}) and bool(w & {"toks", "tokens"})),
    ("group_size", lambda w, n: "global" in w and bool(w & {"seqs", "sequences"})),
    ("mask", lambda w, n: bool(w & _MASKS)),
    ("cu_seqlens", lambda w, n: "cu" in w and bool(w & {"seqlens", "seqlen", "seq", "lens"})),
    ("sequence_ids", lambda w, n: bool(w & _SEQUENCES) and bool(w & _NUMBERS)),
    ("max_seqlen", lambda w, n: "max" in w and bool(w & {"seqlen", "seqlens"})),
    ("position_ids", lambda w, n: bool(w & {"position", "positions"})),
    ("ref_log_ratio", lambda w, n: "ratio" in w and bool(w & {"ref", "reference", "kl"})),
    ("log_ratio", lambda w, n: ("ratio" in w and bool(w & {"log", "logp"})) or "logratio" in w),
    ("log_ratio", lambda w, n: bool(w & {"logratio", "logratios", "logr"})),
    ("width", lambda w, n: "max" in w and bool(w & {"len", "length", "tokens", "completion"})),
    ("ratio", lambda w, n: "ratio" in w and not w & _LIMITS),
    ("old_logp", _logs("logp", "old_")),
    ("ref_logp", _logs("logp", "ref_")),
    ("logp", _logs("logp", "")),
    ("old_logits", _logs("logits", "old_")),
    ("ref_logits", _logs("logits", "ref_")),
    ("logits", _logs("logits", "")),
    ("values", lambda w, n: bool(w & {"values", "vpreds", "vpred"}) or n == "value_preds"),
    ("advantages", lambda w, n: bool(w & _ADVANTAGES) or n in AMBIGUOUS),
    ("token_rewards", lambda w, n: "token" in w and bool(w & _REWARDS)),
    ("rewards", lambda w, n: bool(w & _REWARDS) or n == "r"),
    ("ref_log_ratio", lambda w, n: n in ("kl", "kls", "approx_kl") or _is_a_kl(w, n)),
    ("group_size", lambda w, n: "group" in w and bool(w & {"size", "num"})),
    ("group_size", lambda w, n: n in ("rloo_k", "num_per_prompt")),
    ("group_size", lambda w, n: bool(w & {"n", "num", "per"}) and bool(w & _PER_PROMPT)),
    ("group", lambda w, n: bool(w & {"group", "groups", "uid", "uids", "index", "prompt"})),
    ("count", lambda w, n: bool(w & {"num", "total", "n"}) and bool(w & {"items", "tokens"})),
    ("count", lambda w, n: bool(w & {"count", "step", "global"}) and bool(w & {"token", "tokens"})),
    ("count", lambda w, n: "total" in w and bool(w & {"len", "length"})),
    ("count", lambda w, n: bool(w & {"denom", "denominator", "normalizer", "normaliser"})),
    ("count", lambda w, n: n == "loss_scale"),
    ("discount", lambda w, n: n in ("gamma", "lambd") or "discount" in w or {"gae"} < w),
    ("lengths", lambda w, n: bool(w & _LENGTHS)),
    ("temperature", lambda w, n: bool(w & {"temperature", "temp", "tau"})),
    ("clip", lambda w, n: bool(w & _LIMITS)),
    ("inputs", lambda w, n: n in _BAGS or _is_a_batch(w)),
    ("config", lambda w, n: bool(w & _CONFIGS) or n == "self"),
    ("tokens", lambda w, n: bool(w & _TOKENS) or n in ("response", "completion", "completions")),
    ("ref_logp", lambda w, n: n in ("ref", "reference", "lp_ref", "ref_lp", "teacher")),
    ("old_logp", lambda w, n: n in ("old", "lp_old", "old_lp", "behavior")),
    ("logp", lambda w, n: n in ("lp", "new", "policy", "student", "cur_lp", "new_lp", "lp_new")),
)
