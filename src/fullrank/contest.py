"""A candidate in the race of a selection: its weights in memory when they are needed, its rankings, what failed.

Promise: a candidate that raises has failed and the others go on; what a journal knows of the same weights, data and
settings is not computed again; a guard is judged on complete evaluations, and by bounds only where they refuse.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from urllib.parse import quote

from fullrank._errors import DataError, EvaluationError, FullrankError
from fullrank.anytime import Anytime
from fullrank.data import GoldenSet
from fullrank.discover import Candidate, fingerprint_of
from fullrank.encode import Adapter
from fullrank.gating import fell_beyond
from fullrank.modelfiles import fingerprint, is_own_checkpoint, shape_of
from fullrank.result import Result
from fullrank.ring import Ring, guard_name
from fullrank.selecting import Values, objective_values
from fullrank.selection import Entry

__all__ = ["Contestant"]

logger = logging.getLogger(__name__)

SMALLEST_BLOCK, SHARE_OF_CORPUS = 16, {"adapter": 0.005, "model": 0.02}
"""Of documents that a candidate is extended by. Putting back all weights costs more than an adapter, so its blocks are
larger."""


class Contestant:
    """A `Contender` with real weights.

    Args:
        order: place by rising step.
        candidate: the folder.
        ring: what all share.
        likes: candidates in whose shape (pooling, length, prompts) such a base is loaded: that of the first that loads.
        is_base: whether this is the base model.
        source: path or hub id of a base model that is no folder of the run.
        key: its name in the journal and in files; default: the candidate's, which what is no folder may share.
    """

    def __init__(
        self,
        order: int,
        candidate: Candidate,
        ring: Ring,
        *,
        is_base: bool = False,
        source: str | None = None,
        likes: Sequence[Candidate] = (),
        key: str = "",
    ) -> None:
        self.order, self.candidate, self.ring = order, candidate, ring
        self.is_base, self.source, self._likes = is_base, source, list(likes)
        self.key = key or candidate.name
        self._counts = candidate.origin == "checkpoint" and is_own_checkpoint(candidate.path) and not is_base
        self.error = candidate.problem or ""
        self.results: dict[str, Result] = {}
        self.entry = Entry("")
        self._sessions: dict[str, Anytime] = {}
        self._means: dict[str, dict[str, float]] = {}
        self._seen: dict[str, int] = {}
        self._remember()

    # ------------------------------------------------------------------ what the race asks

    @property
    def failed(self) -> bool:
        """Whether it cannot be evaluated."""
        return bool(self.error)

    @property
    def eligible(self) -> bool:
        """False where a guard, or embeddings that are not finite, refuse it."""
        return not self.entry.refused

    @property
    def bound(self) -> float:
        """Value of the objective over what was ranked so far."""
        if self._has_objective:
            terms = self.ring.objective.terms
            return sum(weight * self._means[name][str(metric)] for name, metric, weight in terms)
        return math.inf if self.entry.bound is None else self.entry.bound

    @property
    def scored(self) -> bool:
        """Whether the whole corpus was ranked for the objective."""
        return self.ring.golden.keys() <= self.results.keys()

    @property
    def complete(self) -> bool:
        """Whether the objective and all guards are known."""
        return self.scored and self.judged

    @property
    def judged(self) -> bool:
        """Whether it is known if a guard refuses it."""
        return not self.eligible or all(self._guard_done(i) for i in range(len(self.ring.guards)))

    @property
    def coverage(self) -> float:
        """Share of the corpora of the objective that was ranked."""
        total = sum(len(g.corpus) for g in self.ring.golden.values())
        if self._has_objective:
            return sum(self._n_seen(name, golden) for name, golden in self.ring.golden.items()) / total
        return sum(self.entry.seen.get(name, 0) for name in self.ring.golden) / total

    def values(self) -> Values:
        """Returns what each query contributes to the bound."""
        results = {n: self.results[n] if n in self.results else self._sessions[n].result() for n in self.ring.golden}
        return objective_values(self.ring.objective, results)

    @property
    def counts(self) -> bool:
        """Whether it is a checkpoint folder of the run, of which the best so many are kept."""
        return self._counts

    @property
    def shape(self) -> Candidate | None:
        """The candidate in whose shape a base was loaded that is no folder of the run."""
        return self._likes[0] if self._likes else None

    def open(self, *, anew: bool = False) -> None:
        """Ranks the relevant documents, where the journal does not know a bound, or what each query gave is wanted."""
        for i in range(len(self.ring.guards)):  # a kill may have come between a guard's result and the judgement
            if self._guard_done(i):
                self._judge(i)
        remembered = self.entry.bound is not None and self.ring.remember_bounds and not anew
        if self.failed or self._has_objective or remembered:
            return

        def first_bounds() -> None:
            for name, golden in self.ring.golden.items():
                if name not in self.results and name not in self._sessions:
                    self._open(name, golden)

        self._guarded(first_bounds)

    def extend(self) -> None:
        """Ranks one more block: of the objective's sets, then of the guards'."""
        self._guarded(lambda: self._go_on(whole=False))

    def finish(self) -> None:
        """Ranks all that is left."""

        def all_of_it() -> None:
            while not self.complete and self.eligible:
                self._go_on(whole=True)

        self._guarded(all_of_it)

    def measure_guards(self) -> list[Result]:
        """Returns the results on the guards' sets, in full: the base's, with which the others are compared."""

        def measure() -> None:
            for i, guard in enumerate(self.ring.guards):
                if not self._guard_done(i):
                    self._extend(guard_name(i), guard.golden, whole=True)

        self._guarded(measure)
        if self.failed:
            raise EvaluationError(f"the base model gave no score for the guards: {self.error}")
        return [self.results[guard_name(i)] for i in range(len(self.ring.guards))]

    def encoder(self) -> Adapter:
        """Returns what encodes with these weights, which are in memory from now on."""
        return self._load()[1]

    @property
    def documents_per_second(self) -> float | None:
        """Of encoding, over all that was done for it."""
        return self.entry.n_encoded / self.entry.seconds if self.entry.seconds else None

    # ------------------------------------------------------------------ work

    @property
    def _has_objective(self) -> bool:
        return self.ring.golden.keys() <= self._means.keys()

    def _guard_done(self, i: int) -> bool:
        return guard_name(i) in self.results

    def _n_seen(self, name: str, golden: GoldenSet) -> int:
        return len(golden.corpus) if name in self.results else self._seen.get(name, 0)

    def _load(self) -> tuple[str, Adapter]:
        if self.source is not None:
            return self._load_base(self.source)
        if not self.candidate.path.is_dir():
            raise DataError(f"{self.candidate.path} has vanished")
        return self.ring.loader.load(self.candidate)

    def _load_base(self, source: str) -> tuple[str, Adapter]:
        try:
            return self.ring.loader.load_base(source, self.shape)
        except FullrankError as error:
            for i, like in enumerate(self._likes[1:], 1):  # the fault may be that of the candidate, not of the base
                try:
                    found = self.ring.loader.load_base(source, like)
                except FullrankError:
                    continue
                self._likes = self._likes[i:]
                return found
            raise error

    def _go_on(self, *, whole: bool) -> None:
        if not self.scored:
            for name, golden in self.ring.golden.items():
                if name not in self.results:
                    self._extend(name, golden, whole=whole)
            return
        for i, guard in enumerate(self.ring.guards):
            if not self._guard_done(i):
                self._extend(guard_name(i), guard.golden, whole=whole)
                self._judge(i)
                return

    def _open(self, name: str, golden: GoldenSet) -> None:
        key, encoder = self._load()
        start = time.perf_counter()
        self._sessions[name] = self.ring.session(key, encoder, name, golden)
        self._note(name, start)

    def _extend(self, name: str, golden: GoldenSet, *, whole: bool) -> None:
        if name not in self._sessions:
            self._open(name, golden)
        session = self._sessions[name]
        block = max(SMALLEST_BLOCK, round(len(golden.corpus) * SHARE_OF_CORPUS[self.candidate.kind]))
        self._load()
        start = time.perf_counter()
        session.extend(session.remaining if whole else self.ring.next_block(name, session, block))
        self._note(name, start)

    def _note(self, name: str, start: float) -> None:
        session = self._sessions[name]
        # Results are made where they are complete or asked for: the lists in them cost more than a block's bound.
        self._means[name] = session.means()
        complete = not len(session.remaining)
        entry = self.entry
        entry.n_encoded += session.n_seen - self._seen.get(name, 0)
        entry.seconds += time.perf_counter() - start
        self._seen[name] = entry.seen[name] = session.n_seen
        entry.bound = self.bound if math.isfinite(self.bound) else None
        if complete:
            result = self.results[name] = session.result()
            self._means[name] = result.metrics
            del self._sessions[name]
            entry.results[name] = file = f"{quote(self.key, safe='')}.{quote(name, safe='')}.json"
            self.ring.journal.save(file, result, entry.fingerprint)
            if name in self.ring.golden:
                self.ring.learn(name, result)
            if not result.eligible:
                entry.refused = "its embeddings are not finite"
        entry.status = "complete" if self.complete else "open"
        self.ring.flush(now=complete)
        self.ring.progress()

    def _judge(self, i: int) -> None:
        """Refuses the candidate where its score on a guard, or the bound of it, lies below the floor."""
        if i >= len(self.ring.guarded):
            return  # the base itself, with which the others are compared
        guard, name = self.ring.guards[i], guard_name(i)
        value, base = self._means[name][str(guard.metric)], self.ring.guarded[i][guard.metric]
        if fell_beyond(value - base, guard.max_drop):
            at_most = "" if name in self.results else "at most "
            self.entry.refused = (
                f"{guard.golden.name}: {guard.metric} {at_most}{value:.4f}, floor {base - guard.max_drop:.4f}"
            )

    def _guarded(self, work: Callable[[], object]) -> None:
        """Runs ``work``; whatever it raises, the candidate has failed and the others go on."""
        if self.failed:
            return
        try:
            work()
        except Exception as error:  # a model may raise anything
            self.error = f"{type(error).__name__}: {error}" if not str(error) else str(error)
            self.entry.status = "failed"
            self._sessions.clear()
            self.ring.flush(now=True)
            logger.warning("%s failed and is not a candidate: %s", self.candidate.name, error)

    def _mark(self) -> str:
        """Returns what tells these weights, and all that shapes the model around them, from others."""
        if self.source is None:
            return fingerprint_of(self.candidate, self.ring.loader.base)
        path = self.candidate.path
        weights = fingerprint(path) if path.is_dir() else f"hub {self.source}"
        return weights if self.shape is None else f"{weights} shaped as {shape_of(self.shape.path)}"

    def _remember(self) -> None:
        """Takes over what the journal knows of these weights."""
        if self.failed:
            return
        try:
            mark = self._mark()
        except OSError as error:
            self.error = str(error)
            return
        journal, name = self.ring.journal, self.key
        known = journal.known(name, mark)
        self.entry = journal.entries[name] = known or Entry(mark)
        if self.entry.status == "failed":  # what failed may have been the machine's fault
            self.entry = journal.entries[name] = Entry(mark, n_encoded=self.entry.n_encoded, seconds=self.entry.seconds)
        for set_name, file in dict(self.entry.results).items():
            result = journal.result(file, mark)
            if result is None:
                del self.entry.results[set_name]
                continue
            self.results[set_name], self._means[set_name] = result, result.metrics
            if set_name in self.ring.golden:
                self.ring.learn(set_name, result)
