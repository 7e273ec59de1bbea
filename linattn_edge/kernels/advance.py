"""The core of every CPU call: one function, `advance`, for steps and prefills, every rule and every feature map.

State heads are taken in groups and tokens in pieces: φ(k), φ(q), the decay Λ = exp(g) and v of a group are packed into
scratch, a row for each token, with loops over all heads of the row where φ allows. The normaliser z, which does not
depend on S, is advanced there too. Then each block of columns of S takes all tokens of the piece; from `DENSE` tokens
on, it is copied into a dense buffer first, so that it stays in L1. A step is a piece of one token with all heads in one
group, worked on in place. Both therefore round alike.

`advance` is reached by its address (jit.core), and so is φ: neither is compiled again by the entries in cpu.py.
"""

import functools
from collections.abc import Callable

import numpy as np
from numba import types

from linattn_edge.kernels import crew, layout, maths, sweep
from linattn_edge.kernels.columns import DENSE, place, types_of
from linattn_edge.kernels.jit import call, core, device
from linattn_edge.kernels.lanes import address, at_address, part, prefetch
from linattn_edge.kernels.layout import AHEAD, FOLD, PAD, READ, WIDEST, WRITE

B, H, HK, N, K, V, F, VP = (getattr(layout, name) for name in ("B", "H", "HK", "N", "K", "V", "F", "VP"))

dot, exp = maths.dot, maths.exp


@device
def fill(y, value):
    for i in range(y.size):
        y[i] = value


