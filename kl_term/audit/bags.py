"""What stands for a batch or a configuration of which only the entries' names are known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kl_term.audit.spellings import role_of
from kl_term.errors import UserError

if TYPE_CHECKING:
    from kl_term.audit.calling import Given


class Bag(dict):
    """A batch or a configuration whose entries are found by their spelling, as key or attribute."""

    def __init__(self, given: Given) -> None:
        super().__init__()
        self.__dict__["_given"] = given

    def _find(self, name: str) -> Any:
        given: Given = self.__dict__["_given"]
        named = given.of._named_in_bags()
        role = named.get(name) or role_of(name)
        if role is None or role in ("inputs", "config"):
            raise UserError(
                f"{given.of.name}: reads {name!r} of its inputs, and nothing tells what that is: "
                f"say it by names={{{name!r}: ROLE}}"
            )
        given.of.bag_beta |= role == "beta"
        if role not in self.__dict__.setdefault("_kept", {}):
            self.__dict__["_kept"][role] = given.value(role)
        return self.__dict__["_kept"][role]

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
