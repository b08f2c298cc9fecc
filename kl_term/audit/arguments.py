"""Which argument of a foreign loss is which: by a mapping, or guessed from its spelling.

The spellings are those of TRL, verl, OpenRLHF, NeMo-RL, open-instruct, slime, prime-rl and of who
writes like them. A name is cut into words; which words it holds decides its role.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

from kl_term.errors import UserError
from kl_term.plain_checks import check_choice

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
    "cu_seqlens",
    "sequence_ids",
    "position_ids",
    "max_seqlen",
    "lengths",
    "count",
    "width",
    "group",
    "group_size",
    "clip",
    "temperature",
    "inputs",
    "config",
]
ROLES: tuple[Role, ...] = get_args(Role)
#: Roles that are passed even where the parameter has a default: tensors, the coefficient, and the
#: length that a constant divisor is.
ALWAYS: tuple[Role, ...] = (
    "logp",
    "ref_logp",
    "old_logp",
    "ref_log_ratio",
    "log_ratio",
    "ratio",
    "mask",
    "padding",
    "advantages",
    "rewards",
    "token_rewards",
    "values",
    "beta",
    "tokens",
    "logits",
    "ref_logits",
    "old_logits",
    "cu_seqlens",
    "sequence_ids",
    "position_ids",
    "max_seqlen",
    "lengths",
    "width",
    "group_size",
    "inputs",
)
#: Roles that hold what the policy being trained says of a token: the gradient is by one of these.
OF_POLICY: tuple[Role, ...] = ("logp", "logits", "ref_log_ratio", "log_ratio", "ratio")

_LOG_PROB = re.compile(r"log_?p(?:rob(?:abilitie|ability)?|i)?s?(?=_|$)")
_REFERENCE = {"ref", "reference", "base", "teacher", "init", "initial", "sft", "frozen", "anchor"}
_REFERENCE |= {"prior", "refs", "pretrained"}
_SAMPLER = {"old", "sampling", "sampler", "behavior", "behaviour", "inference", "rollout", "mu"}
_SAMPLER |= {"generation", "generator", "gen", "prev", "previous", "engine", "vllm", "sglang"}
_SAMPLER |= {"proximal", "prox", "sampled", "actor_old", "beh", "recorded"}
_MASKS = {"mask", "masks", "valid", "counted", "keep", "maskf"}
_ADVANTAGES = {"advantages", "advantage", "adv", "advs", "returns", "return"}
_REWARDS = {"rewards", "reward", "scores", "score", "rews", "rew"}
_COEFFICIENTS = {"coef", "coeff", "coefficient", "weight", "ctl", "lambda", "lam", "scale", "alpha"}
_COEFFICIENTS |= {"penalty"}
_TOKENS = {"labels", "tokens", "ids", "actions", "targets", "responses", "token", "sequences"}
_BAGS = {"inputs", "batch", "data", "samples", "mb", "microbatch", "minibatch", "rollouts"}
_BAGS |= {"sample", "experience", "experiences", "example", "examples", "rollout_data"}
_BAGS |= {"model_output", "model_outputs", "output", "outputs"}
_MODELS = {"model", "module", "actor", "network", "net", "transformer", "lm", "tokenizer"}
#: Names under which some pass advantages and some what a mask is: decided by what they do.
AMBIGUOUS = ("loss_weights", "weights")
_CONFIGS = {"config", "cfg", "args", "hparams", "settings", "self"}
_PER_PROMPT = {"generations", "samples", "rollouts", "responses", "completions"}
_SEQUENCES, _NUMBERS = {"sequence", "seq", "segment"}, {"id", "ids", "idx", "index"}
_LIMITS = {"eps", "epsilon", "clip", "cliprange", "clipping"}


def words_of(name: str) -> set[str]:
    """The words of a name, ``perTokenLogps`` and ``per_token_logps`` alike."""
    return set(_snake(name).split("_"))


def _snake(name: str) -> str:
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_")
    return _LOG_PROB.sub("logp", snake)


def role_of(name: str) -> Role | None:
    """The role that a name is usually given, or None."""
    words = words_of(name)
    return next((role for role, holds in _RULES if holds(words, _snake(name))), None)


def _whose(words: set[str]) -> str:
    if words & _SAMPLER:
        return "old_"
    return "ref_" if words & _REFERENCE else ""


def _is_beta(words: set[str], name: str) -> bool:
    if words & {"low", "high", "target", "type", "mode", "estimator", "reward", "loss"} - {"loss"}:
        return False
    named = "beta" in words or name in ("betas", "klcoef", "klcoeff", "klweight")
    return named or ("kl" in words and bool(words & _COEFFICIENTS))


def _logs(kind: str, whose: str) -> Callable[[set[str], str], bool]:
    return lambda words, name: kind in words and _whose(words) == whose


_RULES: tuple[tuple[Role, Callable[[set[str], str], bool]], ...] = (
    ("beta", _is_beta),
    ("padding", lambda w, n: bool(w & {"pad", "padding"}) and bool(w & {"mask", "masks"})),
    ("sample_mask", lambda w, n: n in ("sample_mask", "sequence_mask", "row_mask")),
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
    ("ref_log_ratio", lambda w, n: n in ("kl", "kls", "per_token_kl", "approx_kl")),
    ("group_size", lambda w, n: "group" in w and bool(w & {"size", "num"})),
    ("group_size", lambda w, n: bool(w & {"n", "num"}) and bool(w & _PER_PROMPT)),
    ("group", lambda w, n: bool(w & {"group", "groups", "uid", "uids", "index", "prompt"})),
    ("count", lambda w, n: bool(w & {"num", "total", "n"}) and bool(w & {"items", "tokens"})),
    ("lengths", lambda w, n: bool(w & {"lengths", "lens", "seqlens"})),
    ("temperature", lambda w, n: bool(w & {"temperature", "temp", "tau"})),
    ("clip", lambda w, n: bool(w & _LIMITS)),
    ("inputs", lambda w, n: n in _BAGS),
    ("config", lambda w, n: n in _CONFIGS),
    ("tokens", lambda w, n: bool(w & _TOKENS)),
    ("ref_logp", lambda w, n: n in ("ref", "reference", "lp_ref", "ref_lp", "teacher")),
    ("old_logp", lambda w, n: n in ("old", "lp_old", "old_lp", "behavior")),
    ("logp", lambda w, n: n in ("lp", "new", "policy", "student", "cur_lp", "new_lp", "lp_new")),
)


class Plan(NamedTuple):
    """How a function is called."""

    roles: dict[str, Role]  #: of the parameters that are given
    fixed: dict[str, Any]  #: values that the user gave
    guessed: dict[str, Role]  #: the roles that were guessed from spellings
    positional: tuple[str, ...]  #: parameters that cannot be given by name, in order


def plan_call(
    function: Callable[..., Any],
    names: Mapping[str, str] | None = None,
    given: Mapping[str, Any] | None = None,
    beta_name: str | None = None,
) -> Plan:
    """Match the parameters of a function with what an audit has to give.

    Args:
        function: any callable with a signature.
        names: parameter -> role, one of :data:`ROLES`; the rest is guessed.
        given: parameter -> value, passed as it is.
        beta_name: the parameter that is the KL coefficient.

    Raises:
        UserError: naming the one parameter that has no role and no default.
    """
    names, fixed = dict(names or {}), dict(given or {})
    if inspect.isclass(function):
        raise UserError(
            f"{name_of(function)}: is a class: pass an object of it, or the class with "
            "factory=True and the coefficient's name as beta_name"
        )
    try:
        parameters = inspect.signature(getattr(function, "forward", function)).parameters
    except (TypeError, ValueError):
        raise UserError(
            f"{name_of(function)}: has no signature to read its arguments from"
        ) from None
    if beta_name is not None:
        names[beta_name] = "beta"
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name, said in names.items():
        check_choice(f"the role of {name!r}", said, ROLES)
        if name not in parameters and said != "beta" and not takes_any:
            raise UserError(f"{name_of(function)}: has no argument {name!r}")
    for name in fixed:
        if name not in parameters and not takes_any:
            raise UserError(f"{name_of(function)}: has no argument {name!r}")
    roles: dict[str, Role] = {n: r for n, r in names.items() if n in parameters}  # type: ignore[misc]
    guessed: dict[str, Role] = {}
    for name, parameter in parameters.items():
        many = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if name in roles or name in fixed or many:
            continue
        role = role_of(name)
        if role == "beta" and "beta" in {*roles.values(), *guessed.values()}:
            role = None
        if role is not None and _is_passed(role, parameter):
            guessed[name] = role
        elif parameter.default is parameter.empty:
            raise UserError(f"{name_of(function)}: {_unknown(function, name)}")
    _one_ratio(roles | guessed, guessed)
    _beside_values(roles | guessed, guessed)
    _refuse_two_policies(function, roles | guessed)
    kinds = {n: p.kind for n, p in parameters.items()}
    positional = tuple(n for n, kind in kinds.items() if kind is inspect.Parameter.POSITIONAL_ONLY)
    bags = {n: r for n, r in names.items() if n not in parameters}  # a coefficient inside a bag
    return Plan(roles | guessed, fixed | {f"*{n}": r for n, r in bags.items()}, guessed, positional)


def _unknown(function: Callable[..., Any], name: str) -> str:
    """What to do about an argument that has no role and no default."""
    if words_of(name) & _MODELS:
        return (
            f"takes a model ({name!r}), and an audit gives log-probs or logits: pass the part of "
            f"it that works on those, or a stub by given={{{name!r}: STUB}}"
        )
    if next(iter(getattr(function, "parameters", tuple)()), None) is not None:
        return (
            f"is a module with weights, and nothing tells what its argument {name!r} is: pass the "
            "function of log-probs or logits that it calls"
        )
    return (
        f"cannot tell what argument {name!r} is: say it by names={{{name!r}: ROLE}} or give a "
        f"value by given={{{name!r}: VALUE}}"
    )


def _refuse_two_policies(function: Callable[..., Any], roles: Mapping[str, Role]) -> None:
    """A loss of pairs has two answers where an audit gives one."""
    for role, what in (("logp", "log-probs"), ("logits", "logits")):
        both = [name for name, held in roles.items() if held == role]
        if len(both) > 1:
            raise UserError(
                f"{name_of(function)}: two arguments look like the policy's {what}, "
                f"{' and '.join(map(repr, both))}: say what one of them is by names=; a loss of "
                "pairs of answers (DPO) is not audited"
            )


def _beside_values(roles: Mapping[str, Role], guessed: dict[str, Role]) -> None:
    """Beside advantages and a critic's values the returns are what the critic is taught."""
    held = list(roles.values())
    if "values" not in held or held.count("advantages") < 2:
        return
    for name in guessed:
        if words_of(name) & {"return", "returns"}:
            guessed[name] = "values"


