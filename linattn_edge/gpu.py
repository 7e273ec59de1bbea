"""The GPU at the boundary: what is there, the caller's arrays and streams, a state on the device, one launch a call.

Nothing here is loaded before `backend="cuda"` or `state.to("cuda")` asks for it, and what does need a GPU asks
`require()` first.
"""

import contextlib
import functools
import importlib.util
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from linattn_edge import arrays
from linattn_edge.errors import DeviceError, DtypeError, NotFiniteError, ShapeError, StateMismatchError
from linattn_edge.kernels.layout import READ, STEP, WRITE
from linattn_edge.layer import Layer
from linattn_edge.state import State, state_dtype

if TYPE_CHECKING:
    from linattn_edge.attention import LinearAttention

Array = NDArray[Any]
DeviceArray = Any  # an array of Numba's on the device

INSTALL = 'pip install "linattn-edge[cuda]"'
OUT_OF_MEMORY = "out of GPU memory"
_WARNINGS = threading.Lock()  # what hides a warning does so for all threads
_COMPILERS = ("Nvvm", "Nvrtc", "Linker", "CCSupport")  # whose errors begin so


def simulated() -> bool:
    """Whether Numba's simulator stands in for the GPU (NUMBA_ENABLE_CUDASIM=1)."""
    return os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")


@functools.cache
def why_not() -> str | None:
    """Why the CUDA backend can't be used here, in one line, or None."""
    if not simulated() and importlib.util.find_spec("numba_cuda") is None:
        return f"the package numba-cuda is missing: {INSTALL}"
    try:
        from numba import cuda

        if cuda.is_available():
            return None
        error = cuda.cuda_error()
    except Exception as failure:  # whatever a broken installation raises
        error = failure
    reason = " ".join(str(error).split()) if error is not None else ""
    return f"no GPU can be used ({reason or 'none found'})"


def require() -> Any:
    """numba.cuda, where it works; DeviceError with what is missing, and how to get it, where not."""
    reason = why_not()
    if reason is not None:
        raise DeviceError(f"backend: 'cuda' is not available: {reason}")
    from numba import cuda

    return cuda


def current_device() -> int:
    """The number of the GPU that calls go to."""
    if simulated():
        return 0
    with guard():
        return int(require().get_current_device().id)


def card() -> str:
    """The GPU's name, compute capability and memory."""
    cuda = require()
    if simulated():
        return "Numba's simulator"
    with guard():
        device = cuda.get_current_device()
        name = device.name.decode() if isinstance(device.name, bytes) else device.name
        memory = cuda.current_context().get_memory_info().total
        return f"{name}, compute capability {'.'.join(map(str, device.compute_capability))}, {memory / 2**30:.1f} GiB"


@contextlib.contextmanager
def guard() -> Iterator[None]:
    """What the driver, its compilers or an allocator refuse becomes a DeviceError of one line."""
    try:
        yield
    except Exception as error:
        kind, text = type(error).__name__, " ".join(str(error).split())
        if kind.startswith(_COMPILERS):
            raise DeviceError(f"no kernel can be compiled: {text or kind}") from error
        if isinstance(error, MemoryError) or kind == "OutOfMemoryError":  # the second is torch's
            raise DeviceError(f"the GPU refused: {OUT_OF_MEMORY} ({text or kind})") from error
        if not kind.startswith(("Cuda", "CUDA")):
            raise
        if "OUT_OF_MEMORY" in text.upper().replace(" ", "_"):
            text = f"{OUT_OF_MEMORY} ({text})"
        raise DeviceError(f"the GPU refused: {text or kind}") from error


def is_device_array(value: Any) -> bool:
    """Whether `value` says that it lies on a GPU."""
    if isinstance(value, np.ndarray):
        return False
    try:
        if getattr(value, "__cuda_ndarray__", False) or hasattr(value, "__cuda_array_interface__"):
            return True
    except Exception:  # torch: a tensor there that requires grad; what is wrong is said when it is taken
        return True
    try:
        return bool(value.__dlpack_device__()[0] == 2)  # kDLCUDA
    except Exception:  # it has none, or can't say
        return False


