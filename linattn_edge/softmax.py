"""SoftmaxAttention: exact attention over a growing key/value cache, the baseline with the same surface."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from linattn_edge import arrays
from linattn_edge.arrays import flag, whole
from linattn_edge.errors import DtypeError, ShapeError, StateMismatchError
from linattn_edge.kernels.layout import HALVES, OK, READ, STEP, WIDE, WRITE, padded
from linattn_edge.layer import scale_value
from linattn_edge.state import state_dtype

Array = NDArray[Any]


class SoftmaxState:
    """All keys and values so far, for B streams; made by `SoftmaxAttention.init_state`. It doubles when it is full."""

    def __init__(
        self, num_heads: int, key_dim: int, value_dim: int, batch_size: int, dtype: Any, capacity: int
    ) -> None:
        self._sizes = num_heads, key_dim, value_dim
        self._dtype = state_dtype(dtype)
        if self._dtype in HALVES:
            raise DtypeError(f"dtype: a cache is float32 or float64, got {dtype!r}")
        self._position = np.zeros(batch_size, np.int64)
        self._keys, self._values, self._scratch = self._allocated(capacity)

    def _allocated(self, capacity: int) -> tuple[Array, Array, Array]:
        """Keys, values and scratch with room for that many tokens."""
        N, K, V = self._sizes
        B, blocks = self._position.size, -(-max(capacity, 1) // WIDE)
        VP = padded(V)
        keys = np.zeros((B, N, blocks, K, WIDE), self._dtype)
        values = np.zeros((B, N, blocks * WIDE, VP), self._dtype)
        return keys, values, np.zeros(K + VP + blocks * WIDE, self._dtype)

    def _reserve(self, tokens: int) -> None:
        capacity = self._values.shape[2]
        if tokens > capacity:
            keys, values = self._keys, self._values
            more_keys, more_values, scratch = self._allocated(max(tokens, 2 * capacity))
            more_keys[:, :, : keys.shape[2]] = keys
            more_values[:, :, :capacity] = values
            self._keys, self._values, self._scratch = more_keys, more_values, scratch

    @property
    def k(self) -> Array:
        """A copy of the keys [B, T, N, K], T the longest stream; zero beyond a stream's own length."""
        T = int(self._position.max(initial=0))
        B, N, blocks, K, _ = self._keys.shape
        return self._keys.transpose(0, 2, 4, 1, 3).reshape(B, blocks * WIDE, N, K)[:, :T].copy()

    @property
    def v(self) -> Array:
        """A copy of the values [B, T, N, V], T the longest stream; zero beyond a stream's own length."""
        T = int(self._position.max(initial=0))
        return self._values[:, :, :T, : self._sizes[2]].transpose(0, 2, 1, 3).copy()

    @property
    def position(self) -> NDArray[np.int64]:
        """Tokens seen by each stream, int64 [B], read-only."""
        position = self._position.view()
        position.flags.writeable = False
        return position

    @property
    def batch_size(self) -> int:
        """B, the number of streams."""
        return self._position.size

    @property
    def dtype(self) -> "np.dtype[Any]":
        """The dtype of the cache."""
        return np.dtype(self._dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the cache as it stands, spare room included, and of position."""
        return self._keys.nbytes + self._values.nbytes + self._position.nbytes

    def copy(self) -> "SoftmaxState":
        """An independent copy."""
        return self.select(np.arange(self.batch_size))

    def __copy__(self) -> "SoftmaxState":
        return self.copy()

    def __deepcopy__(self, memo: Any) -> "SoftmaxState":
        return self.copy()

    def reset(self, rows: Any = None) -> None:
        """Forget all tokens, in place, of all streams or of the given rows."""
        index = slice(None) if rows is None else arrays.row_indices(rows, self.batch_size)
        self._keys[index] = 0
        self._values[index] = 0
        self._position[index] = 0

    def select(self, rows: Any) -> "SoftmaxState":
        """A new state of the given rows, in that order."""
        index = arrays.row_indices(rows, self.batch_size)
        other = SoftmaxState(*self._sizes, index.size, self._dtype, self._values.shape[2])
        other._keys[...] = self._keys[index]
        other._values[...] = self._values[index]
        other._position[...] = self._position[index]
        return other

    def __repr__(self) -> str:
        N, K, V = self._sizes
        return f"SoftmaxState(B={self.batch_size}, N={N}, K={K}, V={V}, {self._dtype}, {self.nbytes} bytes)"


class SoftmaxAttention:
    """Exact causal softmax attention, y = Σ softmax(scale · qᵀk) v, by full scan (Vaswani et al. 2017, eq. 1).

    The same surface as `LinearAttention`, over a cache that grows: a token costs what its position is. Args:
    num_heads H, key_dim K, value_dim V (K by default), num_kv_heads N (GQA), scale (K ** -0.5 by default),
    check_finite.
    """

    def __init__(
        self,
        num_heads: int,
        key_dim: int,
        value_dim: int | None = None,
        num_kv_heads: int | None = None,
        scale: float | None = None,
        check_finite: bool = True,
    ) -> None:
        self.H, self.K = whole("num_heads", num_heads, 1), whole("key_dim", key_dim, 1)
        self.V = self.K if value_dim is None else whole("value_dim", value_dim, 1)
        self.N = self.H if num_kv_heads is None else whole("num_kv_heads", num_kv_heads, 1)
        if self.H % self.N:
            raise ValueError(f"num_kv_heads: expected a divisor of num_heads = {self.H}, got {self.N}")
        self.scale = self.K**-0.5 if scale is None else scale_value(scale)
        self.check_finite = flag("check_finite", check_finite)

    def init_state(self, batch_size: int = 1, dtype: DTypeLike = "float32", capacity: int = 256) -> SoftmaxState:
        """An empty cache with room for `capacity` tokens at first."""
        batch_size, capacity = whole("batch_size", batch_size, 0), whole("capacity", capacity, 0)
        return SoftmaxState(self.N, self.K, self.V, batch_size, dtype, capacity)

    def step(
        self,
        q: ArrayLike,
        k: ArrayLike,
        v: ArrayLike,
        state: SoftmaxState,
        active: ArrayLike | None = None,
        out: Array | None = None,
    ) -> Array:
        """One token of each stream, [B, heads, width]: added to the cache, in place, then attended to."""
        self._check_state(state)
        lengths = None if active is None else arrays.active_array(active, state.batch_size)
        y = self._run(STEP, 3, q, k, v, state, lengths, out)
        assert y is not None
        return y

    def prefill(
        self,
        q: ArrayLike,
        k: ArrayLike,
        v: ArrayLike,
        state: SoftmaxState,
        lengths: ArrayLike | None = None,
        out: Array | None = None,
    ) -> Array:
        """Many tokens, [B, T, heads, width]: the same as T steps. `lengths` as in `LinearAttention.prefill`."""
        y = self._run(STEP, 4, q, k, v, state, lengths, out)
        assert y is not None
        return y

    def write(self, k: ArrayLike, v: ArrayLike, state: SoftmaxState, lengths: ArrayLike | None = None) -> None:
        """Add tokens to the cache, in place, without a query."""
        k = arrays.real_array("k", k)
        self._run(WRITE, 3 if k.ndim == 3 else 4, None, k, v, state, lengths, None)

    def read(self, q: ArrayLike, state: SoftmaxState, out: Array | None = None) -> Array:
        """What the cache answers to q; the cache is left as it is. An empty cache answers 0."""
        q = arrays.real_array("q", q)
        y = self._run(READ, 3 if q.ndim == 3 else 4, q, None, None, state, None, out)
        assert y is not None
        return y

    def _check_state(self, state: Any) -> None:
        if not isinstance(state, SoftmaxState) or state._sizes != (self.N, self.K, self.V):
            got = repr(state) if isinstance(state, SoftmaxState) else type(state).__name__
            raise StateMismatchError(f"state: expected one of this layer's init_state(), got {got}")

    def _warmup(self, dtype: str) -> None:
        from linattn_edge.kernels import softmax as kernels

        kernels.attend(dtype)

    def _run(
        self, mode: int, axes: int, q: Any, k: Any, v: Any, state: SoftmaxState, lengths: Any, out: Array | None
    ) -> Array | None:
        from linattn_edge.kernels import softmax as kernels

        self._check_state(state)
        B, dtype = state.batch_size, state._dtype
        taken = {STEP: {"q": q, "k": k, "v": v}, WRITE: {"k": k, "v": v}, READ: {"q": q}}[mode]
        shapes = {"q": ("H, K", self.H, self.K), "k": ("Hk, K", self.N, self.K), "v": ("Hv, V", self.N, self.V)}
        given, lead, sizes, T = arrays.token_arrays(taken, shapes, axes, B)
        if lengths is not None:
            lengths = arrays.lengths_array(lengths, B, T)
        output = None
        shape = (*sizes, self.H, self.V)
        if "q" in given:
            output = arrays.output_dtype(given["q"])
            if out is not None:
                arrays.check_out(out, shape, f"{lead}, H, V", output)
                arrays.check_apart(out, given | {"the cache": state._keys, "the cached values": state._values})
        ready = {name: arrays.as_dtype(a, dtype).reshape(B, T, *a.shape[-2:]) for name, a in given.items()}
        if mode != READ and B and (needed := int(state._position.max()) + T) > state._values.shape[2]:
            if self.check_finite:
                arrays.check_finite(ready, lengths)  # before the cache grows
            state._reserve(needed)
        none = np.zeros((0, 0, 0, 0), dtype)
        y = out if out is not None and output == np.dtype(dtype) else np.empty(shape, dtype)
        code = kernels.attend(dtype)(
            ready.get("q", none),
            ready.get("k", none),
            ready.get("v", none),
            np.zeros(0, np.int64) if lengths is None else lengths,
            y.reshape(B, T, self.H, self.V),
            state._keys,
            state._values,
            state._position,
            state._scratch,
            np.dtype(dtype).type(self.scale),
            self.check_finite,
            mode,
        )
        if code != OK:
            arrays.check_finite(ready, lengths)
            raise ShapeError("a compiled kernel refused what was checked")
        return None if output is None else arrays.deliver(y, out, output)
