"""Streams of a pool: records of one stream each, which a call takes for itself, works on and gives back.

A record begins with the int64 fields of `layout.py`. Whoever works on one changes USE from FREE by an atomic operation
and back when done, so calls on different streams run at once with no lock, and one stream never has two at work on it.
An id is looked up in `table`, the address of each slot's record (0 where there is none yet), and is good while its
generation is the record's.

A checkpoint is a *journal*, an array of its own: what was written since (WIDTH of g for each token, then k, v, g and
beta of all tokens; of a model the token itself), and behind that the record as it was. `rollback` puts the record back
and writes the tokens again that are to stay.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from linattn_edge.kernels import crew, layout
from linattn_edge.kernels.cpu import all_finite, allowed, fits, overlap, run
from linattn_edge.kernels.jit import device, kernel, large
from linattn_edge.kernels.lanes import address, at_address, flat
from linattn_edge.kernels.layout import (
    COPYING,
    FREE,
    FRESH,
    GENERATION,
    JOURNAL,
    LOGGED,
    LOOKING,
    POSITION,
    RECORD,
    SLOT_BITS,
    STEP,
    STEPPING,
    USE,
    WRITE,
)  # fmt: skip

B, HK, N, K, V, F = (getattr(layout, name) for name in ("B", "HK", "N", "K", "V", "F"))
WORD = 8


@device
def record_at(place):
    return at_address(place, RECORD, np.int64)


@device
def copy_words(source, target, count):
    """count int64 from one address to another."""
    x, y = at_address(source, count, np.int64), at_address(target, count, np.int64)
    for i in range(count):
        y[i] = x[i]


@large
def copy_record(source, target, words):
    """What a stream is, from one record or image of one to another."""
    record_at(target)[POSITION] = record_at(source)[POSITION]
    copy_words(source + RECORD * WORD, target + RECORD * WORD, words - RECORD)


@large
def clear_record(place, words):
    body = at_address(place + RECORD * WORD, words - RECORD, np.int64)
    for i in range(body.size):
        body[i] = 0
    record = record_at(place)
    record[POSITION] = 0
    record[FRESH] = 0


@large
def let_go(streams, count):
    """Give records back."""
    for i in range(count):
        crew.swap(record_at(streams[i]), USE, FREE)


@device
def take_one(id_, place, use):
    """Take the record at an address, if the id is that of its stream."""
    if place == 0 or (id_ >> SLOT_BITS) % 2 == 0:
        return layout.STALE
    record = record_at(place)
    if record[GENERATION] != id_ >> SLOT_BITS:
        return layout.STALE
    was = crew.change(record, USE, FREE, LOOKING)
    if was != FREE:
        return layout.TAKEN if was == STEPPING else layout.WAIT
    if record[GENERATION] != id_ >> SLOT_BITS:  # closed meanwhile, and opened again
        crew.swap(record, USE, FREE)
        return layout.STALE
    record[USE] = use
    return layout.OK


@large
def take(ids, table, streams, use, words):
    """Take the records of all ids, or none; their addresses go to `streams`. Returns a layout code."""
    for i in range(ids.size):
        slot = ids[i] & ((1 << SLOT_BITS) - 1)
        streams[i] = table[slot] if slot < table.size else 0
        code = take_one(ids[i], streams[i], use)
        if code != layout.OK:
            let_go(streams, i)
            return code + layout.CODES * i
    for i in range(ids.size if words > 0 else 0):
        if record_at(streams[i])[FRESH] != 0:
            clear_record(streams[i], words)
    return layout.OK


@device
def copy_numbers(source, at, target, count):
    for i in range(count):
        target[i] = source[at + i]


@device
def journal_place(record, count, window):
    """Where `count` tokens go in a stream's journal, or -1: it has none, or is too short and from now on void."""
    start = record[LOGGED]
    if record[JOURNAL] == 0 or start < 0:
        return -1
    if start + count > window:
        record[LOGGED] = -1
        return -1
    return start


