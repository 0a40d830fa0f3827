"""Result and Comparison on small hand-built results: files, groups, holes, TREC runs, paired verdicts."""

import dataclasses
import json
import math

import numpy as np
import pytest
import pytrec_eval

from fullrank._errors import DataError, SettingError
from fullrank._files import write_atomically
from fullrank.comparison import compare
from fullrank.metrics import Metric
from fullrank.result import Finding, Result, summarise, vacuous_cutoffs


def make(**changes):
    """Three answerable queries and one, q4, that is not; q2 misses its answer, q3 has two unjudged ahead of it."""
    parts = {
        "metrics": {"recall@1": 1 / 3, "mrr": 4 / 9},
        "per_query": {"recall@1": np.array([1.0, 0.0, 0.0]), "mrr": np.array([1.0, 0.0, 1 / 3])},
        "query_ids": ("q1", "q2", "q3"),
        "counts": {"scored": 3, "unanswerable": 1, "documents": 9},
        "hits": {
            "q1": [("a", 0.9), ("b", 0.8)],
            "q2": [("x", 0.5), ("b", 0.25)],
            "q3": [("y", 0.75), ("z", 0.7), ("c", 0.6), ("w", 0.1)],
            "q4": [("a", 0.2)],
        },
        "qrels": {"q1": {"a": 2.0, "n": 0.0}, "q2": {"m": 1.0, "b": 0.0}, "q3": {"c": 1.0}, "q4": {}},
        "queries": {"q1": "what?", "q2": "größe 東京 😀", "q3": "line\nbreak \u2028 'quoted'", "q4": "none"},
        "groups": {"q1": "fact", "q2": "how-to", "q3": "fact", "q4": "fact"},
        "timing": {"encode": 0.1 + 0.2},
        "provenance": {"data": "f00d", "ties": "expected", "prompts": {"query": None}, "versions": [1, 2]},
        "findings": (Finding("vacuous-k", "warning", "says little", 2, ("@50", "@100"), "use recall@1"),),
        "collapsed": True,
        "eligible": False,
    }
    return Result(**{**parts, **changes})


def scored(values, *, ids=None, metric="mrr", **changes):
    values = np.array(values, dtype=np.float64)
    ids = tuple(ids or (f"q{i}" for i in range(len(values))))
    return Result({metric: float(np.mean(values))}, {metric: values}, ids, {"scored": len(values)}, **changes)


def plain(result):
    """Everything a result holds, comparable by ==."""
    parts = {f.name: getattr(result, f.name) for f in dataclasses.fields(result)}
    return parts | {"per_query": {name: values.tolist() for name, values in result.per_query.items()}}


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    "result",
    [
        make(),
        make(relevant_from=2),
        scored([0.1, 1 / 3, 1e-300, 0.7], ids=["ä", "東京", "😀", 'a "b"\t\\']),
        Result({}, {}, (), {}),
    ],
)
def test_reads_back_equal(tmp_path, result):
    path = result.save(tmp_path / "result.json")
    assert path == tmp_path / "result.json"
    loaded = Result.load(path)
    assert plain(loaded) == plain(result)
    assert all(v.dtype == np.float64 for v in loaded.per_query.values())
    assert loaded.save(tmp_path / "again.json").read_bytes() == path.read_bytes()
    assert Result.load(str(path)).query_ids == result.query_ids


def test_half_of_a_surrogate_pair_reads_back(tmp_path):
    """Broken text is in real data; what was saved must be readable."""
    result = make(queries={"q1": "half \ud83d of a pair"})
    assert Result.load(result.save(tmp_path / "r.json")) == result


def test_equal_results_are_equal(tmp_path):
    result = make()
    assert Result.load(result.save(tmp_path / "r.json")) == result
    assert result != make(per_query={"recall@1": np.array([1.0, 0.0, 0.0]), "mrr": np.array([1.0, 0.5, 0.5])})


