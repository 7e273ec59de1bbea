"""Compiled feature maps: each is a function of its own, reached by its address, so a kernel compiles none of them."""

import functools
import math
from collections.abc import Callable

import numpy as np
from numba import types

from linattn_edge.features import MAPS, FeatureMap, Identity
from linattn_edge.kernels.jit import core, device
from linattn_edge.kernels.lanes import at_address, part, prefetch
from linattn_edge.kernels.layout import AHEAD


@device
def scaled(x, factor, y):
    """y = factor · x; y may be x."""
    for i in range(x.size):
        y[i] = factor * x[i]


@device
def size_of(x):
    """What x / sqrt(Σx² + 1e-6) divides by, as two factors, so that it holds where the squares exceed the range."""
    total = x.dtype.type(1e-6)
    for i in range(x.size):
        total += x[i] * x[i]
    root, largest = math.sqrt(total), x.dtype.type(1)
    if root - root != 0:  # not finite
        for i in range(x.size):
            largest = max(largest, abs(x[i]))
        total = x.dtype.type(0)
        for i in range(x.size):
            total += (x[i] / largest) * (x[i] / largest)
        root = math.sqrt(total)
    return largest, root


@device
def unit(x, y):
    """y = x / sqrt(Σx² + 1e-6)."""
    largest, root = size_of(x)
    for i in range(x.size):
        y[i] = x[i] / largest / root


def _build(loop: Callable[..., None], elementwise: bool, dtype: str) -> Callable[..., int]:
    item = np.dtype(dtype).type
    itemsize = np.dtype(dtype).itemsize

    def pack(
        x, x_step, y, y_step, count, heads, K, F, weights, rows, first_row, P, position, moves, norm, factor, scratch
    ):  # fmt: skip
        """φ of `count` tokens of some neighbouring heads, times `factor`. x, y, weights and scratch are addresses.

        norm: φ of x / sqrt(Σx² + 1e-6), the L2 norm that delta-rule models put on q and k. moves: 1 where the position
        grows from token to token.
        """
        numbers, normed = at_address(weights, rows * P, item), at_address(scratch, K, item)
        width, features = K, F
        if elementwise and norm == 0:  # all heads at once
            width, features = heads * K, heads * F
        for t in range(count):
            xt = at_address(x + t * x_step * itemsize, heads * K, item)
            yt = at_address(y + t * y_step * itemsize, heads * F, item)
            now = position + t * moves
            if t + AHEAD < count:
                prefetch(xt, AHEAD * x_step, heads * K)
            for h in range(heads * K // width):
                source = part(xt, h * width, width)
                if norm != 0:
                    unit(source, normed)
                    source = normed
                row = (first_row + h) % rows
                loop(source, part(yt, h * features, features), part(numbers, row * P, P), now)
            if factor != 1.0:
                scaled(yt, item(factor), yt)
        return 0

    return pack


_SIGNATURE = (*([types.int64] * 15), types.float64, types.int64)


_callable = functools.cache(device)  # registering a function twice would leave Numba two to choose from
_packs: dict[tuple[Callable[..., None], str], int] = {}


def pack(phi: FeatureMap, dtype: str) -> int:
    """The address of the compiled map, for computing in dtype; maps of one class share it."""
    loop = phi.loop if phi.has_loop else Identity.loop  # without one, φ is worked out before
    key = loop, dtype
    if key not in _packs:
        if hasattr(loop, "calls"):
            _callable(loop.calls)
        name = f"phi {phi.name} {dtype}" if type(phi) in MAPS.values() else None  # another's code is not in the stamp
        elementwise = phi.elementwise or not phi.has_loop
        _packs[key] = core(_build(_callable(loop), elementwise, dtype), name, _SIGNATURE)
    return _packs[key]
