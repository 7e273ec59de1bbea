"""What Python calls: the compiled step, sequence (prefill, write, read) and helper loop.

An entry checks shapes, finiteness and overlap itself, before anything changes, writes the job to the state's header,
runs `advance` and returns a code (layout.OK or what is wrong); the caller finds the words.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from linattn_edge.kernels import crew, layout
from linattn_edge.kernels.jit import call, device, kernel
from linattn_edge.kernels.lanes import address, at_address, flat, part
from linattn_edge.kernels.layout import READ, STEP, WRITE

B, H, HK, N, K, V, F = (getattr(layout, name) for name in ("B", "H", "HK", "N", "K", "V", "F"))


@device
def finite(x):
    """Whether no number is NaN or inf: 0 times one of those is NaN."""
    total = x.dtype.type(0)
    for i in range(x.size):
        total += x[i] * x.dtype.type(0)
    return total == 0


@device
def below_infinity(x):
    """No NaN and no +inf: a log decay of -inf is a hard reset."""
    total = x.dtype.type(0)
    for i in range(x.size):
        y = x.dtype.type(0) if x[i] < 0 else x[i]
        total += y * x.dtype.type(0)
    return total == 0


@device
def all_finite(header, lengths, T, q, k, v, g, beta):
    """Whether every number that will be looked at is finite. Arrays are flat, the T tokens of one stream adjacent."""
    B_ = header[B]
    gs = 0 if header[layout.CONSTANT_DECAY] != 0 else g.size // (B_ * T)
    qs, ks, vs, bs = q.size // (B_ * T), k.size // (B_ * T), v.size // (B_ * T), beta.size // (B_ * T)
    for b in range(B_):
        a = b * T
        count = lengths[b] if lengths.size > 0 else T
        for x, size in ((q, qs), (k, ks), (v, vs), (beta, bs)):
            if not finite(part(x, a * size, count * size)):
                return False
        if not below_infinity(part(g, a * gs, count * gs)):
            return False
    return True


@device
def within(x, K, limit):
    """Whether the norms of all heads of K numbers are at most `limit`."""
    less = x.dtype.type(1 / limit)
    for start in range(0, x.size, K):
        total = x.dtype.type(0)
        for i in range(start, start + K):
            total += (x[i] * less) * (x[i] * less)
        if not total <= 1:
            return False
    return True


@device
def position_of(header, block, b):
    """The position of stream b, as an array of one."""
    home, seat = block, b
    if header[layout.STREAMS] != 0:
        home, seat = at_address(header[layout.STREAMS] + 8 * b, 1, np.int64)[0], 0
    return at_address(home + header[layout.AT_POSITION] + 8 * seat, 1, np.int64)


@device
def allowed(header, plan, block, lengths, T, q, k, mode):
    """Whether φ takes every query and key that will be looked at: their norms (if CHECK) and positions."""
    bits = at_address(address(plan) + 8 * layout.LIMIT, 1, np.float64)
    limit, horizon, B_ = bits[0], plan[layout.HORIZON], header[B]
    qs, ks = q.size // (B_ * T), k.size // (B_ * T)
    for b in range(B_):
        count = lengths[b] if lengths.size > 0 else T
        if limit > 0 and not (
            within(part(q, b * T * qs, count * qs), header[K], limit)
            and within(part(k, b * T * ks, count * ks), header[K], limit)
        ):
            return False
        if horizon > 0:
            position = position_of(header, block, b)
            if position[0] + (count if mode != READ else 0) > horizon:
                return False
    return True


@device
def overlap(start, size, other, other_size):
    return start < other + other_size and other < start + size


@device
def do(plan, at, control, work):
    """Run `advance`. Whoever calls this holds `work` until it returns: an address alone keeps nothing alive."""
    call(plan[layout.ADVANCE], at, control, address(work))


@device
def run(block, plan, control, work, q, k, v, g, beta, lengths, streams, out, T, width, mode, piece, group):
    """Write the job and do it, with the helpers that wait at `control` (an address, or 0) unless they are busy.

    streams: addresses of the records of a pool, or none where `block` holds the streams.
    """
    at = address(block)
    header = at_address(at, layout.HEADER, np.int64)
    header[layout.PLAN] = address(plan)
    header[layout.Q], header[layout.KEYS], header[layout.VALUES] = address(q), address(k), address(v)
    header[layout.G], header[layout.BETA], header[layout.OUT] = address(g), address(beta), address(out)
    header[layout.LENGTHS] = address(lengths) if lengths.size > 0 else 0
    header[layout.STREAMS] = address(streams) if streams.size > 0 else 0
    header[layout.T], header[layout.WIDTH], header[layout.MODE] = T, width, mode
    header[layout.PIECE], header[layout.GROUP], header[layout.WORK] = piece, group, work.size
    crowd = at_address(control, crew.SIZE if control != 0 else 0, np.int64)
    helped = control != 0 and crew.swap(crowd, crew.BUSY, 1) == 0
    if helped:
        crowd[crew.JOB] = at
        crew.open_job(crowd, header[B] * header[N])
    do(plan, at, control if helped else 0, work)
    if helped:
        crew.close_job(crowd)
    if mode != READ:
        for b in range(header[B]):
            position = position_of(header, at, b)
            position[0] += lengths[b] if lengths.size > 0 else T


def _build_helper() -> Callable[..., int]:
    def helper(control):
        """Take part in every job that is opened at `control`; return when there has been none for a while."""
        served = looks = 0
        while looks < crew.SPINS:
            ticket = crew.get(control, crew.TICKET)
            if ticket % 2 == 0 or ticket == served:
                looks += 1
                crew.relax()
                continue
            served = ticket
            looks = 0
            if crew.enter(control, ticket):
                block = control[crew.JOB]
                header = at_address(block, layout.HEADER, np.int64)
                plan = at_address(header[layout.PLAN], layout.PLAN_SIZE, np.int64)
                work = np.empty(header[layout.WORK], np.uint8)
                do(plan, block, address(control), work)
                crew.leave(control)
        return layout.OK

    return helper


@device
def fits(header, B_, q, k, v, g, beta, out):
    """Whether the arrays of a step have the shapes of B streams of the layer."""
    H_, HK_, N_, K_, V_, width = header[H], header[HK], header[N], header[K], header[V], g.shape[2]
    if (
        q.shape != (B_, H_, K_)
        or k.shape != (B_, HK_, K_)
        or v.shape != (B_, N_, V_)
        or out.shape != (B_, H_ if H_ > N_ else N_, V_)
        or beta.shape != ((B_, N_) if header[layout.TAKES_BETA] != 0 else (0, 0))
    ):
        return False
    if header[layout.CONSTANT_DECAY] == 0:
        if header[layout.TAKES_DECAY] == 0:
            return width == 0
        return g.shape == (B_, N_, width) and (width == 1 or width == header[F])
    return True


def _build_step(dtype: str) -> Callable[..., int]:
    itemsize = np.dtype(dtype).itemsize

    def step(q, k, v, g, beta, out, block, plan, control):
        """One token of each stream; q, k, v, g, out [B, heads, width], beta [B, N]; control an address, or 0."""
        header = at_address(address(block), layout.HEADER, np.int64)
        B_, width = header[B], g.shape[2]
        if not fits(header, B_, q, k, v, g, beta, out):
            return layout.REFUSED
        if B_ == 0:
            return layout.OK
        header[layout.STREAMS] = 0
        flat_q, flat_k, flat_v, flat_g, flat_beta = flat(q), flat(k), flat(v), flat(g), flat(beta)
        none = at_address(0, 0, np.int64)
        if plan[layout.CHECK] != 0 and not all_finite(header, none, 1, flat_q, flat_k, flat_v, flat_g, flat_beta):
            return layout.REFUSED
        limited = plan[layout.LIMIT] != 0 or plan[layout.HORIZON] != 0
        if limited and not allowed(header, plan, address(block), none, 1, flat_q, flat_k, STEP):
            return layout.REFUSED
        at, end = address(block), header[layout.END]
        y, bytes_ = address(out), out.size * itemsize
        for x, size in (
            (address(q), q.size), (address(k), k.size), (address(v), v.size), (address(g), g.size),
            (address(beta), beta.size),
        ):  # fmt: skip
            if overlap(y, bytes_, x, size * itemsize) or overlap(at, end, x, size * itemsize):
                return layout.REFUSED
        if overlap(y, bytes_, at, end):
            return layout.REFUSED
        work = at_address(at + header[layout.AT_WORK], header[layout.STEP_WORK], np.uint8)
        run(
            block, plan, control, work, flat_q, flat_k, flat_v, flat_g, flat_beta, none, none, flat(out), 1, width,
            STEP, 1, header[layout.STEP_GROUP],
        )  # fmt: skip
        return layout.OK

    return step


def _build_sequence() -> Callable[..., int]:
    def sequence(q, k, v, g, beta, lengths, streams, out, block, plan, control, mode):
        """T tokens of each stream, shapes checked by the caller; arrays [B, T, heads, width], beta [B, T, N].

        streams: addresses of B records, which the caller has in use, or none where `block` holds the streams.
        mode STEP writes then reads each token, WRITE has no q and no out, READ no k, v, g and beta.
        """
        header = at_address(address(block), layout.HEADER, np.int64)
        B_ = header[B]
        T = k.shape[1] if mode == WRITE else q.shape[1]
        if B_ == 0 or T == 0:
            return layout.OK
        flat_q, flat_k, flat_v, flat_g, flat_beta = flat(q), flat(k), flat(v), flat(g), flat(beta)
        real = flat(lengths)
        if plan[layout.CHECK] != 0 and not all_finite(header, real, T, flat_q, flat_k, flat_v, flat_g, flat_beta):
            return layout.REFUSED
        if plan[layout.LIMIT] != 0 or plan[layout.HORIZON] != 0:
            header[layout.STREAMS] = address(streams) if streams.size > 0 else 0
            if not allowed(header, plan, address(block), real, T, flat_q, flat_k, mode):
                return layout.REFUSED
        piece = header[layout.PREFILL_PIECE]
        piece = T if piece > T else piece
        work = np.empty(header[layout.PREFILL_WORK], np.uint8)
        run(
            block, plan, control, work, flat_q, flat_k, flat_v, flat_g, flat_beta, real, flat(streams), flat(out), T,
            g.shape[3], mode, piece, header[layout.PREFILL_GROUP],
        )  # fmt: skip
        return layout.OK

    return sequence


def _signature(dtype: str, axes: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Types of the inputs, and of out, block and plan."""
    real = types.float64 if dtype == "float64" else types.float32

    def taken(ndim: int, of: Any = real) -> Any:
        return types.Array(of, ndim, "C", readonly=True)

    kept = types.Array(real, axes, "C"), types.Array(types.uint8, 1, "C"), taken(1, types.int64)
    return (*[taken(axes)] * 4, taken(axes - 1)), kept


@functools.cache
def step(dtype: str) -> Callable[..., int]:
    """The compiled step that computes in dtype; it checks its arguments and returns a layout code."""
    inputs, rest = _signature(dtype, 3)
    return kernel(_build_step(dtype), f"step {dtype}", (*inputs, *rest, types.int64))


@functools.cache
def sequence(dtype: str) -> Callable[..., int]:
    """The compiled prefill, write and read that compute in dtype; arguments are checked by the caller."""
    inputs, rest = _signature(dtype, 4)
    lengths = types.Array(types.int64, 1, "C", readonly=True)
    return kernel(_build_sequence(), f"sequence {dtype}", (*inputs, lengths, lengths, *rest, types.int64, types.int64))


@functools.cache
def helper() -> Callable[..., int]:
    """The compiled loop of a helper thread (see crew.py)."""
    return kernel(_build_helper(), "helper", (types.Array(types.int64, 1, "C"),))