def test_a_file_names_its_schema(tmp_path):
    body = json.loads(make().save(tmp_path / "r.json").read_text(encoding="utf-8"))
    assert body["schema"] == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a result file"),
        ("[1]", "not a result file"),
        ("null", "not a result file"),
        ('{"recall@1": 0.5}', "not a result file"),
        ("{'schema': 1}", "not a result file"),
    ],
)
def test_not_a_result_file(tmp_path, text, says):
    path = tmp_path / "other.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=f"other.json.*{says}"):
        Result.load(path)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_truncated_file(tmp_path, share):
    path = make().save(tmp_path / "cut.json")
    whole = path.read_bytes().rstrip()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(DataError, match=r"cut\.json"):
        Result.load(path)


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "noise.json"
    path.write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(DataError, match=r"noise\.json"):
        Result.load(path)


def test_no_such_file(tmp_path):
    with pytest.raises(DataError, match=r"gone\.json"):
        Result.load(tmp_path / "gone.json")
    with pytest.raises(DataError, match=tmp_path.name):
        Result.load(tmp_path)


@pytest.mark.parametrize("schema", [0, 2, "1", None])
def test_another_schema(tmp_path, schema):
    path = make().save(tmp_path / "old.json")
    body = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(body | {"schema": schema}), encoding="utf-8")
    with pytest.raises(DataError, match=r"old\.json.*schema version.*1"):
        Result.load(path)


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Result)])
def test_a_missing_field(tmp_path, name):
    path = make().save(tmp_path / "less.json")
    body = json.loads(path.read_text(encoding="utf-8"))
    del body[name]
    path.write_text(json.dumps(body), encoding="utf-8")
    with pytest.raises(DataError, match=r"less\.json"):
        Result.load(path)


@pytest.mark.parametrize(
    "change",
    [
        {"surprise": 1},
        {"per_query": [1]},
        {"per_query": {"mrr": ["a"]}},
        {"hits": {"q1": [["a"]]}},
        {"findings": [{}]},
        {"query_ids": 3},
        {"query_ids": ["q1"]},  # fewer than there are values
    ],
)
def test_fields_of_another_shape(tmp_path, change):
    path = make().save(tmp_path / "odd.json")
    body = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(body | change), encoding="utf-8")
    with pytest.raises(DataError, match=r"odd\.json"):
        Result.load(path)


@pytest.mark.parametrize("value", [None, "x", True, float("nan")])
def test_a_value_that_is_no_number_is_named_with_file_metric_and_query(tmp_path, value):
    path = make().save(tmp_path / "r.json")
    body = json.loads(path.read_text())
    body["per_query"]["mrr"][1] = value
    path.write_text(json.dumps(body))
    with pytest.raises(DataError, match=rf"r.json is not .*: metric 'mrr' of query 'q2' is {value!r} and no finite"):
        Result.load(path)
    body["metrics"]["mrr"], body["per_query"]["mrr"][1] = value, 0.0
    path.write_text(json.dumps(body))
    with pytest.raises(DataError, match=rf"r.json is not .*: metric 'mrr' is {value!r} and no finite number"):
        Result.load(path)


def test_a_failed_save_leaves_the_old_file_whole(tmp_path):
    path = make().save(tmp_path / "r.json")
    before = path.read_bytes()
    for broken in (make(metrics={"mrr": math.nan}), make(provenance={"model": object()})):
        with pytest.raises((ValueError, TypeError)):
            broken.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_a_failed_write_leaves_no_temporary_file(tmp_path, monkeypatch):
    def full(_):
        raise OSError("no space left")

    path = write_atomically(tmp_path / "r.json", "old")
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="no space left"):
            write_atomically(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]
    assert write_atomically(path, "new") == path
    assert path.read_text(encoding="utf-8") == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


# ---------------------------------------------------------------- what a result says


def test_values_by_name():
    result = make()
    assert result["mrr"] == result[Metric("mrr")] == result["eval_mrr"] == 4 / 9
    with pytest.raises(SettingError, match="metric 'ndcg@10' was not computed; there are recall@1, mrr"):
        result["ndcg@10"]
    with pytest.raises(SettingError, match="recall@1"):
        result["recall_at_1"]


def test_interval_of_a_metric():
    low, high = make().ci("mrr")
    assert 0 <= low < 4 / 9 < high <= 1
    assert make().ci("mrr", 0.8).level == 0.8
    assert make().ci(Metric("mrr"), seed=4) == make().ci("mrr", seed=4)
    assert scored([1.0] * 20).ci("mrr").method == "wilson"
    with pytest.raises(SettingError, match="was not computed"):
        make().ci("map")


