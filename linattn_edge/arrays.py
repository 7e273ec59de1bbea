"""The boundary: whatever the caller has becomes a NumPy array of the right shape and dtype, or one clear error."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from linattn_edge.errors import DtypeError, NotFiniteError, ShapeError

Array = NDArray[Any]


def whole(name: str, value: Any, least: int, most: int = 2**62) -> int:
    """A whole number from `least` to `most`."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)) or not least <= value <= most:
        open_ = most == 2**62 and not (isinstance(value, int) and value > most)
        range_ = f"of at least {least}" if open_ else f"from {least} to {most}"
        raise ValueError(f"{name}: expected a whole number {range_}, got {value!r}")
    return int(value)


def flag(name: str, value: Any) -> bool:
    """True or False, and nothing that merely counts as one."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name}: expected True or False, got {value!r}")
    return bool(value)


def to_array(name: str, value: Any) -> Array:
    """`value` as a NumPy array: NumPy, a CPU tensor with `__array__` or DLPack, or nested lists.

    Numba's arrays on a GPU have `__array__` too, which copies: they are refused, as those of other libraries are.
    """
    if isinstance(value, np.ndarray):
        return value
    try:
        if hasattr(value, "__cuda_ndarray__") or hasattr(value, "__cuda_array_interface__"):
            raise BufferError("it lies on a GPU")
        if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
            value = np.from_dlpack(value)
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        reason = " ".join(str(error).split())
        raise DtypeError(f"{name}: expected an array on the CPU, got {type(value).__name__} ({reason})") from None


def real_array(name: str, value: Any) -> Array:
    """`value` as an array of real numbers."""
    array = to_array(name, value)
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        got = f"dtype {array.dtype}" if array.ndim else type(value).__name__
        raise DtypeError(f"{name}: expected an array of real numbers, got {got}")
    return array


def row_indices(rows: Any, B: int) -> NDArray[np.intp]:
    """Row numbers (negative ones count from the end) or a bool mask [B] as numbers from 0 to B - 1."""
    index = np.atleast_1d(to_array("rows", rows))
    if index.dtype == bool:
        check_shape("rows", index, "B", (B,))
        return np.flatnonzero(index)
    if index.ndim != 1 or (index.size and index.dtype.kind not in "iu"):
        raise ShapeError(f"rows: expected row numbers or a bool mask [B], got {index.dtype} {list(index.shape)}")
    if index.size and ((index < -B).any() or (index >= B).any()):
        raise ValueError(f"rows: expected numbers below the batch size {B}, got {index.min()} to {index.max()}")
    return index.astype(np.intp) % max(B, 1)


def cast_into(target: Array, name: str, symbols: str, value: Any) -> None:
    """Copy `value` into `target`, which has the right shape and dtype; too large for float32 becomes inf."""
    array = real_array(name, value)
    check_shape(name, array, symbols, target.shape)
    with np.errstate(over="ignore"):
        target[...] = array


def output_dtype(q: Array) -> "np.dtype[Any]":
    """y has q's dtype; integers, which can't hold an average, give float32."""
    return q.dtype if q.dtype.kind not in "iu" else np.dtype(np.float32)


def check_shape(name: str, array: Array, symbols: str, expected: tuple[int | None, ...]) -> None:
    """ShapeError unless the array has that shape; None stands for any size."""
    fits = array.ndim == len(expected) and all(e is None or a == e for a, e in zip(array.shape, expected, strict=True))
    if not fits:
        names = [s.strip() for s in symbols.split(",")]
        sizes = ", ".join(n if e is None else str(e) for n, e in zip(names, expected, strict=True))
        raise ShapeError(f"{name}: expected shape [{symbols}] = [{sizes}], got {list(array.shape)}")


def token_arrays(
    given: dict[str, Any],
    shapes: dict[str, tuple[Any, ...]],
    axes: int,
    B: int,
    take: Callable[[str, Any], Any] = real_array,
) -> tuple[dict[str, Array], str, tuple[int, ...], int]:
    """q, k and v of a step (axes 3) or a sequence (axes 4) as arrays that fit each other and the layer.

    shapes: for each name the symbols of its last two axes, then their sizes. `take` makes an array of what was given.
    Also returns the symbols and the sizes of the leading axes, and T.
    """
    checked = {name: take(name, value) for name, value in given.items()}
    lead = "B" if axes == 3 else "B, T"
    sizes: tuple[int | None, ...] = (B,) if axes == 3 else (B, None)
    T = 1
    for name, array in checked.items():
        symbols, *tail = shapes[name]
        check_shape(name, array, f"{lead}, {symbols}", (*sizes, *tail))
        if axes == 4:
            T = array.shape[1]  # the first one's, which the others must have
            sizes = (B, T)
    return checked, lead, (B,) if axes == 3 else (B, T), T


def deliver(y: Array, out: Array | None, dtype: "np.dtype[Any]") -> Array:
    """The result in the dtype that was promised, in `out` when given; too large for float16 becomes inf."""
    with np.errstate(over="ignore"):
        if out is None:
            return y.astype(dtype, copy=False)
        if y is not out:
            out[...] = y
    return out


def as_dtype(array: Array, dtype: DTypeLike) -> Array:
    """C-contiguous, aligned, native and of that dtype; copies only when it must. Too large for float32 becomes inf."""
    with np.errstate(over="ignore"):
        return np.require(array, dtype, ("C", "A"))


def lengths_array(lengths: Any, B: int, T: int) -> NDArray[np.int64]:
    """Lengths [B] with 0 ≤ length ≤ T as int64."""
    array = to_array("lengths", lengths)
    if array.size and array.dtype.kind not in "iu":
        raise DtypeError(f"lengths: expected integers, got dtype {array.dtype}")
    check_shape("lengths", array, "B", (B,))
    if (array < 0).any() or (array > T).any():
        raise ValueError(f"lengths: expected numbers from 0 to T = {T}, got {array.min()} to {array.max()}")
    return array.astype(np.int64)


def active_array(active: Any, B: int) -> NDArray[np.int64]:
    """The mask `active` bool [B] as lengths of 0 or 1."""
    array = to_array("active", active)
    if array.size and array.dtype != bool:
        raise DtypeError(f"active: expected bool, got dtype {array.dtype}")
    check_shape("active", array, "B", (B,))
    return array.astype(np.int64)


def check_out(out: Any, shape: tuple[int, ...], symbols: str, dtype: "np.dtype[Any]") -> None:
    """`out` must be a writable, C-contiguous NumPy array of y's shape and dtype."""
    if not isinstance(out, np.ndarray):
        raise DtypeError(f"out: expected a NumPy array, got {type(out).__name__}")
    check_shape("out", out, symbols, shape)
    if out.dtype != dtype:
        raise DtypeError(f"out: expected q's dtype {dtype}, got {out.dtype}")
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise ValueError("out: expected a C-contiguous and writable array")


