"""What a run leaves to look at: the page at its end, TensorBoard's bands, floors and rates, bars while it works."""

import io
import json
import logging
import random
import re
import sys
import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import TrainerCallback

from conftest import sentence
from fullrank import GoldenSet, Guard, RetrievalCallback
from fullrank._errors import MissingExtraError, SettingError
from fullrank.page import read_source
from fullrank.progress import progress_bars
from training import make_trainer, plain_trainer


@pytest.fixture(scope="module")
def general():
    rng = random.Random(99)
    corpus = {f"g{i}": sentence(rng, 4, 30) for i in range(30)}
    queries = {f"gq{i}": " ".join(corpus[f"g{i}"].split()[:3]) for i in range(10)}
    return GoldenSet(queries, corpus, {f"gq{i}": {f"g{i}": 1} for i in range(10)}, name="general")


@pytest.fixture
def guarded(tiny_st, tiny_golden, general, pairs, tmp_path):
    """A finished run whose guard is breached at two steps, with a page and TensorBoard events."""
    trainer = make_trainer(tiny_st(), pairs, tmp_path, report_to=["tensorboard"])
    callback = RetrievalCallback(tiny_golden, every=2, guards=Guard(general), report=True).attach(trainer)

    class Forget(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            plan = callback._session.watch.plans["general"]
            real = plan.run

            def run(**options):
                result = real(**options)
                result.metrics["ndcg@10"] = {0: 0.5, 4: 0.4, 6: 0.479}.get(callback._session.step, 0.48)
                return result

            plan.run = run

    trainer.callback_handler.callbacks.insert(1, Forget())
    trainer.train()
    return trainer, callback, tmp_path


def events_of(folder):
    (events,) = folder.rglob("events.out.tfevents.*")
    return EventAccumulator(str(events)).Reload()


# ------------------------------------------------------------------ the page


def test_the_page_shows_the_guard_its_floor_and_the_steps_that_were_not_eligible(guarded, run_main):
    _, callback, out = guarded
    text = (out / "fullrank" / "report.html").read_text()
    lines = callback.history
    floor = 0.48  # a step that stands exactly on it is eligible
    assert json.loads((out / "fullrank" / "guards.json").read_text()) == {"guard/general/ndcg@10": pytest.approx(floor)}
    out_steps = [line.step for line in lines if line.note == "not eligible"]
    assert out_steps == [4, 6]
    row = re.search(r'<section id="guards">.*?</section>', text, re.S)[0]
    assert "guard/general/ndcg@10" in row
    assert f">{floor:.4f}<" in row
    assert f"<td>{', '.join(map(str, out_steps))}</td>" in row
    assert f"not eligible: {len(out_steps)}" in row  # in the figure
    assert "in-batch accuracy" in text  # read from events that were written at that moment
    code, said, _ = run_main("report", out, "--html", "again.html")
    assert code == 0, said
    with open("again.html") as file:
        again = file.read()
    assert re.search(r'<section id="guards">.*?</section>', again, re.S)[0].count(f"{floor:.4f}") >= 1
    assert read_source(out).guards == {"guard/general/ndcg@10": pytest.approx(floor)}


def test_a_page_has_a_place_of_its_own_and_a_markdown_form(tiny_st, tiny_golden, pairs, tmp_path):
    for name in ("page.html", "page.md"):
        trainer = make_trainer(tiny_st(), pairs, tmp_path / name, max_steps=2)
        RetrievalCallback(tiny_golden, every=1, report=tmp_path / "pages" / name).attach(trainer)
        trainer.train()
        assert "recall@1" in (tmp_path / "pages" / name).read_text()
        assert not (tmp_path / name / "fullrank" / "report.html").exists()


def test_what_a_page_needs_is_refused_before_training(tiny_golden, tmp_path, monkeypatch):
    with pytest.raises(SettingError, match="report='' must be True, or the path of the file to write"):
        RetrievalCallback(tiny_golden, report="")
    with pytest.raises(SettingError, match="is a folder; give the name of a file"):
        RetrievalCallback(tiny_golden, report=tmp_path)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtraError, match=r"'jinja2' is needed .* pip install 'fullrank\[report\]'"):
        RetrievalCallback(tiny_golden, report=True)
    RetrievalCallback(tiny_golden)


def test_a_page_that_cannot_be_written_ends_no_training(tiny_st, tiny_golden, pairs, tmp_path, caplog):
    trainer = make_trainer(tiny_st(), pairs, tmp_path / "run", max_steps=2)
    callback = RetrievalCallback(tiny_golden, every=1, report=tmp_path / "page.html").attach(trainer)
    (tmp_path / "page.html").mkdir()
    trainer.train()
    assert callback.best is not None
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR and r.name.startswith("fullrank")]
    assert len(errors) == 1
    assert errors[0].startswith(f"the report could not be written to {tmp_path / 'page.html'}: IsADirectoryError")


def test_floors_that_cannot_be_read_are_a_note(guarded):
    _, _, out = guarded
    (out / "fullrank" / "guards.json").write_text("[1]")
    run = read_source(out)
    assert run.guards == {}
    assert "guards.json is no list of floors" in "".join(run.notes)