def device_array(
    name: str,
    value: Any,
    dtypes: tuple[str, ...] = ("float32",),
    writable: bool = False,
    stream: int = 0,
    held: list[Any] | None = None,
) -> DeviceArray:
    """`value`, which lies on the GPU, as a Numba device array of the same memory.

    stream: the address of the one that it will be used on, which a library with DLPack alone is told, so that what it
    has under way there is done before. What such a library must keep goes to `held`.
    """
    cuda = require()
    if not is_device_array(value):
        raise DtypeError(f"{name}: expected an array on the GPU, as the others are, got {type(value).__name__}")
    with guard():
        try:
            if getattr(value, "__cuda_ndarray__", False):
                array = value
            else:
                interface, owner = _interface(value, stream)
                if owner is not value and held is not None:
                    held.append(owner)
                if writable and interface["data"][1]:
                    raise BufferError("it is read-only")
                array = cuda.from_cuda_array_interface(interface, owner=owner, sync=False)
            start, number = _span(array)[0], _device_of(value, array)
        except (
            TypeError, ValueError, RuntimeError, BufferError, NotImplementedError, LookupError, AttributeError,
            ArithmeticError, SystemError,
        ) as error:  # fmt: skip
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise DtypeError(f"{name}: expected an array on the GPU, got {type(value).__name__} ({reason})") from None
    if array.dtype.name not in dtypes or not array.dtype.isnative:
        raise DtypeError(f"{name}: expected {' or '.join(dtypes)} on the GPU, got {array.dtype}; nothing is converted")
    if array.size and not array.is_c_contiguous():
        raise ShapeError(f"{name}: expected a C-contiguous array on the GPU, got strides {list(array.strides)}")
    if array.size and (start == 0 or start % array.dtype.itemsize):
        raise DtypeError(f"{name}: expected the address of a {array.dtype} on the GPU, got {start:#x}")
    if number is not None and number != current_device():
        raise DeviceError(f"{name}: lies on GPU {number}, the current one is {current_device()}")
    return array


def _device_of(value: Any, array: DeviceArray) -> int | None:
    """The number of the GPU that an array lies on; None where its library does not say."""
    if getattr(value, "__cuda_ndarray__", False):
        return None if simulated() else int(array.gpu_data.context.device.id)
    there = getattr(value, "device", None)
    for number in (getattr(there, "index", None), getattr(there, "id", None)):  # torch, CuPy
        if isinstance(number, int):
            return number
    return int(value.__dlpack_device__()[1]) if hasattr(value, "__dlpack_device__") else None


def _interface(value: Any, stream: int = 0) -> tuple[dict[str, Any], Any]:
    """The CUDA array interface of an array, also of one that has DLPack only, and what keeps its memory."""
    if hasattr(value, "__cuda_array_interface__"):
        found = dict(value.__cuda_array_interface__)
        if found.get("version", 0) > 3:
            raise NotImplementedError(f"version {found['version']} of the interface is not known")
        if found["data"][0] is None or len(found["data"]) != 2:
            raise ValueError("data: expected an address and whether it is read-only")
        return found, value
    from cuda.core.utils import StridedMemoryView  # type: ignore[import-not-found]  # comes with numba-cuda

    view = StridedMemoryView.from_dlpack(value, stream_ptr=stream or 1)  # 1: DLPack's name of the default stream
    size = view.dtype.itemsize
    strides = None if view.strides is None else tuple(s * size for s in view.strides)
    return {
        "version": 3,
        "shape": tuple(view.shape),
        "strides": strides,
        "typestr": view.dtype.str,
        "data": (view.ptr, bool(view.readonly)),
    }, (value, view)


def _address(stream: Any) -> int:
    """Of a stream as `stream_of` gives it."""
    return 0 if not stream or simulated() else int(stream)


