"""One full evaluation: fullrank beside sentence-transformers' evaluator and the bare encoding.

    python scripts/bench_evaluate.py                                   # code search as in the demo, 400 documents
    python scripts/bench_evaluate.py --data beir/scifact --documents 0 # all of a collection
    python scripts/bench_evaluate.py --budgets 512,1024,2048,4096      # which padded-token budget this machine likes

The same MiniLM, texts and thread for all, run interleaved; the numbers must agree. Writes results/bench_evaluate.json.
"""

import argparse
import os
import random
import statistics
import sys
import time
from importlib.metadata import version

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from _bench import write_report
from fullrank import GoldenSet, evaluate, load_golden
from fullrank.codesearch import standard_library_task
from fullrank.demo import packaged_model
from fullrank.models import load_sentence_transformer

METRICS = ["recall@1", "recall@10", "ndcg@10", "mrr@10"]
TOLERANCE = {"fp32": 1e-6, "bf16": 2e-2}
"""Between fullrank and the evaluator: the ranking is the same in fp32 unless two documents score alike to 1e-7."""


def cut(golden, n, seed=0):
    """The judged documents and a random sample of the others, ``n`` in all; 0 keeps everything."""
    if not n or n >= len(golden.corpus):
        return golden
    judged = {doc_id for grades in golden.qrels.values() for doc_id in grades}
    others = sorted(set(golden.corpus) - judged)
    kept = judged | set(random.Random(seed).sample(others, max(0, min(len(others), n - len(judged)))))
    corpus = {doc_id: text for doc_id, text in golden.corpus.items() if doc_id in kept}
    return GoldenSet(golden.queries, corpus, golden.qrels, name=golden.name)


def evaluator_metrics(model, golden):
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    evaluator = InformationRetrievalEvaluator(
        golden.queries,
        dict(zip(golden.doc_ids, golden.doc_texts, strict=True)),
        {qid: {d for d, g in grades.items() if g > 0} for qid, grades in golden.qrels.items()},
        write_csv=False,
    )
    found = evaluator(model)
    return {name: found[f"cosine_{name}"] for name in METRICS}


def bare_encoding(model, golden):
    model.encode_query(list(golden.query_texts))
    model.encode_document(list(golden.doc_texts))


def contenders(budgets):
    def ours(precision, budget):
        return lambda model, golden: (
            evaluate(model, golden, metrics=METRICS, precision=precision, batch_tokens=budget).metrics
        )

    return {
        "sentence_transformers_evaluator": evaluator_metrics,
        "model.encode": bare_encoding,
        **{f"fullrank fp32{'' if b is None else f' {b}'}": ours("fp32", b) for b in budgets},
        **{f"fullrank bf16{'' if b is None else f' {b}'}": ours("bf16", b) for b in budgets},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="BEIR folder; default: the code-search task of the demo")
    parser.add_argument("--documents", type=int, default=400, help="0 for all")
    parser.add_argument("--budgets", help="comma-separated padded tokens of a batch, instead of the default")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.data:
        golden = cut(load_golden(options.data), options.documents)
    else:
        golden = standard_library_task(n_documents=options.documents or None, n_queries=300).golden
    model = load_sentence_transformer(str(packaged_model()))
    budgets = [int(b) for b in options.budgets.split(",")] if options.budgets else [None]
    seconds, values = {}, {}
    for _ in range(options.repeats):
        for name, contender in contenders(budgets).items():  # interleaved: load on the machine meets all alike
            start = time.perf_counter()
            values[name] = contender(model, golden)
            seconds.setdefault(name, []).append(time.perf_counter() - start)
    wanted = values["sentence_transformers_evaluator"]
    for name, found in values.items():
        tolerance = TOLERANCE["bf16" if "bf16" in name else "fp32"]
        off = {m: (found[m], wanted[m]) for m in METRICS if abs(found[m] - wanted[m]) > tolerance} if found else {}
        if off:
            sys.exit(f"{name} gives other numbers than sentence-transformers: {off}")
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    peer = medians["sentence_transformers_evaluator"]
    report = {
        "what": f"{golden.name}: {len(golden.corpus)} documents, {len(golden.queries)} queries, all-MiniLM-L6-v2, "
        f"{options.threads} thread(s), median of {options.repeats}",
        "seconds": medians,
        "times_faster_than_evaluator": {name: peer / value for name, value in medians.items()},
        "metrics": values,
        "versions": {name: version(name) for name in ("torch", "transformers", "sentence-transformers")},
    }
    write_report("bench_evaluate", report)


if __name__ == "__main__":
    main()