def _is_passed(role: Role, parameter: inspect.Parameter) -> bool:
    """A parameter without default, or one whose default only stands for a tensor.

    A default that is a number stays as it is, but for the coefficient.
    """
    if parameter.default is parameter.empty or role == "beta":
        return True
    number = isinstance(parameter.default, (int, float)) and role != "group_size"
    return role in ALWAYS and not number


def _one_ratio(roles: Mapping[str, Role], guessed: dict[str, Role]) -> None:
    """The only log-ratio of a function without log-probs is the one to the reference."""
    held = set(roles.values())
    if not held & {"logp", "ref_logp", "logits", "inputs", "ref_log_ratio"}:
        for name, role in guessed.items():
            if role == "log_ratio":
                guessed[name] = "ref_log_ratio"


def numbers_of(function: Callable[..., Any]) -> dict[str, float]:
    """The parameters of a function whose default is a positive float, and the default."""
    parameters = inspect.signature(getattr(function, "forward", function)).parameters
    return {
        name: p.default
        for name, p in parameters.items()
        if isinstance(p.default, float) and p.default > 0
    }


def name_of(function: Any) -> str:
    """What a message calls a function."""
    inner = getattr(function, "func", function)  # of a partial
    return getattr(inner, "__name__", None) or type(inner).__name__