def test_by_group():
    # fact: q1 and q3; q4 is unanswerable and counts nowhere
    found = make().by_group()
    assert found == {
        "fact": {"n": 2, "recall@1": 0.5, "mrr": pytest.approx(2 / 3)},
        "how-to": {"n": 1, "recall@1": 0, "mrr": 0},
    }


def test_worst_queries():
    first, second = make().worst(2, "mrr")
    assert (first.query_id, first.value, first.query) == ("q2", 0, "größe 東京 😀")
    assert first.expected == {"m": 1}
    assert first.retrieved == [("x", 0.5), ("b", 0.25)]
    assert (second.query_id, second.value) == ("q3", pytest.approx(1 / 3))
    assert [m.query_id for m in make().worst()] == ["q2", "q3", "q1"]
    assert [m.query_id for m in make().worst(2)] == ["q2", "q3"]  # recall@1: two zeros, by id
    assert make().worst(0) == []


def test_worst_lists_only_relevant_documents():
    result = make(relevant_from=2, qrels={"q1": {"a": 2.0, "b": 1.0}, "q2": {}, "q3": {}})
    assert next(m for m in result.worst() if m.query_id == "q1").expected == {"a": 2}
    below = make(relevant_from=0, qrels={"q1": {"a": 2.0, "b": 0.0}, "q2": {}, "q3": {}})
    assert next(m for m in below.worst() if m.query_id == "q1").expected == {"a": 2}


def test_share_of_judged_documents():
    # q1: a of a, b; q2: b (grade 0 is a judgement) of x, b; q3: c of y, z, c, w; q4 does not count: 3 of 8
    assert make().judged == pytest.approx(3 / 8)
    assert scored([1.0]).judged == 0


def test_holes():
    # above the first answer and without a judgement: q3 y and z; q2's answer is not listed, so x
    assert make().holes() == [("q3", "y", 0.75), ("q3", "z", 0.7), ("q2", "x", 0.5)]
    assert make().holes(1) == [("q3", "y", 0.75)]


def test_the_result_is_not_changed_by_looking():
    result = make()
    result.by_group(), result.worst(), result.holes(), result.ci("mrr")
    assert plain(result) == plain(make())


def test_a_finding_says_what_and_what_to_do():
    text = str(make().findings[0])
    for part in ("warning", "says little", "@50", "use recall@1"):
        assert part in text


def test_means_are_exactly_rounded_over_the_answerable():
    values = np.array([0.1] * 10 + [math.nan])
    means, kept = summarise({"mrr": values}, ~np.isnan(values))
    assert means == {"mrr": 0.1}  # a running sum gives 0.09999999999999999
    assert kept["mrr"].tolist() == [0.1] * 10


# ---------------------------------------------------------------- TREC runs


def test_a_trec_run_keeps_the_order(tmp_path):
    rng = np.random.default_rng(0)
    score = np.float32(0.8)
    hits = {}
    for q in range(5):
        scores = [float(score)]
        for _ in range(30):  # neighbours in float32: their order must survive
            scores.append(float(np.nextafter(np.float32(scores[-1]), np.float32(-1))))
        scores += [1e-30, 0.0, -1e-30, -2.5]
        hits[f"q{q}"] = [(f"d{i}é", s) for i, s in zip(rng.permutation(len(scores)), scores, strict=True)]
    path = scored([1.0] * 5, hits=hits).to_trec_run(tmp_path / "out.run", tag="mine")
    with path.open(encoding="utf-8") as lines:
        run = pytrec_eval.parse_run(lines)
    assert {q: sorted(docs, key=docs.get, reverse=True) for q, docs in run.items()} == {
        q: [d for d, _ in rows] for q, rows in hits.items()
    }
    first, second = path.read_text(encoding="utf-8").splitlines()[:2]
    assert first.split()[:2] == ["q0", "Q0"]
    assert (first.split()[3], second.split()[3], first.split()[5]) == ("1", "2", "mine")


@pytest.mark.parametrize("bad", ["a b", "a\tb", "a\nb", "", "a\u00a0b"])
def test_ids_that_a_trec_run_cannot_hold(tmp_path, bad):
    for hits in ({bad: [("d", 1.0)]}, {"q": [(bad, 1.0)]}):
        with pytest.raises(DataError, match="white space"):
            scored([1.0], hits=hits).to_trec_run(tmp_path / "out.run")
    assert list(tmp_path.iterdir()) == []


