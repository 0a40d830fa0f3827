"""Evaluating a finished run: fullrank beside ir_measures and ranx, first call in a fresh process each.

    python scripts/bench_run.py                     # 6,980 queries x 1,000 documents, as MS MARCO dev has them
    python scripts/bench_run.py --queries 500 --repeats 1

Every library gets the same dicts, three metrics, and must give the same numbers. Peers that are not installed are left
out and named (pip install ir-measures ranx). Writes results/bench_run.json.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time

from _bench import write_report

LIBRARIES = ("fullrank", "ir_measures", "ranx")
TOLERANCE = 1e-6


def make_run(n_queries, n_docs):
    rng = random.Random(1)
    run, qrels = {}, {}
    for q in range(n_queries):
        ids = rng.sample(range(8_000_000), n_docs)
        run[f"q{q}"] = {f"d{i}": rng.random() for i in ids}
        qrels[f"q{q}"] = {f"d{i}": 1 for i in rng.sample(ids, 1 + (q % 3 == 0))}
    return run, qrels


def call(library, run, qrels):
    if library == "fullrank":
        from fullrank.run import evaluate_run

        start = time.perf_counter()
        values = evaluate_run(run, qrels, metrics=["ndcg@10", "recall@100", "mrr@10"], ties="trec").metrics
    elif library == "ir_measures":
        import ir_measures
        from ir_measures import RR, R, nDCG

        start = time.perf_counter()
        found = ir_measures.calc_aggregate([nDCG @ 10, R @ 100, RR @ 10], qrels, run)
        values = {"ndcg@10": found[nDCG @ 10], "recall@100": found[R @ 100], "mrr@10": found[RR @ 10]}
    else:
        import ranx

        start = time.perf_counter()
        values = dict(ranx.evaluate(ranx.Qrels(qrels), ranx.Run(run), ["ndcg@10", "recall@100", "mrr@10"]))
    return time.perf_counter() - start, {name: float(value) for name, value in values.items()}


def child(library, n_queries, n_docs):
    try:
        seconds, values = call(library, *make_run(n_queries, n_docs))
    except ImportError as error:
        print(json.dumps({"missing": str(error)}))
        return
    print(json.dumps({"seconds": seconds, "values": values}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=6_980)
    parser.add_argument("--documents", type=int, default=1_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", choices=LIBRARIES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.queries, options.documents)
        return
    seconds, values, missing = {name: [] for name in LIBRARIES}, {}, {}
    for _ in range(options.repeats):
        for library in LIBRARIES:  # interleaved, so that load on the machine meets all alike
            command = [sys.executable, __file__, "--child", library]
            command += ["--queries", str(options.queries), "--documents", str(options.documents)]
            out = json.loads(
                subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
            )
            if "missing" in out:
                missing[library] = out["missing"]
                continue
            seconds[library].append(out["seconds"])
            values[library] = out["values"]
    ours = values["fullrank"]
    for library, found in values.items():
        off = {name: (found[name], ours[name]) for name in ours if abs(found[name] - ours[name]) > TOLERANCE}
        if off:
            sys.exit(f"{library} gives other numbers: {off}")
    medians = {library: statistics.median(times) for library, times in seconds.items() if times}
    report = {
        "what": f"{options.queries} queries x {options.documents} documents, first call, median of {options.repeats}",
        "seconds": medians,
        "times_fullrank": {library: value / medians["fullrank"] for library, value in medians.items()},
        "missing": missing,
    }
    write_report("bench_run", report)


if __name__ == "__main__":
    main()
