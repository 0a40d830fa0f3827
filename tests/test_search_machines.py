"""The search on other processors and in little memory: real processes with other settings give the same numbers."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from fullrank import GoldenSet, evaluate, evaluate_embeddings
from fullrank._errors import EvaluationError, SettingError
from fullrank.scores import prepare
from fullrank.search import TargetPairs, rank

WORLD = """
import json, sys
import numpy as np, torch
from fullrank.scores import prepare
from fullrank.search import TargetPairs, rank

torch.set_num_threads(int(sys.argv[1]))
found = []
for kind in ("random", "near", "copies"):
    rng = np.random.default_rng(5)
    queries, documents = rng.standard_normal((40, 96)), rng.standard_normal((3_000, 96))
    if kind == "near":
        documents = documents[rng.integers(12, size=3_000)] * (1 + 1e-7 * rng.standard_normal((3_000, 96)))
    elif kind == "copies":
        documents = documents[rng.integers(700, size=3_000)]
    for similarity in ("cosine", "dot", "euclidean"):
        q, d = (prepare(torch.from_numpy(x).float(), similarity) for x in (queries, documents))
        pairs = TargetPairs(torch.arange(40).repeat_interleave(3), torch.from_numpy(rng.integers(3_000, size=120)))
        blocks = [(torch.arange(a, min(a + 900, 3_000)), d[a : a + 900]) for a in range(0, 3_000, 900)]
        r = rank(q, pairs, d[pairs.doc], blocks, similarity=similarity, k=20, id_order=torch.arange(3_000))
        found.append([x.tolist() for x in (r.better, r.tied, r.ahead, r.top_docs, r.top_scores)])
first = torch.from_numpy(np.random.default_rng(1).standard_normal((64, 384))).float()
product = (first @ first.T).flatten()[:500].tolist()
print(json.dumps({"found": found, "product": product, "isa": torch.backends.cpu.get_cpu_capability()}))
"""


def process(code, *arguments, **environment):
    run = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_other_instruction_sets_and_thread_counts_give_the_same_counts_and_lists():
    here = process(WORLD, 1)
    older = process(
        WORLD, 1, MKL_ENABLE_INSTRUCTIONS="SSE4_2", ATEN_CPU_CAPABILITY="default", ONEDNN_MAX_CPU_ISA="SSE41"
    )
    avx2 = process(WORLD, 2, MKL_ENABLE_INSTRUCTIONS="AVX2", ATEN_CPU_CAPABILITY="avx2", ONEDNN_MAX_CPU_ISA="AVX2")
    assert older["isa"] != here["isa"]  # the settings reach torch
    assert here["found"] == older["found"] == avx2["found"]


MEMORY = """
import json, resource, sys
import numpy as np
from fullrank import GoldenSet, evaluate_embeddings

n, path = int(sys.argv[1]), sys.argv[2]
table = np.memmap(path, np.float32, "r", shape=(n, 256))
queries = np.array(table[:200])
golden = GoldenSet({f"q{i}": "q" for i in range(200)}, {f"d{i}": "" for i in range(n)},
                   {f"q{i}": {f"d{i}": 1} for i in range(200)}, name="flat")
evaluate_embeddings(queries, table[:300], GoldenSet(golden.queries, {f"d{i}": "" for i in range(300)},
                   golden.qrels, name="warm"), metrics=["recall@100"])
def own():
    pages = dict(line.split(":") for line in open("/proc/self/status"))
    return int(pages["RssAnon"].split()[0])
