"""Graph of the imports between the modules of this repository, read from their sources."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from docs.repository.findings import tree_of

Graph = dict[str, set[str]]


@dataclass
class Imports:
    """Edges from each module to those that it imports, by the place of the import statement.

    Attributes:
        loading: Imports that run when the module is loaded.
        typing: Imports below `if TYPE_CHECKING:`.
        lazy: Imports inside functions.
    """

    loading: Graph = field(default_factory=dict)
    typing: Graph = field(default_factory=dict)
    lazy: Graph = field(default_factory=dict)

    @property
    def declared(self) -> Graph:
        """Every edge but the lazy ones: those that a reader of the modules' heads sees."""
        return {name: self.loading[name] | self.typing[name] for name in self.loading}


def find_modules(root: Path, packages: Iterable[str]) -> dict[str, Path]:
    """The file of each module of `packages`, which are folders below `root`, by its name."""
    return {
        ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for folder in (root / package for package in packages)
        for path in sorted(folder.rglob("*.py"))
    }


def read_imports(root: Path, packages: Iterable[str]) -> Imports:
    """Parse every module of `packages`, which are folders below `root`."""
    paths = find_modules(root, packages)
    imports = Imports()
    for module, path in paths.items():
        for graph in (imports.loading, imports.typing, imports.lazy):
            graph[module] = set()
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for graph, statement in _import_statements(tree_of(path), imports):
            for name in _imported_names(statement, package):
                if target := _module_of(name, paths):
                    graph[module].add(target)
        for graph in (imports.loading, imports.typing, imports.lazy):
            graph[module].discard(module)
    return imports


def _import_statements(
    tree: ast.Module, imports: Imports
) -> Iterator[tuple[Graph, ast.Import | ast.ImportFrom]]:
    def below(node: ast.AST, graph: Graph) -> Iterator[tuple[Graph, ast.Import | ast.ImportFrom]]:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield graph, node
            return
        if isinstance(node, (ast.expr, ast.Pass, ast.Return, ast.Assign)):
            return  # No statement is below it: this is most of a tree.
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            graph = imports.lazy
        if isinstance(node, ast.If) and graph is imports.loading:
            condition = ast.unparse(node.test)
            within = imports.typing if condition.endswith("TYPE_CHECKING") else graph
            for statement in node.body:
                yield from below(statement, within)
            for statement in node.orelse:
                yield from below(statement, graph)
            return
        for child in ast.iter_child_nodes(node):
            yield from below(child, graph)

    yield from below(tree, imports.loading)


def _imported_names(statement: ast.Import | ast.ImportFrom, package: str) -> Iterator[str]:
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
        return
    base = statement.module or ""
    if statement.level:
        parts = package.split(".")
        base = ".".join(parts[: len(parts) - statement.level + 1] + ([base] if base else []))
    # A name may be a module of the package or something that a module defines.
    yield from (f"{base}.{alias.name}" for alias in statement.names)


def _module_of(name: str, paths: dict[str, Path]) -> str | None:
    while name and name not in paths:
        name = name.rpartition(".")[0]
    return name or None


def entries_of(graph: Graph, folder: str, apart: Collection[str] = ()) -> Graph:
    """Return the edges between the entries of ``folder``: a folder in it is one entry.

    Args:
        apart: Folders of folders in it that count as entries of their own.
    """

    def entry(module: str) -> str | None:
        if not module.startswith(f"{folder}."):
            return None
        first, _, rest = module.removeprefix(f"{folder}.").partition(".")
        second = f"{first}.{rest.partition('.')[0]}"
        return second if f"{folder}.{second}" in apart else first

    edges: Graph = {}
    for module, targets in graph.items():
        if (source := entry(module)) is not None:
            found = {other for target in targets if (other := entry(target)) is not None}
            edges.setdefault(source, set()).update(found - {source})
    return edges


def circles(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components of more than one member, sorted (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    open_nodes: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        open_nodes.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in open_nodes:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            at = open_nodes.index(node)
            component = open_nodes[at:]
            del open_nodes[at:]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return sorted(found)
