"""StreamPool: many streams of one layer or model in one slab, opened, stepped, forked, rewound and kept on disk.

A stream has a record of its own in the slab (`kernels/streams.py`): a call takes the
records it works on, and no lock.
"""

import contextlib
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from linattn_edge import arrays, snapshots
from linattn_edge.attention import LinearAttention
from linattn_edge.errors import (
    PoolFullError,
    ShapeError,
    SnapshotError,
    StaleStreamError,
    StateMismatchError,
    StreamError,
)
from linattn_edge.kernels import layout, program
from linattn_edge.kernels.layout import LAPSED, OK, REFUSED, STALE, STEP, TAKEN, WAIT, WORTH_SHARING
from linattn_edge.layer import FORMAT_VERSION, Layer
from linattn_edge.models import Model, ModelState
from linattn_edge.state import State, compute_dtype, state_dtype

Array = NDArray[Any]
Ids = NDArray[np.int64]

MOST_STREAMS = 1 << layout.SLOT_BITS
PATIENCE = 10.0  # seconds: a call waits for a copy of a stream to be done, and a copy for a step or prefill
_ALIGN = 64
_NO_IDS = np.zeros(0, np.int64)


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


@dataclass(frozen=True)
class _Part:
    """Something that a record holds: where, and what of it is shown (S is padded to whole lanes)."""

    row: snapshots.Row
    at: int
    stored: tuple[int, ...]

    def view(self, record: NDArray[np.uint8]) -> Array:
        """It, in a record."""
        size = int(np.prod(self.stored, dtype=np.int64)) * self.row.dtype.itemsize
        whole = record[self.at : self.at + size].view(self.row.dtype).reshape(self.stored)
        return whole[..., : self.row.shape[-1]]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _aligned_bytes(nbytes: int) -> NDArray[np.uint8]:
    raw = np.zeros(nbytes + _ALIGN, np.uint8)
    start = -raw.ctypes.data % _ALIGN
    return raw[start : start + nbytes]


def _place_layer(layer: Layer, dtype: str, prefix: str, at: int) -> tuple[list[_Part], int, int, int]:
    """Where S and z of a layer go in a record from byte `at` on: the parts, the places of S and z, and their end."""
    empty = State(layer, 0, dtype)
    VP = layout.padded(layer.V)
    S = _Part(snapshots.Row(f"{prefix}S", empty.dtype, (layer.N, layer.F, layer.V)), at, (layer.N, layer.F, VP))
    z_at = at + _aligned(layer.N * layer.F * VP * empty.dtype.itemsize)
    if empty.z is None:
        return [S], at, z_at, z_at
    z = _Part(snapshots.Row(f"{prefix}z", empty.z.dtype, (layer.N, layer.F)), z_at, (layer.N, layer.F))
    return [S, z], at, z_at, z_at + _aligned(z.row.nbytes)


def _header(layer: Layer, dtype: str, position_at: int, S: int, z: int, window: int) -> NDArray[np.int64]:
    """The header of a job on records, its scratch right behind."""
    header = State(layer, 0, dtype)._block[: layout.HEADER * 8].view(np.int64).copy()
    header[[layout.AT_POSITION, layout.AT_S, layout.AT_Z]] = position_at, S, z
    header[layout.AT_WORK], header[layout.WINDOW] = layout.HEADER * 8, window
    return header


class _Job:
    """What one call writes to, for itself: headers, scratch, and the addresses of its streams."""

    def __init__(self, headers: list[NDArray[np.int64]], places: NDArray[np.int64] | None = None) -> None:
        ends = np.cumsum([0, *(_aligned(layout.HEADER * 8 + int(h[layout.STEP_WORK])) for h in headers)])
        self.block = _aligned_bytes(int(ends[-1]))
        self.headers = [self.block[start:][: layout.HEADER * 8].view(np.int64) for start in ends[:-1]]
        for mine, header in zip(self.headers, headers, strict=True):
            mine[...] = header
        self.scratch = np.empty(
            max(int(h[layout.PREFILL_WORK]) for h in headers) if places is not None else 0, np.uint8
        )
        self.places = _NO_IDS if places is None else places.copy()
        if places is not None:
            self.places[:: program.PLACES] = [header.ctypes.data for header in self.headers]
        self.streams = np.zeros(64, np.int64)

    def room(self, count: int) -> NDArray[np.int64]:
        """Room for the addresses of `count` streams."""
        if count > self.streams.size:
            self.streams = np.zeros(2 * count, np.int64)
        return self.streams


