"""vLLM's sources as syntax trees: names, signatures and members without an import."""

from __future__ import annotations

import ast
import functools
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from banaserve.base.errors import UserError
from banaserve.engine.compat.manifest import Parameters

ROOT = "vllm"
_MAX_HOPS = 20
"""Maximum number of re-exports or bases to follow before a name counts as missing."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Files(Protocol):
    """Text files of a package, by path below its parent folder."""

    def names(self) -> list[str]:
        """Return the paths of all files, with slashes."""
        ...

    def read(self, name: str) -> str:
        """Return the text of one file."""
        ...


class WheelFiles:
    """Files of a wheel.

    Raises:
        UserError: The file is not a wheel, or not one of vLLM.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._archive = zipfile.ZipFile(path)
            self._names = self._archive.namelist()
        except (OSError, zipfile.BadZipFile) as error:
            raise UserError(f"{path} cannot be read as a wheel: {error}") from None
        if f"{ROOT}/__init__.py" not in self._names:
            raise UserError(f"{path} has no {ROOT}/__init__.py: give a wheel of vLLM")

    def names(self) -> list[str]:
        """See ``Files``."""
        return self._names

    def read(self, name: str) -> str:
        """See ``Files``."""
        return self._archive.read(name).decode()


class FolderFiles:
    """Files of an installed package.

    Args:
        parent: Folder that contains the package's folder.
    """

    def __init__(self, parent: Path) -> None:
        self._parent = parent

    def names(self) -> list[str]:
        """See ``Files``."""
        paths = (self._parent / ROOT).rglob("*.py")
        return [path.relative_to(self._parent).as_posix() for path in paths]

    def read(self, name: str) -> str:
        """See ``Files``."""
        return (self._parent / name).read_text()


@dataclass(frozen=True, slots=True)
class Signature:
    """Parameters of a function, without ``self`` and ``cls``.

    Attributes:
        positional: Parameters that may be passed by position.
        keyword_only: Parameters that may only be passed by name.
        required: Parameters without a default.
        takes_any_positional: True if the function has ``*args``.
        takes_any_keyword: True if the function has ``**kwargs``.
    """

    positional: tuple[str, ...] = ()
    keyword_only: tuple[str, ...] = ()
    required: frozenset[str] = frozenset()
    takes_any_positional: bool = False
    takes_any_keyword: bool = False

    def __str__(self) -> str:
        words = [*self.positional]
        words += ["*args"] if self.takes_any_positional else []
        words += [f"{name}=" for name in self.keyword_only]
        words += ["**kwargs"] if self.takes_any_keyword else []
        return f"({', '.join(words)})"

    def misfit_of_call(self, used: Parameters) -> str:
        """Return why a call with ``used`` does not fit the signature; empty if it fits."""
        given = len(used.positional)
        if self.positional[:given] != used.positional and not self.takes_any_positional:
            return f"parameters are {self}"
        for name in used.keywords:
            if name not in self.positional + self.keyword_only and not self.takes_any_keyword:
                return f"no parameter {name}: {self}"
        if used.is_open:
            return ""
        missing = self.required.difference(used.positional, used.keywords)
        return f"now requires {', '.join(sorted(missing))}" if missing else ""

    def misfit_of_hook(self, taken: Parameters) -> str:
        """Return why a hook with parameters ``taken`` does not fit; empty if it fits."""
        given = len(taken.positional)
        if self.positional[:given] != taken.positional:
            return f"parameters are {self}"
        known = {*self.positional, *self.keyword_only}
        if missing := [name for name in taken.keywords if name not in known]:
            return f"no parameter {', '.join(missing)}: {self}"
        added = known.difference(taken.positional, taken.keywords)
        if added and not taken.is_open:
            return f"also takes {', '.join(sorted(added))}"
        return ""


@dataclass(frozen=True, slots=True)
class Definition:
    """A definition of a name.

    Attributes:
        module: Module that contains the definition.
        node: Syntax tree of the definition; None for a module, and for names of other packages.
        is_module: True if the name stands for a module.
    """

    module: str
    node: ast.AST | None
    is_module: bool = False


