"""What a result was made from: the code it imports and the files it opens.

There is one notion of freshness for pages, the ledger and trained runs. A result depends on the
*code* of every module of this project that it imports, directly or through others, and on every
*file* of the project that it opened. Comments, docstrings and layout are not code.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

#: The folder that holds the packages of this project.
ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kl_term", "analysis", "benchmarks", "torture")
#: Folders whose files are made from others, or are no input.
_OUTPUTS = ("_build", "book/_run", "book/_generated", "notebooks", "sweeps")


def import_closure(starts: Iterable[str], root: Path = ROOT) -> tuple[str, ...]:
    """The modules that ``starts`` import, directly or not, themselves included, sorted.

    Args:
        starts: files, as paths relative to ``root`` such as ``analysis/training/trainer.py``.
        root: the folder that holds the packages.
    """
    found: set[str] = set()
    pending = list(starts)
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += _files(_read(_at(root, name)).imports, root)
    return tuple(sorted(found))


def imported_files(source: str, root: Path = ROOT) -> tuple[str, ...]:
    """The modules that a piece of Python imports by name, such as the cells of a notebook."""
    return _files(_imports(ast.parse(source), ()), root)


def code_sha256(files: Iterable[str], root: Path = ROOT) -> str:
    """Hash of the names and the code of modules."""
    digest = hashlib.sha256()
    for name in files:
        digest.update(f"{name}\0{_read(_at(root, name)).code}\0".encode())
    return digest.hexdigest()


@cache
def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """As the system names it, with the numbers that tell apart makes of one name.

    Where it names none, ``unnamed processor``.
    """
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if value.strip():
                found.setdefault(key.strip(), " ".join(value.split()))
    numbers = [f"{key} {found[key]}" for key in ("cpu family", "model", "stepping") if key in found]
    if "model name" not in found:
        return platform.processor() or "unnamed processor"
    return found["model name"] + (f" ({', '.join(numbers)})" if numbers else "")


class Reads:
    """The files below ``root`` that this process has opened since, and the folders it listed."""

    def __init__(self, root: Path = ROOT, log: Path | None = None) -> None:
        self.paths: set[str] = set()
        self._root = f"{root.resolve()}{os.sep}"
        self._log = log

    def note(self, event: str, path: object) -> None:
        """Take one audit event; keep it if a result may depend on it."""
        if not isinstance(path, str | os.PathLike):
            return
        name = os.path.abspath(path)
        if not name.startswith(self._root):
            return
        name = name[len(self._root) :].replace(os.sep, "/")
        listed = event != "open"
        if listed and not f"{name}/".startswith("results/"):
            return
        if name in self.paths or not (listed or _is_input(name)):
            return
        self.paths.add(name)
        if self._log is not None:
            with open(self._log, "a", encoding="utf-8") as log:
                log.write(name + "\n")


@contextmanager
def track_reads(root: Path = ROOT) -> Iterator[Reads]:
    """Collect the files of the project that the block opens."""
    reads = watch(Reads(root))
    try:
        yield reads
    finally:
        _WATCHING.discard(reads)


def watch(reads: Reads) -> Reads:
    """Let ``reads`` hear of every file that this process opens from now on."""
    global _is_hooked
    if not _is_hooked:  # an audit hook stays for ever
        sys.addaudithook(_hear)
        _is_hooked = True
    _WATCHING.add(reads)
    return reads


_WATCHING: set[Reads] = set()
_is_hooked = False


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if _WATCHING and event in ("open", "os.listdir", "os.scandir"):
        if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        for reads in tuple(_WATCHING):
            reads.note(event, arguments[0])


def _is_input(name: str) -> bool:
    """Whether a file, relative to the root, is an input of a result and no module or output."""
    return not (
        name.endswith((".py", ".pyc", ".lock"))
        or any(part.startswith(".") or part == "__pycache__" for part in name.split("/"))
        or f"{name}/".startswith(tuple(f"{folder}/" for folder in _OUTPUTS))
    )


def reads_sha256(paths: Iterable[str], root: Path = ROOT) -> dict[str, str]:
    """The hash of each file, or of the names in each folder, as it is now, or ``absent``."""
    return {name: _read_sha256(root / name) for name in sorted(paths)}


def changed_read(recorded: Mapping[str, str], root: Path = ROOT) -> str | None:
    """The first file whose hash is not the recorded one any more."""
    return next((n for n, digest in recorded.items() if _read_sha256(root / n) != digest), None)


def _read_sha256(path: Path) -> str:
    try:
        if path.is_dir():
            names = sorted(p.name for p in path.iterdir() if not p.name.startswith("."))
            return hashlib.sha256("\0".join(names).encode()).hexdigest()
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return "absent"


class _Module(NamedTuple):
    """One file, as far as results depend on it."""

    imports: frozenset[tuple[str, str]]  #: see :func:`_imports`
    code: str  #: hash of what runs
    texts: Mapping[str, str]  #: the pairs of texts in its dictionaries


def _read(path: Path) -> _Module:
    state = path.stat()
    return _parsed(path, state.st_mtime_ns, state.st_size)


@cache
def _parsed(path: Path, changed: int, size: int) -> _Module:
    """A file, parsed once while it stays as it is."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parts = path.with_suffix("").parts
    top = max((i for i, part in enumerate(parts) if part in PACKAGES), default=len(parts) - 1)
    pairs = (
        (key.value, value.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(value, ast.Constant)
    )
    code = hashlib.sha256(code_alone(tree).encode()).hexdigest()
    return _Module(frozenset(_imports(tree, parts[top:-1])), code, dict(pairs))


def _imports(tree: ast.AST, package: tuple[str, ...]) -> set[tuple[str, str]]:
    """What a module inside ``package`` imports at run time, at its top or in a function.

    Modules of this project, each with the name that is taken from it, empty for the whole.
    """
    found: set[tuple[str, str]] = set()
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        pending += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *((node.module or "").split(".") if node.module else ())])
            found |= {(module, alias.name) for alias in node.names}
    return {pair for pair in found if pair[0].partition(".")[0] in PACKAGES}


