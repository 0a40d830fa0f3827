"""Searching and evaluating on an accelerator, beside the bare product there; says so where there is none.

    python scripts/bench_device.py                        # 1,000,000 x 384 documents, 1,000 queries, top 100

Checks that the counts are those of the processor on a part of the data. Writes results/bench_device.json.
"""

import argparse
import statistics
import sys
import time

import torch

from _bench import write_report
from bench_search import METRICS, make_task
from fullrank.evaluate import evaluate_embeddings


def seconds(work, repeats):
    """Median seconds of ``work``, the device waited for."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])  # the first one loads kernels


def bare_product(queries, documents):
    for i in range(0, len(documents), 65_536):
        queries @ documents[i : i + 65_536].T


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=1_000)
    parser.add_argument("--dimensions", type=int, default=384)
    parser.add_argument("--k", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no accelerator here: nothing was measured")
        return
    queries, documents, golden = make_task(options.documents, options.queries, options.dimensions)

    def ours(q, d, to):
        return evaluate_embeddings(q, d, to, similarity="dot", metrics=METRICS, list_length=options.k)

    near = make_task(20_000, 200, options.dimensions)
    far = ours(near[0].cuda(), near[1].cuda(), near[2])
    if far.metrics != ours(*near).metrics:
        sys.exit("the device and the processor give other numbers")
    device_queries, device_documents = queries.cuda(), documents.cuda()
    torch.cuda.reset_peak_memory_stats()
    inputs = torch.cuda.memory_allocated()
    evaluated = seconds(lambda: ours(device_queries, device_documents, golden), options.repeats)
    peak = (torch.cuda.max_memory_allocated() - inputs) / 2**20
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    product = seconds(lambda: bare_product(device_queries, device_documents), options.repeats)
    report = {
        "what": f"{options.documents} x {options.dimensions} documents, {options.queries} queries, top {options.k}",
        "device": torch.cuda.get_device_name(),
        "seconds": {"bare_product": product, "fullrank": evaluated},
        "times_bare_product": evaluated / product,
        "peak_mib_above_inputs": peak,
        "versions": {"torch": torch.__version__},
    }
    write_report("bench_device", report)


if __name__ == "__main__":
    main()