class SourceModule:
    """Names at the top level of one module, conditional ones included."""

    def __init__(self, name: str, text: str, is_package: bool) -> None:
        self.name = name
        self._package = name if is_package else name.rpartition(".")[0]
        self.names: dict[str, ast.AST] = {}
        self.stars: list[str] = []
        statements = list(_statements(ast.parse(text).body))
        for node in statements:
            self._take(node)
        if "__getattr__" in self.names:
            for node in statements:
                self._take_lazy(node)

    def _take(self, node: ast.stmt) -> None:
        if isinstance(node, Function | ast.ClassDef):
            if not (isinstance(node, Function) and _is_overload(node)):
                self.names[node.name] = node
        elif isinstance(node, ast.Import):
            for alias in node.names:
                self.names[alias.asname or alias.name.split(".")[0]] = node
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name == "*":
                    self.stars.append(self.source_of(node))
                else:
                    self.names[alias.asname or alias.name] = node
        else:
            for target in _targets(node):
                if isinstance(target, ast.Name):
                    self.names[target.id] = node

    def _take_lazy(self, node: ast.stmt) -> None:
        """Add the names that a ``__getattr__`` finds in a dict ``"name": "module:attribute"``."""
        value = getattr(node, "value", None)
        if not isinstance(value, ast.Dict):
            return
        for key, place in zip(value.keys, value.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                self.names.setdefault(key.value, place)

    def source_of(self, node: ast.ImportFrom) -> str:
        """Return the module that an import statement names."""
        if not node.level:
            return node.module or ""
        parts = self._package.split(".")
        base = parts[: len(parts) - node.level + 1]
        return ".".join([*base, *([node.module] if node.module else [])])

    def imported_as(self, node: ast.Import | ast.ImportFrom, name: str) -> tuple[str, str]:
        """Return the module and attribute that ``name`` stands for; no attribute for a module."""
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                if (alias.asname or alias.name) == name:
                    return self.source_of(node), alias.name
            elif alias.asname == name:
                return alias.name, ""
        return name, ""

    def lazily(self, place: str) -> tuple[str, str]:
        """Return the module and attribute of an entry of a lazy dict."""
        module, _, attribute = place.partition(":")
        if module.startswith("."):
            module = f"{self._package}{module}"
        return module, attribute


class Sources:
    """Sources of one version of vLLM."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._names = frozenset(files.names())
        self._modules: dict[str, SourceModule | None] = {}

    def module(self, name: str) -> SourceModule | None:
        """Return the module of this name, or None."""
        if name not in self._modules:
            self._modules[name] = self._load(name)
        return self._modules[name]

    def _load(self, name: str) -> SourceModule | None:
        path = name.replace(".", "/")
        for file, is_package in ((f"{path}/__init__.py", True), (f"{path}.py", False)):
            if file in self._names:
                return SourceModule(name, self._files.read(file), is_package)
        return None

    def _is_module(self, name: str) -> bool:
        path = name.replace(".", "/")
        return any(file.startswith((f"{path}/", f"{path}.")) for file in self._names)

    # ---- names

    def find(self, module: str, name: str) -> Definition | None:
        """Return the definition of a name qualified within a module, or None; follow re-exports."""
        top, _, rest = name.partition(".")
        found = self._top(module, top)
        if found is None or not rest:
            return found
        if isinstance(found.node, ast.ClassDef):
            return self.member(found, rest)
        return None

    def _top(self, module: str, name: str, hops: int = 0) -> Definition | None:
        if hops > _MAX_HOPS:
            return None
        inside = self.module(module)
        node = inside.names.get(name) if inside is not None else None
        if inside is None or node is None:
            return self._elsewhere(module, name, inside, hops)
        if isinstance(node, ast.Import | ast.ImportFrom):
            return self._follow(*inside.imported_as(node, name), hops)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ":" in node.value:
            return self._follow(*inside.lazily(node.value), hops)
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign) and isinstance(value, ast.Name) and value.id != name:
            return self._top(module, value.id, hops + 1) or Definition(module, node)
        return Definition(module, node)

    def _elsewhere(
        self, module: str, name: str, inside: SourceModule | None, hops: int
    ) -> Definition | None:
        for star in inside.stars if inside is not None else ():
            if (found := self._follow(star, name, hops)) is not None:
                return found
        path = f"{module}.{name}"
        return Definition(path, None, is_module=True) if self._is_module(path) else None

    def _follow(self, module: str, name: str, hops: int) -> Definition | None:
        if module.split(".")[0] != ROOT:
            return Definition(module, None)
        if not name:
            return Definition(module, None, is_module=True) if self._is_module(module) else None
        return self._top(module, name, hops + 1)

    # ---- members of classes

    def member(self, owner: Definition, name: str, hops: int = 0) -> Definition | None:
        """Return the definition of member ``name`` in a class or its bases, or None."""
        assert isinstance(owner.node, ast.ClassDef)
        node = _members(owner.node).get(name)
        if node is not None:
            return Definition(owner.module, node)
        if hops > _MAX_HOPS:
            return None
        for base in self.bases(owner):
            if (found := self.member(base, name, hops + 1)) is not None:
                return found
        return None

    def bases(self, owner: Definition) -> Iterator[Definition]:
        """Yield the base classes that are vLLM's."""
        assert isinstance(owner.node, ast.ClassDef)
        for base in owner.node.bases:
            if isinstance(base, ast.Subscript):
                base = base.value
            names = ast.unparse(base).split(".")
            found = self._top(owner.module, names[0])
            for name in names[1:]:
                if found is None or not found.is_module:
                    break
                found = self._top(found.module, name)
            if found is not None and isinstance(found.node, ast.ClassDef):
                yield found

    def abstract_members(self, owner: Definition) -> set[str]:
        """Return the names of the abstract members that subclasses of a class have to define."""
        assert isinstance(owner.node, ast.ClassDef)
        names: set[str] = set()
        for base in self.bases(owner):
            names |= self.abstract_members(base)
        for name, node in _members(owner.node).items():
            if isinstance(node, Function) and "abstractmethod" in _decorators(node):
                names.add(name)
            else:
                names.discard(name)
        return names

    # ---- signatures

    def signature(self, found: Definition, is_member: bool = False) -> Signature | None:
        """Return the signature of a function or method, or of the constructor of a class.

        Returns:
            None if the sources do not show it.
        """
        if isinstance(found.node, Function):
            skips_first = is_member and "staticmethod" not in _decorators(found.node)
            return _signature(found.node.args, skips_first)
        if not isinstance(found.node, ast.ClassDef):
            return None
        made = self.member(found, "__init__")
        if made is not None and isinstance(made.node, Function):
            return _signature(made.node.args, skips_first=True)
        return _signature_of_fields(list(self._fields(found).items()))

    def _fields(self, owner: Definition) -> dict[str, bool]:
        """Return the fields of a data class and its bases, each with whether it has a default."""
        assert isinstance(owner.node, ast.ClassDef)
        fields: dict[str, bool] = {}
        for base in reversed(list(self.bases(owner))):
            fields |= self._fields(base)
        for node in owner.node.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                kind, value = ast.unparse(node.annotation), node.value
                if "ClassVar" in kind or (value is not None and "init=False" in ast.unparse(value)):
                    continue
                fields[node.target.id] = value is not None
        return fields

    # ---- moves

    @functools.cached_property
    def _texts(self) -> dict[str, str]:
        return {name: self._files.read(name) for name in self._names if name.endswith(".py")}

    def homes(self, name: str) -> list[str]:
        """Return the modules with a definition of this name at their top level."""
        defines = re.compile(rf"^(?:(?:async )?def|class) {re.escape(name)}\b", re.MULTILINE)
        files = sorted(file for file, text in self._texts.items() if defines.search(text))
        return [
            file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in files
        ]


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class, those in ``if``, ``try`` and ``with`` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With | ast.For):
            inner = [*node.body, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])]
            for handler in getattr(node, "handlers", []):
                inner += handler.body
            yield from _statements(inner)


