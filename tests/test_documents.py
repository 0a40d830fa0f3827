"""Documents become chunks under their headings; the split goes by document; questions find their chunks."""

import json
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullrank._errors import DataError, SettingError
from fullrank.documents import Section, held_out_documents, read_documents, read_questions, sections_of


def test_headings_part_a_text_and_fenced_code_does_not():
    text = (
        "before\n# Title #\n\nfirst\n\n## One\nbody\n```python\n# no heading\n```\nmore\n~~~\n```\n# nor this\n~~~\n"
        "## Empty\n### Two  \nlast\n#hashtag"
    )
    assert sections_of(text) == [
        ("", "before"),
        ("Title", "first"),
        ("Title: One", "body\n```python\n# no heading\n```\nmore\n~~~\n```\n# nor this\n~~~"),
        ("Title: Two", "last\n#hashtag"),
    ]
    assert sections_of("plain\ntext") == [("", "plain\ntext")]
    assert sections_of(" \n") == []


def test_underlined_lines_are_headings():
    assert sections_of("Title\n=====\nbody\n\nSub\n---\nmore\n\n---\nend") == [
        ("Title", "body"),
        ("Title: Sub", "more\n\n---\nend"),
    ]
    for text in ("- item\n---", "two\nlines\n---", "| a |\n---", "    code\n---", "---\ntitle: x\n---\ntext"):
        assert sections_of(text) == [("", text.strip())]
    assert sections_of("# C#\nx") == [("C#", "x")]


def test_headings_are_read_in_linear_time():
    start = time.perf_counter()
    for line in ("# a" + " " * 100_000 + "b", "# " + " #" * 50_000 + "b", "# " + "#" * 100_000, "-" * 100_000):
        sections_of(f"{line}\ntext")
    assert time.perf_counter() - start < 2


def test_text_files_have_no_headings_and_names_need_be_no_text(tmp_path):
    pytest.importorskip("semantic_text_splitter")
    (tmp_path / "a.txt").write_text("# no heading\ntext")
    (tmp_path / os.fsdecode(b"caf\xe9.md")).write_text("# H\nbody")
    sections = read_documents(tmp_path)
    assert [(s.document, s.heading) for s in sections] == [("a.txt", ""), ("caf\\udce9.md", "H")]


def test_a_folder_is_read_in_chunks(tmp_path):
    pytest.importorskip("semantic_text_splitter")
    (tmp_path / "guide").mkdir()
    (tmp_path / "guide/b.md").write_text("\ufeff# B\n" + "word " * 30 + "\n## C\nshort")
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "c.py").write_text("# not read")
    sections = read_documents(tmp_path, size=60)
    assert [(s.document, s.heading) for s in sections] == [
        ("a.txt", ""),
        ("guide/b.md", "B"),
        ("guide/b.md", "B: C"),
    ]
    assert list(sections[1].chunks) == ["guide/b.md#0", "guide/b.md#1", "guide/b.md#2"]
    assert all(len(chunk) <= 60 for section in sections for chunk in section.chunks.values())
    assert sections[2].chunks == {"guide/b.md#3": "short"}
    assert " ".join(sections[1].chunks.values()).split() == ["word"] * 30


def test_folders_that_cannot_be_read_are_clear_errors(tmp_path):
    pytest.importorskip("semantic_text_splitter")
    with pytest.raises(DataError, match=r"holds no \.md, \.markdown, \.txt files with text"):
        read_documents(tmp_path)
    (tmp_path / "a.md").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"a\.md is not UTF-8 \(byte at offset 3\); save it as UTF-8"):
        read_documents(tmp_path)
    with pytest.raises(SettingError, match="size=0 must be a whole number of characters"):
        read_documents(tmp_path, size=0)


@given(st.sets(st.text(max_size=4), min_size=1, max_size=30), st.floats(0.01, 0.99), st.text(max_size=4))
def test_a_split_is_never_empty_and_a_new_document_moves_no_old_one(names, share, added):
    held_out = held_out_documents(names, share)
    assert held_out <= names
    assert held_out
    assert len(names) == 1 or held_out < names
    more = held_out_documents(names | {added}, share)
    moved = (more ^ held_out) - {added}
    assert len(moved) <= 1  # only where a side would have been empty


def test_the_share_is_about_met():
    assert 250 < len(held_out_documents([f"{i}.md" for i in range(1000)], 0.3)) < 350
    with pytest.raises(SettingError, match="share=0 must lie between 0 and 1"):
        held_out_documents(["a"], 0)


SECTIONS = [
    Section("a.md", "A", {"a.md#0": "Use  pip install", "a.md#1": "other"}),
    Section("b.md", "", {"b.md#0": "b"}),
]


def test_questions_find_the_chunks_that_answer_them(tmp_path):
    path = tmp_path / "real.jsonl"
    rows = [
        {"query": "how to install", "document": "a.md", "contains": "PIP install"},
        {"query": "all of a", "document": "a.md"},
        {"query": "none", "document": None},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_questions(path, SECTIONS) == [
        {"id": "real-1", "query": "how to install", "relevant": ["a.md#0"], "type": "real"},
        {"id": "real-2", "query": "all of a", "relevant": ["a.md#0", "a.md#1"], "type": "real"},
        {"id": "real-3", "query": "none", "relevant": [], "type": "real"},
    ]


def test_all_faults_of_questions_are_in_one_error(tmp_path):
    path = tmp_path / "real.jsonl"
    path.write_text(
        '{"query": "a"}\n{"query": "a", "document": "c.md"}\n{"query": "a", "document": "a.md", "contains": "zzz"}\n'
        '{"query": "a", "document": "a.md", "contains": 1}\n{"document": "a.md"}\n'
    )
    with pytest.raises(DataError) as caught:
        read_questions(path, SECTIONS)
    assert str(caught.value).splitlines()[:6] == [
        f"{path}: 5 problems",
        "  line 1: the field 'document' is missing",
        "  line 2: there is no document 'c.md' with text",
        "  line 3: no chunk of 'a.md' contains 'zzz'",
        "  line 4: 'contains' must be a string, got 1",
        "  line 5: the field 'query' is missing",
    ]
