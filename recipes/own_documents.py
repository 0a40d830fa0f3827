"""From a folder of text or Markdown files to a golden set and training pairs of your own.

    python recipes/own_documents.py --tiny
    python recipes/own_documents.py --documents docs --output data/docs --queries real.jsonl --unanswerable none.jsonl

Writes corpus.jsonl (the chunks), synthetic.jsonl (golden set of made-up queries from held-out documents), real.jsonl
(golden set of real questions, kept apart), train.jsonl (pairs from the other documents) and unanswerable.todo.jsonl, to
be filled in by hand with questions that the documents do not answer and given back with --unanswerable.

Queries are headings, which are then cut from the chunks: with them in place any model finds the answer by its words. A
function of your own makes better ones: --llm module:function, called with a chunk, returns a list of questions.
--queries holds one object a line: {"query": ..., "document": "guide/install.md", "contains": "pip install"}; a null
document says that there is no answer, and without "contains" every chunk of the document is one.

Then: python recipes/lora_sentence_transformers.py --data data/docs/synthetic.jsonl --train data/docs/train.jsonl
"""

import importlib
import inspect
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from transformers import HfArgumentParser
from transformers.hf_argparser import HfArg

from fullrank import TrainingExample, evaluate, load_golden
from fullrank._errors import DataError, SettingError
from fullrank.checks import normalise
from fullrank.demo import packaged_model
from fullrank.documents import Section, held_out_documents, read_documents, read_questions
from fullrank.models import load_sentence_transformer
from fullrank.records import mistakes_as_messages, peak_memory_mib, write_record
from fullrank.report import findings_text, result_table
from fullrank.sources import Problems, read_objects
from fullrank.training_data import write_training_data

MIN_WORDS = 5
UNANSWERABLE = 0.15
"""Share of unanswerable questions to aim at: between 10 and 20 %."""
MODULES = "bisect csv fnmatch glob heapq json shutil string tempfile textwrap"
"""What the try-out reads the documentation of."""


@dataclass(frozen=True)
class Knobs:
    """Everything there is to turn; each is an option of the command line."""

    documents: str = HfArg(default="docs", help="folder of .md and .txt files")
    output: str = HfArg(default="runs/documents", help="folder of the golden sets and the training pairs")
    queries: str | None = HfArg(default=None, help="real questions, JSONL")
    unanswerable: str | None = HfArg(default=None, help="unanswerable.todo.jsonl, filled in")
    llm: str | None = HfArg(default=None, help="module:function, text -> list of questions")
    chunk: int = HfArg(default=800, help="characters of a chunk at most")
    held_out: float = HfArg(default=0.3, help="share of the documents that are not trained on")
    model: str | None = HfArg(default=None, help="path or hub id of the model to measure")
    tiny: bool = HfArg(default=False, help="a try-out of a minute on a CPU, on documentation of Python modules")
    json: str | None = HfArg(default=None, help="write counts and numbers there")


def made_up(sections: list[Section], ask: Callable[[str], list[str]] | None) -> list[tuple[Section, str, list[str]]]:
    """Returns (section, query, answers): what ``ask`` makes of each chunk, or the headings that stand once."""
    if ask is not None:
        chunks = [(section, key, text) for section in sections for key, text in section.chunks.items()]
        return [(section, query, [key]) for section, key, text in chunks for query in ask(text) if query.strip()]
    count = Counter(normalise(s.heading) for s in sections)
    return [
        (s, s.heading, list(s.chunks))
        for s in sections
        if s.heading and count[normalise(s.heading)] == 1 and len(" ".join(s.chunks.values()).split()) >= MIN_WORDS
    ]


def imported(name: str) -> Callable[[str], list[str]]:
    """Returns the function of ``module:function``."""
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingError(f"--llm {name}: {error}. Expected module:function that Python can import") from error