def stream_of(stream: Any, value: Any) -> Any:
    """The stream to launch on: the one given, else the one that `value`'s library works on, else the default one."""
    cuda = require()
    if stream is None:
        with contextlib.suppress(Exception):  # what is wrong with `value` is said when it is taken
            if _library(value) == "torch":
                stream = sys.modules["torch"].cuda.current_stream(value.device).cuda_stream
            elif hasattr(value, "__cuda_array_interface__"):
                stream = value.__cuda_array_interface__.get("stream")
        if not stream:
            return 0
    for name in ("cuda_stream", "ptr"):  # torch, CuPy
        if isinstance(getattr(stream, name, None), int):
            stream = getattr(stream, name)
    if hasattr(stream, "__cuda_stream__"):
        stream = stream.__cuda_stream__()[1]
    if isinstance(stream, bool) or (isinstance(stream, int) and stream < 0):
        raise ValueError(f"stream: expected a CUDA stream or its address, got {stream!r}")
    if isinstance(stream, int):
        return 0 if stream == 0 or simulated() else cuda.external_stream(stream)
    if not hasattr(stream, "synchronize"):
        raise ValueError(f"stream: expected a CUDA stream or its address, got {type(stream).__name__}")
    return stream


def _library(value: Any) -> str | None:
    """Of those that have streams and memory of their own: "torch" or "cupy", subclasses too."""
    modules = [kind.__module__.partition(".")[0] for kind in type(value).__mro__]
    return next((name for name in ("torch", "cupy") if name in modules), None)


def _like(value: Any, shape: tuple[int, ...], stream: Any) -> Any:
    """A new float32 array on the GPU, of the library that `value` comes from."""
    library = _library(value)
    if library == "torch":
        return value.new_empty(shape)
    if library == "cupy":
        return sys.modules["cupy"].empty(shape, np.float32)
    return require().device_array(shape, np.float32, stream=stream)


def _span(array: DeviceArray) -> tuple[int, int]:
    """Where an array begins and ends."""
    start = array._ary.ctypes.data if simulated() else int(array.device_ctypes_pointer.value or 0)
    return start, start + array.size * array.dtype.itemsize


def _apart(name: str, here: tuple[int, int], other: str, there: tuple[int, int]) -> None:
    """Refuse arrays that share memory."""
    if here[0] < there[1] and there[0] < here[1]:
        raise ValueError(f"{name}: overlaps {other}; give it memory of its own")


