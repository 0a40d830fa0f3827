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

from _bench import write_report

QUERIES, SMALL_QUERIES = 650, 200
"""Modules are held out until there are so many queries. Each brings a relevant document, which every bound needs:
with a third of the functions as queries, as the demo has them, a third would be encoded whatever the order."""
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
    from fullrank import select_checkpoint

    def select(metric, *, exhaustive):
        start = time.perf_counter()
        found = select_checkpoint(
            out, golden, metric=metric, exhaustive=exhaustive, journal=out / f"bench-{metric}-{exhaustive}.json"
        )
        print(f"{metric}: {found.winner.name}, {found.documents_encoded} documents encoded", flush=True)
        return found, time.perf_counter() - start

    bounded = {metric: select(metric, exhaustive=False) for metric in METRICS}
    whole, seconds = select("recall@1", exhaustive=True)
    rows = {
        "exhaustive": {
            "documents_encoded": whole.documents_encoded,
            "seconds": seconds,
            "scores": {row.name: row.metrics for row in whole.rows},
        }
    }
    for metric, (found, spent) in bounded.items():
        first = min(whole.rows, key=lambda row: (-row.metrics[metric], row.step))
        if found.winner.name != first.name:
            sys.exit(f"{metric}: branch and bound names {found.winner.name}, exhaustive evaluation {first.name}")
        share = found.documents_encoded / (options.checkpoints * len(golden.corpus))
        rows[metric] = {
            "winner": found.winner.name,
            "documents_encoded": found.documents_encoded,
            "share_of_full_evaluations_of_the_checkpoints": share,
            "target_share": METRICS[metric],
            "reached": share <= METRICS[metric],
            "seconds": spent,
        }
    report = {
        "what": f"{len(golden.corpus)} documents, {len(golden.queries)} queries, {options.checkpoints} checkpoints of "
        f"{steps} steps and the base",
        "results": rows,
    }
    write_report("bench_select_small" if options.small else "bench_select", report)


if __name__ == "__main__":
    main()