def test_a_tag_that_a_trec_run_cannot_hold(tmp_path):
    with pytest.raises((DataError, SettingError), match="tag"):
        scored([1.0], hits={"q": [("d", 1.0)]}).to_trec_run(tmp_path / "out.run", tag="my model")


# ---------------------------------------------------------------- comparison


def test_joined_by_query_id():
    # a .5 -> 1, b .5 -> .5, c 1 -> .25: mean of .5, 0, -.75
    before = scored([0.5, 0.5, 1.0], ids=["a", "b", "c"])
    after = scored([0.25, 1.0, 0.5], ids=["c", "a", "b"])
    found = compare(before, after, "mrr")
    assert (found.metric, found.n) == ("mrr", 3)
    assert found.delta == pytest.approx(-0.25 / 3)
    assert (found.wins, found.losses) == (("a",), ("c",))
    assert found.verdict == "not separable"
    assert found.interval.low <= found.delta <= found.interval.high


def test_better_and_worse():
    rng = np.random.default_rng(1)
    low = rng.random(40) * 0.5
    before, after = scored(low), scored(low + 0.1 + 0.2 * rng.random(40))
    better, worse = compare(before, after, "mrr"), compare(after, before, Metric("mrr"))
    assert (better.verdict, worse.verdict) == ("better", "worse")
    assert better.delta == pytest.approx(-worse.delta)
    assert better.delta == pytest.approx(after["mrr"] - before["mrr"])
    assert better.p_value == worse.p_value < 0.001
    assert better.interval.low > 0 > worse.interval.high
    assert (len(better.wins), better.losses) == (40, ())
    assert (worse.wins, len(worse.losses)) == ((), 40)


def test_the_verdict_follows_the_level():
    # 6 wins of 6: p = 2 / 64 = .03125
    before, after = scored([0.0] * 6), scored([0.5, 0.25, 1.0, 1.0, 0.5, 0.2])
    assert compare(before, after, "mrr").p_value == pytest.approx(2 / 64)
    assert compare(before, after, "mrr").verdict == "better"
    strict = compare(before, after, "mrr", level=0.99)
    assert (strict.verdict, strict.interval.level) == ("not separable", 0.99)


def test_a_result_with_itself():
    found = compare(make(), make(), "mrr")
    assert (found.delta, found.p_value, found.verdict) == (0, 1, "not separable")
    assert (found.wins, found.losses) == ((), ())
    assert found.interval.low <= 0 <= found.interval.high


@pytest.mark.parametrize("after", [[0.0, 0.5, 0.2, 1.0], [0.5, 0.5, 0.2, 1.0]])
def test_one_query_changed(after):
    before = scored([1.0, 0.5, 0.2, 1.0])
    found = compare(before, scored(after), "mrr")
    assert (found.n, found.p_value, found.verdict, found.losses) == (4, 1, "not separable", ("q0",))


def test_one_query():
    found = compare(scored([0.5]), scored([1.0]), "mrr")
    assert (found.n, found.p_value, found.verdict) == (1, 1, "not separable")
    assert found.interval.method == "degenerate"


@pytest.mark.parametrize("step", [0.5, 1.0, 0.25])
def test_the_interval_of_a_loss_mirrors_that_of_a_gain(step):
    low, high = scored([0.0] * 6), scored([step] * 6)
    gain, loss = compare(low, high, "mrr").interval, compare(high, low, "mrr").interval
    assert (gain.method, gain.low, gain.high) == (loss.method, pytest.approx(-loss.high), pytest.approx(-loss.low))
    assert gain.low < gain.high


def test_other_data_is_refused():
    before = scored([0.5, 0.2], provenance={"data": "f00d"})
    after = scored([0.2, 0.5], provenance={"data": "beef"})
    with pytest.raises(DataError, match="the two results differ in data"):
        compare(before, after, "mrr")
    assert compare(before, after, "mrr", allow_other_data=True).n == 2