def _at(root: Path, name: str) -> Path:
    """A file below ``root``; on a machine of a cluster each package lies in a folder of its own."""
    package = sys.modules.get(name.partition("/")[0])
    folders = list(getattr(package, "__path__", ())) if root == ROOT else []
    return Path(folders[0]).parent / name if folders else root / name


def _files(imports: Iterable[tuple[str, str]], root: Path) -> tuple[str, ...]:
    """The files that imports mean.

    A name that a package loads when asked for, by the table in its ``__init__.py`` or by that of a
    package that it imports from itself, means the module that the table says, and so does one that
    a module looks up in its neighbours; a package around a
    module is none of its inputs.
    """
    found: set[str] = set()
    for module, name in imports:
        files = {file for part in _homes(module, name, root) for file in _file_of(part, root)}
        found |= files if name and files else files | _file_of(module, root)
    return tuple(sorted(found))


def _homes(module: str, name: str, root: Path) -> list[str]:
    """The modules that may hold a name of a package, or of all its names for an empty one."""
    package = _at(root, f"{module.replace('.', '/')}/__init__.py")
    if not package.is_file():  # a module may look names up in its neighbours
        file, parent = _at(root, f"{module.replace('.', '/')}.py"), module.rpartition(".")[0]
        near = _read(file).texts if file.is_file() else {}
        return [f"{parent}.{near[name]}" if name in near else f"{module}.{name}"] if name else []
    read = _read(package)
    inner = sorted(f"{module}.{part}" for base, part in read.imports if base == module)
    if not name:
        own = [f"{module}.{part}" for part in read.texts.values()]
        return own + [home for part in inner for home in (part, *_homes(part, "", root))]
    own = [f"{module}.{read.texts.get(name, name)}"]
    return own + [home for part in inner for home in _homes(part, name, root)]


def _file_of(module: str, root: Path) -> set[str]:
    """The file of a module or package; none for what is no module."""
    path = module.replace(".", "/")
    files = (f"{path}.py", f"{path}/__init__.py")
    return {*[file for file in files if _at(root, file).is_file()][:1]}


def code_alone(tree: ast.AST) -> str:
    """Python without comments, docstrings and layout: the same text on every Python.

    (``ast.unparse`` and ``ast.dump`` change their spelling from version to version.)
    """
    return repr(_spelt(tree))


def _spelt(part: Any) -> Any:
    """A node as nested lists: its type and the fields that hold something."""
    if isinstance(part, ast.JoinedStr):  # whose parts may be empty texts, or are left out
        return ["JoinedStr", *(_spelt(value) for value in part.values if not _is_empty(value))]
    if isinstance(part, ast.AST):
        fields = [(name, value) for name, value in ast.iter_fields(part) if name != "kind"]
        held = [[name, _spelt(value)] for name, value in fields if value is not None]
        return [type(part).__name__, *(field for field in held if field[1] != [])]
    if isinstance(part, list):
        return [_spelt(each) for each in part if not _is_text(each)]
    return repr(part)


def _is_empty(part: ast.expr) -> bool:
    return isinstance(part, ast.Constant) and part.value == ""


def _is_text(part: Any) -> bool:
    """A statement that is a text and does nothing."""
    return (
        isinstance(part, ast.Expr)
        and isinstance(part.value, ast.Constant)
        and isinstance(part.value.value, str)
    )