class CudaState:
    """A State on the GPU, for layers with `backend="cuda"`: made by their `init_state`, or by `state.to("cuda")`.

    S [B, N, F, V] and z [B, N, F] are float32 arrays on the device (`__cuda_array_interface__`, or `copy_to_host()`); z
    is to be read only (assign to it as a whole, which copies in). position is a NumPy copy. Besides `S` and `z`,
    everything here waits for the GPU. `check()` says whether a token was not finite.
    """

    __slots__ = (
        "_S", "_device", "_dtype", "_fingerprint", "_flags", "_kept", "_layer", "_lengths", "_origin", "_positions",
        "_spans", "_zs",
    )  # fmt: skip

    def __init__(self, layer: Layer, batch_size: int, dtype: Any = "float32") -> None:
        B = arrays.whole("batch_size", batch_size, 0)
        if state_dtype(dtype) != "float32":
            raise DtypeError(f"dtype: a state on the GPU is float32, got {state_dtype(dtype)}")
        cuda = require()
        from linattn_edge.kernels import cuda as kernels

        shape = check_layer(layer)
        self._layer, self._fingerprint, self._dtype = layer, layer.fingerprint, "float32"
        self._device = current_device()
        self._kept: list[Any] = []  # what the last call's arrays must have kept while the GPU is at it
        with guard():
            self._S = cuda.device_array((B, layer.N, layer.F, layer.V), np.float32)
            copies = (shape.blocks, B, layer.N, layer.F) if layer.normalize else (0, 0, 0, 0)
            self._zs = cuda.device_array(copies, np.float32)
            self._positions = cuda.device_array((layer.N * shape.blocks, B), np.int64)
            self._flags = cuda.to_device(np.zeros(kernels.FLAGS, np.int32))
            self._lengths = cuda.device_array(B, np.int64)  # for those that come from NumPy
            self._spans = tuple(_span(a) for a in (self._S, self._zs, self._positions, self._flags, self._lengths))
            self._origin = np.zeros(B, np.int64)  # as in State: where the streams began with nothing, or -1
            self.reset()

    @property
    def S(self) -> DeviceArray:
        """The matrix state [B, N, F, V], on the device. Assigning copies in."""
        return self._S

    @S.setter
    def S(self, value: Any) -> None:
        self._put(self._S, "S", "B, N, F, V", value)

    @property
    def z(self) -> DeviceArray | None:
        """The normaliser [B, N, F], on the device; None for a layer without one. Assigning copies in."""
        return self._zs[0] if self._layer.normalize else None

    @z.setter
    def z(self, value: Any) -> None:
        if not self._layer.normalize:
            raise StateMismatchError("z: this layer does not normalise, so its state has no z")
        for copy in range(self._zs.shape[0]):
            self._put(self._zs[copy], "z", "B, N, F", value)

    def _put(self, target: DeviceArray, name: str, symbols: str, value: Any) -> None:
        with guard():
            if is_device_array(value):
                source = device_array(name, value)
                arrays.check_shape(name, source, symbols, tuple(target.shape))
            else:
                source = np.empty(tuple(target.shape), np.float32)
                arrays.cast_into(source, name, symbols, value)
            self._wait()
            if source.size:
                target.copy_to_device(source)
                self._wait()
        self._origin[...] = -1

    @property
    def position(self) -> NDArray[np.int64]:
        """Tokens seen by each stream, int64 [B]: a copy. Assigning copies in."""
        with guard():
            self._wait()
            return np.array(self._positions.copy_to_host()[0])

    @position.setter
    def position(self, value: Any) -> None:
        host = State(self._layer, self.batch_size)
        host.position = value
        self._set_position(host.position)
        self._origin[...] = -1

    def _set_position(self, position: NDArray[np.int64]) -> None:
        copies = np.tile(position, (self._positions.shape[0], 1))
        if copies.size:
            with guard():
                self._wait()
                self._positions.copy_to_device(copies)
                self._wait()

    @property
    def log_decay(self) -> Array | None:
        """As on the CPU: known of a layer's constant decay alone, float64 [B, N, F]."""
        host = State(self._layer, self.batch_size)
        host.position = self.position
        host._origin[...] = self._origin
        return host.log_decay

    @property
    def batch_size(self) -> int:
        """B, the number of streams."""
        return int(self._S.shape[0])

    @property
    def dtype(self) -> "np.dtype[Any]":
        """The dtype of S."""
        return np.dtype(np.float32)

    @property
    def nbytes(self) -> int:
        """Bytes of S, z and position on the device."""
        return int(self._S.nbytes + self._zs.nbytes + self._positions.nbytes)

    def check(self) -> None:
        """Wait for the GPU, and raise if any token since `clear()` was not finite or beyond what φ takes, or a length
        out of range.

        NotFiniteError or ValueError; the state then holds what such a token left in it: go back to a copy, or `reset`.
        """
        from linattn_edge.kernels import cuda as kernels

        with guard():
            self._wait()
            flags = self._flags.copy_to_host()
        phi = self._layer.phi
        if flags[kernels.NOT_FINITE]:
            raise NotFiniteError("state: a token held NaN or inf; it stays in the state until it is reset")
        if flags[kernels.OUT_OF_RANGE]:
            raise ValueError(f"state: a query or key was beyond the range of {phi!r}")
        if flags[kernels.BEYOND]:
            raise ValueError(f"state: a stream has gone beyond max_len = {phi.horizon} of {phi.name}")
        if flags[kernels.LENGTH]:
            raise ValueError("state: a length was not from 0 to T; it was taken for the nearest of them")

    def clear(self) -> None:
        """Forget what `check` would report."""
        with guard():
            self._wait()
            self._flags.copy_to_device(np.zeros(self._flags.shape[0], np.int32))
            self._wait()

    def to(self, device: str) -> "State | CudaState":
        """The state on "cpu" (a new one) or "cuda" (itself).

        What `check` reports is raised here, as it is by `save` and pickle: a state on the CPU has no flags to keep it.
        """
        if device_name(device) == "cuda":
            return self
        self.check()
        state = State(self._layer, self.batch_size)
        with guard():
            self._wait()
            if state.S.size:
                state.S = self._S.copy_to_host()
                if state.z is not None:
                    state.z = self._zs.copy_to_host()[0]
        state.position = self.position
        state._origin[...] = self._origin
        return state

    @classmethod
    def of(cls, state: State) -> "CudaState":
        """A copy of a CPU state on the GPU."""
        if state._log_decay is not None or state._far_S is not None:
            raise StateMismatchError(
                "state: it counts its decays (track_decay) or is compensated, and a state on a GPU can do neither; "
                "State.from_arrays takes its S and z without"
            )
        other = cls(state._layer, state.batch_size, state._dtype)
        if state.S.size:
            other.S = state.S
            if state.z is not None:
                other.z = state.z
        other._set_position(state.position)
        other._origin[...] = state._origin
        return other

    def copy(self) -> "CudaState":
        """An independent copy."""
        other = CudaState(self._layer, self.batch_size)
        with guard():
            self._wait()
            for mine, theirs in self._pairs(other):
                if mine.size:
                    theirs.copy_to_device(mine)
            self._wait()
        other._origin[...] = self._origin
        return other

    def _pairs(self, other: "CudaState") -> tuple[tuple[Any, Any], ...]:
        return (
            (self._S, other._S),
            (self._zs, other._zs),
            (self._positions, other._positions),
            (self._flags, other._flags),
        )

    def __copy__(self) -> "CudaState":
        return self.copy()

    def __deepcopy__(self, memo: Any) -> "CudaState":
        return self.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        return CudaState.of, (self.to("cpu"),)

    def reset(self, rows: Any = None) -> None:
        """Put streams back to the beginning, in place: all of them, or the given rows (indices or a bool mask).

        All of them: also what `check` would report is forgotten.
        """
        B = self.batch_size
        index = np.arange(B) if rows is None else arrays.row_indices(rows, B)
        layer = self._layer
        position = np.zeros(B, np.int64) if rows is None else self.position
        position[index] = 0
        S, z = np.zeros((layer.N, layer.F, layer.V), np.float32), np.zeros((layer.N, layer.F), np.float32)
        with guard():
            self._wait()
            for row in np.unique(index):
                self._S[row].copy_to_device(S)
                for copy in range(self._zs.shape[0]):
                    self._zs[copy, row].copy_to_device(z)
                S, z = self._S[row], self._zs[0, row] if layer.normalize else z  # the others' from there: no bus
            self._set_position(position)
            if rows is None:
                self.clear()
        self._origin[index] = 0

    def select(self, rows: Any) -> "CudaState":
        """A new state of the given rows, in that order: beam reorder, fork (repeat a row), drop (leave one out)."""
        index = arrays.row_indices(rows, self.batch_size)
        other = CudaState(self._layer, index.size)
        with guard():
            self._wait()
            for to, row in enumerate(index):
                other._S[to].copy_to_device(self._S[row])
                for copy in range(self._zs.shape[0]):
                    other._zs[copy, to].copy_to_device(self._zs[copy, row])
            other._flags.copy_to_device(self._flags)
            self._wait()
        other._set_position(self.position[index])
        other._origin[...] = self._origin[index]
        return other

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file that the state on the CPU would write."""
        self.to("cpu").save(path)

    def _wait(self) -> None:
        """For all work on the GPU, whichever stream it is on."""
        self._is_here()
        require().synchronize()

    def _is_here(self) -> None:
        here = current_device()
        if self._device != here:
            raise DeviceError(f"state: lies on GPU {self._device}, the current one is {here}")

    def __repr__(self) -> str:
        la = self._layer
        return f"CudaState(B={self.batch_size}, N={la.N}, F={la.F}, V={la.V}, float32, {self.nbytes} bytes)"


def device_name(device: Any) -> str:
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device: expected 'cpu' or 'cuda', got {device!r}")
    return str(device)


def check_layer(layer: Layer) -> Any:
    """The shape of a layer's step on the GPU; refuses a layer that can't run there."""
    from linattn_edge.kernels.cuda import shape_of

    if not layer.phi.has_loop:
        raise DeviceError(f"feature_map: {layer.phi!r} has no loop, and the GPU can't call NumPy; give it one")
    shape = shape_of(layer, STEP, False)
    if shape is not None:
        return shape
    shared = layer.H // layer.N
    fit = next((r for r in range(shared - 1, 0, -1) if shape_of(layer, STEP, False, r)), 0)
    if fit:
        raise DeviceError(
            f"num_heads, num_kv_heads: {shared} query heads share a state head of F = {layer.F} features; in a GPU's "
            f"shared memory there is room for {fit}"
        )
    raise DeviceError(
        f"feature_map: {layer.phi!r} has F = {layer.F} features, more than fit into a GPU's shared memory"
    )


class Engine:
    """A layer on the GPU: its kernels, compiled when first needed, and φ's numbers."""

    def __init__(self, layer: Layer, check_finite: bool) -> None:
        cuda = require()
        check_layer(layer)
        self.layer, self.check_finite = layer, check_finite
        self._kernels: dict[tuple[Any, ...], Any] = {}
        self._launchers: dict[tuple[Any, ...], Any] = {}
        with guard():
            weights = np.ascontiguousarray(layer.weights.reshape(-1), np.float32)
            self._weights = cuda.to_device(weights if weights.size else np.zeros(1, np.float32))
            self._none = cuda.to_device(np.zeros(1, np.float32))
            self._no_lengths = cuda.to_device(np.zeros(1, np.int64))
            decay = None if layer.decay is None else np.ascontiguousarray(layer.decay.reshape(-1), np.float32)
            self._decay = None if decay is None else cuda.to_device(decay)
            cuda.synchronize()  # the first call may be on any stream

    def launch(
        self, mode: int, state: CudaState, given: dict[str, DeviceArray], lengths: Any, out: Any, T: int, stream: Any
    ) -> None:
        """One launch: nothing is allocated, nothing waits. Arrays are on the device and checked; B and T are not 0."""
        from linattn_edge.kernels import cuda as kernels

        layer, flat = self.layer, {name: a.reshape(a.size) for name, a in given.items()}
        width = 0
        if layer.decay is not None:
            flat["g"], width = self._decay, layer.decay.shape[1]
        elif "g" in given:
            g = given["g"]
            width = tuple(g.shape)[-1] if g.ndim > given["k"].ndim - 1 else 1
        key = mode, width, T > 1, lengths is not None
        if key not in self._kernels:
            self._kernels[key] = kernels.compiled(layer, mode, width, T > 1, lengths is not None, self.check_finite)
        kernel, shape = self._kernels[key]
        none = self._none
        size = state.batch_size * layer.N * shape.blocks, (shape.columns, shape.threads)
        S, z = state._S, state._zs if layer.normalize else none
        with guard():
            self._launcher(kernel, key, size, stream)(
                flat.get("q", none), flat.get("k", none), flat.get("v", none), flat.get("g", none),
                flat.get("beta", none), self._no_lengths if lengths is None else lengths,
                none if out is None else out.reshape(out.size), S.reshape(S.size), z.reshape(z.size),
                state._positions.reshape(state._positions.size), self._weights, state._flags, T,
            )  # fmt: skip

    def _launcher(self, kernel: Any, key: tuple[Any, ...], size: tuple[int, Any], stream: Any) -> Any:
        """A kernel with its grid, kept: making one costs time, and Numba warns that one stream is little work."""
        if simulated():
            return kernel[(*size, stream)]
        known = *key, size[0], int(stream)
        launcher = self._launchers.get(known)
        if launcher is None:
            if len(self._launchers) >= 256:
                self._launchers.clear()
            with _WARNINGS, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                launcher = kernel[(*size, stream)]
            self._launchers[known] = launcher
        return launcher


