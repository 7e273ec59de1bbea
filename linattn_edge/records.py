"""The memory of a pool: a record for each stream (`kernels/layout.py`), and what a call on some of them needs."""

import secrets
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn_edge import snapshots
from linattn_edge.kernels import layout, program
from linattn_edge.state import State, aligned, aligned_bytes

Array = NDArray[Any]
Ids = NDArray[np.int64]

MOST_STREAMS = 1 << layout.SLOT_BITS
NO_IDS = np.zeros(0, np.int64)

Keep = Callable[["Records", dict[str, Array], NDArray[np.int64] | None], None]


@dataclass(frozen=True)
class Part:
    """Something that a record holds: where, and what of it is shown (S is padded to whole lanes)."""

    row: snapshots.Row
    at: int
    stored: tuple[int, ...]

    def view(self, record: NDArray[np.uint8]) -> Array:
        """It, in a record."""
        size = int(np.prod(self.stored, dtype=np.int64)) * self.row.dtype.itemsize
        whole = record[self.at : self.at + size].view(self.row.dtype).reshape(self.stored)
        return whole[..., : self.row.shape[-1]]


class Places(NamedTuple):
    """Where what a layer keeps begins in a record, and where it ends: bytes. The totals are of a compensated state."""

    S: int
    z: int
    S_total: int
    z_total: int
    end: int


def place_layer(empty: State, prefix: str, at: int) -> tuple[list[Part], Places]:
    """Lay out a state such as `empty` from byte `at` on."""
    parts: list[Part] = []
    begins: list[int] = []
    arrays = empty._S, empty._z, empty._far_S, empty._far_z
    for name, array in zip(Places._fields, arrays, strict=False):
        begins.append(at)
        if array is None:
            continue
        shape = array.shape[1:]
        stored = (*shape[:-1], layout.padded(shape[-1])) if "S" in name else shape
        parts.append(Part(snapshots.Row(prefix + name, array.dtype, shape), at, stored))
        at += aligned(int(np.prod(stored, dtype=np.int64)) * array.itemsize)
    return parts, Places._make([*begins, at])


def job_header(empty: State, position_at: int, places: Places, window: int) -> NDArray[np.int64]:
    """The header of a job on records, its scratch right behind."""
    header = empty._block[: layout.HEADER * 8].view(np.int64).copy()
    header[[layout.AT_POSITION, layout.AT_S, layout.AT_Z]] = position_at, places.S, places.z
    if empty._far_S is not None:
        header[[layout.AT_FAR_S, layout.AT_FAR_Z]] = places.S_total, places.z_total
    header[layout.AT_WORK], header[layout.WINDOW] = layout.HEADER * 8, window
    return header


class Job:
    """What one call writes to, for itself: headers, scratch, and the addresses of its streams."""

    def __init__(self, headers: list[NDArray[np.int64]], places: NDArray[np.int64] | None = None) -> None:
        ends = np.cumsum([0, *(aligned(layout.HEADER * 8 + int(h[layout.STEP_WORK])) for h in headers)])
        self.block = aligned_bytes(int(ends[-1]))
        self.headers = [self.block[start:][: layout.HEADER * 8].view(np.int64) for start in ends[:-1]]
        for mine, header in zip(self.headers, headers, strict=True):
            mine[...] = header
        self.scratch = np.empty(
            max(int(h[layout.PREFILL_WORK]) for h in headers) if places is not None else 0, np.uint8
        )
        self.places = NO_IDS if places is None else places.copy()
        if places is not None:
            self.places[:: program.PLACES] = [header.ctypes.data for header in self.headers]
        self.streams = np.zeros(64, np.int64)

    def room(self, count: int) -> NDArray[np.int64]:
        """Room for the addresses of `count` streams."""
        if count > self.streams.size:
            self.streams = np.zeros(2 * count, np.int64)
        return self.streams


class Jobs:
    """The jobs of a pool: each belongs to one call at a time."""

    def __init__(self, headers: list[NDArray[np.int64]], places: NDArray[np.int64] | None = None) -> None:
        self._headers, self._places = headers, places
        self._idle: deque[Job] = deque()
        self.give = self._idle.append  # where the call is over; bound, since a step does it each time

    def take(self) -> Job:
        """One that no call is using."""
        try:
            return self._idle.pop()
        except IndexError:
            return Job(self._headers, self._places)


class Slab:
    """The records of a pool, by slot: memory that grows, and never moves."""

    def __init__(self, size: int, most: int) -> None:
        self.words = size // 8
        self.capacity = 0
        self.table = np.zeros(most, np.int64)  # the address of each slot's record
        self.before = 2 * secrets.randbits(36)  # generations begin here: ids of other pools mean nothing in this one
        self._pieces: list[NDArray[np.uint8]] = []
        self._firsts: list[int] = []  # the first slot of each piece
        self._entries: dict[str, Callable[..., int]] = {}

    def grow(self, count: int) -> range:
        """Room for `count` more streams; returns their slots. Called by one thread at a time."""
        piece = aligned_bytes(count * self.words * 8)
        first = self.capacity
        self._fields(piece)[:, layout.GENERATION] = self.before
        self.table[first : first + count] = piece.ctypes.data + np.arange(count) * self.words * 8
        self._pieces.append(piece)
        self._firsts.append(first)
        self.capacity += count
        return range(first, first + count)

    def fields(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """The first slot of each piece, and the fields of its records."""
        return zip(self._firsts, map(self._fields, self._pieces), strict=False)

    def record(self, id: int) -> NDArray[np.uint8]:
        """The record of an id's slot."""
        slot = id & (MOST_STREAMS - 1)
        number = max(i for i, first in enumerate(self._firsts) if first <= slot)
        size = self.words * 8
        start = (slot - self._firsts[number]) * size
        return self._pieces[number][start : start + size]

    def field(self, id: int, field: int) -> int:
        """One of the fields of a record."""
        return int(self.record(id)[: layout.RECORD * 8].view(np.int64)[field])

    def entry(self, name: str) -> Callable[..., int]:
        """One of the compiled calls that do not depend on what a stream is."""
        entry = self._entries.get(name)
        if entry is None:
            from linattn_edge.kernels import streams

            entry = self._entries[name] = streams.small(name)
        return entry

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return sum(piece.nbytes for piece in self._pieces)

    def _fields(self, piece: NDArray[np.uint8]) -> NDArray[np.int64]:
        return piece.view(np.int64).reshape(-1, self.words)[:, : layout.RECORD]


class Records:
    """Streams that a call has taken, for the code that else has a State or a ModelState.

    `keep` gets the tokens that have been written to them: for the journals of streams with a checkpoint.
    """

    def __init__(self, slab: Slab, job: Job, count: int, dtype: str, kind: str, keep: Keep) -> None:
        self.batch_size = count
        self._keep = keep
        self._streams = job.streams[:count]
        self._block, self._scratch = job.block, job.scratch
        self._dtype, self._kind = dtype, kind
        self._bytes = slab.words * 8 * count
        for header in job.headers:
            header[layout.B] = count
        self._places = job.places
        self.position = np.empty(count, np.int64)
        slab.entry("positions")(self._streams, self.position)

    def _wrote(self, given: dict[str, Array], lengths: NDArray[np.int64] | None) -> None:
        self._keep(self, given, lengths)
