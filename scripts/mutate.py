"""Plants one fault at a time in a copy of a module and runs its tests: a fault that no test notices is a gap.

    python scripts/mutate.py                                  every mutant of src/fullrank/metrics.py
    python scripts/mutate.py --limit 20 --seed 1              a sample
    python scripts/mutate.py src/fullrank/stats.py --tests tests/test_stats.py

The working tree is never touched. Exit code: 0 all killed, 1 a mutant survived, 2 the tests fail without a mutation.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
# (stripped line, mutation): why no test can tell the mutant from the original.
_FIRST = "first = np.flatnonzero(np.diff(query, prepend=-1))"
_GROUP = "group = np.flatnonzero((np.diff(query, prepend=-1) != 0) | (np.diff(better, prepend=-1) != 0))"
_EACH = "for index, (b, t, c, r_) in _distinct((tied > 1) & (better < k), better, tied, before, r):"
_SURE = "score[index] = 1.0 if b_ + t_ <= k else np.sum(probability)"
_INSIDE = "for index, (b_, t_, r_) in _distinct(inside & (t > 1), b, t, r):"
_TIED = "for index, (b, t) in _distinct(tied > 1, better, tied):"
EQUIVALENT: dict[tuple[str, str], str] = {
    ("TINY = float(np.nextafter(0.0, 1.0))", "1.0 -> 2.0"): "the next number after 0 either way",
    (_TIED, "1 -> 0"): "a group of one has the same value in closed form, only more slowly",
    (_TIED, "tied > 1 -> tied >= 1"): "a group of one has the same value in closed form, only more slowly",
    (_FIRST, "1 -> 2"): "any number that is no query position starts the first run",
    ('score = np.where(inside, 1 / (b + 1) if name == "mrr" else 1.0, 0.0)', "1.0 -> 2.0"): "values are clamped to 1",
    (_INSIDE, "1 -> 0"): "a group of one has the same value in closed form, only more slowly",
    (_INSIDE, "t > 1 -> t >= 1"): "a group of one has the same value in closed form, only more slowly",
    (_GROUP, "1 -> 2"): "any number that is no count starts the first group",
    (_GROUP, "1 -> 0"): "the other half of the condition starts the first group",
    (_SURE, "1.0 -> 2.0"): "values are clamped to 1",
    (_SURE, "b_ + t_ <= k -> b_ + t_ < k"): "the sum of all probabilities is 1, but for rounding",
    (_SURE, "k -> k - 1"): "the sum of all probabilities is 1, but for rounding",
    (_EACH, "better < k -> better <= k"): "a group that begins at the cut-off adds an empty sum",
    (_EACH, "k -> k + 1"): "a group that begins at the cut-off adds an empty sum",
    ("inverse = inverse.reshape(-1)", "1 -> 2"): "numpy infers the length from any negative number",
    ("return [(index, tuple(map(float, row))) for index, row in zip(splits, rows, strict=True)]", "True -> False"): (
        "both have one entry a distinct row"
    ),
    ("n = len(keys[0])", "0 -> -1"): "all keys are equally long",
    ("starts[:1] = True", "1 -> 0"): "the first entry is 0 whether it starts a group or not",
    ("starts[:1] = True", "True -> False"): "the first entry is 0 whether it starts a group or not",
    (
        "return (index - np.maximum.accumulate(np.where(starts, index, 0))).astype(np.float64)",
        "0 -> -1",
    ): "the running maximum begins at 0, the first start",
    ("near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)", "1 -> 2"): "only the nearest is shown",
}

COMPARISONS = {ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd}
NAMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any"}
# Loaded by every pytest run: proves that the copy is what is tested, and spares hypothesis the shrinking.
PLUGIN = """
import fullrank, hypothesis, pytest
def pytest_configure(config):
    if not fullrank.__file__.startswith({copy!r}):
        pytest.exit("tested " + fullrank.__file__ + ", not the mutated copy", returncode=90)
phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
hypothesis.settings.register_profile("mutate", phases=phases, derandomize=True, database=None)
hypothesis.settings.load_profile("mutate")
"""


def swapped(node):
    """Yields every mutated form of one expression."""
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            if other := COMPARISONS.get(type(op)):
                yield ast.Compare(node.left, [*node.ops[:i], other(), *node.ops[i + 1 :]], node.comparators)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert):
        yield node.operand
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        longer = ast.BinOp(node.right, ast.Add(), ast.Constant(1))
        yield from (ast.BinOp(node.right, node.op, node.left), ast.BinOp(node.left, node.op, longer), node.left)
    elif isinstance(node, ast.BinOp) and (other := OPERATORS.get(type(node.op))):
        yield ast.BinOp(node.left, other(), node.right)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield from (ast.Constant(node.value + 1), ast.Constant(node.value - 1))
    elif isinstance(node, ast.Name) and node.id == "k" and isinstance(node.ctx, ast.Load):
        yield from (ast.BinOp(node, op, ast.Constant(1)) for op in (ast.Add(), ast.Sub()))
    elif isinstance(node, ast.Call) and (name := getattr(node.func, "attr", getattr(node.func, "id", ""))) in NAMES:
        yield ast.parse(ast.unparse(node).replace(name, NAMES[name], 1), mode="eval").body


def expressions(node):
    """Yields the expressions that run; types and f-strings (whose positions are not those of the file) do not count."""
    for child in (child for field, child in ast.iter_fields(node) if field not in ("annotation", "returns")):
        for item in child if isinstance(child, list) else [child]:
            if isinstance(item, ast.AST) and not isinstance(item, ast.JoinedStr | ast.arg):
                yield item
                yield from expressions(item)


def mutants(source):
    """Returns [(line number, stripped line, mutation, mutated source)] for every single change."""
    lines, found = source.encode().splitlines(keepends=True), []
    starts = [sum(map(len, lines[:i])) for i in range(len(lines))]
    for node in expressions(ast.parse(source)):
        for new in swapped(node):
            head = source.encode()[: starts[node.lineno - 1] + node.col_offset].decode()
            tail = source.encode()[starts[node.end_lineno - 1] + node.end_col_offset :].decode()
            mutation, line = f"{ast.unparse(node)} -> {ast.unparse(new)}", lines[node.lineno - 1].decode().strip()
            found.append((node.lineno, line, mutation, f"{head}({ast.unparse(new)}){tail}"))
    return sorted(found, key=lambda mutant: mutant[:3])


def run_tests(copied, tests, *options, timeout=None):
    """Returns the exit code of pytest on the copy and what it printed; a mutant that hangs is a killed one."""
    command = [sys.executable, "-B", "-m", "pytest", "-p", "mutate_plugin", "-p", "no:cacheprovider", *options, *tests]
    paths = os.pathsep.join([str(copied / "src"), str(copied)])
    env = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=copied, env=env, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return 1, "timed out"
    if done.returncode > 2:
        raise SystemExit(f"pytest could not run (code {done.returncode}):\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode, done.stdout


def copy_tree(folder):
    """Returns a folder with the package, its tests and the plugin, to plant faults in."""
    copied = Path(folder).resolve()
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, copied / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copied)
    (copied / "mutate_plugin.py").write_text(PLUGIN.format(copy=str(copied / "src")), encoding="utf-8")
    return copied


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=["src/fullrank/metrics.py"], help="default: %(default)s")
    parser.add_argument("--tests", nargs="+", default=["tests/test_metrics.py"], help="default: %(default)s")
    parser.add_argument("--limit", type=int, help="try a random sample of so many mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--allow-red", action="store_true", help="leave out tests that fail without a mutation")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="fullrank-mutate-") as folder:
        copied = copy_tree(folder)
        code, printed = run_tests(copied, args.tests)
        failed = [line for line in printed.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        red = [line.split(" ", 1)[1].split(" - ")[0] for line in failed]
        if code and not args.allow_red:
            print(printed[-3000:], f"{len(red)} tests fail without a mutation", sep="\n", file=sys.stderr)
            return 2
        options = ["-x", *(part for name in red for part in ("--deselect", name))]

        sources = {module: (copied / module).read_text(encoding="utf-8") for module in args.modules}
        every = [(module, *mutant) for module, source in sources.items() for mutant in mutants(source)]
        known = [mutant for mutant in every if (mutant[2], mutant[3]) in EQUIVALENT]
        todo = [mutant for mutant in every if mutant not in known]
        if args.limit and args.limit < len(todo):
            todo = random.Random(args.seed).sample(todo, args.limit)
        survivors = 0
        for module, number, line, mutation, mutated in tqdm(todo, unit="mutant", disable=None):
            (copied / module).write_text(mutated, encoding="utf-8")
            if run_tests(copied, args.tests, *options, timeout=180)[0] == 0:
                survivors += 1
                tqdm.write(f"SURVIVED {module}:{number}: {line}\n         {mutation}", file=sys.stdout)
            (copied / module).write_text(sources[module], encoding="utf-8")
    killed = len(todo) - survivors
    print(f"{len(todo)} mutants: {killed} killed, {survivors} survived; {len(known)} more known as equivalent")
    print("".join(f"left out, for it fails without a mutation: {name}\n" for name in red), end="")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