def unanswerable(knobs: Knobs, n_answerable: int) -> list[dict]:
    """Returns the questions without an answer that were filled in; writes the form to fill in where there is none."""
    n = max(1, round(UNANSWERABLE / (1 - UNANSWERABLE) * n_answerable))
    form = Path(knobs.output) / "unanswerable.todo.jsonl"
    if not form.exists():  # it may have been filled in
        row = {"query": "", "relevant": [], "type": "unanswerable"}
        write_lines(form, [{"id": f"unanswerable-{i}"} | row for i in range(1, n + 1)])
    if knobs.unanswerable is None:
        print(f"Fill in {form} with about {n} questions that the documents do not answer, for --unanswerable")
        return []
    problems = Problems(knobs.unanswerable, f"Expected rows as in {form}.")
    rows = [row for _, row in read_objects(Path(knobs.unanswerable), problems)]
    problems.close(rows)
    return [row for row in rows if str(row.get("query", "")).strip()]


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def python_documents(folder: Path) -> None:
    """Writes the documentation of some modules of Python as Markdown, and two real questions beside the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in MODULES.split():
        module = importlib.import_module(name)
        parts = [f"# {name}", inspect.getdoc(module) or ""]
        for key in getattr(module, "__all__", ()):
            parts += [f"## {key}", inspect.getdoc(getattr(module, key)) or ""]
        (folder / f"{name}.md").write_text("\n\n".join(parts), encoding="utf-8")
    questions = (
        ("how do I delete a whole folder", "shutil.md", "delete a directory tree"),
        ("is it raining", None, ""),
    )
    rows = [{"query": query, "document": name, "contains": part} for query, name, part in questions]
    write_lines(folder.with_name("questions.jsonl"), rows)


def main(knobs: Knobs) -> None:
    start, out = time.perf_counter(), Path(knobs.output)
    if knobs.tiny:
        knobs = replace(knobs, documents=str(out / "docs"), queries=knobs.queries or str(out / "questions.jsonl"))
        python_documents(out / "docs")
    out.mkdir(parents=True, exist_ok=True)
    sections = read_documents(knobs.documents, size=knobs.chunk)
    real = read_questions(knobs.queries, sections) if knobs.queries else []
    queries = made_up(sections, imported(knobs.llm) if knobs.llm else None)
    if not queries and not real:
        raise DataError(
            f"{knobs.documents} has no headings to make queries of (in .md files, each with {MIN_WORDS} words below). "
            "Give --llm module:function or --queries"
        )
    documents = {section.document for section in sections}
    asked = {key.rpartition("#")[0] for row in real for key in row["relevant"]}  # real questions measure as well
    tested = held_out_documents(documents, knobs.held_out) | asked
    chunks = {key: text for section in sections for key, text in section.chunks.items()}
    write_lines(out / "corpus.jsonl", [{"_id": key, "text": text} for key, text in chunks.items()])
    kind = "llm" if knobs.llm else "heading"
    synthetic = [
        {"id": f"{kind}-{i}", "query": query, "relevant": answers, "type": kind}
        for i, (section, query, answers) in enumerate(queries)
        if section.document in tested
    ]
    synthetic += unanswerable(knobs, len(synthetic))
    pairs = [(query, chunks[answers[0]]) for section, query, answers in queries if section.document not in tested]
    seen = {normalise(text) for section in sections if section.document in tested for text in section.chunks.values()}
    fit = [pair for pair in pairs if normalise(pair[1]) not in seen]  # the same text stands in a held-out document
    print(f"{len(pairs) - len(fit)} training pairs left out: a held-out document has their text")
    pairs = fit
    write_training_data(out / "train.jsonl", [TrainingExample(*pair) for pair in pairs])
    write_lines(out / "synthetic.jsonl", synthetic)
    if knobs.queries:
        write_lines(out / "real.jsonl", real)
    print(f"{len(documents)} documents, {len(chunks)} chunks, {len(pairs)} training pairs")
    if not pairs:
        print(
            f"Nothing to train on: {len(tested)} of {len(documents)} documents are held out. Add documents with "
            "headings, lower --held_out, ask about fewer of them in --queries, or give --llm"
        )

    model = load_sentence_transformer(knobs.model or str(packaged_model()))
    model.max_seq_length = 64 if knobs.tiny else model.max_seq_length
    record = {"settings": asdict(knobs), "chunks": len(chunks), "pairs": len(pairs)}
    answered = {"synthetic": synthetic, "real": real}
    for name in (name for name, rows in answered.items() if any(row["relevant"] for row in rows)):  # never in one mean
        golden = load_golden(out / f"{name}.jsonl")
        print(findings_text(golden.check(train_pairs=pairs)))
        result = evaluate(model, golden)
        print(result_table(result, title=f"{name}, {len(golden.queries)} queries"))
        record[name] = {"metrics": result.metrics, "counts": result.counts, "groups": result.by_group()}
    if knobs.json:
        cost = {"seconds": round(time.perf_counter() - start, 1), "peak_memory_mib": peak_memory_mib()}
        write_record(knobs.json, record | cost)


if __name__ == "__main__":
    (parsed,) = HfArgumentParser(Knobs, description=__doc__).parse_args_into_dataclasses()
    with mistakes_as_messages():
        main(parsed)