import threading, time
peak, done = [own()], threading.Event()
before = peak[0]
def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], own())
watcher = threading.Thread(target=watch); watcher.start()
result = evaluate_embeddings(queries, table, golden, metrics=["recall@1", "recall@100"])
done.set(); watcher.join()
print(json.dumps({"kib": peak[0] - before, "recall": result.metrics["recall@1"]}))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_does_not_grow_with_the_documents(tmp_path):
    """A memory-mapped table is read tile by tile: what lies in memory beside it is the work, not the corpus."""
    path, sizes = tmp_path / "table.bin", (40_000, 80_000)
    table = np.memmap(path, np.float32, "w+", shape=(sizes[-1], 256))
    rng = np.random.default_rng(0)
    for start in range(0, sizes[-1], 20_000):
        table[start : start + 20_000] = rng.standard_normal((20_000, 256), np.float32)
    table.flush()
    peaks = []
    for n in sizes:
        found = process(MEMORY, n, path)
        assert found["recall"] == 1.0
        peaks.append(found["kib"] / 1024)
    assert max(peaks) < 300
    assert peaks[1] < 1.2 * peaks[0] + 8  # MiB; the documents themselves are 40 MiB more


# ---------------------------------------------------------------- inputs


def world(n=300, q=11, d=16, seed=0):
    rng = np.random.default_rng(seed)
    documents = (rng.integers(-8, 9, (n, d)) / 4).astype(np.float32)  # exact in fp16 and bf16
    documents[:, 0] = 1
    golden = GoldenSet(
        {f"q{i}": f"query {i}" for i in range(q)},
        {f"d{i}": f"text {i}" for i in range(n)},
        {f"q{i}": {f"d{j}": 1 for j in rng.choice(n, 3, replace=False)} for i in range(q)},
        name="world",
    )
    return documents[rng.choice(n, q)] + np.float32(0.25), documents, golden


def strided(table):
    wide = torch.zeros(table.shape[0] * 2, table.shape[1] * 2)
    wide[::2, ::2] = torch.from_numpy(table)
    return wide[::2, ::2]