@device
def decays_of(g, width, F, y):
    """y = exp(g), where each of y's heads of F numbers has `width` numbers in g: F of them or one."""
    if width == F:
        for i in range(y.size):
            y[i] = exp(g[i])
    else:
        for h in range(y.size // F):
            fill(part(y, h * F, F), exp(g[h]))


@device
def advance_z(z, k, decay, q):
    """z ← Λz + k; returns the new q·z."""
    total = z.dtype.type(0)
    for i in range(z.size):
        z[i] = decay[i] * z[i] + k[i]
        total += q[i] * z[i]
    return total


@device
def write_z(z, k, decay):
    """z ← Λz + k"""
    for i in range(z.size):
        z[i] = decay[i] * z[i] + k[i]


@device
def gather_z(z, total, k, q):
    """z ← z + k of a compensated state; returns q·(total + z)."""
    sum_ = z.dtype.type(0)
    for i in range(z.size):
        z[i] += k[i]
        sum_ += q[i] * (total[i] + z[i])
    return sum_


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
def copy_padded(x, y):
    """y = x, and zeros to its end."""
    for i in range(x.size):
        y[i] = x[i]
    for i in range(x.size, y.size):
        y[i] = 0


@device
def divisor(den, eps, add):
    """den + eps, or den kept at least eps away from zero, on its own side; NaN stays."""
    if add:
        return den + eps
    if den < 0:
        return den if den < -eps else -eps
    return eps if den < eps else den


@device
def least(a, b):
    """The smaller of two integers, cheaper to compile than min."""
    return a if a < b else b


def _build(dtype: str) -> Callable[..., int]:
    item, kept = types_of(dtype)
    size, kept_size = np.dtype(item).itemsize, np.dtype(kept).itemsize

    def advance(block, control, work):
        """Do the job in a state's header; with a crew's `control`, chunks of it until none is left. All addresses."""
        header = at_address(block, layout.HEADER, np.int64)
        plan = at_address(header[layout.PLAN], layout.PLAN_SIZE, np.int64)
        B_, H_, HK_, N_, K_, V_ = header[B], header[H], header[HK], header[N], header[K], header[V]
        F_, VP_ = header[F], header[VP]
        T, width, mode, piece = header[layout.T], header[layout.WIDTH], header[layout.MODE], header[layout.PIECE]
        group = header[layout.GROUP]
        outputs = H_ if H_ > N_ else N_
        r = outputs // N_  # query heads that read one state
        shared = outputs // H_  # states that share one query head
        keys = N_ // HK_  # states that share one key head
        rule, norm = header[layout.RULE], header[layout.QK_NORM]
        normalize, add = header[layout.NORMALIZE] != 0, header[layout.EPS_ADD] != 0
        takes_beta = header[layout.TAKES_BETA] != 0
        constant = header[layout.CONSTANT_DECAY] != 0
        far = header[layout.AT_FAR_S] != 0
        reals = at_address(block + 8 * layout.SCALE, 2, np.float64)
        scale, eps = item(reals[0]), item(reals[1])
        one, nothing = item(1), item(0)
        sides, rows, P = plan[layout.SIDES], plan[layout.HEADS], plan[layout.P]
        # φ(k) of one token is k itself, and v and y need no padding: used where they are
        in_place = piece == 1 and header[layout.PLAIN] != 0 and norm == 0
        exact = piece == 1 and V_ == VP_

        numbers = B_ * T
        given = numbers if mode != READ else 0
        q = at_address(header[layout.Q], numbers * H_ * K_ if mode != WRITE else 0, item)
        k = at_address(header[layout.KEYS], given * HK_ * K_, item)
        v = at_address(header[layout.VALUES], given * N_ * V_, item)
        g = at_address(header[layout.G], (1 if constant else given) * N_ * width, item)
        beta = at_address(header[layout.BETA], given * N_ if takes_beta else 0, item)
        lengths = at_address(header[layout.LENGTHS], B_ if header[layout.LENGTHS] != 0 else 0, np.int64)
        out = at_address(header[layout.OUT], numbers * outputs * V_ if mode != WRITE else 0, item)
        streams = at_address(header[layout.STREAMS], B_ if header[layout.STREAMS] != 0 else 0, np.int64)

        # rows of scratch: a token's features of all heads of the group, PAD, the next token's
        ld, ldq, ldv, ldy = group * F_ + PAD, group * r * F_ + PAD, group * VP_ + PAD, group * r * VP_ + PAD
        told = at_address(work, sweep.SIZE, np.int64)
        a = work + sweep.SIZE * 8
        ks = at_address(a, piece * ld, item)
        a += piece * ld * size
        qs = at_address(a, piece * ldq, item)
        a += piece * ldq * size
        decays = at_address(a, piece * ld, item)
        a += piece * ld * size
        dks = at_address(a, piece * ld, item)
        a += piece * ld * size
        dqs = at_address(a, piece * ld, item)
        a += piece * ld * size
        vs = at_address(a, piece * ldv, item)
        a += piece * ldv * size
        ys = at_address(a, piece * ldy, item)
        a += piece * ldy * size
        buffer = a
        a += F_ * WIDEST * size
        betas = at_address(a, piece * group, item)
        a += piece * group * size
        qks = at_address(a, piece * group, item)
        a += piece * group * size
        dens = at_address(a, piece * group * r, item)
        scratch = a + piece * group * r * size
        ldd, dh = ld, F_
        if width == 0:
            fill(part(decays, 0, F_), one)
            ldd, dh = 0, 0

        told[sweep.RULE], told[sweep.MODE], told[sweep.VP], told[sweep.F] = rule, mode, VP_, F_
        told[sweep.R], told[sweep.SHARED_KEYS], told[sweep.SHARED] = r, keys, shared
        told[sweep.BUFFER], told[sweep.Q], told[sweep.DECAY] = buffer, address(qs), address(decays)
        told[sweep.DK], told[sweep.DQ] = address(dks), address(dqs)
        told[sweep.BETA], told[sweep.QK] = address(betas), address(qks)
        told[sweep.NORMALIZE], told[sweep.FACTORS] = header[layout.NORMALIZE], address(dens)
        told[sweep.LD], told[sweep.LDQ], told[sweep.LDD], told[sweep.DH] = ld, ldq, ldd, dh

        first, last = 0, B_ * N_
        crowd = at_address(control, crew.SIZE if control != 0 else 0, np.int64)
        if control != 0:
            first = crew.add(crowd, crew.NEXT, crowd[crew.CHUNK])
            last = least(B_ * N_, first + crowd[crew.CHUNK])
        while first < B_ * N_:
            # Pieces outside, heads inside: a token's heads are neighbours in memory, its pages are visited once so.
            for start in range(0, T, piece):
                unit = first
                while unit < last:
                    b, n = unit // N_, unit % N_
                    G = least(group, least(last - unit, N_ - n))
                    length = lengths[b] if lengths.size > 0 else T
                    home, seat = block, b  # where this stream's memory begins, and which one it is there
                    if streams.size > 0:
                        home, seat = streams[b], 0
                    if mode != WRITE:
                        for t in range(length if length > start else start, least(T, start + piece)):
                            fill(part(out, ((b * T + t) * outputs + n * r) * V_, G * r * V_), nothing)
                    count = least(piece, length - start)
                    if count <= 0:
                        unit += G
                        continue
                    row = b * T + start
                    position = at_address(home + header[layout.AT_POSITION] + seat * 8, 1, np.int64)
                    now, moves = position[0] + start, 1
                    if mode == READ:
                        now, moves = position[0] - 1 if position[0] > 0 else 0, 0
                    kp, vp, yp = address(ks), address(vs), address(ys)
                    vt, vh, yt, yh, yj = ldv, VP_, ldy, r * VP_, VP_
                    if mode != WRITE:
                        h = n // shared if shared > 1 else n * r
                        many = place(n, G - 1, shared) * r + r
                        call(
                            plan[layout.PACK], address(q) + (row * H_ + h) * K_ * size, H_ * K_, address(qs), ldq,
                            count, many, K_, F_, plan[layout.WEIGHTS] + (sides - 1) * rows * P * size, rows, h, P, now,
                            moves, norm, 1.0 if normalize else np.float64(scale), scratch,
                        )  # fmt: skip
                    else:
                        for t in range(count if takes_beta or far or count < DENSE else 0):
                            fill(part(qs, t * ldq, G * r * F_), nothing)
                    if mode != READ:
                        h = n // keys
                        many = place(n, G - 1, keys) + 1
                        if in_place:
                            kp = address(k) + (row * HK_ + h) * K_ * size
                        else:
                            call(
                                plan[layout.PACK], address(k) + (row * HK_ + h) * K_ * size, HK_ * K_, address(ks), ld,
                                count, many, K_, F_, plan[layout.WEIGHTS], rows, h, P, now, moves, norm, 1.0, scratch,
                            )  # fmt: skip
                        if exact:
                            vp, vh = address(v) + (row * N_ + n) * V_ * size, V_
                        for t in range(count):
                            if t + AHEAD < count:
                                if width > 0:
                                    x = (n if constant else (row + t + AHEAD) * N_ + n) * width
                                    prefetch(g, x, G * width)
                                prefetch(v, ((row + t + AHEAD) * N_ + n) * V_, G * V_)
                            if width > 0:
                                x = (n if constant else (row + t) * N_ + n) * width
                                decays_of(part(g, x, G * width), width, F_, part(decays, t * ld, G * F_))
                            if not exact:
                                x = ((row + t) * N_ + n) * V_
                                if V_ == VP_:
                                    copy_padded(part(v, x, G * V_), part(vs, t * ldv, G * V_))
                                else:
                                    for i in range(G):
                                        copy_padded(part(v, x + i * V_, V_), part(vs, t * ldv + i * VP_, VP_))
                            if takes_beta:
                                for i in range(G):
                                    betas[t * G + i] = beta[(row + t) * N_ + n + i]
                                    kt = at_address(kp + (t * ld + place(n, i, keys) * F_) * size, F_, item)
                                    x = t * ld + i * F_
                                    decay = part(decays, t * ldd + i * dh, F_)
                                    qt = part(qs, t * ldq + place(n, i, shared) * r * F_, F_)
                                    qks[t * G + i] = products(kt, qt, decay, part(dks, x, F_), part(dqs, x, F_))
                    if exact and mode != WRITE:
                        yp, yh, yj = address(out) + (row * outputs + n * r) * V_ * size, r * V_, V_
                    if normalize:
                        z = at_address(home + header[layout.AT_Z] + (seat * N_ + n) * F_ * size, G * F_, item)
                        total = at_address(
                            home + header[layout.AT_FAR_Z] + (seat * N_ + n) * F_ * size, G * F_ if far else 0, item
                        )
                        for t in range(count):
                            for i in range(G):
                                zn = part(z, i * F_, F_)
                                x, j = t * ldq + place(n, i, shared) * r * F_, 0
                                if mode != READ and far:
                                    kt = at_address(kp + (t * ld + place(n, i, keys) * F_) * size, F_, item)
                                    den = gather_z(zn, part(total, i * F_, F_), kt, part(qs, x, F_))
                                    dens[(t * G + i) * r] = scale / divisor(den, eps, add)
                                    j = 1
                                    if (now + t + 1) % FOLD == 0:
                                        call(plan[layout.FOLD_Z], address(zn), address(total) + i * F_ * size, F_)
                                elif mode == WRITE:
                                    kt = at_address(kp + (t * ld + place(n, i, keys) * F_) * size, F_, item)
                                    write_z(zn, kt, part(decays, t * ldd + i * dh, F_))
                                elif mode != READ:
                                    kt = at_address(kp + (t * ld + place(n, i, keys) * F_) * size, F_, item)
                                    den = advance_z(zn, kt, part(decays, t * ldd + i * dh, F_), part(qs, x, F_))
                                    dens[(t * G + i) * r] = scale / divisor(den, eps, add)
                                    j = 1
                                while j < r and mode != WRITE:
                                    den = dot(qs, x + j * F_, zn)
                                    if far:
                                        den += dot(qs, x + j * F_, part(total, i * F_, F_))
                                    dens[(t * G + i) * r + j] = scale / divisor(den, eps, add)
                                    j += 1
                    told[sweep.GROUP], told[sweep.FIRST_HEAD], told[sweep.COUNT] = G, n, count
                    told[sweep.S] = home + header[layout.AT_S] + (seat * N_ + n) * F_ * VP_ * kept_size
                    told[sweep.K], told[sweep.V], told[sweep.Y] = kp, vp, yp
                    told[sweep.VT], told[sweep.VH], told[sweep.YT] = vt, vh, yt
                    told[sweep.YH], told[sweep.YJ] = yh, yj
                    told[sweep.NOW] = now
                    told[sweep.FAR] = home + header[layout.AT_FAR_S] + (seat * N_ + n) * F_ * VP_ * kept_size
                    wide = plan[layout.COLUMNS]
                    if wide <= VP_:
                        call(plan[layout.COLUMNS_WIDE], work, 0)
                    if VP_ % wide != 0:
                        call(plan[layout.COLUMNS_NARROW], work, VP_ // wide * wide)
                    if mode != WRITE and not exact:
                        for t in range(count):
                            if t + AHEAD < count:
                                prefetch(out, ((row + t + AHEAD) * outputs + n * r) * V_, G * r * V_)
                            for i in range(G * r):
                                x = ((row + t) * outputs + n * r + i) * V_
                                copy_padded(part(ys, t * ldy + i * VP_, V_), part(out, x, V_))
                    unit += G
            first = B_ * N_
            if control != 0:
                first = crew.add(crowd, crew.NEXT, crowd[crew.CHUNK])
                last = least(B_ * N_, first + crowd[crew.CHUNK])
        return 0

    return advance


@functools.cache
def advance(dtype: str) -> int:
    """The address of the compiled `advance` for states of that dtype."""
    return core(_build(dtype), f"advance {dtype}", (types.int64, types.int64, types.int64))
