"""StreamPool: many streams of one layer or model in one slab, opened, stepped, forked, rewound and kept on disk.

Here is who may use a stream when, and what a mistake is called; memory is in `records.py`, layers and models in
`pooled.py`, the compiled calls in `kernels/streams.py`, files in `snapshots.py`.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from linattn_edge import arrays, snapshots
from linattn_edge.attention import LinearAttention
from linattn_edge.errors import (
    DtypeError,
    PoolFullError,
    ShapeError,
    StaleStreamError,
    StreamError,
)
from linattn_edge.kernels import layout
from linattn_edge.kernels.layout import LAPSED, OK, STALE, TAKEN, WAIT
from linattn_edge.models import Model, ModelState
from linattn_edge.pooled import LayerStreams, ModelStreams
from linattn_edge.records import MOST_STREAMS, NO_IDS, Array, Ids, Records, Slab
from linattn_edge.state import State, aligned_bytes

PATIENCE = 10.0  # seconds: a call waits for a copy of a stream to be done, and a copy for a step or prefill


class PoolStatistics(NamedTuple):
    """Of a `StreamPool`: streams open now and slots for them, streams opened and closed since the beginning, tokens
    that the open ones have seen, checkpoints held, bytes of the slab and of the checkpoints."""

    open: int
    capacity: int
    opened: int
    closed: int
    tokens: int
    checkpoints: int
    nbytes: int


class StreamPool:
    """Many streams of one layer or model, in one slab of memory.

    Args:
        layer_or_model: a `LinearAttention` (backend "cpu") or a `Model`.
        capacity: streams that there is memory for from the start.
        max_capacity: streams that there may be; up to there the slab doubles when it is full, and no stream moves. By
            default `capacity`: then opening one more raises PoolFullError.
        dtype: of the states, as in `init_state`.
        window: tokens that a checkpoint keeps: how far back `rollback` goes.
        compensated: sums in two parts, as in `init_state`: for streams of a "linear" layer that go on for ever.

    An id is a Python int that names one stream of one pool, once: after `close` it is an error (StaleStreamError), for
    ever. `len(pool)`, `id in pool` and iteration (over the ids of open streams) look at what is open now.

    Threads: different streams may be used by different threads at once; there is no lock around the arithmetic, and
    opening and closing do not wait for it. Where one thread steps a stream and another steps, rewinds, resets or
    closes it meanwhile, that is a StreamError for the latter, which changes nothing. What only copies a stream (`fork`,
    `save`, `state`, `position`) waits for the one who works on it, and a step waits the microseconds of a copy.
    """

    def __init__(
        self,
        layer_or_model: LinearAttention | Model,
        capacity: int,
        max_capacity: int | None = None,
        dtype: DTypeLike = "float32",
        window: int = 16,
        compensated: bool = False,
    ) -> None:
        capacity = arrays.whole("capacity", capacity, 1, MOST_STREAMS)
        most = capacity if max_capacity is None else arrays.whole("max_capacity", max_capacity, capacity, MOST_STREAMS)
        window = arrays.whole("window", window, 1, 1 << 20)
        compensated = arrays.flag("compensated", compensated)
        self._kind: LayerStreams | ModelStreams
        if isinstance(layer_or_model, LinearAttention):
            self._kind = LayerStreams(layer_or_model, dtype, window, compensated)
        elif isinstance(layer_or_model, Model):
            self._kind = ModelStreams(layer_or_model, dtype, window, compensated)
        else:
            raise TypeError(f"layer_or_model: expected a LinearAttention or Model, got {type(layer_or_model).__name__}")
        self.window, self.max_capacity = window, most
        self._slab = Slab(self._kind.size, most)
        self._free = deque(self._slab.grow(capacity))  # slots
        self._journals: dict[int, NDArray[np.uint8]] = {}  # by slot
        self._growing = threading.Lock()

    # opening and closing

    def open(self, state: State | ModelState | None = None) -> int:
        """Begin a stream and return its id. `state`, of one stream, is copied in; without one it begins with nothing.

        PoolFullError where `max_capacity` streams are open.
        """
        given = None
        if state is not None:
            given = self._kind.arrays_of(state)
            if state.batch_size != 1:
                raise ShapeError(f"state: expected one stream, got {state.batch_size}")
        slot = self._slot()
        if given is None:
            return self._begin(slot)
        try:
            self._put(slot, *given)
        except BaseException:
            self._free.append(slot)
            raise
        return self._begin(slot, filled=True)

    def close(self, id: int) -> None:
        """End a stream: its id is an error from now on, its slot is free. Takes the same time whatever its size."""
        ids = self._one(id)
        self._renew(ids, 1)
        slot = int(ids[0]) & (MOST_STREAMS - 1)
        self._journals.pop(slot, None)
        self._free.append(slot)

    def reset(self, id: int) -> None:
        """Put a stream back to the beginning, under the same id. A checkpoint of it is void; its memory stays with the
        stream."""
        self._renew(self._one(id), 0)

    def fork(self, id: int) -> int:
        """A new stream that goes on from where this one is; its checkpoint is not taken along. Returns the new id."""
        if type(id) is not int or not 0 <= id < 2**63:
            id = int(self._one(id)[0])
        if not self._free and id not in self:  # then there is nothing to make room for
            self._check(STALE, np.array([id], np.int64))
        fork, slot = self._slab.entry("fork"), self._slot()
        new = int(fork(id, slot, self._slab.table, self._slab.words))
        if new > 0:
            return new

        def again() -> int:
            nonlocal new
            new = int(fork(id, slot, self._slab.table, self._slab.words))
            return max(OK, -new)

        try:
            self._check(self._wait(again, until_free=True), np.array([id], np.int64))
        finally:
            if new <= 0:
                self._free.append(slot)
        return new

    # tokens

    def step(
        self,
        ids: ArrayLike,
        q: ArrayLike,
        k: ArrayLike | None = None,
        v: ArrayLike | None = None,
        g: ArrayLike | None = None,
        beta: ArrayLike | None = None,
        out: Array | None = None,
        on_error: str = "raise",
    ) -> Any:
        """One token of each of the streams `ids` [B], any of them, each once, in one compiled call.

        Of a layer: q, k, v, g, beta and `out` as in `LinearAttention.step`, one row for each id; returns y
        [B, heads, V]. Of a model: `pool.step(ids, tokens)`, tokens [B]; returns logits [B, vocab].

        Ids given twice are an error. A row that can't be taken (NaN, a token that is none, an id that is stale or in
        use elsewhere) is named in the error, and no stream is changed; with on_error="skip" the other rows are stepped,
        and the result is (y, refused): 0 in the rows left out, and their ids.
        """
        self._check_skip(on_error)
        numbers = self._ids(ids)
        code = self._kind.step(self._slab, numbers, q, k, v, g, beta, out)
        if isinstance(code, np.ndarray):
            return code if on_error == "raise" else (code, [])
        return self._run(numbers, 3, self._given(q, k, v, g, beta), None, out, on_error, ids)

    def prefill(
        self,
        ids: ArrayLike,
        q: ArrayLike,
        k: ArrayLike | None = None,
        v: ArrayLike | None = None,
        g: ArrayLike | None = None,
        beta: ArrayLike | None = None,
        lengths: ArrayLike | None = None,
        out: Array | None = None,
        on_error: str = "raise",
        logits: str = "all",
    ) -> Any:
        """Many tokens of each of the streams: of a layer [B, T, heads, width] as in `LinearAttention.prefill`, of a
        model tokens [B, T] as in `Model.prefill`, which `logits` is for. Errors as in `step`."""
        self._check_skip(on_error)
        if logits not in ("all", "last"):
            raise ValueError(f"logits: expected 'all' or 'last', got {logits!r}")
        given = self._given(q, k, v, g, beta)
        if "tokens" in given:
            given["logits"] = logits
        return self._run(self._ids(ids), 4, given, lengths, out, on_error, ids)

    # rewinding

    def checkpoint(self, id: int) -> None:
        """Remember the state of a stream, so that `rollback` can take back tokens that follow, up to `window` of them.

        One copy of the state, and memory for one more, until the stream is closed; a step of the stream then also keeps
        its token. A later checkpoint replaces it.
        """
        ids = self._one(id)
        slot = int(ids[0]) & (MOST_STREAMS - 1)
        # Whatever address a record gets is that of the journal in the dict, from before until the stream is closed.
        journal = self._journals.get(slot)
        if journal is None:
            if ids[0] not in self:
                self._check(STALE, ids)
            journal = self._journals.setdefault(slot, aligned_bytes(self._kind.image_at + self._slab.words * 8))
        mark = self._slab.entry("mark")
        address, at = journal.ctypes.data, self._kind.image_at
        self._insist(ids, lambda room: mark(ids, self._slab.table, room, address, at, self._slab.words))

    def rollback(self, id: int, n: int) -> None:
        """Take back the last n tokens of a stream since its checkpoint, which stays.

        The state becomes that of the checkpoint, and the tokens between are written again: to the bit what it was.
        StreamError, with nothing changed, where there is no checkpoint, fewer than n tokens since, or more than
        `window`.
        """
        n = arrays.whole("n", n, 0)
        ids = self._one(id)
        journal = self._journals.get(int(ids[0]) & (MOST_STREAMS - 1))
        code = self._wait(lambda: self._kind.rollback(self._slab, ids, n, self._taken, journal))
        if code == LAPSED:
            logged = int(self._slab.field(id, layout.LOGGED))
            why = "it has no checkpoint"
            if self._slab.field(id, layout.JOURNAL):
                why = f"{logged} tokens have followed its checkpoint"
                if logged < 0:
                    why = f"more tokens have followed its checkpoint than the window of {self.window}"
            raise StreamError(f"stream {id}: can't take back {n} tokens: {why}")
        self._check(code, ids)

    # states and files

    def state(self, id: int) -> Any:
        """A copy of a stream as a State (of a model a ModelState) of one stream."""
        position, parts = self._image(id)
        state = self._kind.new_state()
        self._kind.fill(state, position, parts)
        return state

    def position(self, id: int) -> int:
        """Tokens that a stream has seen."""
        return self._image(id)[0]

    def save(self, path: str | os.PathLike[str], ids: Iterable[int] | None = None) -> None:
        """Write streams, by default all that are open, to one file, atomically: whatever happens meanwhile, `path` is
        the old file or the new one.

        Each stream is copied at a moment of its own, between two of its tokens; others may be stepped meanwhile.
        Without `ids`, streams that are closed before their turn comes are left out. Checkpoints are not saved.
        """
        chosen = list(self) if ids is None else self._chosen(ids)

        def images() -> Iterator[tuple[int, int, list[Array]]]:
            for id_ in chosen:
                try:
                    yield id_, *self._image(id_)
                except StaleStreamError:
                    if ids is not None:
                        raise

        rows = [part.row for part in self._kind.parts]
        snapshots.write(path, self._kind.metadata, rows, len(chosen), images())

    def load(self, path: str | os.PathLike[str], ids: Iterable[int] | None = None) -> dict[int, int]:
        """Open the streams of a file, all or those with these ids, and return {id when saved: id now}.

        SnapshotError where the file is damaged, cut, or of another layer or model, PoolFullError where there is no
        room: then none is opened.
        """
        slots: dict[int, int] = {}  # by id when saved; nobody sees these streams before all are there

        def take(id_: int, position: int, parts: list[Array]) -> None:
            slots[id_] = slot = self._slot()
            self._put(slot, position, parts)

        wanted = None if ids is None else self._chosen(ids)
        try:
            check = partial(self._kind.check_metadata, path)
            snapshots.read(path, check, [part.row for part in self._kind.parts], wanted, take)
        except BaseException:
            self._free.extend(slots.values())
            raise
        return {id_: self._begin(slot, filled=True) for id_, slot in slots.items()}

    # looking

    @property
    def capacity(self) -> int:
        """Streams that there is memory for now."""
        return self._slab.capacity

    def __len__(self) -> int:
        return self.capacity - len(self._free)

    def __iter__(self) -> Iterator[int]:
        found: list[int] = []
        for first, fields in self._slab.fields():
            generation = fields[:, layout.GENERATION].copy()
            slots = np.flatnonzero(generation % 2)
            found += ((generation[slots] << layout.SLOT_BITS) | (slots + first)).tolist()
        return iter(found)

    def __contains__(self, id: object) -> bool:
        if isinstance(id, (bool, np.bool_)) or not isinstance(id, (int, np.integer)) or not 0 <= id < 2**63:
            return False
        generation, slot = int(id) >> layout.SLOT_BITS, int(id) & (MOST_STREAMS - 1)
        there = slot < self.capacity and generation % 2 == 1
        return there and self._slab.field(int(id), layout.GENERATION) == generation

    def statistics(self) -> PoolStatistics:
        """How many streams there are and have been, and what they take."""
        opened = closed = tokens = checkpoints = 0
        for _, fields in self._slab.fields():
            seen = fields[:, layout.GENERATION] - self._slab.before
            opened += int(((seen + 1) // 2).sum())
            closed += int((seen // 2).sum())
            alive = (seen % 2 == 1) & (fields[:, layout.FRESH] == 0)
            tokens += int(fields[alive, layout.POSITION].sum())
            checkpoints += int((fields[seen % 2 == 1, layout.JOURNAL] != 0).sum())
        journals = list(self._journals.values())
        nbytes = self._slab.nbytes + sum(a.nbytes for a in journals)
        return PoolStatistics(opened - closed, self.capacity, opened, closed, tokens, checkpoints, nbytes)

    def __repr__(self) -> str:
        return f"StreamPool({len(self)} of {self.capacity} streams, {self._slab.words * 8} bytes each)"

    def __reduce__(self) -> Any:
        raise TypeError("a StreamPool can't be pickled or copied: save its streams, or take a copy of one by `state`")

    # within

    def _slot(self) -> int:
        while True:
            try:
                return self._free.popleft()
            except IndexError:
                with self._growing:
                    if self._free:
                        continue
                    if self.capacity >= self.max_capacity:
                        raise PoolFullError(
                            f"the pool is full: {self.max_capacity} streams are open; close some, or make it with a "
                            "larger max_capacity"
                        ) from None
                    self._free.extend(self._slab.grow(min(self.capacity, self.max_capacity - self.capacity)))

    def _begin(self, slot: int, filled: bool = False) -> int:
        """Open the stream of a slot that nobody else has: with nothing, or with what `_put` has filled in."""
        return int(self._slab.entry("begin")(slot, self._slab.table, int(filled)))

    def _put(self, slot: int, position: int, parts: list[Array]) -> None:
        """Fill the record of a slot that nobody else has."""
        record = self._slab.record(slot)
        record[layout.RECORD * 8 :] = 0
        for part, value in zip(self._kind.parts, parts, strict=True):
            part.view(record)[...] = value
        fields = record[: self._kind.parts[0].at].view(np.int64)
        fields[self._kind.positions] = position
        fields[layout.FRESH] = 0

    def _image(self, id: int) -> tuple[int, list[Array]]:
        """Position and parts of a stream: copies."""
        image = aligned_bytes(self._slab.words * 8)
        self._copy(self._one(id), image.ctypes.data)
        return int(image[:8].view(np.int64)[0]), [part.view(image) for part in self._kind.parts]

    def _copy(self, ids: Ids, target: int) -> None:
        copy = self._slab.entry("copy")
        self._insist(ids, lambda room: copy(ids, self._slab.table, room, target, self._slab.words), until_free=True)

    def _renew(self, ids: Ids, close: int) -> None:
        renew = self._slab.entry("renew")
        self._insist(ids, lambda room: renew(ids, self._slab.table, room, close))

    def _one(self, id: Any) -> Ids:
        if isinstance(id, np.ndarray) and id.ndim == 0:
            id = id[()]
        if isinstance(id, (bool, np.bool_)) or not isinstance(id, (int, np.integer)):
            raise DtypeError(f"id: expected a stream's id, a whole number, got {id!r}")
        return np.array([id if 0 <= id < 2**63 else -1], np.int64)

    def _ids(self, ids: Any) -> Ids:
        """Ids as int64; -1, which no stream has, for numbers that are none."""
        if isinstance(ids, np.ndarray) and ids.dtype == np.int64 and ids.ndim == 1 and ids.flags.c_contiguous:
            return ids
        array = arrays.to_array("ids", ids)
        if array.ndim != 1:
            got = list(array.shape) if array.dtype != object else type(ids).__name__
            raise ShapeError(f"ids: expected a list or array of stream ids [B], got {got}")
        if array.dtype == object and all(isinstance(i, (int, np.integer)) for i in array):
            array = np.array([i if 0 <= i < 2**63 else -1 for i in array], np.int64)
        if array.size and array.dtype.kind not in "iu":
            raise DtypeError(f"ids: expected stream ids, whole numbers, got {array.dtype}")
        if array.dtype == np.uint64:
            array = np.where(array < 2**63, array.astype(np.int64), -1)
        return np.ascontiguousarray(array, np.int64)

    def _chosen(self, ids: Iterable[int]) -> list[int]:
        """The ids of a list, set or whatever else one can go through, each once."""
        chosen = self._ids(ids if isinstance(ids, np.ndarray) else list(ids))
        self._check_twice(chosen)
        return [int(i) for i in chosen]

    def _check_skip(self, on_error: str) -> None:
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error: expected 'raise' or 'skip', got {on_error!r}")

    def _check_twice(self, ids: Ids) -> None:
        kinds, counts = np.unique(ids, return_counts=True)
        if (counts > 1).any():
            raise StreamError(f"ids: stream {kinds[np.argmax(counts > 1)]} is there more than once")

    def _given(self, q: Any, k: Any, v: Any, g: Any, beta: Any) -> dict[str, Any]:
        if isinstance(self._kind, ModelStreams):
            if not (k is None and v is None and g is None and beta is None):
                raise TypeError("a pool of a model takes ids and tokens, no k, v, g and beta")
            if q is None:
                raise TypeError("a pool of a model takes ids and tokens, got None")
            return {"tokens": q}
        if k is None or v is None:
            raise TypeError("a pool of a layer takes ids, q, k and v (and g and beta, where the rule does)")
        return {"q": q, "k": k, "v": v, "g": g, "beta": beta}

    def _wait(self, call: Callable[[], int], until_free: bool = False) -> int:
        """The code of a call, tried again while a stream is being copied, or `until_free` of any use."""
        end, tries = 0.0, 0
        while True:
            code = call()
            if code % layout.CODES != WAIT and not (until_free and code % layout.CODES == TAKEN):
                return code
            now = time.monotonic()
            end = end or now + PATIENCE
            if now > end:
                return code
            tries += 1
            time.sleep(0 if tries < 50 else 1e-4)

    def _insist(self, ids: Ids, call: Callable[[NDArray[np.int64]], int], until_free: bool = False) -> None:
        room = np.empty(ids.size, np.int64)
        self._check(self._wait(lambda: call(room), until_free), ids)

    def _check(self, code: int, ids: Ids) -> None:
        """The error that a code of streams stands for."""
        if code == OK:
            return
        kind, place = code % layout.CODES, code // layout.CODES
        if kind == STALE:
            name = f"stream {ids[place]}" if ids[place] >= 0 else f"ids: row {place}"
            error: StreamError = StaleStreamError(f"{name} is not open in this pool: it was closed, or never was")
        else:
            assert kind in (TAKEN, WAIT)
            self._check_twice(ids)
            error = StreamError(
                f"stream {ids[place]} is in use by another thread; a stream is stepped by one at a time"
            )
        error.row = place
        raise error

    @contextlib.contextmanager
    def _taken(self, ids: Ids, after: Callable[[Records], None] | None = None) -> Iterator[Records]:
        """Streams, for a call that is made of several."""
        job = self._kind.jobs.take()
        try:
            room, take = job.room(ids.size), self._slab.entry("take")
            self._check(self._wait(lambda: take(ids, self._slab.table, room, self._slab.words)), ids)
            records = Records(self._slab, job, ids.size, self._kind.dtype, self._kind.kind, self._kind.keep)
            try:
                yield records
            finally:
                if after is None:
                    self._slab.entry("release")(records._streams, NO_IDS, NO_IDS, 0, 0)
                else:
                    after(records)
        finally:
            self._kind.jobs.give(job)

    def _run(
        self, ids: Ids, axes: int, given: dict[str, Any], lengths: Any, out: Array | None, on_error: str, named: Any
    ) -> Any:
        """The way that converts, finds the words for what is wrong, and leaves rows out. named: the ids as they were
        given."""
        self._check_twice(ids)
        given = {name: value for name, value in given.items() if value is not None}
        if lengths is not None:
            T = arrays.to_array("tokens", given["tokens" if "tokens" in given else "k"]).shape[1:2]
            lengths = arrays.lengths_array(lengths, ids.size, *(T or (0,)))
        if on_error == "raise":
            try:
                return self._attempt(ids, axes, given, lengths, out)
            except _RowsRefused as refused:
                row, reason = next(iter(refused.reasons.items()))
                raise type(reason)(f"stream {ids[row]}, row {row}: {reason}") from None
        given, shape, dtype = self._kind.checked(axes, given, out, ids.size)
        rows = np.array([row for row, id_ in enumerate(ids) if int(id_) in self], np.intp)
        while True:
            some = {name: value if name == "logits" else value[rows] for name, value in given.items()}
            try:
                part = self._attempt(ids[rows], axes, some, None if lengths is None else lengths[rows], None)
                break
            except _RowsRefused as refused:
                rows = np.delete(rows, list(refused.reasons))
            except StreamError as error:
                if error.row is None:
                    raise
                rows = np.delete(rows, error.row)
        y = np.empty(shape, dtype) if out is None else out
        y[...] = 0
        y[rows] = part
        return y, [int(named[row]) for row in np.delete(np.arange(ids.size), rows)]

    def _attempt(self, ids: Ids, axes: int, given: dict[str, Any], lengths: Any, out: Array | None) -> Array:
        """A call of all rows or, by `_RowsRefused` or another error, of none."""
        written = False

        def after(records: Records) -> None:
            self._kind.release(self._slab, records, given if written else None, lengths)

        with self._taken(ids, after) as records:
            position = records.position
            try:
                y = self._kind.run(records, axes, given, lengths, out)
                written = True
                return y
            except ValueError as error:
                if isinstance(error, ShapeError):
                    raise
                reasons = self._kind.wrong(axes, given, lengths, position)
                if not reasons:
                    raise
                raise _RowsRefused(reasons) from None


class _RowsRefused(Exception):
    """Rows of a call that can't be taken, and why; nothing was done."""

    def __init__(self, reasons: dict[int, ValueError]) -> None:
        super().__init__(reasons)
        self.reasons = reasons