def run_host(
    engine: Engine, mode: int, state: CudaState, ready: dict[str, Array], lengths: Any, y: Array | None, stream: Any
) -> None:
    """Run checked NumPy sequences [B, T, ...]: copied to the device and back."""
    cuda = require()
    first = next(iter(ready.values()))
    B, T = first.shape[:2]
    if B * T == 0:
        if y is not None:
            y[...] = 0
        return
    state._is_here()
    where = stream_of(stream, None)
    with guard():
        given = {name: cuda.to_device(np.ascontiguousarray(a), stream=where) for name, a in ready.items()}
        counts = None if lengths is None else cuda.to_device(lengths, stream=where)
        out = None if y is None else cuda.device_array(y.shape, np.float32, stream=where)
        engine.launch(mode, state, given, counts, out, T, where)
        result = None if out is None else out.copy_to_host(stream=where)
        if where:
            where.synchronize()  # before it is read: on a stream a copy may come back before it is done
        if y is not None:
            y[...] = result


def run(
    attn: "LinearAttention", engine: Engine, mode: int, axes: int, given: dict[str, Any], state: CudaState, g: Any,
    beta: Any, lengths: Any, out: Any, stream: Any,
) -> Any:  # fmt: skip
    """Run on arrays that lie on the device; the result stays there. Everything is checked before the launch."""
    layer, B = attn.layer, state.batch_size
    state._is_here()
    first = next(iter(given.values()))
    where = stream_of(stream, first)
    held: list[Any] = []
    take = functools.partial(device_array, stream=_address(where), held=held)
    shapes = {"q": ("H, K", layer.H, layer.K), "k": ("Hk, K", layer.HK, layer.K), "v": ("Hv, V", layer.N, layer.V)}
    checked, lead, sizes, T = arrays.token_arrays(given, shapes, axes, B, take)
    if mode != READ:
        attn._check_gates(checked, g, beta, lead, sizes, take)
    counts = host = None
    if lengths is not None:
        name = counts_name(mode, axes)
        if is_device_array(lengths):
            counts = take(name, lengths, ("bool",) if name == "active" else ("int64", "int32"))
            arrays.check_shape(name, counts, "B", (B,))
        else:
            host = arrays.lengths_array(lengths, B, T)
    inputs = [(name, _span(a)) for name, a in checked.items()]
    if counts is not None:
        inputs.append((name, _span(counts)))
    states = [("the state", span) for span in state._spans]
    if mode != READ:  # blocks of threads read them while others write the state
        for name, here in inputs:
            for other, there in states:
                _apart(name, here, other, there)
    y = target = None
    if mode != WRITE:
        shape = (*sizes, layer.outputs, layer.V)
        with guard():
            y = _like(first, shape, where) if out is None else out
        target = take("out", y, writable=True)
        arrays.check_shape("out", target, f"{lead}, heads, V", shape)
        if out is not None:
            for other, there in (*inputs, *states):
                _apart("out", _span(target), other, there)
    if B * T:
        if host is not None:
            counts = state._lengths
            with guard():
                counts.copy_to_device(host, stream=where)
                if where:
                    where.synchronize()  # `host` goes; a capture ends here, since a replay would copy from it
        state._kept = held
        engine.launch(mode, state, checked, counts, target, T, where)
    return y


def counts_name(mode: int, axes: int) -> str:
    """What the caller knows `lengths` as: a step has `active`."""
    return "active" if mode == STEP and axes == 3 else "lengths"


def warmup(attn: "LinearAttention") -> None:
    """Compile the step, prefill, write and read of a layer, with g for each head and without lengths: run them on
    zeros. Other kinds of call compile when they are first made."""
    layer, state = attn.layer, attn.init_state(1)
    widths: dict[str, tuple[int, ...]] = {"q": (layer.H, layer.K), "k": (layer.HK, layer.K), "v": (layer.N, layer.V)}
    for T in (1, 2):
        if (layer.phi.horizon or T) < T:
            continue
        q, k, v = (np.zeros((1, T, *width), np.float32) for width in widths.values())
        gate = np.zeros((1, T, layer.N), np.float32)
        g = gate if layer.rule.decay and layer.decay is None else None
        beta = gate if layer.rule.beta else None
        attn.prefill(q, k, v, state, g, beta)
        state.reset()  # a horizon may be near
        attn.write(k, v, state, g, beta)
        attn.read(q, state)
        state.reset()