@pytest.mark.parametrize(
    "settings",
    [
        ({"provenance": {"ties": "expected"}}, {"provenance": {"ties": "trec"}}),
        ({"provenance": {"truncated_run": True}}, {"provenance": {"truncated_run": False}}),
        ({"relevant_from": 1}, {"relevant_from": 2}),
    ],
)
def test_other_settings_of_the_data_are_refused(settings):
    before, after = (scored([0.5, 0.2], **changes) for changes in settings)
    with pytest.raises(DataError, match="the two results differ in"):
        compare(before, after, "mrr")


def test_other_queries_are_refused():
    before, after = scored([0.5, 0.2], ids=["a", "b"]), scored([1.0, 0.6, 0.1], ids=["c", "b", "a"])
    with pytest.raises(DataError, match="differ in queries"):
        compare(before, after, "mrr")
    found = compare(before, after, "mrr", allow_other_data=True)
    assert (found.n, found.wins, found.losses) == (2, ("b",), ("a",))


@pytest.mark.parametrize("allow", [False, True])
def test_no_common_query(allow):
    with pytest.raises(DataError, match="no query in common"):
        compare(scored([0.5], ids=["a"]), scored([0.5], ids=["b"]), "mrr", allow_other_data=allow)


def test_a_metric_that_was_not_computed():
    for pair in ((scored([0.5, 1.0]), make()), (make(), scored([0.5, 1.0]))):
        with pytest.raises(SettingError, match="'recall@1' was not computed; there are mrr"):
            compare(*pair, "recall@1")


def test_a_level_that_is_none():
    with pytest.raises(SettingError, match="must lie between 0 and 1"):
        compare(scored([0.5, 1.0]), scored([1.0, 0.2]), "mrr", level=95)


def test_comparing_is_reproducible_and_changes_nothing():
    rng = np.random.default_rng(2)
    before, after = scored(rng.random(50)), scored(rng.random(50))
    kept = plain(before), plain(after)
    assert compare(before, after, "mrr", seed=7) == compare(before, after, "mrr", seed=7)
    assert (plain(before), plain(after)) == kept


# ---------------------------------------------------------------- vacuous cut-offs


def test_vacuous_cutoffs():
    metrics = [Metric.parse(m) for m in ("recall@1", "recall@50", "hit@50", "ndcg@100", "mrr", "mrr@49")]
    (found,) = vacuous_cutoffs(metrics, 1000)
    assert (found.kind, found.severity, found.count, found.examples) == ("vacuous-k", "warning", 2, ("@50", "@100"))
    assert "1000" in found.message
    assert found.remedy
    assert vacuous_cutoffs([Metric("recall", 50)], 1001) == []
    assert vacuous_cutoffs([Metric("recall", 1)], 5) == []
    assert [f.examples for f in vacuous_cutoffs([Metric("recall", 1), Metric("recall", 2)], 5)] == [("@2",)]
    assert vacuous_cutoffs([], 10) == vacuous_cutoffs([Metric("mrr")], 10) == []


def test_5_percent_is_exact():
    # k >= 5 % of n is 20 k >= n, in whole numbers
    for n in range(1, 400):
        for k in (n // 20, n // 20 + 1):
            if k >= 2:
                assert bool(vacuous_cutoffs([Metric("hit", k)], n)) == (20 * k >= n), (k, n)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("metrics", {"recall@1": "x"}),
        ("metrics", [1]),
        ("per_query", {"mrr": [[1.0]]}),
        ("query_ids", "abcd"),
        ("counts", {"n_documents": "many"}),
        ("hits", {"q": [["d", 1, 2]]}),
        ("qrels", {"q": {"d": "1"}}),
        ("queries", {"q": 3}),
        ("groups", None),
        ("relevant_from", "1"),
        ("timing", {"encode": None}),
        ("provenance", [1]),
        ("findings", [{"kind": "x"}]),
        ("tie_rate", True),
        ("collapsed", 0),
        ("mean_cosine", "0.5"),
    ],
)
def test_a_field_of_a_wrong_type_is_named(tmp_path, name, value):
    path = make().save(tmp_path / "r.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(DataError, match=rf"r\.json is not a whole result file: ({name} is |metric ')"):
        Result.load(path)


def test_a_metric_without_values_and_a_deep_file_are_refused(tmp_path):
    path = make().save(tmp_path / "r.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "per_query": {}}))
    with pytest.raises(DataError, match="per_query has no '"):
        Result.load(path)
    path.write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"r\.json is not a result file"):
        Result.load(path)
