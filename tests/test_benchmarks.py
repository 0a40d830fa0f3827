"""BEIR and MTEB sets by name: where they are found, base against tuned, the 2-point rule; and the door to them."""

import json
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from fullrank import GoldenSet, Result, evaluate, load_golden
from fullrank._errors import DataError, NonFiniteError, SettingError
from fullrank.benchmarks import (
    average,
    beir_sets,
    forgotten,
    load_benchmark,
    mteb_sets,
    run_benchmarks,
    wanted_metrics,
)
from fullrank.tables import benchmark_table, forgotten_text

COLOUR = re.compile(r"\x1b|\x9b|\r")


def make_result(values, **fields):
    values = np.asarray(values, dtype=np.float64)
    ids = tuple(f"q{i}" for i in range(len(values)))
    counts = {"n_scored": len(values), "n_documents": 1000}
    return Result({"ndcg@10": math.fsum(values) / len(values)}, {"ndcg@10": values}, ids, counts, **fields)


def write_beir(folder, golden, split="test"):
    """Writes a golden set as a BEIR folder."""
    (folder / "qrels").mkdir(parents=True)
    for name, texts in (("corpus", golden.corpus), ("queries", golden.queries)):
        rows = [json.dumps({"_id": key, "text": text}) + "\n" for key, text in texts.items()]
        (folder / f"{name}.jsonl").write_text("".join(rows))
    rows = [f"{q}\t{d}\t{g}\n" for q, grades in golden.qrels.items() for d, g in grades.items()]
    (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(rows))
    return folder


# ------------------------------------------------------------------------------------------------ sets


def test_the_names_of_a_set_in_beir_and_in_mteb():
    (scifact, mine) = beir_sets(["scifact", "mine", "scifact"])
    assert (scifact.name, scifact.folder, scifact.hub, scifact.task) == (
        "scifact",
        "scifact",
        "hf:BeIR/scifact",
        "SciFact",
    )
    assert (mine.folder, mine.task) == ("mine", "mine")
    (fiqa,) = mteb_sets(["FiQA2018"])
    assert (fiqa.name, fiqa.folder, fiqa.hub, fiqa.task) == ("FiQA2018", "fiqa", "mteb:FiQA2018", "FiQA2018")


@pytest.mark.parametrize("name", ["Retrieval-subset", "retrieval-subset"])
def test_the_retrieval_subset(name):
    assert [b.name for b in mteb_sets([name, "SciFact"])] == ["SciFact", "SCIDOCS", "NQ", "FiQA2018"]


def test_the_self_match_rule_of_each_set_is_that_of_mteb():
    mteb = pytest.importorskip("mteb")
    names = ["arguana", "climate-fever", "dbpedia-entity", "fever", "fiqa", "hotpotqa", "msmarco", "nfcorpus", "nq"]
    for benchmark in beir_sets([*names, "quora", "scidocs", "scifact", "trec-covid", "webis-touche2020"]):
        assert mteb.get_task(benchmark.task).ignore_identical_ids == benchmark.exclude_self, benchmark
    others = ["MLQuestions", "NanoArguAnaRetrieval", "no such task"]
    rules = [benchmark.exclude_self for benchmark in mteb_sets(others)]
    assert rules == [*(mteb.get_task(name).ignore_identical_ids for name in others[:2]), False]
    assert rules[0], "the sets must be able to tell"


@pytest.mark.parametrize("names", [["../scifact"], ["/data/scifact"], [".."], ["a\\b"]])
def test_names_that_are_paths_are_refused(names):
    with pytest.raises(SettingError, match="are paths; sets are named, and their folders lie under --beir-root"):
        beir_sets(names)


def test_no_names():
    with pytest.raises(SettingError, match="no sets are named; write them comma-separated, for example --mteb SciFact"):
        mteb_sets([])


def test_a_folder_goes_before_the_hub(tmp_path, tiny_golden):
    write_beir(tmp_path / "scifact", tiny_golden)
    for (benchmark,) in (beir_sets(["scifact"]), mteb_sets(["SciFact"])):
        assert load_benchmark(benchmark, tmp_path).fingerprint() == tiny_golden.fingerprint()


def test_a_set_that_is_nowhere_says_where_it_was_looked_for(tmp_path):
    pytest.importorskip("datasets")
    with pytest.raises(DataError) as found:
        load_benchmark(beir_sets(["scifact"])[0], tmp_path)
    assert f"there is no folder '{tmp_path / 'scifact'}', and hf:BeIR/scifact could not be loaded" in str(found.value)


