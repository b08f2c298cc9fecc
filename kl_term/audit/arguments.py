"""Which argument of a foreign loss is which: by a mapping, or guessed from its spelling."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kl_term.audit.layout import IGNORED
from kl_term.audit.spellings import ALWAYS, MODELS, OF_PROMPT, ROLES, Role, role_of, words_of
from kl_term.errors import UserError
from kl_term.plain_checks import check_choice


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
        elsewhere = said == "beta" or takes_any or _takes_a_bag(parameters, names, fixed)
        if name not in parameters and not elsewhere:
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
    for name in _taken_by_key(function, parameters):
        role = role_of(name)
        if name in names:
            roles[name] = names[name]  # type: ignore[assignment]
        elif name not in {**roles, **guessed, **fixed} and role in ALWAYS:
            guessed[name] = role
    _one_ratio(roles | guessed, guessed)
    _beside_values(roles | guessed, guessed)
    _total_alone(roles | guessed, guessed)
    _refuse_two_policies(function, roles | guessed)
    _refuse_two_ratios(function, roles | guessed, guessed)
    kinds = {n: p.kind for n, p in parameters.items()}
    positional = tuple(n for n, kind in kinds.items() if kind is inspect.Parameter.POSITIONAL_ONLY)
    bags = {n: r for n, r in names.items() if n not in {**parameters, **roles}}  # inside a bag
    return Plan(roles | guessed, fixed | {f"*{n}": r for n, r in bags.items()}, guessed, positional)


def _takes_a_bag(
    parameters: Mapping[str, Any], names: Mapping[str, str], fixed: Mapping[str, Any]
) -> bool:
    """Whether a parameter is a batch or a configuration, in which names may lie."""
    free = (name for name in parameters if name not in fixed)
    return any((names.get(name) or role_of(name)) in ("inputs", "config") for name in free)


def _taken_by_key(function: Callable[..., Any], parameters: Mapping[str, Any]) -> list[str]:
    """The names that a function reads of its ``**kwargs``."""
    bag = next((n for n, p in parameters.items() if p.kind is p.VAR_KEYWORD), None)
    try:
        text = inspect.getsource(getattr(function, "forward", function)) if bag else ""
    except (OSError, TypeError):
        return []
    asked = rf"""\b{bag}\s*(?:\.\s*(?:get|pop)\s*\(|\[)\s*["'](\w+)["']"""
    return [*dict.fromkeys(re.findall(asked, text))] if bag else []


def _unknown(function: Callable[..., Any], name: str) -> str:
    """What to do about an argument that has no role and no default."""
    if words_of(name) & MODELS:
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


def _refuse_two_ratios(
    function: Callable[..., Any], roles: Mapping[str, Role], guessed: Mapping[str, Role]
) -> None:
    """Beside the log-probs of both a KL is some other number, such as the baseline of KTO."""
    if not {"logp", "ref_logp"} <= {*roles.values()}:
        return
    for name, role in guessed.items():
        if role == "ref_log_ratio":
            raise UserError(f"{name_of(function)}: {_unknown(function, name)}")


def _beside_values(roles: Mapping[str, Role], guessed: dict[str, Role]) -> None:
    """Beside advantages and a critic's values the returns are what the critic is taught."""
    held = list(roles.values())
    if "values" not in held or held.count("advantages") < 2:
        return
    for name in guessed:
        if words_of(name) & {"return", "returns"}:
            guessed[name] = "values"


def _total_alone(roles: Mapping[str, Role], guessed: dict[str, Role]) -> None:
    """Total lengths with nothing beside them that the prompt's could be told from are lengths."""
    if not {*roles.values()} & {"lengths", *OF_PROMPT}:
        for name, role in guessed.items():
            guessed[name] = "lengths" if role == "total_lengths" else role


def _is_passed(role: Role, parameter: inspect.Parameter) -> bool:
    """A parameter without default, or one whose default only stands for a tensor.

    A default that is a number stays as it is, but for the coefficient.
    """
    if parameter.default is parameter.empty or role == "beta":
        return True
    number = isinstance(parameter.default, (int, float)) and role not in ("group_size", "pad_id")
    return role in ALWAYS and not number


def _one_ratio(roles: Mapping[str, Role], guessed: dict[str, Role]) -> None:
    """The only log-ratio of a function without log-probs is the one to the reference."""
    held = set(roles.values())
    if not held & {"logp", "ref_logp", "logits", "inputs", "ref_log_ratio"}:
        for name, role in guessed.items():
            if role == "log_ratio":
                guessed[name] = "ref_log_ratio"


def numbers_of(function: Callable[..., Any], *, integers: bool = False) -> dict[str, float]:
    """The parameters of a function whose default is a positive float, and the default."""
    kinds = (float, int) if integers else (float,)
    parameters = inspect.signature(getattr(function, "forward", function)).parameters
    return {
        name: p.default
        for name, p in parameters.items()
        if isinstance(p.default, kinds) and not isinstance(p.default, bool) and p.default > 0
    }


def zeros_of(function: Callable[..., Any]) -> list[str]:
    """The parameters of a function whose default is 0.0: what they scale is off."""
    parameters = inspect.signature(getattr(function, "forward", function)).parameters
    return [n for n, p in parameters.items() if isinstance(p.default, float) and p.default == 0]


def ignored_of(function: Callable[..., Any]) -> int | None:
    """The label that is counted nowhere, by the parameter that says it; None without one."""
    parameters = inspect.signature(getattr(function, "forward", function)).parameters
    said = [p.default for name, p in parameters.items() if role_of(name) == "ignore_index"]
    if not said:
        return None
    return said[0] if isinstance(said[0], int) else IGNORED


def name_of(function: Any) -> str:
    """What a message calls a function."""
    inner = getattr(function, "func", function)  # of a partial
    return getattr(inner, "__name__", None) or type(inner).__name__
