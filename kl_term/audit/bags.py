"""What stands for a batch or a configuration of which only the entries' names are known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kl_term.audit.spellings import (
    AMBIGUOUS,
    CONTROLLERS,
    NUMBERS,
    OF_POLICY,
    role_inside,
    role_of,
    words_of,
)
from kl_term.errors import UserError

if TYPE_CHECKING:
    from kl_term.audit.given import Given


#: Under these names a batch holds its tensors once more.
_INSIDE = ("batch", "non_tensor_batch", "meta_info", "tensors")


class Controller(float):
    """A coefficient that may be asked for its value, or by its name: ``kl_ctrl.kl_coef``."""

    def __getattr__(self, name: str) -> float:
        if name != "value" and "beta" not in (role_of(name), role_inside("kl", name)):
            raise AttributeError(name)
        return float(self)


def asked_for(name: str, role: str, made: Any) -> Any:
    """What is given under a name: of a controller's, a number that also answers as one."""
    held = role == "beta" and words_of(name) & CONTROLLERS and isinstance(made, float)
    return Controller(made) if held else made


class Bag(dict):
    """A batch or a configuration whose entries are found by their spelling, as key or attribute."""

    def __init__(
        self,
        given: Given,
        *,
        nests: bool = False,
        path: str = "",
        row: int | None = None,
        fields: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.__dict__.update(_given=given, _nests=nests, _path=path, _row=row, _fields=fields)

    def __iter__(self) -> Iterator[Any]:
        """Of a named tuple, its entries; else the names that were put here."""
        fields = self.__dict__["_fields"]
        return (self[name] for name in fields) if fields else dict.__iter__(self)

    def _find(self, name: str) -> Any:
        given: Given = self.__dict__["_given"]
        named = given.of.named_in_bags()
        path = f"{self.__dict__['_path']}{name}"
        role = named.get(path) or named.get(name) or role_of(name) or role_inside(*path.split("."))
        if name in _INSIDE:
            return self
        held = given.of.bag_roles
        own = given.of.roles & {*OF_POLICY} or "logits" in held.values()
        if role == "logp" and name not in named and own:
            role = "old_logp"  # the policy's own are an argument, or by logits: these were recorded
        if name in AMBIGUOUS and name not in named:
            others = given.of.roles | {r for n, r in held.items() if n not in AMBIGUOUS}
            role = "mask" if "advantages" in others else role  # beside those they weigh tokens
        if self.__dict__["_nests"] and role not in NUMBERS:
            return Nested(given, nests=True, path=f"{path}.")
        if role is None or role in ("inputs", "config"):
            raise UserError(
                f"{given.of.name}: reads {name!r} of its inputs, and nothing tells what that is: "
                f"say it by names={{{name!r}: ROLE}}"
            )
        held[name] = role
        if role not in self.__dict__.setdefault("_kept", {}):
            self.__dict__["_kept"][role] = given.value(role, row=self.__dict__["_row"])
        return asked_for(name, role, self.__dict__["_kept"][role])

    def __getitem__(self, name: str) -> Any:
        return dict.__getitem__(self, name) if dict.__contains__(self, name) else self._find(name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self._find(name)
        except UserError as error:
            raise AttributeError(str(error)) from None

    def __contains__(self, name: object) -> bool:
        return dict.__contains__(self, name) or role_of(str(name)) is not None

    def get(self, name: str, default: Any = None) -> Any:
        known = name in self  # by its spelling, not because it was put here
        return self[name] if known else default


class Nested(Bag):
    """A configuration in a configuration, as long as only its entries are asked for."""

    def _refuse(self, *_: object) -> Any:
        given, path = self.__dict__["_given"], self.__dict__["_path"].rstrip(".")
        raise UserError(
            f"{given.of.name}: reads {path!r} of its configuration, and nothing tells what "
            "that is: give the configuration itself by given={ARGUMENT: OBJECT}"
        )

    __bool__ = __float__ = __int__ = __neg__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __pow__ = __iter__ = __len__ = _refuse
    __hash__ = None  # type: ignore[assignment]