# ------------------------------------------------------------------------------------------------ outcomes


def outcomes_of(pairs):
    """Runs over results made up by name: ``{set: (base values, tuned values)}``."""
    sets = beir_sets(list(pairs))
    return list(
        run_benchmarks(
            sets,
            lambda b: b.name,
            lambda b, _: make_result(pairs[b.name][1]),
            lambda b, _: make_result(pairs[b.name][0]),
        )
    )


def test_the_rule_names_the_sets_that_lost_more_than_two_points():
    found = outcomes_of({"kept": ([0.5] * 9 + [0.6], [0.5] * 9 + [0.4]), "lost": ([1.0] * 20, [1.0] * 15 + [0.5] * 5)})
    assert [round(o.change.comparison.delta, 10) for o in found] == [-0.02, -0.125]
    assert [o.benchmark.name for o in forgotten(found)] == ["lost"], "exactly 2 points are allowed"
    assert forgotten(found, 0.2) == []
    assert len(forgotten(found, 0.0)) == 2
    text = forgotten_text(found, 0.02)
    assert text.startswith(
        "Over-specialised: more than 2.00 points of NDCG@10 lost against the baseline on lost (-12.50, "
    )
    assert "lower learning rate" in text
    assert forgotten_text(found, 0.2) == "No set has more than 20.00 points of NDCG@10 lost against the baseline."


def test_a_set_that_cannot_be_loaded_does_not_stop_the_others():
    def load(benchmark):
        if benchmark.name == "gone":
            raise DataError("it is not there")
        return benchmark.name

    found = list(run_benchmarks(beir_sets(["gone", "here"]), load, lambda b, g: make_result([0, 1])))
    assert [(o.benchmark.name, o.error, o.result is None) for o in found] == [
        ("gone", "it is not there", True),
        ("here", "", False),
    ]


def test_a_model_that_has_diverged_stops():
    def diverged(benchmark, golden):
        raise NonFiniteError("NaN")

    with pytest.raises(NonFiniteError):
        list(run_benchmarks(beir_sets(["a"]), lambda b: b.name, diverged))


def test_a_baseline_of_other_data_is_an_error_of_that_set():
    other = make_result([0, 1], provenance={"data": "x"})
    mine = make_result([0, 1], provenance={"data": "y"})
    (found,) = run_benchmarks(beir_sets(["a"]), lambda b: b.name, lambda b, g: mine, lambda b, g: other)
    assert found.result is mine
    assert found.error.startswith("no baseline to compare with: the two results differ in data")
    assert forgotten([found], 0.0) == []


def test_tables():
    found = outcomes_of({"one": ([0.0, 0.0, 1.0], [0.0, 1.0, 1.0]), "[bold]two": ([1.0, 1.0], [0.0, 1.0])})
    lines = benchmark_table(found, ["ndcg@10"]).splitlines()
    assert re.search(r"^one +│ *3│0\.3333│0\.6667│ *\+33\.33│", lines[2])
    assert lines[3].startswith("[bold]two")
    assert re.search(r"^average of 2 *│ *│0\.6667│0\.5833│ *-8\.33│", lines[5])
    alone = [type(o)(o.benchmark, o.result) for o in found]
    lines = benchmark_table(alone, ["ndcg@10"]).splitlines()
    assert re.search(r"^one +│ *3│ *1,000│ *0\.6667", lines[2])
    assert re.search(r"^average of 2 *│ *│ *│ *0\.5833", lines[5])


def test_the_average_is_over_sets_not_over_queries():
    assert average([make_result([1.0] * 9 + [0.0]), make_result([0.0])]) == 0.45
    assert math.isnan(average([]))


def test_ndcg_is_always_computed():
    assert [str(m) for m in wanted_metrics(["recall@1"])] == ["ndcg@10", "recall@1"]
    assert [str(m) for m in wanted_metrics(["recall@1", "ndcg@10"])] == ["ndcg@10", "recall@1"]


# ------------------------------------------------------------------------------------------------ the door


@pytest.fixture(scope="module")
def worse_folder(tmp_path_factory, model_folder):
    """The same model with its word embeddings shuffled in part: it retrieves worse."""
    import torch
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(model_folder), device="cpu")
    with torch.no_grad():
        table = model[0].model.embeddings.word_embeddings.weight
        table[20:150] = table[20:21] + 0.01 * table[20:150]
    folder = tmp_path_factory.mktemp("models") / "worse-model"
    model.save_pretrained(str(folder))
    return folder