class _Records:
    """Streams that a call has taken, for the code that else has a State or a ModelState."""

    def __init__(self, pool: "StreamPool", job: _Job, ids: Ids) -> None:
        self.batch_size = ids.size
        self._pool = pool
        self._streams = job.streams[: ids.size]
        self._block, self._scratch = job.block, job.scratch
        self._dtype = self._kind = pool._kind.dtype
        self._bytes = pool._words * 8 * ids.size
        for header in job.headers:
            header[layout.B] = ids.size
        self._places = job.places
        self.position = np.empty(ids.size, np.int64)
        pool._small("positions")(self._streams, self.position)

    def _wrote(self, given: dict[str, Array], lengths: NDArray[np.int64] | None) -> None:
        """What has been written goes to the journals of streams with a checkpoint."""
        kind = self._pool._kind
        assert isinstance(kind, _LayerKind)
        kind.keep(self, given, lengths)


class _LayerKind:
    """How streams of a layer are kept and stepped."""

    def __init__(self, attn: LinearAttention, dtype: DTypeLike, window: int) -> None:
        if attn.backend != "cpu":
            raise ValueError(f"layer_or_model: a pool runs compiled kernels, not the backend {attn.backend!r}")
        self.attn, self.layer, self.window = attn, attn.layer, window
        self.dtype = state_dtype(dtype)
        self.parts, S, z, self.size = _place_layer(self.layer, self.dtype, "", layout.RECORD * 8)
        self.positions = [0]
        self.headers = [_header(self.layer, self.dtype, 0, S, z, window)]
        self.metadata = self.layer.metadata() | {"dtype": self.dtype}
        self.real = np.dtype(compute_dtype(self.dtype))
        H = self.headers[0]
        numbers = H[layout.HK] * H[layout.K] + H[layout.N] * (self.layer.V + self.layer.F + 1)
        self.image_at = window * 8 + -(-window * int(numbers) * self.real.itemsize // 8) * 8
        attn._prepare(self.dtype)
        _, self.plan, no_g, no_beta, self._kept = attn._entries[self.dtype]
        self.no_g, self.no_beta = no_g, no_beta
        self.constant = np.array(no_g.reshape(-1))
        self.entry: Callable[..., int] | None = None

    def new_job(self) -> _Job:
        return _Job(self.headers)

    def step(self, pool: "StreamPool", ids: Ids, q: Any, k: Any, v: Any, g: Any, beta: Any, out: Any) -> Any:
        """y, where the inputs are as the compiled step takes them and nothing is wrong; else a layout code."""
        attn, entry = self.attn, self.entry
        if not attn._has_loop:
            return REFUSED
        if entry is None:
            from linattn_edge.kernels import streams

            entry = self.entry = streams.step(self.real.name)
        job = pool._job()
        try:
            control = attn._helpers() if attn.num_threads > 1 and pool._words * 8 * ids.size >= WORTH_SHARING else 0
            if g is None:
                g = self.no_g
            elif self.no_g.size or g.ndim < 2:
                return REFUSED
            elif g.ndim == 2:
                g = g[:, :, None]
            y = out if out is not None else np.empty((ids.size, attn._outputs, attn._V), q.dtype)
            beta = self.no_beta if beta is None else beta
            room = job.room(ids.size)
            code = entry(ids, pool._table, q, k, v, g, beta, y, room, job.block, self.plan, control, pool._words)
            return y if code == OK else code
        except (TypeError, AttributeError, IndexError):
            return REFUSED
        finally:
            pool._jobs.append(job)

    def keep(self, records: _Records, given: dict[str, Array], lengths: NDArray[np.int64] | None) -> None:
        from linattn_edge.kernels import streams

        k = given["k"]
        streams.keep(self.real.name)(
            k,
            given["v"],
            given.get("g", self.no_g[None]),
            given.get("beta", self.no_beta[None]),
            _NO_IDS if lengths is None else lengths,
            records._streams,
            records._block,
            k.shape[1],
        )

    def run(self, records: _Records, axes: int, given: dict[str, Any], lengths: Any, out: Array | None) -> Array:
        """A step (axes 3) or prefill (axes 4) of streams that have been taken."""
        g, beta = given.get("g"), given.get("beta")
        y = self.attn._run(STEP, axes, given.get("q"), given.get("k"), given.get("v"), records, g, beta, lengths, out)  # type: ignore[arg-type]
        assert y is not None
        return y

    def wrong(self, axes: int, given: dict[str, Any], lengths: Any, position: Ids) -> dict[int, ValueError]:
        """The rows that would be refused, and why."""
        ready = {n: arrays.as_dtype(arrays.real_array(n, a), self.real) for n, a in given.items() if a is not None}
        ready = {n: a[:, None] if axes == 3 else a for n, a in ready.items()}
        found: dict[int, ValueError] = {}
        for row in range(position.size):
            mine = {name: a[row : row + 1] for name, a in ready.items()}
            length = None if lengths is None else lengths[row : row + 1]
            try:
                if self.attn.check_finite:
                    arrays.check_finite(mine, length)
                self.attn._check_phi(STEP, _Row(position[row : row + 1], self.dtype), mine, length)  # type: ignore[arg-type]
            except ValueError as error:
                found[row] = error
        return found

    def release(self, pool: "StreamPool", records: _Records, given: Any, lengths: Any) -> None:
        pool._small("release")(records._streams, _NO_IDS, _NO_IDS, 0, 0)

    def rollback(self, pool: "StreamPool", ids: Ids, n: int) -> int:
        from linattn_edge.kernels import streams

        job = pool._job()
        try:
            return streams.rollback(self.real.name)(
                ids, pool._table, job.room(1), self.constant, job.block, self.plan, pool._words, n
            )
        finally:
            pool._jobs.append(job)

    def new_state(self) -> State:
        return State(self.layer, 1, self.dtype)

    def arrays_of(self, state: Any) -> tuple[int, list[Array]]:
        """Position and parts of a State of one stream."""
        self.attn._check_state(state)
        if state._dtype != self.dtype:
            raise StateMismatchError(f"state: expected one of {self.dtype}, as the pool is, got {state._dtype}")
        return int(state.position[0]), [state.S[0], *([] if state.z is None else [state.z[0]])]

    def fill(self, state: Any, position: int, parts: list[Array]) -> None:
        state.S, state.position = parts[0][None], position
        if state.z is not None:
            state.z = parts[1][None]


@dataclass
class _Row:
    """One stream, for checks."""

    position: Ids
    _dtype: str
    batch_size: int = 1


class _ModelKind:
    """How streams of a model are kept and stepped."""

    dtype = "float32"

    def __init__(self, model: Model, dtype: DTypeLike, window: int) -> None:
        if state_dtype(dtype) != "float32":
            raise ValueError(f"dtype: the states of a model are float32; got {dtype!r}")
        self.model, self.window = model, window
        self.parts: list[_Part] = []
        self.headers, self.positions = [], []
        self.places = np.zeros(len(model.layers) * program.PLACES, np.int64)
        at = _aligned((layout.RECORD + len(model.layers)) * 8)
        self.size = at
        for i, (layer, past) in enumerate(zip(model.layers, model.convolutions, strict=True)):
            position_at = 0 if i == 0 else (layout.RECORD + i) * 8
            self.positions.append(position_at // 8)
            parts, S, z, at = _place_layer(layer, self.dtype, f"layers.{i}.", at)
            self.parts += parts
            self.headers.append(_header(layer, self.dtype, position_at, S, z, 0))
            start = at
            for j, (channels, kept) in enumerate(past):
                self.places[i * program.PLACES + 1 + j] = at
                at += channels * kept * 4
            if past:
                shape = (sum(channels for channels, _ in past), past[0][1])
                self.parts.append(_Part(snapshots.Row(f"layers.{i}.conv", np.dtype(np.float32), shape), start, shape))
            at = _aligned(at)
        self.size = at
        self.image_at = window * 8
        self.metadata = {"format_version": FORMAT_VERSION, "layers": model._digest}

    def new_job(self) -> _Job:
        return _Job(self.headers, self.places)

    def step(self, pool: "StreamPool", ids: Ids, *given: Any) -> Any:
        return REFUSED  # there is one way to step a model, `run`

    def run(self, records: _Records, axes: int, given: dict[str, Any], lengths: Any, out: Any) -> Array:
        tokens = self.model._ids(given["tokens"], records.batch_size, axes - 2)
        given["tokens"] = tokens
        if axes == 3:
            y = self.model._step(tokens, records)
        else:
            if lengths is not None:
                lengths = arrays.lengths_array(lengths, *tokens.shape)
            y = self.model._prefill(tokens, records, lengths, given["logits"])
        if out is not None:
            arrays.check_out(out, y.shape, "B, vocab", np.dtype(np.float32))
            out[...] = y
            return out
        return y

    def wrong(self, axes: int, given: dict[str, Any], lengths: Any, position: Ids) -> dict[int, ValueError]:
        tokens = arrays.to_array("tokens", given["tokens"])
        found: dict[int, ValueError] = {}
        for row in range(position.size):
            mine = tokens[row : row + 1]
            try:
                self.model._ids(mine if lengths is None or axes == 3 else mine[:, : lengths[row]], 1, axes - 2)
            except ValueError as error:
                found[row] = error
        return found

    def release(self, pool: "StreamPool", records: _Records, given: dict[str, Any] | None, lengths: Any) -> None:
        tokens = _NO_IDS if given is None else given["tokens"].reshape(-1)
        T = tokens.size // max(1, records.batch_size)
        pool._small("release")(records._streams, tokens, _NO_IDS if lengths is None else lengths, T, self.window)

    def rollback(self, pool: "StreamPool", ids: Ids, n: int) -> int:
        with pool._taken(ids) as records:
            record = pool._record(int(ids[0]))
            fields = record[: layout.RECORD * 8].view(np.int64)
            journal = pool._journals.get(int(ids[0]) & (MOST_STREAMS - 1))
            if fields[layout.JOURNAL] == 0 or journal is None or fields[layout.LOGGED] < n:
                return LAPSED
            image = journal[self.image_at :][: pool._words * 8]
            record[layout.RECORD * 8 :] = image[layout.RECORD * 8 :]
            fields[layout.POSITION] = image[: layout.RECORD * 8].view(np.int64)[layout.POSITION]
            fields[layout.LOGGED] -= n
            count = int(fields[layout.LOGGED])
            if count:
                tokens = journal[: count * 8].view(np.int64)
                self.model._prefill(tokens[None].copy(), records, None, "last")
        return OK

    def new_state(self) -> ModelState:
        return self.model.init_state(1)

    def arrays_of(self, state: Any) -> tuple[int, list[Array]]:
        self.model._check_state(state)
        parts: list[Array] = []
        for layer, past in zip(state.layers, state.convolutions, strict=True):
            parts += [layer.S[0], *([] if layer.z is None else [layer.z[0]])]
            if past:
                parts.append(np.concatenate([a[0] for a in past]))
        return int(state.position[0]), parts

    def fill(self, state: Any, position: int, parts: list[Array]) -> None:
        rest = iter(parts)
        for layer, past in zip(state.layers, state.convolutions, strict=True):
            layer.S, layer.position = next(rest)[None], position
            if layer.z is not None:
                layer.z = next(rest)[None]
            if past:
                kept, start = next(rest), 0
                for a in past:
                    a[0] = kept[start : start + a.shape[1]]
                    start += a.shape[1]


class StreamPool:
    """Many streams of one layer or model, in one slab of memory.

    Args:
        layer_or_model: a `LinearAttention` (backend "cpu") or a `Model`.
        capacity: streams that there is memory for from the start.
        max_capacity: streams that there may be; up to there the slab doubles when it is full, and no stream moves. By
            default `capacity`: then opening one more raises PoolFullError.
        dtype: of the states, as in `init_state`.
        window: tokens that a checkpoint keeps: how far back `rollback` goes.

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
    ) -> None:
        capacity = arrays.whole("capacity", capacity, 1, MOST_STREAMS)
        most = capacity if max_capacity is None else arrays.whole("max_capacity", max_capacity, capacity, MOST_STREAMS)
        window = arrays.whole("window", window, 1, 1 << 20)
        self._kind: _LayerKind | _ModelKind
        if isinstance(layer_or_model, LinearAttention):
            self._kind = _LayerKind(layer_or_model, dtype, window)
        elif isinstance(layer_or_model, Model):
            self._kind = _ModelKind(layer_or_model, dtype, window)
        else:
            raise TypeError(f"layer_or_model: expected a LinearAttention or Model, got {type(layer_or_model).__name__}")
        self.window, self.max_capacity = window, most
        self._words = self._kind.size // 8
        self._table = np.zeros(most, np.int64)  # the address of each slot's record
        self._slabs: list[NDArray[np.uint8]] = []
        self._firsts: list[int] = []  # the first slot of each slab
        self._free: deque[int] = deque()
        self._jobs: deque[_Job] = deque()
        self._journals: dict[int, NDArray[np.uint8]] = {}  # by slot
        self._growing = threading.Lock()
        self._before = 2 * secrets.randbits(36)  # generations begin here: ids of other pools mean nothing in this one
        self._entries: dict[str, Callable[..., int]] = {}
        self.capacity = 0
        self._grow(capacity)

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
        id_ = self._begin(slot)
        if given is not None:
            with self._taken(np.array([id_], np.int64)):
                self._put(id_, *given)
        return id_

    def close(self, id: int) -> None:
        """End a stream: its id is an error from now on, its slot is free. Takes the same time whatever its size."""
        ids = self._one(id)
        self._renew(ids, 1)
        slot = int(ids[0]) & (MOST_STREAMS - 1)
        self._journals.pop(slot, None)
        self._free.append(slot)

    def reset(self, id: int) -> None:
        """Put a stream back to the beginning, under the same id. A checkpoint of it is dropped."""
        self._renew(self._one(id), 0)

    def fork(self, id: int) -> int:
        """A new stream that goes on from where this one is; its checkpoint is not taken along. Returns the new id."""
        if type(id) is not int or not 0 <= id < 2**63:
            id = int(self._one(id)[0])
        fork, slot = self._small("fork"), self._slot()
        new = int(fork(id, slot, self._table, self._words))
        if new > 0:
            return new

        def again() -> int:
            nonlocal new
            new = int(fork(id, slot, self._table, self._words))
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
        ids = self._ids(ids)
        code = self._kind.step(self, ids, q, k, v, g, beta, out)
        if isinstance(code, np.ndarray):
            return code if on_error == "raise" else (code, [])
        return self._run(ids, 3, self._given(q, k, v, g, beta), None, out, on_error)

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
        return self._run(self._ids(ids), 4, given, lengths, out, on_error)

    # rewinding

    def checkpoint(self, id: int) -> None:
        """Remember the state of a stream, so that `rollback` can take back tokens that follow, up to `window` of them.

        One copy of the state, and memory for one more; a step of the stream then also keeps its token. A later
        checkpoint replaces it.
        """
        ids = self._one(id)
        slot = int(ids[0]) & (MOST_STREAMS - 1)
        journal = self._journals.get(slot)
        if journal is None:
            journal = _aligned_bytes(self._kind.image_at + self._words * 8)
        mark = self._small("mark")
        address, at = journal.ctypes.data, self._kind.image_at
        self._insist(ids, lambda room: mark(ids, self._table, room, address, at, self._words))
        self._journals[slot] = journal

    def rollback(self, id: int, n: int) -> None:
        """Take back the last n tokens of a stream since its checkpoint, which stays.

        The state becomes that of the checkpoint, and the tokens between are written again: to the bit what it was.
        StreamError, with nothing changed, where there is no checkpoint, fewer than n tokens since, or more than
        `window`.
        """
        n = arrays.whole("n", n, 0)
        ids = self._one(id)
        code = self._wait(lambda: self._kind.rollback(self, ids, n))
        if code == LAPSED:
            logged = int(self._field(id, layout.LOGGED))
            why = "it has no checkpoint"
            if self._field(id, layout.JOURNAL):
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

    def save(self, path: str | os.PathLike[str], ids: Sequence[int] | None = None) -> None:
        """Write streams, by default all that are open, to one file, atomically: whatever happens meanwhile, `path` is
        the old file or the new one.

        Each stream is copied at a moment of its own, between two of its tokens; others may be stepped meanwhile.
        Checkpoints are not saved.
        """
        chosen = list(self) if ids is None else [int(i) for i in self._ids(ids)]
        self._check_twice(np.array(chosen, np.int64))
        rows = [part.row for part in self._kind.parts]
        snapshots.write(path, self._kind.metadata, rows, chosen, (self._image(id_) for id_ in chosen))

    def load(self, path: str | os.PathLike[str], ids: Sequence[int] | None = None) -> dict[int, int]:
        """Open the streams of a file, all or those with these ids, and return {id when saved: id now}.

        SnapshotError where the file is damaged, cut, or of another layer or model, PoolFullError where there is no
        room: then none is opened.
        """
        made: dict[int, int] = {}

        def check(metadata: dict[str, str]) -> None:
            for name, value in self._kind.metadata.items():
                if metadata.get(name) != value:
                    raise SnapshotError(
                        f"{path}: belongs to another layer, model or format: {name} is {metadata.get(name)!r} in the "
                        f"file, {value!r} here"
                    )

        def take(id_: int, position: int, parts: list[Array]) -> None:
            made[id_] = now = self._begin(self._slot())
            with self._taken(np.array([now], np.int64)):
                self._put(now, position, parts)

        wanted = None if ids is None else [int(i) for i in self._ids(ids)]
        if wanted is not None:
            self._check_twice(np.array(wanted, np.int64))
        try:
            snapshots.read(path, check, [part.row for part in self._kind.parts], wanted, take)
        except BaseException:
            for now in made.values():
                self.close(now)
            raise
        return made

    # looking

    def __len__(self) -> int:
        return self.capacity - len(self._free)

    def __iter__(self) -> Iterator[int]:
        found: list[int] = []
        for first, fields in zip(self._firsts, map(self._fields, self._slabs), strict=False):
            generation = fields[:, layout.GENERATION].copy()
            slots = np.flatnonzero(generation % 2)
            found += ((generation[slots] << layout.SLOT_BITS) | (slots + first)).tolist()
        return iter(found)

    def __contains__(self, id: object) -> bool:
        if isinstance(id, (bool, np.bool_)) or not isinstance(id, (int, np.integer)) or not 0 <= id < 2**63:
            return False
        slot = int(id) & (MOST_STREAMS - 1)
        return bool(slot < self.capacity and self._field(int(id), layout.GENERATION) == int(id) >> layout.SLOT_BITS)

    def statistics(self) -> PoolStatistics:
        """How many streams there are and have been, and what they take."""
        opened = closed = tokens = 0
        for fields in map(self._fields, self._slabs):
            seen = fields[:, layout.GENERATION] - self._before
            opened += int(((seen + 1) // 2).sum())
            closed += int((seen // 2).sum())
            alive = (seen % 2 == 1) & (fields[:, layout.FRESH] == 0)
            tokens += int(fields[alive, layout.POSITION].sum())
        journals = list(self._journals.values())
        nbytes = sum(slab.nbytes for slab in self._slabs) + sum(a.nbytes for a in journals)
        return PoolStatistics(opened - closed, self.capacity, opened, closed, tokens, len(journals), nbytes)

    def __repr__(self) -> str:
        return f"StreamPool({len(self)} of {self.capacity} streams, {self._words * 8} bytes each)"

    def __reduce__(self) -> Any:
        raise TypeError("a StreamPool can't be pickled or copied: save its streams, or take a copy of one by `state`")

    # within

    def _grow(self, count: int) -> None:
        """Room for `count` more streams. Called by one thread at a time."""
        slab = _aligned_bytes(count * self._words * 8)
        first = self.capacity
        self._fields(slab)[:, layout.GENERATION] = self._before
        self._table[first : first + count] = slab.ctypes.data + np.arange(count) * self._words * 8
        self._slabs.append(slab)
        self._firsts.append(first)
        self.capacity += count
        self._free.extend(range(first, first + count))

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
                    self._grow(min(self.capacity, self.max_capacity - self.capacity))

    def _begin(self, slot: int) -> int:
        """Open the stream of a free slot."""
        return int(self._small("begin")(slot, self._table))

    def _fields(self, slab: NDArray[np.uint8]) -> NDArray[np.int64]:
        return slab.view(np.int64).reshape(-1, self._words)[:, : layout.RECORD]

    def _record(self, id: int) -> NDArray[np.uint8]:
        slot = id & (MOST_STREAMS - 1)
        number = max(i for i, first in enumerate(self._firsts) if first <= slot)
        size = self._words * 8
        start = (slot - self._firsts[number]) * size
        return self._slabs[number][start : start + size]

    def _field(self, id: int, field: int) -> int:
        return int(self._record(id)[: layout.RECORD * 8].view(np.int64)[field])

    def _put(self, id: int, position: int, parts: list[Array]) -> None:
        """Fill the record of a stream that has been taken."""
        record = self._record(id)
        for part, value in zip(self._kind.parts, parts, strict=True):
            part.view(record)[...] = value
        record[: self._kind.parts[0].at].view(np.int64)[self._kind.positions] = position

    def _image(self, id: int) -> tuple[int, list[Array]]:
        """Position and parts of a stream: copies."""
        image = _aligned_bytes(self._words * 8)
        self._copy(self._one(id), image.ctypes.data)
        return int(image[:8].view(np.int64)[0]), [part.view(image) for part in self._kind.parts]

    def _copy(self, ids: Ids, target: int) -> None:
        copy = self._small("copy")
        self._insist(ids, lambda room: copy(ids, self._table, room, target, self._words), until_free=True)

    def _renew(self, ids: Ids, close: int) -> None:
        renew = self._small("renew")
        self._insist(ids, lambda room: renew(ids, self._table, room, close))

    def _small(self, name: str) -> Callable[..., int]:
        entry = self._entries.get(name)
        if entry is None:
            from linattn_edge.kernels import streams

            entry = self._entries[name] = streams.small(name)
        return entry

    def _job(self) -> _Job:
        try:
            return self._jobs.pop()
        except IndexError:
            return self._kind.new_job()

    def _one(self, id: Any) -> Ids:
        if isinstance(id, (bool, np.bool_)) or not isinstance(id, (int, np.integer)):
            raise StaleStreamError(f"id: expected a stream's id, a whole number, got {id!r}")
        if not 0 <= id < 2**63:
            raise StaleStreamError(f"stream {id} is not open in this pool: its id was never given out")
        return np.array([id], np.int64)

    def _ids(self, ids: Any) -> Ids:
        if isinstance(ids, np.ndarray) and ids.dtype == np.int64 and ids.ndim == 1 and ids.flags.c_contiguous:
            return ids
        array = arrays.to_array("ids", ids)
        if array.dtype == object and array.ndim == 1 and all(isinstance(i, int) for i in array):
            raise StaleStreamError("ids: not all are open in this pool: some are no int64")
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ShapeError(f"ids: expected stream ids [B], got {array.dtype} {list(array.shape)}")
        return np.ascontiguousarray(array, np.int64)

    def _check_skip(self, on_error: str) -> None:
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error: expected 'raise' or 'skip', got {on_error!r}")

    def _check_twice(self, ids: Ids) -> None:
        kinds, counts = np.unique(ids, return_counts=True)
        if (counts > 1).any():
            raise StreamError(f"ids: stream {kinds[np.argmax(counts > 1)]} is there more than once")

    def _given(self, q: Any, k: Any, v: Any, g: Any, beta: Any) -> dict[str, Any]:
        if isinstance(self._kind, _ModelKind):
            if not (k is None and v is None and g is None and beta is None):
                raise TypeError("a pool of a model takes ids and tokens, no k, v, g and beta")
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
            raise StaleStreamError(f"stream {ids[place]} is not open in this pool: it was closed, or never was")
        self._check_twice(ids)
        assert kind in (TAKEN, WAIT)
        raise StreamError(f"stream {ids[place]} is in use by another thread; a stream is stepped by one at a time")

    @contextlib.contextmanager
    def _taken(self, ids: Ids, after: Callable[[_Records], None] | None = None) -> Iterator[_Records]:
        """Streams, for a call that is made of several."""
        job = self._job()
        try:
            room, take = job.room(ids.size), self._small("take")
            self._check(self._wait(lambda: take(ids, self._table, room, self._words)), ids)
            records = _Records(self, job, ids)
            try:
                yield records
            finally:
                if after is None:
                    self._small("release")(records._streams, _NO_IDS, _NO_IDS, 0, 0)
                else:
                    after(records)
        finally:
            self._jobs.append(job)

    def _run(self, ids: Ids, axes: int, given: dict[str, Any], lengths: Any, out: Array | None, on_error: str) -> Any:
        """The way that converts, finds the words for what is wrong, and leaves rows out."""
        self._check_twice(ids)
        given = {name: value for name, value in given.items() if value is not None}
        if lengths is not None:
            T = arrays.to_array("tokens", given["tokens" if "tokens" in given else "k"]).shape[1:2]
            lengths = arrays.lengths_array(lengths, ids.size, *(T or (0,)))

        written = False

        def after(records: _Records) -> None:
            self._kind.release(self, records, given if written else None, lengths)

        refused: dict[int, Exception] = {}
        try:
            with self._taken(ids, after) as records:
                position = records.position
                try:
                    y = self._kind.run(records, axes, given, lengths, out)
                    written = True
                    return y if on_error == "raise" else (y, [])
                except ValueError as error:
                    if isinstance(error, ShapeError):
                        raise
                    refused = dict(self._kind.wrong(axes, given, lengths, position))
                    if not refused:
                        raise
        except StreamError:
            if on_error == "raise":
                raise
            refused = {row: StreamError("not open") for row, id_ in enumerate(ids) if int(id_) not in self}
            if not refused:
                raise
        if on_error == "raise":
            row, reason = next(iter(refused.items()))
            raise type(reason)(f"stream {ids[row]}, row {row}: {reason}") from None
        kept = np.array([row for row in range(ids.size) if row not in refused], np.intp)
        rest = {
            name: value if name == "logits" else arrays.to_array(name, value)[kept] for name, value in given.items()
        }
        part, more = self._run(ids[kept], axes, rest, None if lengths is None else lengths[kept], None, "skip")
        y = np.zeros((ids.size, *part.shape[1:]), part.dtype) if out is None else out
        y[...] = 0
        gone = set(more)
        y[kept] = part
        return y, [int(i) for row, i in enumerate(ids) if row in refused or int(i) in gone]