# ------------------------------------------------------------------ TensorBoard


def test_tensorboard_gets_bands_floors_and_throughput_and_other_trackers_do_not(guarded):
    trainer, callback, out = guarded
    seen = events_of(out)
    steps = [line.step for line in callback.history]
    for tag in (
        "eval/recall@1",
        "eval/recall@1_low",
        "eval/recall@1_high",
        "eval/documents_per_second",
        "eval/queries_per_second",
        "eval/guard_general_ndcg@10",
        "eval/guard_general_ndcg@10_floor",
    ):
        assert [event.step for event in seen.Scalars(tag)] == steps, tag
    low, high = callback.base_result.ci("recall@1")
    assert seen.Scalars("eval/recall@1_low")[0].value == pytest.approx(low, abs=1e-6)
    assert seen.Scalars("eval/recall@1_high")[0].value == pytest.approx(high, abs=1e-6)
    assert {round(event.value, 5) for event in seen.Scalars("eval/guard_general_ndcg@10_floor")} == {0.48}
    logged = {name for row in trainer.state.log_history for name in row}
    assert not [name for name in logged if name.endswith(("_low", "_high", "_floor")) or "documents_per" in name]
    (layout,) = [tag for tag in seen.Tags()["tensors"] if "custom_scalars" in tag]
    shown = seen.Tensors(layout)[0].tensor_proto.string_val[0].decode("utf-8", "replace")
    for part in ("recall@1 with its interval", "guard eval/guard_general_ndcg@10", "throughput"):
        assert part in shown


def test_a_pool_has_no_band(tiny_st, tiny_golden, pairs, tmp_path):
    trainer = make_trainer(tiny_st(), pairs, tmp_path, report_to=["tensorboard"], max_steps=2)
    RetrievalCallback(tiny_golden, every=1, pool=20).attach(trainer)
    trainer.train()
    tags = events_of(tmp_path).Tags()["scalars"]
    assert "eval/recall@1_pool" in tags
    assert "eval/documents_per_second" in tags
    assert not [tag for tag in tags if tag.endswith(("_low", "_high"))]


def test_without_a_trainer_our_own_events_hold_them_too(tiny_st, tiny_golden, pairs, tmp_path):
    trainer = make_trainer(tiny_st(), pairs, tmp_path, max_steps=2, callbacks=[RetrievalCallback(tiny_golden, every=1)])
    trainer.train()
    tags = events_of(tmp_path).Tags()["scalars"]
    assert {"eval/recall@1", "eval/recall@1_low", "eval/documents_per_second"} <= set(tags)


# ------------------------------------------------------------------ bars


def slow(plan, seconds):
    """Makes the documents of a plan come slowly, as a large corpus does."""
    real = plan.run

    def run(*, progress=None, **options):
        def waited(phase, done, total):
            if progress is not None:
                progress(phase, 0, total)
                time.sleep(seconds)
                progress(phase, done, total)

        return real(progress=waited, **options)

    plan.run = run


class Terminal(io.StringIO):
    """A console on which somebody watches."""

    def isatty(self):
        return True


@pytest.mark.parametrize(("verbose", "seconds", "shown"), [(True, 2.2, True), (False, 2.2, False), (True, 0.0, False)])
def test_an_evaluation_that_takes_long_shows_a_bar(
    tiny_st, tiny_golden, pairs, tmp_path, monkeypatch, verbose, seconds, shown
):
    trainer = make_trainer(tiny_st(), pairs, tmp_path, max_steps=1)
    callback = RetrievalCallback(tiny_golden, every=1, verbose=verbose).attach(trainer)

    class Slow(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            slow(callback._session.plans["tiny"], seconds)

    trainer.callback_handler.callbacks.insert(1, Slow())
    monkeypatch.setattr(sys, "stderr", Terminal())
    trainer.train()
    assert ("evaluate documents" in sys.stderr.getvalue()) is shown


def test_a_bar_counts_to_its_end_and_tells_the_time_left(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress_bars(after_seconds=0, leading="evaluate") as progress:
        for done in (1, 5, 10):
            time.sleep(0.15)  # a bar is drawn ten times a second at most
            progress("documents", done, 10)
    text = sys.stderr.getvalue()
    assert "evaluate documents" in text
    assert "10/10" in text
    assert re.search(r"\d\d:\d\d<", text)
    assert text.endswith("\r")  # nothing is left of it


def test_a_plain_trainer_can_have_a_page_too(tiny_bert, tiny_tokenizer, tiny_golden, pairs, tmp_path):
    from fullrank import Backbone

    trainer = plain_trainer(tiny_bert, tiny_tokenizer, pairs, tmp_path, max_steps=2)
    encoder = Backbone(tiny_bert, tiny_tokenizer, max_length=32)
    RetrievalCallback(tiny_golden, every=1, encoder=encoder, report=True).attach(trainer)
    trainer.train()
    assert (tmp_path / "fullrank" / "report.html").is_file()
