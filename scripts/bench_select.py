"""Choosing among the checkpoints of a run: documents encoded, against evaluating each checkpoint in full.

    python scripts/bench_select.py                    # the whole standard library, 12 checkpoints
    python scripts/bench_select.py --small            # the demo's 2,000 functions
    python scripts/bench_select.py --train-only       # leave the run in --out, to be looked at

Trains with the demo's task and settings, saves at even steps, evaluates all exhaustively once, and selects by branch
and bound for each metric. The winners must be the same. Writes results/bench_select.json.
"""

import argparse
import sys
import time
import warnings
from pathlib import Path

import numpy as np

from _bench import write_report

QUERIES, SMALL_QUERIES = 650, 200
"""Modules are held out until there are so many queries; of what comes together so many are drawn, and all are tried as
well. Each query brings a relevant document, which every bound needs, so the share hangs on how many there are."""
METRICS = {"recall@1": 0.30, "ndcg@10": 0.50}
"""The share of the documents that each may encode."""


def train(out, *, small, n_checkpoints, steps):
    import peft
    from transformers import set_seed

    from fullrank import demo
    from fullrank.codesearch import standard_library_task
    from fullrank.models import load_sentence_transformer

    sizes = {"n_documents": demo.DOCUMENTS, "n_queries": SMALL_QUERIES} if small else {"n_queries": QUERIES}
    task = standard_library_task(**sizes)
    if out.exists():
        return task.golden
    network = load_sentence_transformer(str(demo.packaged_model()))
    set_seed(demo.SEED)
    network.max_seq_length = demo.MAX_TOKENS
    targets = demo._lora_targets(network)
    config = peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules=targets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        network[0].model = peft.get_peft_model(network[0].model, config)
    network.model_card_data.generate_widget_examples = False
    trainer = demo._trainer(network, task.pairs, out, steps)
    trainer.args.save_strategy, trainer.args.save_steps = "steps", steps // n_checkpoints
    trainer.args.report_to = []
    trainer.train()
    return task.golden


def sampled(golden, n):
    """Returns the golden set with ``n`` of its queries, or itself where it has no more."""
    from fullrank import GoldenSet

    if len(golden.queries) <= n:
        return golden
    chosen = np.sort(np.random.default_rng(0).permutation(len(golden.queries))[:n])
    ids = [golden.query_ids[i] for i in chosen]
    queries, qrels = {q: golden.queries[q] for q in ids}, {q: golden.qrels[q] for q in ids}
    return GoldenSet(queries, golden.corpus, qrels, name=golden.name)


def mean_over(result, metric, golden):
    place = {query_id: i for i, query_id in enumerate(result.query_ids)}
    return float(np.mean(result.per_query[metric][[place[query_id] for query_id in golden.query_ids]]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--checkpoints", type=int, default=12)
    parser.add_argument("--steps", type=int, help="optimizer steps; default 240, with --small 60")
    parser.add_argument("--out", type=Path, help="the run; trained if it is not there")
    parser.add_argument("--train-only", action="store_true")
    options = parser.parse_args()
    out = options.out or Path("runs") / ("bench-select-small" if options.small else "bench-select")
    steps = options.steps or (60 if options.small else 240)
    start = time.perf_counter()
    golden = train(out, small=options.small, n_checkpoints=options.checkpoints, steps=steps)
    print(
        f"{len(golden.corpus)} documents, {len(golden.queries)} queries; {time.perf_counter() - start:.0f} s to train"
    )
    if options.train_only:
        return
    from fullrank import Result, select_checkpoint

    def select(golden, metric, label, *, exhaustive=False):
        start = time.perf_counter()
        journal = out / f"bench-{label}.json"
        found = select_checkpoint(out, golden, metric=metric, exhaustive=exhaustive, journal=journal)
        print(f"{label}: {found.winner.name}, {found.documents_encoded} documents encoded", flush=True)
        return found, time.perf_counter() - start

    whole, _ = select(golden, "recall@1", "exhaustive", exhaustive=True)
    rows = {
        "exhaustive": {
            "documents_encoded": whole.documents_encoded,
            "seconds": sum(len(golden.corpus) / row.documents_per_second for row in whole.rows),
            "scores": {row.name: row.metrics for row in whole.rows},
        }
    }
    exact = {
        row.name: Result.load(next((out / "bench-exhaustive.results").glob(f"*{row.name}.*"))) for row in whole.rows
    }
    n_checkpoints = sum(row.name != "base" for row in whole.rows)
    few = sampled(golden, SMALL_QUERIES if options.small else QUERIES)
    for part in [few, golden] if few is not golden else [golden]:
        n_queries, relevant = len(part.queries), len({d for grades in part.qrels.values() for d in grades})
        for metric, target in METRICS.items():
            found, spent = select(part, metric, f"{metric}-{n_queries}")
            scores = {name: mean_over(result, metric, part) for name, result in exact.items()}
            first = min(whole.rows, key=lambda row: (-round(scores[row.name], 12), row.step))
            if found.winner.name != first.name:
                sys.exit(f"{metric}: branch and bound names {found.winner.name}, exhaustive evaluation {first.name}")
            share = found.documents_encoded / (n_checkpoints * len(golden.corpus))
            rows[f"{metric} of {n_queries} queries"] = {
                "winner": found.winner.name,
                "score": found.winner.score,
                "highest_of_the_others": max(v for name, v in scores.items() if name != first.name),
                "at_least_over_the_base": found.winner.delta,
                "p_at_most": found.p_at_most,
                "relevant_documents": relevant,
                "documents_encoded": found.documents_encoded,
                "share_of_full_evaluations_of_the_checkpoints": share,
                "target_share": target,
                "reached": share <= target,
                "seconds": spent,
            }
    report = {
        "what": f"{len(golden.corpus)} documents, {n_checkpoints} checkpoints of {steps} steps and the base, which is "
        "left at its bound where that proves the choice better",
        "results": rows,
    }
    write_report("bench_select_small" if options.small else "bench_select", report)


if __name__ == "__main__":
    main()