def check_apart(out: Array, others: dict[str, Array]) -> None:
    """`out` may not overlap an input or the state."""
    for name, other in others.items():
        if np.may_share_memory(out, other):
            raise ValueError(f"out: overlaps {name}; give it memory of its own")


def _not_finite(name: str, array: Array, lengths: NDArray[np.int64] | None) -> NDArray[np.bool_]:
    """Where an array [B, T, ...] holds NaN or inf in a place that counts; g may be -inf."""
    bad: NDArray[np.bool_] = np.isnan(array) | (array == np.inf) if name == "g" else ~np.isfinite(array)
    if lengths is not None:
        inside = np.arange(array.shape[1]) < lengths[:, None]
        bad &= inside.reshape(inside.shape + (1,) * (array.ndim - 2))
    return bad


def rows_not_finite(arrays: dict[str, Array], lengths: NDArray[np.int64] | None) -> list[int]:
    """The rows that `check_finite` would refuse."""
    each = [_not_finite(name, a, lengths).reshape(len(a), -1).any(axis=1) for name, a in arrays.items()]
    rows: list[int] = np.flatnonzero(np.logical_or.reduce(each)).tolist()
    return rows


def check_finite(arrays: dict[str, Array], lengths: NDArray[np.int64] | None, one: bool = False) -> None:
    """NotFiniteError naming the first array [B, T, ...] that holds NaN or inf in a place that counts; g may be -inf.

    one: there is one stream, which whoever passes the error on names.
    """
    for name, array in arrays.items():
        bad = _not_finite(name, array, lengths)
        if bad.any():
            index = np.argwhere(bad)[0].tolist()
            stream = "" if one else f"stream {index[0]}, "
            stays = "" if name == "q" else "it would stay in the state for ever; "
            raise NotFiniteError(
                f"{name}: {array[tuple(index)]} (as {array.dtype}) at {stream}token {index[1]}, index {index[2:]}: "
                f"{stays}check_finite=False lets it through"
            )
