"""Ranking embeddings: fullrank beside the bare product, faiss and sentence-transformers' evaluator.

    python scripts/bench_search.py                       # 200,000 x 384 documents, 1,000 queries, top 100
    python scripts/bench_search.py --documents 20000 --repeats 1

All get the same embeddings and one thread, run interleaved, and must give the same numbers. fullrank counts exact ranks
and computes metrics beside the lists; faiss gives lists alone. A peer that is not installed is left out and named
(pip install faiss-cpu). Writes results/bench_search.json.
"""

import argparse
import resource
import statistics
import sys
import time
from importlib.metadata import version

import numpy as np
import torch

from _bench import write_report
from fullrank import GoldenSet
from fullrank.evaluate import evaluate_embeddings

METRICS = ["recall@1", "recall@10", "recall@100", "ndcg@10", "mrr@10"]
TOLERANCE = 1e-6


def make_task(n_documents, n_queries, d):
    """Random unit vectors; the relevant document of each query lies nearer to it than most."""
    rng = np.random.default_rng(1)
    documents = rng.standard_normal((n_documents, d), dtype=np.float32)
    queries = rng.standard_normal((n_queries, d), dtype=np.float32)
    answers = rng.choice(n_documents, n_queries, replace=False)
    documents[answers] += 0.25 * queries
    for table in (documents, queries):
        table /= np.linalg.norm(table, axis=1, keepdims=True)
    golden = GoldenSet(
        {f"q{i}": f"query {i}" for i in range(n_queries)},
        {f"d{i}": f"document {i}" for i in range(n_documents)},
        {f"q{i}": {f"d{a}": 1} for i, a in enumerate(answers)},
    )
    return torch.from_numpy(queries), torch.from_numpy(documents), golden


def bare_product(queries, documents, golden, k):
    for i in range(0, len(documents), 4_096):
        for j in range(0, len(queries), 256):
            queries[j : j + 256] @ documents[i : i + 4_096].T
    return None


def fullrank(queries, documents, golden, k):
    return evaluate_embeddings(queries, documents, golden, similarity="dot", metrics=METRICS, list_length=k).metrics


def faiss_flat(queries, documents, golden, k):
    import faiss

    faiss.omp_set_num_threads(1)
    index = faiss.IndexFlatIP(documents.shape[1])
    index.add(documents.numpy())
    _, lists = index.search(queries.numpy(), k)
    answers = np.array([int(next(iter(grades))[1:]) for grades in golden.qrels.values()])
    return {f"recall@{n}": float((lists[:, :n] == answers[:, None]).any(axis=1).mean()) for n in (1, 10, 100)}


def sentence_transformers_evaluator(queries, documents, golden, k):
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
    from sentence_transformers.util import dot_score

    class Given:
        def encode_query(self, texts, **options):
            return queries

    evaluator = InformationRetrievalEvaluator(
        golden.queries,
        golden.corpus,
        {qid: set(grades) for qid, grades in golden.qrels.items()},
        accuracy_at_k=[1],
        precision_recall_at_k=[1, 10, 100],
        map_at_k=[k],
        score_functions={"dot": dot_score},
        write_csv=False,
    )
    found = evaluator.compute_all_metrics(Given(), corpus_embeddings=documents)["dot"]
    values = {f"recall@{n}": value for n, value in found["recall@k"].items()}
    return {**values, "ndcg@10": found["ndcg@k"][10], "mrr@10": found["mrr@k"][10]}


CONTENDERS = (bare_product, fullrank, faiss_flat, sentence_transformers_evaluator)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--queries", type=int, default=1_000)
    parser.add_argument("--dimensions", type=int, default=384)
    parser.add_argument("--k", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = make_task(options.documents, options.queries, options.dimensions)
    seconds, values, missing = {f.__name__: [] for f in CONTENDERS}, {}, {}
    for _ in range(options.repeats):
        for contender in CONTENDERS:  # interleaved, so that load on the machine meets all alike
            start = time.perf_counter()
            try:
                found = contender(*task, options.k)
            except ImportError as error:
                missing[contender.__name__] = str(error)
                continue
            seconds[contender.__name__].append(time.perf_counter() - start)
            if found is not None:
                values[contender.__name__] = found
    for name, found in values.items():
        off = {m: (v, values["fullrank"][m]) for m, v in found.items() if abs(v - values["fullrank"][m]) > TOLERANCE}
        if off:
            sys.exit(f"{name} gives other numbers: {off}")
    medians = {name: statistics.median(times) for name, times in seconds.items() if times}
    report = {
        "what": f"{options.documents} x {options.dimensions} documents, {options.queries} queries, top {options.k}, "
        f"one thread, median of {options.repeats}",
        "seconds": medians,
        "times_bare_product": {name: value / medians["bare_product"] for name, value in medians.items()},
        "missing": missing,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "versions": {name: version(name) for name in ("torch", "numpy", "sentence-transformers")},
    }
    write_report("bench_search", report)


if __name__ == "__main__":
    main()
