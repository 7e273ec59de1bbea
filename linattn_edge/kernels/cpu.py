"""The CPU kernels: one body, `advance`, serves a step and a prefill, every rule and every built-in feature map.

For each state head of each stream, pieces of up to `PIECE` tokens are packed head-major into scratch: φ(k), φ(q), the
decay Λ = exp(g), v. The normaliser z, which does not depend on S, is advanced there too. Then each block of columns
of S takes all tokens of the piece; from `DENSE` tokens on, it is copied into a dense buffer first, so that it stays
in L1. A step is a piece of one token, worked on in place. Both therefore round alike.

Compiled entries check shapes, finiteness and overlap themselves, before anything changes, and return a code
(layout.OK or what is wrong); the caller finds the words.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from linattn_edge.features import MAPS
from linattn_edge.kernels import crew, layout, maths
from linattn_edge.kernels.jit import device, kernel, large, switch
from linattn_edge.kernels.lanes import Operations, at_address, flat, operations, part, pointer, view
from linattn_edge.kernels.layout import NARROW, READ, STEP, WIDE, WRITE
from linattn_edge.rules import LOOPS

DENSE = 4  # tokens from which copying a block of columns into a dense buffer pays

B, H, HK, N, K, V, F, VP = (getattr(layout, name) for name in ("B", "H", "HK", "N", "K", "V", "F", "VP"))

exp = maths.exp
IDENTITY = list(MAPS).index("identity")


features = switch([cls.loop for cls in MAPS.values()], "x, y, weights, position")


@device
def norm_of(x):
    """sqrt(Σx² + 1e-6), also where the squares exceed the range."""
    root = x.dtype.type(np.sqrt(dot(x, x) + x.dtype.type(1e-6)))
    if root - root == 0:  # finite
        return root
    largest = x.dtype.type(0)
    for i in range(x.size):
        largest = max(largest, abs(x[i]))
    total = x.dtype.type(0)
    for i in range(x.size):
        total += (x[i] / largest) * (x[i] / largest)
    return largest * x.dtype.type(np.sqrt(total))


@device
def phi(code, norm, x, y, weights, position, scratch):
    """y = φ(x), or φ of x / sqrt(Σx² + 1e-6), the L2 norm that delta-rule models put on q and k."""
    source = x
    if norm:
        root = norm_of(x)
        for i in range(x.size):
            scratch[i] = x[i] / root
        source = scratch
    features(code, source, y, weights, position)


@device
def fill(y, value):
    for i in range(y.size):
        y[i] = value


@device
def exp_into(g, y):
    """y = exp(g), one number for all of y or one each."""
    if g.size == 1:
        fill(y, exp(g[0]))
    else:
        for i in range(y.size):
            y[i] = exp(g[i])


@device
def advance_z(z, k, decay):
    for i in range(z.size):
        z[i] = decay[i] * z[i] + k[i]


@device
def dot(a, b):
    total = a.dtype.type(0)
    for i in range(a.size):
        total += a[i] * b[i]
    return total


@device
def products(k, q, decay, dk, dq):
    """dk = Λk and dq = Λq; returns q·k."""
    total = k.dtype.type(0)
    for i in range(k.size):
        dk[i] = decay[i] * k[i]
        dq[i] = decay[i] * q[i]
        total += q[i] * k[i]
    return total


@device
def scaled(x, factor, y):
    """y = factor · x; y may be x."""
    for i in range(x.size):
        y[i] = factor * x[i]


@device
def copy_padded(x, y):
    """y = x, and zeros to its end."""
    for i in range(x.size):
        y[i] = x[i]
    for i in range(x.size, y.size):
        y[i] = 0


@device
def divisor(den, eps, add):
    """den + eps, or den kept at least eps away from zero, on its own side."""
    if add:
        return den + eps
    if den < 0:
        return min(den, -eps)
    return max(den, eps) if den == den else den


def weighted_rows(op: Operations) -> Callable[..., None]:
    """y = Σ_i q[i] · row i of S, for one block of columns: how a state is read, and a cache of values too."""
    load, store, fma, zero = op.load, op.store, op.fma, op.zero

    @device
    def read(S, at, stride, F, q, y, column):
        total = zero(load(S, at))
        for i in range(F):
            total = fma(q[i], load(S, at), total)
            at += stride
        store(y, column, total)

    return read


def _columns(op: Operations, width: int) -> Callable[..., None]:
    """One block of `width` columns of one state head, taken through a piece of `count` tokens.

    k, decay, dk and dq are [count, F], q [r, count, F], beta and qk [count], all flat; a token's v is at t * vs, its
    y for query head j at j * yj + t * ys.
    """
    load, store = op.load, op.store
    read = weighted_rows(op)
    update = switch(
        [loop(op) for loop in LOOPS], "S, at, stride, F, k, q, decay, decayed_k, decayed_q, v, y, column, beta, qk"
    )

    @device
    def tokens(rule, mode, S, at, stride, F, c, count, r, k, q, decay, dk, dq, v, vs, y, ys, yj, beta, qk):
        for t in range(count):
            f = t * F
            first = 0
            if mode != READ:
                kt, qt, decay_t = pointer(k, f), pointer(q, f), pointer(decay, f)
                dkt, dqt, vt, yt = pointer(dk, f), pointer(dq, f), pointer(v, t * vs), pointer(y, t * ys)
                update(rule, S, at, stride, F, kt, qt, decay_t, dkt, dqt, vt, yt, c, beta[t], qk[t])
                first = 1
            if mode != WRITE:
                for j in range(first, r):
                    read(S, at, stride, F, pointer(q, (j * count + t) * F), pointer(y, j * yj + t * ys), c)

    @large
    def columns(rule, mode, S, F, VP, c, count, r, k, q, decay, dk, dq, v, vs, y, ys, yj, beta, qk, buffer):
        if count < DENSE:
            tokens(rule, mode, S, c, VP, F, c, count, r, k, q, decay, dk, dq, v, vs, y, ys, yj, beta, qk)
            return
        for i in range(F):
            store(buffer, i * width, load(S, c + i * VP))
        tokens(rule, mode, buffer, 0, width, F, c, count, r, k, q, decay, dk, dq, v, vs, y, ys, yj, beta, qk)
        if mode != READ:
            for i in range(F):
                store(S, c + i * VP, load(buffer, i * width))

    return columns


wide = _columns(operations(WIDE), WIDE)
narrow = _columns(operations(NARROW), NARROW)


@large
def advance(
    helped, control, block, S, w, piece, weights, sides, heads, q, k, v, g, beta, lengths, out, T, width, mode, total
):
    """Take `total` state heads through T tokens, or, with helpers, chunks of them until none is left.

    All arrays are flat, weights [sides, heads, P] too. Queries and keys are packed into scratch, head by head; a step
    uses v and out where they are if V is whole lanes.
    """
    header = view(block, 0, layout.HEADER, np.int64)
    H_, HK_, N_, K_, V_, F_, VP_ = header[H], header[HK], header[N], header[K], header[V], header[F], header[VP]
    r = max(1, H_ // N_)  # query heads that read one state
    shared = max(1, N_ // H_)  # states that share one query head
    keys = N_ // HK_  # states that share one key head
    outputs = max(H_, N_)
    rule, code, norm = header[layout.RULE], header[layout.MAP], header[layout.QK_NORM] != 0
    normalize, add = header[layout.NORMALIZE] != 0, header[layout.EPS_ADD] != 0
    takes_beta = header[layout.TAKES_BETA] != 0
    constant = header[layout.CONSTANT_DECAY] != 0
    itemsize = w.itemsize
    position = view(block, header[layout.AT_POSITION], header[B], np.int64)
    z = view(block, header[layout.AT_Z], (header[layout.AT_WORK] - header[layout.AT_Z]) // itemsize, w.dtype)
    reals = view(block, 8 * layout.SCALE, 2, np.float64)
    scale, eps = w.dtype.type(reals[0]), w.dtype.type(reals[1])
    one, nothing = w.dtype.type(1), w.dtype.type(0)
    P = weights.size // (sides * heads)
    plain = code == IDENTITY and not norm
    exact = piece == 1 and V_ == VP_  # then v and y are used where they are

    ks = part(w, 0, piece * F_)
    qs = part(w, piece * F_, r * piece * F_)
    a = (1 + r) * piece * F_
    decays = part(w, a, piece * F_)
    dks = part(w, a + piece * F_, piece * F_)
    dqs = part(w, a + 2 * piece * F_, piece * F_)
    a += 3 * piece * F_
    vs = part(w, a, piece * VP_)
    ys = part(w, a + piece * VP_, r * piece * VP_)
    a += (1 + r) * piece * VP_
    betas = part(w, a, piece)
    qks = part(w, a + piece, piece)
    dens = part(w, a + 2 * piece, r * piece)
    a += (2 + r) * piece
    scratch = part(w, a, K_)
    buffer = part(w, a + K_, F_ * WIDE)
    # what the columns get: scratch, or where a step finds things
    kp, vp, yp = pointer(ks, 0), pointer(vs, 0), pointer(ys, 0)
    qp, decayp, dkp, dqp = pointer(qs, 0), pointer(decays, 0), pointer(dks, 0), pointer(dqs, 0)
    betap, qkp, bufferp = pointer(betas, 0), pointer(qks, 0), pointer(buffer, 0)

    if width == 0:
        fill(decays, one)
    first, last = 0, total
    if helped:
        first = crew.add(control, crew.NEXT, control[crew.CHUNK])
        last = min(total, first + control[crew.CHUNK])
    while first < total:
        # Pieces outside, heads inside: a token's heads are neighbours in memory, its pages are visited once so.
        for start in range(0, T, piece):
            b, n = first // N_, first % N_ - 1
            for unit in range(first, last):
                n += 1
                if n == N_:
                    b, n = b + 1, 0
                length = lengths[b] if lengths.size > 0 else T
                if mode != WRITE:
                    for t in range(max(length, start), min(T, start + piece)):
                        fill(part(out, ((b * T + t) * outputs + n * r) * V_, r * V_), nothing)
                count = min(piece, length - start)
                if count <= 0:
                    continue
                zn = part(z, unit * F_ if normalize else 0, F_ if normalize else 0)
                hk = n if keys == 1 else n // keys
                key_row = 0 if heads == 1 else hk % heads
                for t in range(count):
                    row = b * T + start + t
                    now = position[b] + start + t
                    kt = part(ks, t * F_, F_)
                    if mode != READ:
                        x = (row * HK_ + hk) * K_
                        if plain and piece == 1:
                            kt, kp = part(k, x, K_), pointer(k, x)
                        else:
                            phi(code, norm, part(k, x, K_), kt, part(weights, key_row * P, P), now, scratch)
                        decay = part(decays, t * F_, F_)
                        if width > 0:
                            x = ((0 if constant else row * N_) + n) * width
                            exp_into(part(g, x, width), decay)
                        if not exact:
                            copy_padded(part(v, (row * N_ + n) * V_, V_), part(vs, t * VP_, VP_))
                        if takes_beta:
                            betas[t] = beta[row * N_ + n]
                        if normalize:
                            advance_z(zn, kt, decay)
                    else:
                        now = max(0, position[b] - 1)
                    for j in range(r):
                        qt = part(qs, (j * count + t) * F_, F_)
                        if mode == WRITE:
                            fill(qt, nothing)
                            continue
                        h = n // shared if shared > 1 else n * r + j
                        x = (row * H_ + h) * K_
                        query_row = (sides - 1) * heads + (0 if heads == 1 else h % heads)
                        if plain:
                            scaled(part(q, x, K_), scale if not normalize else one, qt)
                        else:
                            phi(code, norm, part(q, x, K_), qt, part(weights, query_row * P, P), now, scratch)
                            if not normalize and scale != one:
                                scaled(qt, scale, qt)
                        if normalize:
                            dens[j * count + t] = scale / divisor(dot(qt, zn), eps, add)
                    if takes_beta and mode != READ:
                        qt = part(qs, t * F_, F_)
                        decay = part(decays, t * F_, F_)
                        qks[t] = products(kt, qt, decay, part(dks, t * F_, F_), part(dqs, t * F_, F_))
                vs_, ys_, yj = VP_, VP_, count * VP_
                if exact and mode != READ:
                    vp, vs_ = pointer(v, ((b * T + start) * N_ + n) * V_), N_ * V_
                if exact and mode != WRITE:
                    yp, ys_, yj = pointer(out, ((b * T + start) * outputs + n * r) * V_), outputs * V_, V_
                Sn = pointer(S, unit * F_ * VP_)
                c = 0
                while c + WIDE <= VP_:
                    wide(
                        rule, mode, Sn, F_, VP_, c, count, r, kp, qp, decayp, dkp, dqp, vp, vs_, yp, ys_, yj, betap,
                        qkp, bufferp,
                    )  # fmt: skip
                    c += WIDE
                while c < VP_:
                    narrow(
                        rule, mode, Sn, F_, VP_, c, count, r, kp, qp, decayp, dkp, dqp, vp, vs_, yp, ys_, yj, betap,
                        qkp, bufferp,
                    )  # fmt: skip
                    c += NARROW
                if mode != WRITE and (normalize or not exact):
                    for t in range(count):
                        for j in range(r):
                            x = ((b * T + start + t) * outputs + n * r + j) * V_
                            factor = dens[j * count + t] if normalize else one
                            scaled(part(yp, j * yj + t * ys_, V_), factor, part(out, x, V_))
        first = total
        if helped:
            first = crew.add(control, crew.NEXT, control[crew.CHUNK])
            last = min(total, first + control[crew.CHUNK])


@device
def finite(x, largest):
    bad = 0
    for i in range(x.size):
        bad |= 0 if abs(x[i]) <= largest else 1
    return bad == 0


@device
def below_infinity(x, largest):
    """No NaN and no +inf: a log decay of -inf is a hard reset."""
    bad = 0
    for i in range(x.size):
        bad |= 0 if x[i] <= largest else 1
    return bad == 0


@device
def all_finite(header, lengths, T, q, k, v, g, beta, largest):
    """Whether every number that will be looked at is finite. Arrays are flat, the T tokens of one stream adjacent."""
    B_ = header[B]
    gs = 0 if header[layout.CONSTANT_DECAY] != 0 else g.size // (B_ * T)
    qs, ks, vs, bs = q.size // (B_ * T), k.size // (B_ * T), v.size // (B_ * T), beta.size // (B_ * T)
    for b in range(B_):
        a = b * T
        e = a + (lengths[b] if lengths.size > 0 else T)
        if not (
            finite(part(q, a * qs, (e - a) * qs), largest)
            and finite(part(k, a * ks, (e - a) * ks), largest)
            and finite(part(v, a * vs, (e - a) * vs), largest)
            and below_infinity(part(g, a * gs, (e - a) * gs), largest)
            and finite(part(beta, a * bs, (e - a) * bs), largest)
        ):
            return False
    return True


piece_length, work_size = device(layout.piece_length), device(layout.work_size)


@device
def overlap(a, b):
    start, other = a.ctypes.data, b.ctypes.data
    return start < other + b.size * b.itemsize and other < start + a.size * a.itemsize


piece_length, work_size = device(layout.piece_length), device(layout.work_size)


@device
def state_matrix(block, kept):
    """S of a block, flat, as it is stored."""
    header = view(block, 0, layout.HEADER, np.int64)
    return view(block, header[layout.AT_S], header[B] * header[N] * header[F] * header[VP], kept)


def _types(dtype: str) -> tuple[Any, Any]:
    """What a state of that dtype is computed in, and stored as."""
    if dtype in layout.HALVES:
        return np.float32, np.uint16 if dtype == "float16" else np.int16
    return np.dtype(dtype).type, np.dtype(dtype).type


@device
def post(job, place, array):
    """Write one array's address and size to a job."""
    job[crew.JOB + 2 * place] = array.ctypes.data
    job[crew.JOB + 2 * place + 1] = array.size


