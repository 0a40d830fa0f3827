"""The demo's retrieval task: code search over the running Python's own standard library.

Promise: the same Python gives the same task; no query's function, nor any other of its module, was trained on.

A document is the source of a function without its docstring; a query is the first sentence of the docstring; the answer
is that function. The corpus holds all functions; queries come from held-out modules only.
"""

import ast
import hashlib
import inspect
import re
import sysconfig
import textwrap
import tokenize
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from fullrank._errors import DataError
from fullrank.data import GoldenSet

__all__ = ["CodeSearch", "standard_library_task"]

HELD_OUT_SHARE = 1 / 3
"""Of the functions, where all modules are used."""
MIN_WORDS = 3
_NOT_LIBRARY = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__", "turtledemo"}
_SENTENCE_END = re.compile(r"(?<=[.!?])\s")


@dataclass(frozen=True)
class CodeSearch:
    """A retrieval task with training pairs.

    Attributes:
        golden: queries of the held-out modules against all functions.
        pairs: (query, function source) of the other modules.
        n_modules: modules in all.
        n_held_out: modules that queries come from.
    """

    golden: GoldenSet
    pairs: list[tuple[str, str]]
    n_modules: int
    n_held_out: int


@dataclass(frozen=True)
class _Function:
    module: str
    name: str
    query: str
    source: str


def standard_library_task(
    *, n_documents: int | None = None, n_queries: int | None = None, within: Collection[str] | None = None
) -> CodeSearch:
    """Returns the task over modules of the standard library.

    Args:
        n_documents: take modules until there are so many functions; None for all.
        n_queries: hold modules out until there are so many queries; None for a third of the functions.
        within: look at these packages alone, such as ``("email", "json")``: for a try-out, as reading the whole library
            takes seconds.

    Raises:
        DataError: the library's sources are not installed, or hold no documented functions.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    by_module: dict[str, list[_Function]] = {}
    for function in _distinct([f for path in _library_files(root, within) for f in _functions(path, root)]):
        by_module.setdefault(function.module, []).append(function)
    sizes = {module: len(by_module[module]) for module in sorted(by_module, key=_draw)}
    chosen = _until(sizes, sum(sizes.values()) if n_documents is None else n_documents)
    wanted = HELD_OUT_SHARE * sum(sizes[module] for module in chosen) if n_queries is None else n_queries
    held_out = set(_until({module: sizes[module] for module in chosen}, wanted))
    functions = [(f"{f.module}.{f.name}", f) for module in sorted(chosen) for f in by_module[module]]
    tested = [(doc_id, f) for doc_id, f in functions if f.module in held_out]
    if not tested:
        raise DataError(f"{root} holds no documented functions; install the standard library's sources")
    golden = GoldenSet(
        {f"what is {doc_id}": f.query for doc_id, f in tested},
        {doc_id: f.source for doc_id, f in functions},
        {f"what is {doc_id}": {doc_id: 1} for doc_id, _ in tested},
        name="python-library",
    )
    pairs = [(f.query, f.source) for _, f in functions if f.module not in held_out]
    return CodeSearch(golden, pairs, len(chosen), len(held_out))


def _until(sizes: dict[str, int], total: float) -> list[str]:
    """Returns the first modules that hold at least ``total`` functions together."""
    taken, seen = [], 0
    for module, size in sizes.items():
        if seen >= total:
            break
        taken.append(module)
        seen += size
    return taken


def _library_files(root: Path, within: Collection[str] | None = None) -> list[Path]:
    below = [root] if within is None else [root / name for name in within]
    files = (path for folder in below for path in folder.rglob("*.py"))
    return sorted(path for path in files if not _NOT_LIBRARY & set(path.relative_to(root).parts))


def _functions(path: Path, root: Path) -> Iterator[_Function]:
    """Yields the documented functions and methods of a file, nested ones too."""
    try:
        with tokenize.open(path) as file:
            text = file.read()
        tree = ast.parse(text)
    except (OSError, SyntaxError, UnicodeDecodeError, ValueError):
        return
    module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    seen: Counter[str] = Counter()
    for name, node in _definitions(tree, ""):
        query, source = _first_sentence(node), _without_docstring(node, text)
        if query is None or source is None:
            continue
        seen[name] += 1  # a name may be defined twice, under different conditions
        yield _Function(module, name if seen[name] == 1 else f"{name}#{seen[name]}", query, source)


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
        inner = prefix + f"{child.name}." if isinstance(child, ast.ClassDef | ast.FunctionDef) else prefix
        yield from _definitions(child, inner)


def _first_sentence(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    paragraph = inspect.cleandoc(ast.get_docstring(node) or "").split("\n\n")[0]
    sentence = _SENTENCE_END.split(" ".join(paragraph.split()))[0]
    return sentence if len(sentence.split()) >= MIN_WORDS else None


def _without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef, text: str) -> str | None:
    """Returns the source less the docstring, or None where nothing else is in the body."""
    if len(node.body) < 2:
        return None
    docstring, first = node.body[0], node.body[1]
    lines = text.splitlines()
    if first.lineno == docstring.end_lineno or docstring.lineno == node.lineno:
        return ast.unparse(_stripped(node))
    kept = lines[node.lineno - 1 : docstring.lineno - 1] + lines[docstring.end_lineno : node.end_lineno]
    return textwrap.dedent("\n".join(kept)).strip()


def _stripped(node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
    fields = {name: getattr(node, name) for name in node._fields if name != "body"}
    return ast.copy_location(type(node)(**fields, body=node.body[1:]), node)


def _distinct(functions: list[_Function]) -> list[_Function]:
    """Returns the functions whose query and whose source stand once: anything else would be a second right answer."""
    queries = Counter(f.query.casefold() for f in functions)
    sources = Counter(f.source for f in functions)
    return [f for f in functions if queries[f.query.casefold()] == 1 and sources[f.source] == 1]


def _draw(module: str) -> str:
    # A hash of the name, so that the split does not follow the alphabet and needs no random state.
    return hashlib.sha256(module.encode()).hexdigest()