FORMS = {
    "float64": lambda table, path: table.astype(np.float64),
    "float16": lambda table, path: table.astype(np.float16),
    "fortran": lambda table, path: np.asfortranarray(table),
    "reversed": lambda table, path: np.ascontiguousarray(table[::-1])[::-1],
    "lists": lambda table, path: table.tolist(),
    "tensor": lambda table, path: torch.from_numpy(table),
    "double": lambda table, path: torch.from_numpy(table).double(),
    "half": lambda table, path: torch.from_numpy(table).half(),
    "bfloat16": lambda table, path: torch.from_numpy(table).bfloat16(),
    "strided": lambda table, path: strided(table),
    "transposed": lambda table, path: torch.from_numpy(table.T.copy()).T,
    "gradient": lambda table, path: torch.from_numpy(table).requires_grad_(),
    "memmap": lambda table, path: np.save(path, table) or np.load(path, mmap_mode="r"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean"])
def test_embeddings_in_any_form_give_the_same_result(form, similarity, tmp_path, monkeypatch):
    from fullrank import search

    monkeypatch.setattr(search, "DOCUMENT_TILE", 64)
    queries, documents, golden = world()
    expected = evaluate_embeddings(queries, documents, golden, similarity=similarity)
    path = tmp_path / "table.npy"
    given = FORMS[form](documents, path)
    if form == "memmap":
        path.chmod(0o400)
    for q in (queries, FORMS[form](queries, tmp_path / "queries.npy")):
        found = evaluate_embeddings(q, given, golden, similarity=similarity)
        assert found == dataclass_without_time(found, expected)


def dataclass_without_time(found, expected):
    from dataclasses import replace

    return replace(expected, timing=found.timing)


# ---------------------------------------------------------------- bad input


def nothing():
    return torch.empty(0, dtype=torch.int64)


def test_a_block_that_raises_is_the_callers_error_and_leaves_the_settings():
    q = prepare(torch.ones(2, 3), "dot")

    def blocks():
        yield torch.arange(2), q
        raise OSError("disk gone")

    before = torch.backends.mkldnn.matmul.fp32_precision, torch.is_grad_enabled()
    with pytest.raises(OSError, match="disk gone"):
        rank(q, TargetPairs(nothing(), nothing()), q[:0], blocks(), similarity="dot", k=1)
    assert (torch.backends.mkldnn.matmul.fp32_precision, torch.is_grad_enabled()) == before


def test_empty_blocks_change_nothing():
    torch.manual_seed(0)
    q, d = prepare(torch.randn(4, 8), "cosine"), prepare(torch.randn(50, 8), "cosine")
    pairs = TargetPairs(torch.arange(4), torch.arange(4))
    whole = rank(q, pairs, d[:4], [(torch.arange(50), d)], similarity="cosine", k=7)
    empty = (nothing(), d[:0])
    parts = [empty, (torch.arange(20), d[:20]), empty, empty, (torch.arange(20, 50), d[20:]), empty]
    found = rank(q, pairs, d[:4], parts, similarity="cosine", k=7)
    for name in ("better", "tied", "top_docs", "top_scores"):
        assert torch.equal(getattr(whole, name), getattr(found, name))
    assert found.n_documents == 50
    none = rank(q, TargetPairs(nothing(), nothing()), d[:0], [], similarity="cosine", k=7)
    assert none.n_documents == 0
    assert none.top_docs.unique().tolist() == [-1]


@pytest.mark.parametrize("k", [0, -1, True, 2.0, "3"])
def test_lists_without_a_length_are_refused(k):
    queries, documents, golden = world()
    with pytest.raises(SettingError, match=f"list_length={k!r} must be a whole number from 1 or None"):
        evaluate_embeddings(queries, documents, golden, list_length=k)


@pytest.mark.parametrize("k", [0, -3])
def test_a_search_for_no_documents_is_refused(k):
    q = prepare(torch.ones(2, 3), "dot")
    with pytest.raises(SettingError, match=f"k={k} must be a whole number from 1"):
        rank(q, TargetPairs(nothing(), nothing()), q[:0], [(torch.arange(2), q)], similarity="dot", k=k)


def test_tables_of_other_widths_name_both():
    queries, documents, golden = world()
    with pytest.raises(EvaluationError, match="queries have 15 dimensions and documents 16"):
        evaluate_embeddings(queries[:, :15], documents, golden)


class Model:
    """Answers with whatever ``answer`` makes of the right rows."""

    def __init__(self, answer):
        self.answer = answer

    def encode(self, texts):
        return self.answer(np.array([[len(text), int(text.split()[-1]) + 1, 1] for text in texts], np.float32))


@pytest.mark.parametrize(
    "answer",
    [
        lambda rows: rows.tolist(),
        lambda rows: list(torch.from_numpy(rows)),
        lambda rows: list(rows),
        lambda rows: tuple(map(tuple, rows.tolist())),
        lambda rows: torch.from_numpy(rows).requires_grad_(),
        lambda rows: rows.astype(np.float64),
        lambda rows: rows.astype(np.int64),
        lambda rows: torch.from_numpy(rows).half(),
    ],
)
def test_a_model_may_answer_in_any_form(answer):
    _, _, golden = world()
    assert evaluate(Model(answer), golden).hits == evaluate(Model(lambda rows: rows), golden).hits


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda rows: rows[:-1], r"encode returned the shape \(\d+, 3\) for \d+ texts; expected \[\d+, d\]"),
        (lambda rows: rows[0], r"encode returned the shape \(3,\)"),
        (lambda rows: rows[None], r"encode returned the shape \(1, \d+, 3\)"),
        (lambda rows: None, "encode returned"),
        (lambda rows: {"a": 1}, "encode returned a dict that is no"),
        (lambda rows: [], "encode returned the shape"),
        (lambda rows: [[1.0], [2.0, 3.0]], "encode returned a list that is no"),
        (lambda rows: ["x"] * len(rows), "encode returned a list that is no"),
        (lambda rows: rows.astype(np.complex64), "encode returned torch.complex64; expected real numbers"),
        (lambda rows: torch.from_numpy(rows).cfloat(), "encode returned torch.complex64; expected real numbers"),
        (lambda rows: np.full(rows.shape, "x"), "encode returned a ndarray that is no"),
    ],
)
def test_answers_that_are_no_table_name_the_place(answer, words):
    _, _, golden = world()
    with pytest.raises(EvaluationError, match=words):
        evaluate(Model(answer), golden)
