"""What searching costs as the corpus grows: seconds and peak memory at 10,000, 100,000 and 1,000,000 documents.

    python scripts/bench_growth.py
    python scripts/bench_growth.py --sizes 10000,100000 --queries 100

Random vectors of 384 dimensions are made a block at a time and forgotten, so that memory shows what the search itself
holds; only the search is timed. Each size runs in a process of its own, one thread. Writes results/bench_growth.json.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import time

import numpy as np
import torch

from _bench import write_report
from fullrank.search import TargetPairs, prepare, rank

BLOCK = 8_192


def unit_rows(n, d, seed):
    rows = torch.randn(n, d, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(rows, dim=1)


def search(n, n_queries, d, k):
    """Returns seconds of searching n documents and MiB held above what was there before."""
    torch.set_num_threads(1)
    queries = prepare(unit_rows(n_queries, d, 0), "dot")
    first = unit_rows(min(BLOCK, n), d, 1)
    answers = torch.arange(n_queries) % len(first)  # in the first block, so that it can be made again
    pairs = TargetPairs(torch.arange(n_queries), answers)
    spent = 0.0

    def blocks():
        nonlocal spent, mark
        for i, start in enumerate(range(0, n, BLOCK)):
            rows = prepare(unit_rows(min(BLOCK, n - start), d, i + 1), "dot")
            mark = time.perf_counter()
            yield torch.arange(start, start + len(rows.rows)), rows
            spent += time.perf_counter() - mark

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    mark = 0.0
    found = rank(queries, pairs, prepare(first, "dot")[answers], blocks(), similarity="dot", k=k)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"seconds": spent, "peak_mib": held / 1024, "mean_rank": float(found.better.double().mean()) + 1}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="10000,100000,1000000")
    parser.add_argument("--queries", type=int, default=1_000)
    parser.add_argument("--dimensions", type=int, default=384)
    parser.add_argument("--k", type=int, default=100)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(search(options.one, options.queries, options.dimensions, options.k)))
        return
    rows = {}
    for n in map(int, options.sizes.split(",")):
        same = [f"--{name}={getattr(options, name)}" for name in ("queries", "dimensions", "k")]
        run = subprocess.run(
            [sys.executable, __file__, f"--one={n}", *same], capture_output=True, text=True, check=True
        )
        rows[n] = json.loads(run.stdout)
    x, y = (np.log([float(v) for v in values]) for values in (rows, [row["seconds"] for row in rows.values()]))
    slope = float(np.polyfit(x, y, 1)[0]) if len(rows) > 1 else math.nan
    what = f"{options.queries} queries, {options.dimensions} dimensions, top {options.k}, one thread, one run a size"
    versions = {"torch": torch.__version__, "numpy": np.__version__}
    write_report("bench_growth", {"what": what, "documents": rows, "slope_of_time": slope, "versions": versions})


if __name__ == "__main__":
    main()
