"""The pool of a run: the part of a large corpus that its evaluations rank.

Promise: all evaluations of a run rank the same documents, a resumed run too; the pool holds every judged document, so
that a value on it is an upper bound of the score on the corpus.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fullrank._errors import DataError, first_few
from fullrank._files import write_atomically
from fullrank.competitors import hard_first, pool_positions
from fullrank.data import GoldenSet
from fullrank.result import Result

__all__ = ["Pools", "draw_pools", "n_judged", "pooled_sets", "read_pools", "write_pools"]

FILE = "pool.json"
Pools = dict[str, NDArray[np.int64]]
"""Positions of the documents of a pool, by golden set."""


def n_judged(golden: GoldenSet) -> int:
    """Returns how many documents of the corpus are judged: no pool is smaller."""
    return len(np.unique(golden.judgements.doc[golden.judgements.doc >= 0]))


def pooled_sets(golden: Mapping[str, GoldenSet], pool: int | None) -> frozenset[str]:
    """Returns the names of the sets whose corpus is larger than the pool; the others are ranked whole."""
    if pool is None:
        return frozenset()
    return frozenset(name for name, one in golden.items() if max(pool, n_judged(one)) < len(one.corpus))


def draw_pools(golden: Mapping[str, GoldenSet], pool: int, base: Mapping[str, Result]) -> Pools:
    """Returns the pools of the sets that need one.

    Args:
        golden: by name.
        pool: documents in it.
        base: results of the base model on the whole corpus, whose lists are the hard competitors; where one is missing
            the pool is the judged documents and a random sample.
    """
    return {
        name: pool_positions(golden[name], pool, hard_first([base[name]] if name in base else [], golden[name]))
        for name in sorted(pooled_sets(golden, pool))
    }


def write_pools(folder: Path, golden: Mapping[str, GoldenSet], pool: int, pools: Pools) -> None:
    """Writes the ids of the documents to ``FOLDER/pool.json``."""
    sets = {
        name: {"data": golden[name].fingerprint(), "documents": [golden[name].doc_ids[i] for i in positions]}
        for name, positions in pools.items()
    }
    write_atomically(folder / FILE, json.dumps({"pool": pool, "sets": sets}) + "\n")


def read_pools(folder: Path, golden: Mapping[str, GoldenSet], pool: int | None) -> Pools:
    """Returns the pools that a run began with; empty where it has none and none is asked for.

    Raises:
        DataError: another pool than the run began with, or a file that cannot be read.
    """
    path, wanted = folder / FILE, pooled_sets(golden, pool)
    try:
        began = json.loads(path.read_text("utf-8")) if path.is_file() else {"pool": None, "sets": {}}
        sets = {str(name): (entry["data"], list(entry["documents"])) for name, entry in began["sets"].items()}
        size = began["pool"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} does not list the documents of a pool ({error!r})") from error
    same = all(data == golden[name].fingerprint() for name, (data, _) in sets.items() if name in golden)
    if set(sets) != wanted or (sets and size != pool) or not same:
        raise DataError(
            f"{folder.parent} began with pool={size}, and is resumed with pool={pool}: values on two pools cannot be "
            "ranked. Resume with the same pool and data, or start anew in another output_dir"
        )
    pools = {}
    for name, (_, documents) in sets.items():
        place = {doc_id: i for i, doc_id in enumerate(golden[name].doc_ids)}
        if unknown := [doc_id for doc_id in documents if doc_id not in place]:
            raise DataError(f"{path} lists documents that {name!r} does not hold: {first_few(unknown)}")
        pools[name] = np.sort(np.array([place[doc_id] for doc_id in documents], dtype=np.int64))
    return pools