@device
def posted(job, place, dtype):
    """The array that `post` wrote."""
    return at_address(job[crew.JOB + 2 * place], job[crew.JOB + 2 * place + 1], dtype)


NUMBERS = crew.JOB + 2 * 9  # piece, sides, heads, T, width and mode follow the nine arrays of a job


@device
def begin(control, block, weights, q, k, v, g, beta, lengths, out, piece, sides, heads, T, width, mode):
    """Open a job for the helpers that wait at `control`; False where there are none or they are busy."""
    if control.size == 0 or crew.swap(control, crew.BUSY, 1) != 0:
        return False
    post(control, 0, block)
    post(control, 1, weights)
    post(control, 2, q)
    post(control, 3, k)
    post(control, 4, v)
    post(control, 5, g)
    post(control, 6, beta)
    post(control, 7, lengths)
    post(control, 8, out)
    control[NUMBERS] = piece
    control[NUMBERS + 1] = sides
    control[NUMBERS + 2] = heads
    control[NUMBERS + 3] = T
    control[NUMBERS + 4] = width
    control[NUMBERS + 5] = mode
    header = view(block, 0, layout.HEADER, np.int64)
    crew.open_job(control, header[B] * header[N])
    return True


@device
def finish(helped, control, block, lengths, T, mode):
    """Wait for the helpers, and count the tokens."""
    if helped:
        crew.close_job(control)
    if mode != READ:
        header = view(block, 0, layout.HEADER, np.int64)
        position = view(block, header[layout.AT_POSITION], header[B], np.int64)
        for b in range(header[B]):
            position[b] += lengths[b] if lengths.size > 0 else T