def _targets(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return [
            part
            for target in node.targets
            for part in (target.elts if isinstance(target, ast.Tuple) else [target])
        ]
    if isinstance(node, ast.AnnAssign | ast.AugAssign):
        return [node.target]
    return []


@functools.cache
def _members(owner: ast.ClassDef) -> dict[str, ast.AST]:
    """Return methods, properties, class attributes, and attributes that methods set on ``self``."""
    assigned: dict[str, ast.AST] = {}
    defined: dict[str, ast.AST] = {}
    for node in _statements(owner.body):
        if isinstance(node, Function):
            assigned |= _assigned_to_self(node)
            if not _is_overload(node):
                defined[node.name] = node
        elif isinstance(node, ast.ClassDef):
            defined[node.name] = node
        for target in _targets(node):
            if isinstance(target, ast.Name):
                defined[target.id] = node
    return assigned | defined


def _assigned_to_self(method: Function) -> dict[str, ast.AST]:
    found: dict[str, ast.AST] = {}
    for node in ast.walk(method):
        if not isinstance(node, ast.stmt):
            continue
        for target in _targets(node):
            if (
                isinstance(target, ast.Attribute)
                and isinstance(target.value, ast.Name)
                and target.value.id == "self"
            ):
                found[target.attr] = node
    return found


def _decorators(node: Function) -> set[str]:
    return {ast.unparse(one).split("(")[0].rpartition(".")[2] for one in node.decorator_list}


def _is_overload(node: Function) -> bool:
    return "overload" in _decorators(node)


def _signature(given: ast.arguments, skips_first: bool) -> Signature:
    positional = [one.arg for one in (*given.posonlyargs, *given.args)]
    required = set(positional[: len(positional) - len(given.defaults)])
    keyword_only = [one.arg for one in given.kwonlyargs]
    required.update(
        one.arg
        for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
        if default is None
    )
    if skips_first and positional:
        required.discard(positional.pop(0))
    return Signature(
        tuple(positional),
        tuple(keyword_only),
        frozenset(required),
        given.vararg is not None,
        given.kwarg is not None,
    )


def _signature_of_fields(fields: list[tuple[str, bool]]) -> Signature:
    return Signature(
        tuple(name for name, _ in fields),
        required=frozenset(name for name, has_default in fields if not has_default),
    )
