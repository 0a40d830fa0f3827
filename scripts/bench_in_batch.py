"""What the in-batch diagnostics cost: a training step with and without them, on the same batches.

    python scripts/bench_in_batch.py                # all-MiniLM-L6-v2, MultipleNegativesRankingLoss, 32 pairs a step
    python scripts/bench_in_batch.py --quick        # fewer steps, for a first number
    python scripts/bench_in_batch.py --loss cached --batch 256

One model and one optimizer; the steps take turns, and which comes first changes every time, so that load on the machine
meets both alike. Also timed: what the monitor computes, by itself, and its share of a step; that is steadier than a
difference of steps. Fails where the losses differ in a bit. Writes results/bench_in_batch.json.
"""

import argparse
import statistics
import sys
import time

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses

from _bench import write_report
from fullrank import in_batch
from fullrank.codesearch import standard_library_task
from fullrank.demo import packaged_model
from fullrank.in_batch import InBatchMonitor
from fullrank.taps import text_keys

TARGET = 1.02
FLUSH_EVERY = 10  # a loss line, as the Trainer writes them


def make_loss(kind, model):
    if kind == "cached":
        return losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=32)
    return losses.MultipleNegativesRankingLoss(model)


def step(loss, optimizer, features):
    """Returns seconds and loss of one optimizer step; the learning rate is 0, so that both kinds see equal weights."""
    torch.manual_seed(0)
    start = time.perf_counter()
    value = loss(features, None)
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, value.detach()


def own_seconds(features, repeats=50):
    """Returns the median of what the monitor computes in a step: keys of the texts, ranks of one score matrix."""
    n = len(features[0]["input_ids"])
    scores = torch.randn(n, n, device=features[0]["input_ids"].device)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        keys = text_keys(features[1:]).flatten()
        in_batch._sums(scores, torch.eq(keys[:, None], keys[None, :]))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--loss", choices=("plain", "cached"), default="plain")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    steps = 12 if options.quick else options.steps
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = SentenceTransformer(str(packaged_model()), device=device).train()
    model.max_seq_length = options.tokens
    pairs = standard_library_task(n_documents=500, n_queries=50).pairs
    bare, watched = make_loss(options.loss, model), make_loss(options.loss, model)
    monitor = InBatchMonitor()
    monitor.watch_loss(watched)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    seconds = {"without": [], "with": []}
    for i in range(-2, steps):  # two rounds to warm up
        chosen = [pairs[(i * options.batch + j) % len(pairs)] for j in range(options.batch)]
        values = {}
        for name in ("without", "with") if i % 2 else ("with", "without"):
            features = [
                {key: value.to(device) if torch.is_tensor(value) else value for key, value in column.items()}
                for column in (model.preprocess([text for text, _ in chosen]), model.preprocess([t for _, t in chosen]))
            ]
            taken, values[name] = step(watched if name == "with" else bare, optimizer, features)
            if name == "with" and i % FLUSH_EVERY == 0:
                start = time.perf_counter()
                found = monitor.flush()
                taken += time.perf_counter() - start
            if i >= 0:
                seconds[name].append(taken)
        if not torch.equal(values["with"], values["without"]):
            sys.exit(f"step {i}: the loss is {values['with']} with the monitor and {values['without']} without")
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    paired = [a / b for a, b in zip(seconds["with"], seconds["without"], strict=True)]
    report = {
        "what": f"{options.loss} MNRL, {options.batch} pairs of up to {options.tokens} tokens, {steps} steps each, "
        f"{device}, {torch.get_num_threads()} threads",
        "seconds": medians,
        "ratio_of_medians": medians["with"] / medians["without"],
        "median_of_paired_ratios": statistics.median(paired),
        "own_work_seconds": (own := own_seconds(features)),
        "own_work_share_of_a_step": own / medians["without"],
        "target_ratio": TARGET,
        "last_numbers": found,
    }
    write_report("bench_in_batch", report)


if __name__ == "__main__":
    main()