@large
def keep_tokens(header, streams, lengths, T, width, k, v, g, beta, size):
    """Write what a call has written to the journals of streams that have a checkpoint. k, v, g and beta are flat."""
    window = header[layout.WINDOW]
    constant = header[layout.CONSTANT_DECAY] != 0
    keys, values = header[HK] * header[K], header[N] * header[V]
    decays, betas = header[N] * header[F], header[N]
    for b in range(streams.size):
        record = record_at(streams[b])
        count = lengths[b] if lengths.size > 0 else T
        start = journal_place(record, count, window)
        if start < 0:
            continue
        widths = at_address(record[JOURNAL], window, np.int64)
        a = record[JOURNAL] + window * WORD
        for t in range(count):
            at, row = start + t, b * T + t
            widths[at] = width
            copy_numbers(k, row * keys, at_address(a + at * keys * size, keys, k.dtype), keys)
            y = a + window * keys * size
            copy_numbers(v, row * values, at_address(y + at * values * size, values, k.dtype), values)
            y += window * values * size
            if width > 0 and not constant:
                many = betas * width
                copy_numbers(g, row * many, at_address(y + at * decays * size, many, k.dtype), many)
            y += window * decays * size
            if beta.size > 0:
                copy_numbers(beta, row * betas, at_address(y + at * betas * size, betas, k.dtype), betas)
        record[LOGGED] = start + count


def _build_step(dtype: str) -> Callable[..., int]:
    size = np.dtype(dtype).itemsize

    def step(ids, table, q, k, v, g, beta, out, streams, job, plan, control, words):
        """One token of each of the streams `ids` [B]; arrays as of `cpu.step`. streams: room for B addresses; job: a
        header and scratch that nobody else uses now; words: the length of a record."""
        header = at_address(address(job), layout.HEADER, np.int64)
        count, width = ids.size, g.shape[2]
        header[B] = count
        if streams.size < count or not fits(header, count, q, k, v, g, beta, out):
            return layout.REFUSED
        if count == 0:
            return layout.OK
        flat_q, flat_k, flat_v, flat_g, flat_beta = flat(q), flat(k), flat(v), flat(g), flat(beta)
        none = at_address(0, 0, np.int64)
        if plan[layout.CHECK] != 0 and not all_finite(header, none, 1, flat_q, flat_k, flat_v, flat_g, flat_beta):
            return layout.REFUSED
        y, bytes_ = address(out), out.size * size
        for x, numbers in (
            (address(q), q.size), (address(k), k.size), (address(v), v.size), (address(g), g.size),
            (address(beta), beta.size),
        ):  # fmt: skip
            if overlap(y, bytes_, x, numbers * size):
                return layout.REFUSED
        code = take(ids, table, streams, STEPPING, words)
        if code != layout.OK:
            return code
        mine = at_address(address(streams), count, np.int64)
        if plan[layout.LIMIT] != 0 or plan[layout.HORIZON] != 0:
            header[layout.STREAMS] = address(streams)
            if not allowed(header, plan, address(job), none, 1, flat_q, flat_k, STEP):
                let_go(mine, count)
                return layout.REFUSED
        work = at_address(address(job) + header[layout.AT_WORK], header[layout.STEP_WORK], np.uint8)
        run(
            job, plan, control, work, flat_q, flat_k, flat_v, flat_g, flat_beta, none, mine, flat(out), 1, width, STEP,
            1, header[layout.STEP_GROUP],
        )  # fmt: skip
        keep_tokens(header, mine, none, 1, width, flat_k, flat_v, flat_g, flat_beta, size)
        let_go(mine, count)
        return layout.OK

    return step


def _build_keep(dtype: str) -> Callable[..., int]:
    size = np.dtype(dtype).itemsize

    def keep(k, v, g, beta, lengths, streams, job, T):
        """After a `cpu.sequence` on records: write its tokens to the journals."""
        header = at_address(address(job), layout.HEADER, np.int64)
        keep_tokens(header, streams, lengths, T, g.shape[3], flat(k), flat(v), flat(g), flat(beta), size)
        return layout.OK

    return keep


