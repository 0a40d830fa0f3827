"""The plan of the house: a module imports only modules above it; above the torch line nothing imports torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fullrank

SRC = Path(fullrank.__file__).parent
ABOVE_TORCH = [
    "_errors",
    "_optional",
    "_files",
    "progress",
    "metrics",
    "settings",
    "stats",
    "resultfile",
    "result",
    "comparison",
    "changes",
    "gating",
    "sources",
    "training_data",
    "checks",
    "data",
    "loaders",
    "leaks",
    "clock",
    "competitors",
    "pooling",
    "labelling",
    "run",
    "benchmarks",
    "mteb_io",
    "abstention",
    "report",
    "tables",
    "announce",
    "guards",
    "card",
    "objective",
    "advice",
    "checkpoints",
    "adviser",
    "schedule",
    "journal",
    "store",
    "runfolder",
    "figures",
    "pagerows",
    "pagedata",
    "page",
    "modelfiles",
    "discover",
    "selecting",
    "selection",
    "leaderboard",
    "keeping",
    "watching",
    "codesearch",
    "documents",
    "records",
]
BELOW_TORCH = [
    "models",
    "scores",
    "ranks",
    "toplists",
    "shortlist",
    "search",
    "isolate",
    "tokens",
    "wrappers",
    "encode",
    "texts",
    "prompting",
    "outcome",
    "measure",
    "anytime",
    "plan",
    "evaluate",
    "latency",
    "mine",
    "decoders",
    "taps",
    "in_batch",
    "unison",
    "scoring",
    "adapters",
    "weights",
    "hooks",
    "keeper",
    "guarding",
    "session",
    "options",
    "beginning",
    "costing",
    "completing",
    "ending",
    "callback",
    "shells",
    "candidates",
    "averaging",
    "ring",
    "contest",
    "standings",
    "select",
    "handing",
    "watch",
    "demo",
    "doors",
    "cli_benchmarks",
    "cli_measure",
    "cli_results",
    "cli_golden",
    "cli_report",
    "cli_choose",
    "cli_mine",
    "cli",
    "__main__",
]
ORDER = ABOVE_TORCH + BELOW_TORCH


def imports_of(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    ignored = {id(inner) for block in typing_only for inner in ast.walk(block)}
    for node in (n for n in ast.walk(tree) if id(n) not in ignored):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_every_module_has_its_place():
    assert sorted(p.stem for p in SRC.glob("*.py") if p.stem != "__init__") == sorted(ORDER)


@pytest.mark.parametrize("module", ORDER)
def test_a_module_imports_only_modules_above_it(module):
    inside = {name.split(".")[1] for name in imports_of(SRC / f"{module}.py") if name.startswith("fullrank.")}
    below = [name for name in inside if ORDER.index(name) >= ORDER.index(module)]
    assert not below


def test_above_the_torch_line_nothing_imports_torch():
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'transformers', 'sentence_transformers', 'peft'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        f"for name in {ABOVE_TORCH!r}:\n"
        "    __import__('fullrank.' + name)\n"
        "print('done')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "done", run.stderr


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, fullrank; print([m for m in ('numpy', 'scipy', 'torch', 'rich') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_every_public_name_can_be_imported_and_is_documented():
    for name in fullrank.__all__:
        value = getattr(fullrank, name)
        assert name == "__version__" or value.__doc__
    with pytest.raises(AttributeError, match="no attribute 'evalute'"):
        fullrank.evalute  # noqa: B018


def test_importing_the_module_evaluate_does_not_hide_the_function():
    code = (
        "import fullrank.evaluate, fullrank\n"
        "from fullrank.evaluate import evaluate_embeddings\n"
        "print(callable(fullrank.evaluate), fullrank.evaluate.__name__)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True", "evaluate"]


def test_the_product_does_not_name_a_machine_or_the_shared_folder():
    for path in SRC.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        for word in ("../shared", "/work/", "/root/", "pypi.org"):
            assert word not in text, (path.name, word)