def _build_helper(dtype: str, stamp: int) -> Callable[..., int]:
    item, kept = _types(dtype)

    def helper(control):
        """Take part in every job that is opened at `control`; return when there has been none for a while."""
        _ = stamp
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
                block = posted(control, 0, np.uint8)
                header = view(block, 0, layout.HEADER, np.int64)
                piece = control[NUMBERS]
                size = work_size(piece, header[H], header[N], header[K], header[F], header[VP])
                advance(
                    True, control, block, state_matrix(block, kept), np.empty(size, item), piece,
                    posted(control, 1, item), control[NUMBERS + 1], control[NUMBERS + 2], posted(control, 2, item),
                    posted(control, 3, item), posted(control, 4, item), posted(control, 5, item),
                    posted(control, 6, item), posted(control, 7, np.int64), posted(control, 8, item),
                    control[NUMBERS + 3], control[NUMBERS + 4], control[NUMBERS + 5], header[B] * header[N],
                )  # fmt: skip
                crew.leave(control)
        return layout.OK

    return helper


def _build_step(dtype: str, stamp: int) -> Callable[..., int]:
    item, kept = _types(dtype)
    itemsize, largest = np.dtype(item).itemsize, np.finfo(item).max

    def step(q, k, v, g, beta, lengths, out, weights, block, check, control):
        """One token of each stream; q, k, v, g, out [B, heads, width], beta [B, N], lengths [B] of 0 or 1, or empty."""
        _ = stamp
        header = view(block, 0, layout.HEADER, np.int64)
        B_, H_, HK_, N_, K_, V_ = header[B], header[H], header[HK], header[N], header[K], header[V]
        width = g.shape[2]
        if (
            q.shape != (B_, H_, K_)
            or k.shape != (B_, HK_, K_)
            or v.shape != (B_, N_, V_)
            or out.shape != (B_, max(H_, N_), V_)
            or beta.shape != ((B_, N_) if header[layout.TAKES_BETA] != 0 else (0, 0))
            or (lengths.size != B_ and lengths.size != 0)
        ):
            return layout.REFUSED
        if header[layout.CONSTANT_DECAY] == 0:
            if header[layout.TAKES_DECAY] == 0:
                if width != 0:
                    return layout.REFUSED
            elif g.shape != (B_, N_, width) or (width != 1 and width != header[F]):
                return layout.REFUSED
        if B_ == 0:
            return layout.OK
        flat_q, flat_k, flat_v, flat_g, flat_beta = flat(q), flat(k), flat(v), flat(g), flat(beta)
        if check and not all_finite(header, lengths, 1, flat_q, flat_k, flat_v, flat_g, flat_beta, largest):
            return layout.REFUSED
        if (
            overlap(out, q) or overlap(out, k) or overlap(out, v) or overlap(out, g) or overlap(out, beta)
            or overlap(out, block) or overlap(q, block) or overlap(k, block) or overlap(v, block) or overlap(g, block)
            or overlap(beta, block)
        ):  # fmt: skip
            return layout.REFUSED
        S = state_matrix(block, kept)
        w = view(block, header[layout.AT_WORK], (header[layout.END] - header[layout.AT_WORK]) // itemsize, item)
        sides, heads, _ = weights.shape
        rows, flat_out = flat(weights), flat(out)
        helped = begin(
            control, block, rows, flat_q, flat_k, flat_v, flat_g, flat_beta, lengths, flat_out, 1, sides, heads, 1,
            width, STEP,
        )  # fmt: skip
        advance(
            helped, control, block, S, w, 1, rows, sides, heads, flat_q, flat_k, flat_v, flat_g, flat_beta, lengths,
            flat_out, 1, width, STEP, B_ * N_,
        )  # fmt: skip
        finish(helped, control, block, lengths, 1, STEP)
        return layout.OK

    return step


def _build_sequence(dtype: str, stamp: int) -> Callable[..., int]:
    item, kept = _types(dtype)
    itemsize, largest = np.dtype(item).itemsize, np.finfo(item).max

    def sequence(q, k, v, g, beta, lengths, out, weights, block, check, control, mode):
        """T tokens of each stream, shapes checked by the caller; arrays [B, T, heads, width], beta [B, T, N].

        mode STEP writes then reads each token, WRITE has no q and no out, READ no k, v, g and beta.
        """
        _ = stamp
        header = view(block, 0, layout.HEADER, np.int64)
        B_, H_, N_, K_, F_, VP_ = header[B], header[H], header[N], header[K], header[F], header[VP]
        T = k.shape[1] if mode == WRITE else q.shape[1]
        if B_ == 0 or T == 0:
            return layout.OK
        flat_q, flat_k, flat_v, flat_g, flat_beta = flat(q), flat(k), flat(v), flat(g), flat(beta)
        if check and not all_finite(header, lengths, T, flat_q, flat_k, flat_v, flat_g, flat_beta, largest):
            return layout.REFUSED
        piece = min(T, piece_length(H_, N_, K_, F_, VP_, itemsize))
        S = state_matrix(block, kept)
        w = np.empty(work_size(piece, H_, N_, K_, F_, VP_), item)
        sides, heads, _ = weights.shape
        rows, flat_out = flat(weights), flat(out)
        helped = begin(
            control, block, rows, flat_q, flat_k, flat_v, flat_g, flat_beta, lengths, flat_out, piece, sides, heads, T,
            g.shape[3], mode,
        )  # fmt: skip
        advance(
            helped, control, block, S, w, piece, rows, sides, heads, flat_q, flat_k, flat_v, flat_g, flat_beta, lengths,
            flat_out, T, g.shape[3], mode, B_ * N_,
        )  # fmt: skip
        finish(helped, control, block, lengths, T, mode)
        return layout.OK

    return sequence


def _signature(dtype: str, axes: int) -> tuple[Any, ...]:
    real = types.float64 if dtype == "float64" else types.float32

    def taken(ndim: int, of: Any = real) -> Any:
        return types.Array(of, ndim, "C", readonly=True)

    arrays = [taken(axes)] * 4 + [taken(axes - 1), taken(1, types.int64)]
    kept = types.Array(real, axes, "C"), taken(3), types.Array(types.uint8, 1, "C")
    return (*arrays, *kept, types.boolean, _CONTROL)


_CONTROL = types.Array(types.int64, 1, "C")


@functools.cache
def step(dtype: str) -> Callable[..., int]:
    """The compiled step for states of that dtype; it checks its arguments and returns a layout code."""
    return kernel(functools.partial(_build_step, dtype), _signature(dtype, 3))


@functools.cache
def sequence(dtype: str) -> Callable[..., int]:
    """The compiled prefill, write and read for states of that dtype; arguments are checked by the caller."""
    return kernel(functools.partial(_build_sequence, dtype), (*_signature(dtype, 4), types.int64))


@functools.cache
def helper(dtype: str) -> Callable[..., int]:
    """The compiled loop of a helper thread for states of that dtype (see crew.py)."""
    return kernel(functools.partial(_build_helper, dtype), (_CONTROL,))
