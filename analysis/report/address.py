"""Where the project is: its repository, site, authors and DOI, from ``address.yaml`` alone.

What pages make of it is :mod:`analysis.report.address_pages`. ``analysis refresh`` brings
CITATION.cff and the README up to date.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from analysis.report.project import Project
from analysis.report.strict_yaml import load_yaml
from kl_term.errors import UserError
from kl_term.files import replace_file

FILE = "address.yaml"
#: Who wrote it, while nobody is named.
MAINTAINERS = "The KL Term maintainers"
_WHOLE = re.compile(r"https://[^\s/]+(/[^\s/]+)*")
_DOI = re.compile(r"10\.\d{4,}/\S+")
_MARKS = ("<!-- address -->", "<!-- /address -->")


@dataclass(frozen=True)
class Address:
    """Where the project is; each part is empty until it is known.

    Attributes:
        repository, branch: the page of the repository, without a slash at its end.
        site: the address of the built book.
        authors: names, in order.
        doi: without a resolver.
    """

    repository: str = ""
    branch: str = "main"
    site: str = ""
    authors: tuple[str, ...] = ()
    doi: str = ""

    @property
    def cited(self) -> tuple[str, ...]:
        """The authors, or the maintainers."""
        return self.authors or (MAINTAINERS,)


def load_address(project: Project) -> Address:
    """The address, checked; an empty one where the checkout has no such file.

    Raises:
        UserError: an unknown key, an address that is not whole, or no DOI.
    """
    if not project.address.is_file():
        return Address()
    found = load_yaml(project.address, FILE) or {}
    if unknown := set(found) - set(Address.__annotations__):
        raise UserError(f"{FILE}: unknown {', '.join(sorted(unknown))}")
    address = Address(**{**found, "authors": tuple(found.get("authors") or ())})
    for name in ("repository", "site"):
        said = getattr(address, name)
        if said and not _WHOLE.fullmatch(said):
            raise UserError(f"{FILE}: {name} is {said!r}; write https://..., no slash at its end")
    if address.doi and not _DOI.fullmatch(address.doi):
        raise UserError(f"{FILE}: doi is {address.doi!r}; write 10.NUMBER/NAME")
    return address


def bibtex(address: Address, *, year: str) -> str:
    """The entry by which the book is cited."""
    names = [name if address.authors else f"{{{name}}}" for name in address.cited]
    fields = {
        "title": "The {KL} Term: what {GRPO}'s regulariser really optimises",
        "author": " and ".join(names),
        "year": year,
        "note": "A book that runs, and the Python package kl-term",
        "doi": address.doi,
        "url": address.site or address.repository,
    }
    lines = [f"  {name:<6} = {{{said}}}" for name, said in fields.items() if said]
    return "\n".join(["@misc{klterm" + year + ",", ",\n".join(lines), "}"])


def sources(address: Address) -> str:
    """What to fetch before a command is run, as MyST."""
    folder = "the folder of the book's sources, the one that holds `pyproject.toml`"
    if address.repository:
        return f"In {folder}: `git clone {address.repository}`."
    return f"In {folder}."


def cited(address: Address, text: str) -> str:
    """The text of CITATION.cff with this address; what else it says stays."""
    kept = yaml.safe_load(text)
    for name in ("repository-code", "url", "doi"):
        kept.pop(name, None)
    kept["authors"] = [{"name": name} for name in address.cited]
    told = {"repository-code": address.repository, "url": address.site, "doi": address.doi}
    kept |= {name: said for name, said in told.items() if said}
    return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True, width=1000)


def linked(address: Address, text: str) -> str:
    """The text of the README with its line of links, between its two marks."""
    doi = f"https://doi.org/{address.doi}" if address.doi else ""
    told = {"Read it": address.site, "Source": address.repository, "DOI": doi}
    links = " · ".join(f"[{name}]({where})" for name, where in told.items() if where)
    begin, end = _MARKS
    if text.count(begin) != 1 or text.count(end) != 1:
        raise UserError(f"README.md: wants {begin} and {end}, once each")
    before, after = text.partition(begin)[0], text.partition(end)[2]
    return "".join([before, begin, links, end, after])


def refresh_address(project: Project) -> list[Path]:
    """Bring the files that cannot read the address up to date; those that changed."""
    address, changed = load_address(project), []
    for path, write in ((project.root / "CITATION.cff", cited), (project.readme, linked)):
        before = path.read_text(encoding="utf-8")
        after = write(address, before)
        if after != before:
            replace_file(path, after.encode())
            changed.append(path)
    return changed
