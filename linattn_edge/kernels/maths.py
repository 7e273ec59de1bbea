"""Scalar functions that kernels and feature maps call; plain Python, compiled by whoever registers them (jit.py)."""

import math
from typing import Any

import numpy as np

_LOG2E = np.float32(1.44269504)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_LOWEST, _HIGHEST = np.float32(-104), np.float32(88.72283)  # exp underflows to 0, overflows
_HALF, _ONE = np.float32(0.5), np.float32(1)
_INF = np.float32(np.inf)
# Cephes expf: minimax polynomial for exp on [-ln2/2, ln2/2], 1.1e-7 relative error
_P = tuple(
    np.float32(c)
    for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)
_P0, _P1, _P2, _P3, _P4, _P5 = _P
_BIAS, _MANTISSA, _HALVE = np.int32(127), np.int32(23), np.int32(1)


def from_bits(bits: Any) -> Any:
    """The float32 with these 32 bits."""
    return np.int32(bits).view(np.float32)


def to_bits(x: Any) -> Any:
    """The 32 bits of a float32."""
    return np.float32(x).view(np.int32)


def exp32(x: Any) -> Any:
    """exp of a float32 by range reduction and a polynomial: no branches, so loops over it vectorise.

    Subnormal results are right; below -104 it is 0, above 88.72283 inf; NaN stays NaN.
    """
    y = x if x > _LOWEST else _LOWEST
    y = y if y < _HIGHEST else _HIGHEST
    t = y * _LOG2E
    m = np.int32(t + (_HALF if t > 0 else -_HALF))
    n = np.float32(m)
    r = y - n * _LN2_HIGH - n * _LN2_LOW
    p = ((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _P5
    p = p * r * r + r + _ONE
    half = m >> _HALVE  # 2^m in two steps, which reaches the subnormals and 2^128: one by p's exponent, since the
    p = from_bits(np.int32(to_bits(p) + ((m - half) << _MANTISSA)))  # compiler may reorder two multiplications
    e = p * from_bits(np.int32((half + _BIAS) << _MANTISSA))
    e = e if x <= _HIGHEST else _INF
    return x if x != x else e


def exp(x: Any) -> Any:
    """exp in x's own precision."""
    return exp32(x) if isinstance(x, np.float32) else math.exp(x)


def cos(x: Any) -> Any:
    """cos in x's own precision."""
    return math.cos(x)


def sin(x: Any) -> Any:
    """sin in x's own precision."""
    return math.sin(x)


def dot(weights: Any, at: int, x: Any) -> Any:
    """Σ weights[at + i] · x[i]. Compiled, `at` is not checked: indices that may be negative do not vectorise."""
    total = x.dtype.type(0)
    for i in range(x.size):
        total += weights[at + i] * x[i]
    return total


def multiply(y: Any, to: int, factor: Any, at: int, count: int) -> None:
    """y[to + i] = factor · y[at + i], rising, to ≤ at. Compiled, neither is checked."""
    for i in range(count):
        y[to + i] = factor * y[at + i]