def _build_rollback(dtype: str) -> Callable[..., int]:
    size = np.dtype(dtype).itemsize

    def rollback(ids, table, streams, constant, job, plan, words, n):
        """Take back the last n tokens of one stream: the record as it was, and the other tokens again.

        constant: the decays of a layer that has them, or none.
        """
        header = at_address(address(job), layout.HEADER, np.int64)
        code = take(ids, table, streams, STEPPING, words)
        if code != layout.OK:
            return code
        mine = at_address(address(streams), 1, np.int64)
        record = record_at(mine[0])
        if record[JOURNAL] == 0 or record[LOGGED] < n:
            let_go(mine, 1)
            return layout.LAPSED
        window = header[layout.WINDOW]
        keys, values = header[HK] * header[K], header[N] * header[V]
        decays, betas = header[N] * header[F], header[N]
        widths = at_address(record[JOURNAL], window, np.int64)
        first = record[JOURNAL] + window * WORD
        image = first + -(-window * (keys + values + decays + betas) * size // WORD) * WORD
        copy_record(image, mine[0], words)
        record[LOGGED] -= n
        header[B] = 1
        work = at_address(address(job) + header[layout.AT_WORK], header[layout.STEP_WORK], np.uint8)
        none, nothing = at_address(0, 0, np.int64), at_address(0, 0, constant.dtype)
        for t in range(record[LOGGED]):
            a, width = first, widths[t]
            k = at_address(a + t * keys * size, keys, constant.dtype)
            a += window * keys * size
            v = at_address(a + t * values * size, values, constant.dtype)
            a += window * values * size
            g = constant
            if header[layout.CONSTANT_DECAY] == 0:
                g = at_address(a + t * decays * size, betas * width, constant.dtype)
            a += window * decays * size
            beta = at_address(a + t * betas * size, betas, constant.dtype)
            run(
                job, plan, 0, work, nothing, k, v, g, beta, none, mine, nothing, 1, width, WRITE, 1,
                header[layout.STEP_GROUP],
            )  # fmt: skip
        let_go(mine, 1)
        return layout.OK

    return rollback


def _build_take() -> Callable[..., int]:
    def taking(ids, table, streams, words):
        """Take streams for a call that is made of several: `release` gives them back."""
        return take(ids, table, streams, STEPPING, words)

    return taking


def _build_release() -> Callable[..., int]:
    def release(streams, tokens, lengths, T, window):
        """Give streams back; of a model write the tokens [B * T] first to the journals, if there are any."""
        if tokens.size > 0:
            for b in range(streams.size):
                record = record_at(streams[b])
                count = lengths[b] if lengths.size > 0 else T
                start = journal_place(record, count, window)
                if start < 0:
                    continue
                kept = at_address(record[JOURNAL], window, np.int64)
                for t in range(count):
                    kept[start + t] = tokens[b * T + t]
                record[LOGGED] = start + count
        let_go(streams, streams.size)
        return layout.OK

    return release


def _build_copy() -> Callable[..., int]:
    def copy(ids, table, streams, target, words):
        """Copy one stream to the record, or image of a record, at an address. It is COPYING meanwhile."""
        code = take(ids, table, streams, COPYING, words)
        if code == layout.OK:
            copy_record(streams[0], target, words)
            record_at(target)[FRESH] = 0
            let_go(streams, 1)
        return code

    return copy


def _build_fork() -> Callable[..., int]:
    def fork(id_, slot, table, words):
        """Open the stream of a slot that nobody has as a copy of another: the new id, or minus a code."""
        at = id_ & ((1 << SLOT_BITS) - 1)
        place = table[at] if at < table.size else 0
        code = take_one(id_, place, COPYING)
        if code != layout.OK:
            return -code
        record, target = record_at(place), record_at(table[slot])
        if record[FRESH] == 0:
            copy_record(place, table[slot], words)
        target[FRESH] = record[FRESH]
        target[LOGGED] = 0
        target[JOURNAL] = 0
        target[GENERATION] += 1
        crew.swap(record, USE, FREE)
        return target[GENERATION] << SLOT_BITS | slot

    return fork


def _build_renew() -> Callable[..., int]:
    def renew(ids, table, streams, close):
        """Put streams back to the beginning; with `close` their ids are good no more."""
        code = take(ids, table, streams, STEPPING, 0)  # nothing is cleared yet: that is for the next token to do
        if code != layout.OK:
            return code
        for i in range(ids.size):
            record = record_at(streams[i])
            record[FRESH] = 1
            record[JOURNAL] = 0
            record[GENERATION] += close
        let_go(streams, ids.size)
        return code

    return renew


def _build_mark() -> Callable[..., int]:
    def mark(ids, table, streams, journal, at_image, words):
        """Make a checkpoint of one stream in `journal`, an address; at_image: where in it the record goes."""
        code = take(ids, table, streams, COPYING, words)
        if code == layout.OK:
            record = record_at(streams[0])
            copy_record(streams[0], journal + at_image, words)
            record[LOGGED] = 0
            record[JOURNAL] = journal
            let_go(streams, 1)
        return code

    return mark


def _build_begin() -> Callable[..., int]:
    def begin(slot, table, filled):
        """Open the stream of a slot that nobody has: returns its id. filled: what it begins with is in its record."""
        record = record_at(table[slot])
        if filled == 0:
            record[POSITION] = 0
            record[FRESH] = 1  # whatever was put there, by a load that was refused
        record[LOGGED] = 0
        record[JOURNAL] = 0
        record[GENERATION] += 1
        return record[GENERATION] << SLOT_BITS | slot

    return begin


def _build_positions() -> Callable[..., int]:
    def positions(streams, out):
        """The positions of records."""
        for i in range(out.size):
            out[i] = record_at(streams[i])[POSITION]
        return layout.OK

    return positions


_WORD = types.int64
_WORDS = types.Array(types.int64, 1, "C", readonly=True)
_ROOM = types.Array(types.int64, 1, "C")
_BYTES = types.Array(types.uint8, 1, "C")


def _reals(dtype: str, axes: int, readonly: bool = True) -> Any:
    return types.Array(types.float64 if dtype == "float64" else types.float32, axes, "C", readonly=readonly)


@functools.cache
def step(dtype: str) -> Callable[..., int]:
    """The compiled step of a pool that computes in dtype."""
    inputs = [_reals(dtype, 3)] * 4 + [_reals(dtype, 2), _reals(dtype, 3, False)]
    signature = (_WORDS, _WORDS, *inputs, _ROOM, _BYTES, _WORDS, _WORD, _WORD)
    return kernel(_build_step(dtype), f"pool step {dtype}", signature)


@functools.cache
def keep(dtype: str) -> Callable[..., int]:
    """The compiled second half of a prefill of a pool."""
    signature = (*[_reals(dtype, 4)] * 3, _reals(dtype, 3), _WORDS, _WORDS, _BYTES, _WORD)
    return kernel(_build_keep(dtype), f"pool keep {dtype}", signature)


@functools.cache
def rollback(dtype: str) -> Callable[..., int]:
    """The compiled rollback."""
    signature = (_WORDS, _WORDS, _ROOM, _reals(dtype, 1, False), _BYTES, _WORDS, _WORD, _WORD)
    return kernel(_build_rollback(dtype), f"pool rollback {dtype}", signature)


_SMALL: dict[str, tuple[Callable[[], Callable[..., int]], tuple[Any, ...]]] = {
    "take": (_build_take, (_WORDS, _WORDS, _ROOM, _WORD)),
    "release": (_build_release, (_WORDS, _WORDS, _WORDS, _WORD, _WORD)),
    "copy": (_build_copy, (_WORDS, _WORDS, _ROOM, _WORD, _WORD)),
    "fork": (_build_fork, (_WORD, _WORD, _WORDS, _WORD)),
    "renew": (_build_renew, (_WORDS, _WORDS, _ROOM, _WORD)),
    "begin": (_build_begin, (_WORD, _WORDS, _WORD)),
    "positions": (_build_positions, (_WORDS, _ROOM)),
    "mark": (_build_mark, (_WORDS, _WORDS, _ROOM, _WORD, _WORD, _WORD)),
}


@functools.cache
def small(name: str) -> Callable[..., int]:
    """One of the compiled operations on records that no dtype matters to."""
    build, signature = _SMALL[name]
    return kernel(build(), f"pool {name}", signature)
