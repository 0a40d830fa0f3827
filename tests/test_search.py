"""The search against a naive oracle: the same counts and lists, to the last bit, however the corpus is cut up.

The oracle scores one pair at a time: float64 products, `math.fsum`, rounded to float32 (DESIGN.md section 3). It shares
no code with the product, and makes its own unit vectors.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullrank import scores, search, shortlist
from fullrank._errors import EvaluationError, SettingError
from fullrank.search import TargetPairs, Vectors, canonical_scores, exact_fp32, prepare, rank

SIMILARITIES = ("cosine", "dot", "euclidean")


# ---------------------------------------------------------------- the oracle


def usable_rows(rows, similarity):
    """Float32 rows as they are scored, and which of them are unusable; ``rows`` is float32 [n, d]."""
    out, bad = np.zeros(rows.shape, np.float32), np.zeros(len(rows), bool)
    for i, row in enumerate(rows.astype(np.float64)):
        bad[i] = not np.isfinite(row).all() or (similarity == "cosine" and not row.any())
        if bad[i]:
            continue
        out[i] = row / math.sqrt(math.fsum((row * row).tolist())) if similarity == "cosine" else row
    return out, bad


def pair_score(a, b, similarity):
    a, b = a.astype(np.float64), b.astype(np.float64)
    if similarity == "euclidean":
        return np.float32(-math.sqrt(math.fsum(((a - b) ** 2).tolist())))
    return np.float32(math.fsum((a * b).tolist()))


def score_matrix(queries, documents, similarity):
    q, _ = usable_rows(queries, similarity)
    d, bad = usable_rows(documents, similarity)
    scores = np.array([[pair_score(a, b, similarity) for b in d] for a in q], np.float32).reshape(len(q), len(d))
    scores[:, bad] = -np.inf
    return scores


@dataclass
class Expected:
    better: list
    tied: list
    ahead: list
    top_docs: list
    top_scores: list


def oracle(scores, pairs, k, *, id_order=None, exclude=None):
    better, tied, ahead = [], [], []
    n = scores.shape[1]
    scores = scores.astype(float).tolist()  # float32 values are exact in python's floats
    there = [[exclude is None or exclude[q] != d for d in range(n)] for q in range(len(scores))]
    for q, target in pairs:
        row = scores[q]
        better.append(sum(row[d] > row[target] for d in range(n) if there[q][d]))
        equal = [d for d in range(n) if there[q][d] and row[d] == row[target]]
        tied.append(len(equal))
        ahead.append(0 if id_order is None else sum(id_order[d] > id_order[target] for d in equal))
    top_docs, top_scores = [], []
    for q, row in enumerate(scores):
        listed = sorted((d for d in range(n) if there[q][d] and row[d] > -math.inf), key=lambda d: (-row[d], d))[:k]
        top_docs.append(listed + [-1] * (k - len(listed)))
        top_scores.append([row[d] for d in listed] + [-math.inf] * (k - len(listed)))
    return Expected(better, tied, ahead, top_docs, top_scores)


# ---------------------------------------------------------------- the product


def search_for(queries, documents, pairs, *, similarity, k, order=None, sizes=None, id_order=None, exclude=None):
    """Ranks through the product: documents in ``order``, in blocks of ``sizes`` (an int, or the borders)."""
    q, d = prepare(torch.as_tensor(queries), similarity), prepare(torch.as_tensor(documents), similarity)
    n = len(d.rows)
    order = np.arange(n) if order is None else np.asarray(order)
    size = sizes if isinstance(sizes, int) else n
    borders = [*range(0, n, max(1, size)), n] if not isinstance(sizes, list) else [0, *sizes, n]

    def take(index):
        index = torch.as_tensor(np.asarray(index, np.int64))
        return index, Vectors(d.rows[index], d.scale[index], d.bad[index])

    target_query = torch.tensor([p[0] for p in pairs], dtype=torch.int64)
    target_doc = torch.tensor([p[1] for p in pairs], dtype=torch.int64)
    return rank(
        q,
        TargetPairs(target_query, target_doc),
        take(target_doc)[1],
        [take(order[a:b]) for a, b in pairwise(borders) if b > a],
        similarity=similarity,
        k=k,
        id_order=None if id_order is None else torch.as_tensor(id_order),
        exclude=None if exclude is None else torch.as_tensor(exclude),
    )


def assert_same(ranking, expected):
    assert ranking.better.tolist() == expected.better
    assert ranking.tied.tolist() == expected.tied
    assert ranking.ahead.tolist() == expected.ahead
    scores, docs = ranking.top_scores.tolist(), ranking.top_docs.tolist()
    listed = [[d if s > -math.inf else -1 for d, s in zip(*row, strict=True)] for row in zip(docs, scores, strict=True)]
    assert scores == expected.top_scores
    assert listed == expected.top_docs


# ---------------------------------------------------------------- worlds to search


def world(kind, seed=0, q=9, n=83, d=12):
    """Queries float32 [q, d], documents float32 [n, d] and targets, made to be hard to order."""
    rng = np.random.default_rng(seed)
    queries = rng.standard_normal((q, d)).astype(np.float32)
    if kind == "random":
        documents = rng.standard_normal((n, d))
    elif kind == "duplicates":  # every row stands four times, scattered
        documents = rng.standard_normal((n // 4 + 1, d))[rng.permutation(4 * (n // 4 + 1))[:n] % (n // 4 + 1)]
    elif kind == "near ties":  # five rows and many copies of them, 1e-7 to 1e-9 away
        noise = 10.0 ** rng.uniform(-9, -7, (n, 1)) * rng.standard_normal((n, d))
        documents = rng.standard_normal((5, d))[rng.integers(5, size=n)] * (1 + noise)
    elif kind == "collapsed":  # one row, with noise of one unit in the last place
        documents = rng.standard_normal(d) * (1 + 1e-7 * rng.integers(-1, 2, (n, d)))
    elif kind == "negative":  # every score is below 0
        queries = np.abs(queries)
        documents = -np.abs(rng.standard_normal((n, d)))
    elif kind == "lengths":  # from 1e-3 to 1e3 long, one of them standing ten times
        documents = rng.standard_normal((n, d)) * 10.0 ** rng.uniform(-3, 3, (n, 1))
        documents[::9] = documents[0]
    elif kind == "small integers":
        queries = rng.integers(-1, 2, (q, d)).astype(np.float32)
        queries[:, 0] = 1
        documents = rng.integers(-1, 2, (n, d))
        documents[:, -1] = 1
    else:
        raise AssertionError(kind)
    pairs = sorted({(int(i), int(j)) for i in range(q) for j in rng.integers(n, size=3)})
    return queries, documents.astype(np.float32), pairs


KINDS = ("random", "duplicates", "near ties", "collapsed", "negative", "lengths", "small integers")


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("kind", KINDS)
def test_counts_and_lists_are_those_of_the_oracle_for_any_cut_of_the_corpus(kind, similarity, monkeypatch):
    queries, documents, pairs = world(kind)
    n = len(documents)
    rng = np.random.default_rng(1)
    id_order = rng.permutation(n)
    expected = oracle(score_matrix(queries, documents, similarity), pairs, 10, id_order=id_order)
    for size in (1, 2, 3, 7, 16, 40, n - 1, n):
        for order in (None, rng.permutation(n)):
            found = search_for(
                queries, documents, pairs, similarity=similarity, k=10, order=order, sizes=size, id_order=id_order
            )
            assert_same(found, expected)
            assert found.n_documents == n
    for query_tile, document_tile in ((1, 1), (2, 5), (4, 32), (256, 17)):
        monkeypatch.setattr(search, "QUERY_TILE", query_tile)
        monkeypatch.setattr(search, "DOCUMENT_TILE", document_tile)
        order = rng.permutation(n)
        found = search_for(
            queries, documents, pairs, similarity=similarity, k=10, order=order, sizes=50, id_order=id_order
        )
        assert_same(found, expected)


@pytest.mark.parametrize("kind", ["near ties", "collapsed", "duplicates"])
def test_the_short_cuts_for_many_undecided_pairs_change_nothing(kind, monkeypatch):
    queries, documents, pairs = world(kind, seed=3)
    for similarity in SIMILARITIES:
        expected = oracle(score_matrix(queries, documents, similarity), pairs, 5)
        for dense, pair_bytes, groups in ((0.0, 1, 0.0), (2.0, 1, 1.0), (0.0, 1 << 20, 0.4), (2.0, 4_000, 0.0)):
            with monkeypatch.context() as patch:
                patch.setattr(scores, "DENSE_SHARE", dense)
                patch.setattr(scores, "PAIR_BYTES", pair_bytes)
                patch.setattr(shortlist, "DENSE_SHARE", groups)
                assert_same(search_for(queries, documents, pairs, similarity=similarity, k=5, sizes=30), expected)


def test_sums_that_cancel_are_scored_alike_on_every_path(monkeypatch):
    # Products of 2**60 and 1 that cancel: the order of summation decides what is left, so it must be one order.
    rng = np.random.default_rng(7)
    queries, documents = rng.standard_normal((6, 32)), rng.standard_normal((60, 32))
    for table in (queries, documents):
        table[:, ::2] = np.sign(table[:, ::2]) * 2.0**30
    queries, documents = queries.astype(np.float32), documents.astype(np.float32)
    pairs = [(q, d) for q in range(6) for d in range(0, 60, 7)]
    q, d = torch.from_numpy(queries), torch.from_numpy(documents)
    exact = torch.stack([canonical_scores(row.expand_as(d), d, "dot") for row in q]).numpy()
    assert (np.abs(exact) < 2.0**32).sum() > 20
    expected = oracle(exact, pairs, 60)
    for dense in (0.0, 2.0):
        monkeypatch.setattr(scores, "DENSE_SHARE", dense)
        for size in (1, 17, 60):
            assert_same(search_for(queries, documents, pairs, similarity="dot", k=60, sizes=size), expected)


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_one_and_two_threads_and_shapes_big_enough_for_blocked_products_agree(similarity):
    queries, documents, pairs = world("near ties", seed=5, q=12, n=300, d=96)
    expected = oracle(score_matrix(queries, documents, similarity), pairs, 20)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for size in (1, 64, 300):
                assert_same(search_for(queries, documents, pairs, similarity=similarity, k=20, sizes=size), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_embeddings_of_another_dtype_are_scored_in_fp32(dtype, similarity):
    queries, documents, pairs = world("random", seed=2)
    queries, documents = torch.from_numpy(queries).to(dtype), torch.from_numpy(documents).to(dtype)
    # As numbers the half values are exact in fp32; a product in half precision would merge many of them.
    expected = oracle(score_matrix(queries.float().numpy(), documents.float().numpy(), similarity), pairs, 10)
    assert_same(search_for(queries, documents, pairs, similarity=similarity, k=10, sizes=11), expected)


small = st.integers(-2, 2)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_whatever_the_corpus_the_order_the_blocks_and_the_tiles(data):
    d, n, q = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4))
    matrix = st.lists(st.lists(small, min_size=d, max_size=d), min_size=n, max_size=n)
    documents = np.array(data.draw(matrix), np.float32)
    queries = np.array(data.draw(st.lists(st.lists(small, min_size=d, max_size=d), min_size=q, max_size=q)), np.float32)
    similarity = data.draw(st.sampled_from(SIMILARITIES))
    if similarity == "cosine":
        queries[:, 0] += 3  # a zero query is the caller's business, see test_prepare
    for i in data.draw(st.sets(st.integers(0, n - 1), max_size=2)):
        documents[i, data.draw(st.integers(0, d - 1))] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    pairs = sorted(data.draw(st.sets(st.tuples(st.integers(0, q - 1), st.integers(0, n - 1)), max_size=6)))
    # The judged documents themselves cannot be excluded (the callers refuse it).
    judged = [{b for a, b in pairs if a == i} for i in range(q)]
    exclude = [data.draw(st.sampled_from([-1, *sorted(set(range(n)) - judged[i])])) for i in range(q)]
    order, id_order = data.draw(st.permutations(range(n))), data.draw(st.permutations(range(n)))
    sizes = sorted(data.draw(st.lists(st.integers(0, n), max_size=4)))
    k = data.draw(st.integers(1, 15))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "QUERY_TILE", data.draw(st.integers(1, 5)))
        patch.setattr(search, "DOCUMENT_TILE", data.draw(st.integers(1, 5)))
        patch.setattr(shortlist, "DENSE_SHARE", data.draw(st.sampled_from([0.0, 0.4, 1.0])))
        patch.setattr(search, "MAX_WAITING", data.draw(st.sampled_from([0, 8, 1 << 20])))
        found = search_for(
            queries,
            documents,
            pairs,
            similarity=similarity,
            k=k,
            order=order,
            sizes=sizes,
            id_order=id_order,
            exclude=exclude,
        )
    scores = score_matrix(queries, documents, similarity)
    assert_same(found, oracle(scores, pairs, k, id_order=id_order, exclude=exclude))


# ---------------------------------------------------------------- small cases with known answers


def test_case_5_a_constant_row_lists_the_first_documents():
    ones = np.ones((64, 1), np.float32)
    found = search_for(np.ones((1, 1), np.float32), ones, [(0, 40)], similarity="dot", k=5)
    assert found.top_docs.tolist() == [[0, 1, 2, 3, 4]]
    assert found.better.tolist() == [0]
    assert found.tied.tolist() == [64]


def test_case_6_lists_do_not_depend_on_blocks_and_short_ones_begin_long_ones():
    documents = np.array([[0.5], [0.9], [0.9], [0.1], [0.9], [0.5], [0.2]], np.float32)
    query = np.ones((1, 1), np.float32)
    for size in range(1, 8):
        for k, top in ((3, [1, 2, 4]), (5, [1, 2, 4, 0, 5])):
            for order in (range(7), reversed(range(7))):
                found = search_for(query, documents, [], similarity="dot", k=k, order=list(order), sizes=size)
                assert found.top_docs.tolist() == [top]
        longest = search_for(query, documents, [], similarity="dot", k=7, sizes=size).top_docs.tolist()[0]
        assert longest == [1, 2, 4, 0, 5, 6, 3]


def test_more_asked_for_than_there_is():
    found = search_for([[1.0, 0.0]], [[0.5, 0.0], [2.0, 0.0], [-1.0, 0.0]], [(0, 2)], similarity="dot", k=10, sizes=2)
    assert found.top_docs.tolist() == [[1, 0, 2] + [-1] * 7]
    assert found.top_scores.tolist() == [[2.0, 0.5, -1.0] + [-math.inf] * 7]
    assert found.better.tolist() == [2]


def test_one_query_and_one_document():
    found = search_for([[3.0, 4.0]], [[-3.0, -4.0]], [(0, 0)], similarity="cosine", k=1)
    assert (found.better.tolist(), found.tied.tolist(), found.top_docs.tolist()) == ([0], [1], [[0]])
    assert found.top_scores.item() == pytest.approx(-1.0, abs=1e-6)


def test_no_targets_and_targets_of_some_queries_only():
    queries, documents, _ = world("random", q=6, n=20)
    scores = score_matrix(queries, documents, "dot")
    for pairs in ([], [(3, 5)], [(0, 1), (5, 19)]):
        assert_same(search_for(queries, documents, pairs, similarity="dot", k=4, sizes=6), oracle(scores, pairs, 4))


def test_equal_documents_on_both_sides_of_a_block_border_tie():
    rng = np.random.default_rng(0)
    documents = rng.standard_normal((64, 33)).astype(np.float32)
    documents[32:] = documents[:32]
    queries = rng.standard_normal((5, 33)).astype(np.float32)
    pairs = [(q, d) for q in range(5) for d in (0, 31, 32, 63)]
    for size in (1, 31, 32, 33, 63, 64):
        found = search_for(queries, documents, pairs, similarity="cosine", k=64, sizes=size)
        assert found.tied.tolist() == [2] * len(pairs)
        for docs in found.top_docs.tolist():  # copies stand side by side, the earlier one first
            assert [d + 32 for d in docs[::2]] == docs[1::2]


def test_more_equals_than_the_list_is_long_leave_the_earliest():
    documents = np.zeros((500, 2), np.float32)
    documents[:, 0] = 1.0
    documents[333, 0] = 2.0
    for size in (1, 50, 500):
        order = np.random.default_rng(size).permutation(500)
        found = search_for([[1.0, 1.0]], documents, [(0, 7)], similarity="dot", k=4, order=order, sizes=size)
        assert found.top_docs.tolist() == [[333, 0, 1, 2]]
        assert (found.better.tolist(), found.tied.tolist()) == ([1], [499])


def test_unusable_documents_stand_below_all_others_and_tie_with_one_another():
    nan, inf = math.nan, math.inf
    documents = [[1.0, 0.1], [nan, 1.0], [-5.0, 0.0], [inf, 0.0], [1.0, 0.3], [nan, nan]]
    for similarity in SIMILARITIES:
        for size in (1, 2, 6):
            found = search_for([[1.0, 0.0]], documents, [(0, 1), (0, 2)], similarity=similarity, k=6, sizes=size)
            assert found.better.tolist() == [3, 2]
            assert found.tied.tolist() == [3, 1]
            assert [d for d, s in zip(found.top_docs[0], found.top_scores[0], strict=True) if s > -inf] == [0, 4, 2]


def test_a_zero_document_is_unusable_under_cosine_only():
    documents = [[0.0, 0.0], [-1.0, 0.0]]
    found = search_for([[1.0, 0.0]], documents, [(0, 0)], similarity="cosine", k=2)
    assert found.better.tolist() == [1]
    assert found.top_scores.tolist() == [[-1.0, -math.inf]]
    found = search_for([[1.0, 0.0]], documents, [(0, 0)], similarity="dot", k=2)
    assert found.better.tolist() == [0]
    assert found.top_docs.tolist() == [[0, 1]]


def test_an_excluded_document_is_gone_for_its_query_alone():
    documents = [[1.0], [1.0], [0.5]]
    found = search_for([[1.0], [1.0]], documents, [(0, 1), (1, 1)], similarity="dot", k=3, exclude=[0, -1])
    assert found.tied.tolist() == [1, 2]
    assert found.top_docs.tolist() == [[1, 2, -1], [0, 1, 2]]


def test_scores_in_the_lists_are_the_canonical_ones():
    queries, documents, _ = world("random", q=4, n=50, d=40)
    for similarity in SIMILARITIES:
        scores = score_matrix(queries, documents, similarity)
        found = search_for(queries, documents, [], similarity=similarity, k=50, sizes=13)
        assert found.top_scores.numpy().tolist() == np.take_along_axis(scores, found.top_docs.numpy(), 1).tolist()


def test_autocast_and_low_precision_products_around_the_search_do_not_reach_it():
    queries, documents, pairs = world("random", q=30, n=400, d=64)
    expected = oracle(score_matrix(queries, documents, "dot"), pairs, 10)
    backend = torch.backends.mkldnn.matmul
    before = backend.fp32_precision
    try:
        backend.fp32_precision = "bf16"
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_same(search_for(queries, documents, pairs, similarity="dot", k=10), expected)
        assert backend.fp32_precision == "bf16"
    finally:
        backend.fp32_precision = before


@pytest.mark.parametrize("similarity", ["dot", "euclidean"])
@pytest.mark.parametrize("factor", [1e-12, 1e-6, 1e6, 1e12])
def test_very_short_and_very_long_vectors(similarity, factor):
    queries, documents, pairs = world("near ties", seed=8)
    queries, documents = queries * np.float32(factor), documents * np.float32(factor)
    expected = oracle(score_matrix(queries, documents, similarity), pairs, 10)
    assert_same(search_for(queries, documents, pairs, similarity=similarity, k=10, sizes=20), expected)


# ---------------------------------------------------------------- the parts


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_canonical_scores_are_float64_sums_rounded_once(similarity):
    rng = np.random.default_rng(4)
    for d in (1, 2, 3, 7, 8, 31, 384):
        a, b = (rng.standard_normal((30, d)).astype(np.float32) for _ in range(2))
        found = canonical_scores(torch.from_numpy(a), torch.from_numpy(b), similarity)
        assert found.dtype == torch.float32
        assert found.tolist() == [float(pair_score(x, y, similarity)) for x, y in zip(a, b, strict=True)]


def test_canonical_scores_keep_what_fp32_sums_lose():
    # 2**24 + 1 - 2**24: in fp32 the 1 is gone.
    a = torch.tensor([[4096.0, 1.0, 4096.0]])
    assert canonical_scores(a, torch.tensor([[4096.0, 1.0, -4096.0]]), "dot").tolist() == [1.0]


def test_canonical_scores_of_a_pair_do_not_depend_on_the_other_pairs():
    rng = np.random.default_rng(6)
    a, b = (torch.from_numpy(rng.standard_normal((257, 384)).astype(np.float32)) for _ in range(2))
    for similarity in SIMILARITIES:
        whole = canonical_scores(a, b, similarity)
        assert torch.equal(
            whole, torch.cat([canonical_scores(a[i : i + 1], b[i : i + 1], similarity) for i in range(257)])
        )


def test_prepare_makes_unit_rows_under_cosine_and_leaves_others():
    rows = torch.tensor([[3.0, 4.0], [0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0], [1e-30, 0.0], [1e30, 1e30]])
    unit = prepare(rows, "cosine")
    assert unit.bad.tolist() == [False, True, True, True, False, False]
    assert unit.rows[0].tolist() == [float(np.float32(0.6)), float(np.float32(0.8))]
    assert unit.rows[4].tolist() == [1.0, 0.0]
    assert unit.rows[5].tolist() == [float(np.float32(math.sqrt(0.5)))] * 2
    assert unit.rows[unit.bad].tolist() == [[0.0, 0.0]] * 3
    for similarity in ("dot", "euclidean"):
        plain = prepare(rows, similarity)
        assert plain.bad.tolist() == [False, False, True, True, False, False]
        assert torch.equal(plain.rows[[0, 1, 4, 5]], rows[[0, 1, 4, 5]])
        assert plain.scale[0].item() == 5.0
    assert unit.rows.dtype == unit.scale.dtype == torch.float32


def test_prepare_leaves_its_input_alone_and_rows_do_not_depend_on_their_neighbours():
    rows = torch.randn(50, 33, generator=torch.Generator().manual_seed(0))
    before = rows.clone()
    whole = prepare(rows, "cosine").rows
    assert torch.equal(rows, before)
    assert torch.equal(whole, torch.cat([prepare(rows[i : i + 1], "cosine").rows for i in range(50)]))
    assert torch.equal(prepare(rows[::3], "cosine").rows, whole[::3])  # not contiguous


def test_prepare_refuses_other_shapes_and_similarities():
    with pytest.raises(EvaluationError, match=r"\[n, d\], got \(3,\)"):
        prepare(torch.ones(3), "dot")
    with pytest.raises(SettingError, match="'manhattan' is unknown; choose one of cosine, dot, euclidean"):
        prepare(torch.ones(3, 2), "manhattan")


def test_dimensions_that_differ_are_an_error_that_names_both():
    q, d = prepare(torch.ones(2, 3), "dot"), prepare(torch.ones(5, 4), "dot")
    none = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(EvaluationError, match="queries have 3 dimensions and documents 4"):
        rank(
            q,
            TargetPairs(none, none),
            Vectors(d.rows[:0], d.scale[:0], d.bad[:0]),
            [(torch.arange(5), d)],
            similarity="dot",
            k=2,
        )


def precision_settings():
    backends = torch.backends
    return (
        backends.cuda.matmul.fp32_precision,
        backends.mkldnn.matmul.fp32_precision,
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
    )


@pytest.mark.parametrize("setting", ["ieee", "tf32"])
def test_exact_fp32_holds_inside_and_puts_the_settings_back(setting):
    cuda, mkldnn = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = cuda.fp32_precision, mkldnn.fp32_precision
    try:
        cuda.fp32_precision, mkldnn.fp32_precision = setting, setting
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outside = precision_settings()
            with exact_fp32("cpu"):
                assert precision_settings() == ("ieee", "ieee", False, False)
                assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
            assert precision_settings() == outside == (setting, setting, True, True)
            with pytest.raises(KeyError), exact_fp32("cpu"):
                raise KeyError
            assert precision_settings() == outside
    finally:
        cuda.fp32_precision, mkldnn.fp32_precision = before


def test_rank_puts_the_settings_back_when_a_block_fails():
    q = prepare(torch.ones(1, 2), "dot")
    none = torch.zeros(0, dtype=torch.int64)

    def blocks():
        yield torch.arange(1), q
        raise MemoryError

    outside = precision_settings()
    with pytest.raises(MemoryError):
        rank(q, TargetPairs(none, none), Vectors(q.rows[:0], q.scale[:0], q.bad[:0]), blocks(), similarity="dot", k=1)
    assert precision_settings() == outside


def test_precision_settings_that_were_inherited_stay_inherited():
    general = torch.backends.fp32_precision
    try:
        torch.backends.fp32_precision = "tf32"
        with exact_fp32("cpu"):
            assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
        assert torch.backends.mkldnn.matmul.fp32_precision == "tf32"
        torch.backends.fp32_precision = "ieee"
        assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
    finally:
        torch.backends.fp32_precision = general


def test_lists_that_are_not_full_meet_padding_and_their_own_text():
    """A query whose own text is left out has a list one shorter than the others, and -inf reaches its floor."""
    torch.manual_seed(3)
    queries, documents = torch.randn(9, 8), torch.randn(70, 8)
    q, d = prepare(queries, "cosine"), prepare(documents, "cosine")
    exclude = torch.full((9,), -1)
    exclude[4] = 2
    blocks = [(torch.arange(i, i + 5), d[i : i + 5]) for i in range(0, 70, 5)]
    pairs = TargetPairs(torch.arange(9), torch.arange(9) + 20)
    found = rank(q, pairs, d[pairs.doc], blocks, similarity="cosine", k=5, exclude=exclude)
    table = torch.stack([canonical_scores(row.expand(70, -1), d.rows, "cosine") for row in q.rows])
    table[4, 2] = -torch.inf
    expected = table.sort(dim=1, descending=True, stable=True).indices[:, :5]
    assert torch.equal(found.top_docs, expected)


@pytest.mark.parametrize("similarity", ["dot", "euclidean"])
def test_short_documents_after_long_ones(similarity):
    """The floor of a list may stand on a document a million times longer than those of the block at hand."""
    torch.manual_seed(4)
    long, short = 1e3 * torch.randn(6, 16), 1e-3 * torch.randn(200, 16)
    queries, documents = torch.randn(7, 16), torch.cat([-long.abs(), short])
    queries = queries.abs()
    q, d = prepare(queries, similarity), prepare(documents, similarity)
    pairs = TargetPairs(torch.arange(7), torch.arange(7) + 50)
    blocks = [(torch.arange(i, min(i + 40, 206)), d[i : i + 40]) for i in range(0, 206, 40)]
    found = rank(q, pairs, d[pairs.doc], blocks, similarity=similarity, k=4)
    table = torch.stack([canonical_scores(row.expand(206, -1), d.rows, similarity) for row in q.rows])
    assert torch.equal(found.top_docs, table.sort(dim=1, descending=True, stable=True).indices[:, :4])
    goal = table[pairs.query, pairs.doc][:, None]
    assert torch.equal(found.better, (table > goal).sum(dim=1))


@pytest.mark.parametrize("similarity", ["cosine", "euclidean"])
def test_a_screen_that_errs_as_far_as_it_may_changes_nothing(similarity, monkeypatch):
    """Real products err far less than `MARGIN`: a margin of half the size would not be noticed by them."""
    rng = np.random.default_rng(2)
    queries = rng.standard_normal((8, 12)).astype(np.float32)
    documents = (rng.standard_normal(12) * (1 + 3e-5 * rng.standard_normal((120, 12)))).astype(np.float32)
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    documents /= np.linalg.norm(documents, axis=1, keepdims=True)
    pairs = [(q, d) for q in range(8) for d in range(0, 120, 17)]
    expected = oracle(score_matrix(queries, documents, similarity), pairs, 6)
    screen = search.Pass._screen

    def erring(self, rows, tile):
        scores = screen(self, rows, tile)
        error = 0.95 * search.MARGIN * (2 if similarity == "euclidean" else 1)
        return scores + torch.from_numpy(rng.choice([-error, error], scores.shape).astype(np.float32))

    monkeypatch.setattr(search.Pass, "_screen", erring)
    for size in (7, 40, 120):
        for tile in (8, 4_096):
            monkeypatch.setattr(search, "DOCUMENT_TILE", tile)
            assert_same(search_for(queries, documents, pairs, similarity=similarity, k=6, sizes=size), expected)


def test_a_floor_that_stands_on_long_documents_may_be_too_high(monkeypatch):
    """What long documents are screened too high by may hide short ones that are better."""
    rng = np.random.default_rng(3)
    long, short = np.zeros((30, 4), np.float32), np.zeros((60, 4), np.float32)
    long[:, 0], long[:, 1] = rng.uniform(0, 0.008, 30), 1_000
    short[:, 0], short[:, 2] = rng.uniform(0, 0.01, 60), 1
    documents, queries = np.concatenate([long, short]), np.eye(1, 4, dtype=np.float32)
    expected = oracle(score_matrix(queries, documents, "dot"), [(0, 3), (0, 50)], 5)
    assert sum(doc >= 30 for doc in expected.top_docs[0]) > 1
    screen = search.Pass._screen
    monkeypatch.setattr(
        search.Pass, "_screen", lambda self, rows, tile: screen(self, rows, tile) + 0.95 * search.MARGIN * tile.scale
    )
    for size in (5, 30, 90):
        assert_same(search_for(queries, documents, [(0, 3), (0, 50)], similarity="dot", k=5, sizes=size), expected)


def test_pairs_that_only_the_canonical_score_can_order_do_not_pile_up(monkeypatch):
    # A collapsed model makes every document one: they are decided as they come, not at the end of a block.
    monkeypatch.setattr(search, "DOCUMENT_TILE", 32)
    monkeypatch.setattr(search, "MAX_WAITING", 50)
    q = prepare(torch.ones(2, 4), "dot")
    d = prepare(torch.ones(320, 4), "dot")
    pairs = TargetPairs(torch.tensor([0, 1]), torch.tensor([3, 5]))
    waiting = []
    decide = search.Pass._decide

    def watched(self, positions, block):
        waiting.append((self.n_undecided, sum(shortlist.n for _, shortlist in self.shortlists)))
        decide(self, positions, block)

    monkeypatch.setattr(search.Pass, "_decide", watched)
    found = rank(q, pairs, d[pairs.doc], [(torch.arange(320), d)], similarity="dot", k=4)
    assert found.better.tolist() == [0, 0]
    assert found.tied.tolist() == [320, 320]
    assert found.top_docs.tolist() == [[0, 1, 2, 3]] * 2
    assert max(undecided for undecided, _ in waiting) <= 50 + 2 * 32
    assert len(waiting) >= 5