@pytest.fixture
def root(tmp_path, tiny_golden):
    """A folder with two sets, ``scifact`` and ``fiqa`` (half of the queries, whose ids are those of documents)."""
    folder = tmp_path / "sets"
    write_beir(folder / "scifact", tiny_golden)
    ids = zip(list(tiny_golden.queries)[:8], [f"d{i}" for i in range(8)], strict=True)
    free = {q: d for q, d in ids if d not in tiny_golden.qrels[q]}
    half = GoldenSet(
        {free[q]: tiny_golden.queries[q] for q in free},
        tiny_golden.corpus,
        {free[q]: tiny_golden.qrels[q] for q in free},
    )
    write_beir(folder / "fiqa", half)
    return folder


@pytest.fixture
def run(run_main):
    """Runs ``fullrank eval`` in this process, as a process would tell of it."""
    return lambda *arguments: subprocess.CompletedProcess(arguments, *run_main("eval", *arguments))


def test_eval_of_beir_sets_as_a_real_process(here, root, model_folder):
    found = subprocess.run(
        [sys.executable, "-m", "fullrank", "eval", str(model_folder), "--beir", "scifact,none"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "FULLRANK_BEIR": str(root), "COLUMNS": "20"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 2
    assert not COLOUR.search(found.stdout + found.stderr)
    assert found.stderr.startswith(f"error: none: there is no folder '{root / 'none'}', and hf:BeIR/none could not be")
    assert found.stderr.count("error: ") == 1
    assert "average of 1" in found.stdout
    assert [path.name for path in here.iterdir()] == ["tiny-model-sets"]


def test_eval_of_beir_sets_prints_one_table_and_saves_a_result_each(run, here, root, model_folder):
    found = run(model_folder, "--beir", "scifact,fiqa", "--beir-root", root, "--out", "out")
    assert found.returncode == 0, found.stderr
    assert found.stderr == ""
    assert not COLOUR.search(found.stdout)
    out = here / "out"
    assert sorted(p.name for p in out.iterdir()) == ["fiqa.json", "scifact.json"]
    results = {name: Result.load(out / f"{name}.json") for name in ("scifact", "fiqa")}
    for name, result in results.items():
        assert re.search(rf"{name} *│.*│ *{result['ndcg@10']:.4f}", found.stdout)
        assert result.provenance["ties"] == "trec"
        assert 0 < result.timing["query_ms_p50"] <= result.timing["query_ms_p95"]
    mean = (results["scifact"]["ndcg@10"] + results["fiqa"]["ndcg@10"]) / 2
    assert re.search(rf"average of 2 *│.*{mean:.4f}", found.stdout)
    assert "One query, p50 / p95: scifact " in found.stdout
    assert results["fiqa"].provenance["exclude_self"] is True
    assert results["scifact"].provenance["exclude_self"] is False
    assert all(q not in [d for d, _ in hits] for q, hits in results["fiqa"].hits.items())


def test_the_numbers_are_those_of_the_library(run, here, root, model_folder):
    from sentence_transformers import SentenceTransformer

    found = run(model_folder, "--beir", "scifact", "--beir-root", root, "--json", "--no-latency")
    assert found.returncode == 0, found.stderr
    body = json.loads(found.stdout)
    assert body["sets"]["scifact"]["result"] == "tiny-model-sets/scifact.json"
    assert "query_ms_p50" not in body["sets"]["scifact"]["timing"]
    metrics = list(body["sets"]["scifact"]["metrics"])
    model = SentenceTransformer(str(model_folder), device="cpu")
    assert (
        body["sets"]["scifact"]["metrics"]
        == evaluate(model, load_golden(root / "scifact"), metrics=metrics, ties="trec").metrics
    )
    assert (body["errors"], body["forgotten"]) == ({}, [])
    assert body["average"]["ndcg@10"] == body["sets"]["scifact"]["metrics"]["ndcg@10"]


def test_a_missing_set_is_named_the_others_go_on_and_the_exit_code_is_2(run, here, root, model_folder):
    found = run(model_folder, "--mteb", "SciFact,SCIDOCS", "--beir-root", root)
    assert found.returncode == 2
    assert found.stderr.startswith(
        f"error: SCIDOCS: there is no folder '{root / 'scidocs'}', and mteb:SCIDOCS could not"
    )
    assert "Traceback" not in found.stderr
    assert re.search(r"(?m)^SciFact", found.stdout)
    assert "average of 1" in found.stdout
    assert [p.name for p in (here / "tiny-model-sets").iterdir()] == ["SciFact.json"]


def test_base_against_tuned_applies_the_rule(run, here, root, model_folder, worse_folder):
    options = ("--beir", "scifact,fiqa", "--beir-root", root, "--no-latency")
    found = run(worse_folder, *options, "--baseline", model_folder, "--out", "tuned")
    assert found.returncode == 0, found.stderr
    assert "Over-specialised: more than 2.00 points of NDCG@10 lost against the baseline on scifact (-" in found.stdout
    assert sorted(p.name for p in (here / "tuned" / "baseline").iterdir()) == ["fiqa.json", "scifact.json"]

    found = run(worse_folder, *options, "--baseline", here / "tuned" / "baseline", "--max-drop", "0.02", "--json")
    assert found.returncode == 1, found.stderr
    body = json.loads(found.stdout)
    assert "scifact" in body["forgotten"]
    base, tuned = (Result.load(here / "tuned" / part / "scifact.json") for part in ("baseline", "."))
    assert body["sets"]["scifact"]["change"]["before"] == base["ndcg@10"]
    assert body["sets"]["scifact"]["change"]["after"] == pytest.approx(tuned["ndcg@10"])

    found = run(model_folder, *options, "--baseline", model_folder, "--max-drop", "0")
    assert found.returncode == 0, found.stderr
    assert "No set has more than 0.00 points of NDCG@10 lost against the baseline." in found.stdout


def test_results_in_the_form_of_mteb(run, here, root, model_folder):
    pytest.importorskip("mteb")
    from mteb.results import TaskResult

    found = run(model_folder, "--beir", "scifact", "--beir-root", root, "--mteb-json", "mteb", "--no-latency")
    assert found.returncode == 0, found.stderr
    assert "map@1000" not in found.stdout
    assert "warning" not in found.stdout
    loaded = TaskResult.from_disk(here / "mteb" / "SciFact.json")
    result = Result.load(here / "tiny-model-sets" / "scifact.json")
    assert loaded.get_score() == result["ndcg@10"]
    assert loaded.scores["test"][0]["map_at_1000"] == result["map@1000"]
    assert max(len(hits) for hits in result.hits.values()) == 10


def test_latency_ties_and_mteb_json_of_one_golden_set(run, here, root, model_folder):
    found = run(model_folder, "--data", root / "scifact", "--ties", "worst", "--mteb-json", "mteb", "--out", "r.json")
    assert found.returncode == 0, found.stderr
    assert re.search(r"; one query \d+\.\d / \d+\.\d ms \(p50 / p95\); result in r\.json", found.stdout)
    result = Result.load(here / "r.json")
    assert result.provenance["ties"] == "worst"
    assert result.timing["query_ms_p95"] > 0
    assert (here / "mteb" / "scifact.json").is_file()
    found = run(model_folder, "--data", root / "scifact", "--no-latency", "--json")
    assert "query_ms_p50" not in json.loads(found.stdout)["timing"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ((), "give one of --data, --beir and --mteb"),
        (("--data", "x", "--beir", "scifact"), "give one of --data, --beir and --mteb"),
        (("--beir", "scifact", "--max-drop", "0.02"), "--max-drop needs a --baseline to fall behind"),
        (("--beir", "scifact", "--baseline", ".", "--max-drop", "2"), "max_drop=2.0 must be at least 0 and below 1"),
        (("--beir", "scifact", "--baseline", "."), "--baseline . holds neither a model nor a result of these sets"),
        (("--beir", "scifact", "--baseline", ".", "--out", "."), "--baseline and --out are both .: the new results"),
        (("--beir", "../x"), "are paths; sets are named"),
        (("--beir", ","), "no sets are named"),
        (("--data", "x", "--baseline", "y"), "--baseline and --max-drop go with --beir or --mteb"),
        (("--beir", "scifact", "--exclude-self"), "--exclude-self goes with --data"),
    ],
)
def test_wrong_options(options, text, run, here):
    found = run("./none", *options)
    assert found.returncode == 2
    assert text in " ".join(found.stderr.split())
    assert "Traceback" not in found.stderr
    assert list(here.iterdir()) == []
