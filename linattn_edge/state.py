"""State: what is left of all tokens so far. S, z and positions of B streams, in one block of memory."""

import contextlib
import json
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from linattn_edge import arrays
from linattn_edge.errors import DtypeError, NotFiniteError, StateMismatchError
from linattn_edge.features import Identity
from linattn_edge.kernels import layout
from linattn_edge.layer import Layer
from linattn_edge.rules import LOOPS

if TYPE_CHECKING:
    from linattn_edge.attention import LinearAttention

Array = NDArray[Any]

_ALIGN = 64
_DTYPES = ("float32", "float64", *layout.HALVES)
LAST_POSITION = 2**62  # leaves room to count on


def aligned(nbytes: int) -> int:
    """So many bytes, rounded up to whole cache lines."""
    return -(-nbytes // _ALIGN) * _ALIGN


def aligned_bytes(nbytes: int) -> NDArray[np.uint8]:
    """Zeros that begin with a cache line."""
    raw = np.zeros(nbytes + _ALIGN, np.uint8)
    start = -raw.ctypes.data % _ALIGN
    return raw[start : start + nbytes]


def state_dtype(dtype: Any) -> str:
    """The name of a state dtype, from a name, a NumPy type or a dtype."""
    try:
        name = "None" if dtype is None else str(dtype) if dtype in _DTYPES else np.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in _DTYPES:
        raise DtypeError(f"dtype: a state is one of {', '.join(_DTYPES)}; got {dtype!r}")
    return name


def compute_dtype(dtype: str) -> str:
    """What a state of that dtype is computed in; z is kept in it."""
    return "float32" if dtype in layout.HALVES else dtype


def _stored(dtype: str, layer: Layer) -> "np.dtype[Any]":
    """The NumPy dtype of S, refused where half precision would be wrong or is not there."""
    if dtype not in layout.HALVES:
        return np.dtype(dtype)
    if not (layer.rule.decay or layer.rule.beta):
        raise DtypeError(
            f"dtype: {layer.rule.name!r} never forgets, and a {dtype} sum stops growing: outputs were 44 % wrong after "
            "1e4 tokens in float16, 37 % after 1e3 in bfloat16; use float32, or a gated or delta rule"
        )
    if dtype == "float16":
        return np.dtype(np.float16)
    try:
        import ml_dtypes
    except ImportError:
        raise DtypeError("dtype: bfloat16 needs the package ml_dtypes: pip install ml_dtypes") from None
    return np.dtype(ml_dtypes.bfloat16)


class State:
    """The state of a layer for `batch_size` streams: made by `LinearAttention.init_state`, changed by its methods.

    S [B, N, F, V] and z [B, N, F] are float32 (or float64; S float16 or bfloat16) views that can be written to;
    position int64 [B] counts the tokens seen. One thread at a time may use a state; different states at once.
    """

    __slots__ = (
        "_S",
        "_block",
        "_bytes",
        "_dtype",
        "_far_S",
        "_far_z",
        "_fingerprint",
        "_kind",
        "_layer",
        "_log_decay",
        "_origin",
        "_position",
        "_z",
    )

    _streams = np.zeros(0, np.int64)  # all are in one block: see `kernels/layout.py`, and streams.py for others

    def __init__(
        self,
        layer: Layer,
        batch_size: int,
        dtype: Any = "float32",
        track_decay: bool = False,
        compensated: bool = False,
    ) -> None:
        B = arrays.whole("batch_size", batch_size, 0)
        self._layer = layer
        self._fingerprint = sys.intern(layer.fingerprint)  # compared by identity, also after unpickling
        self._dtype = state_dtype(dtype)
        self._kind = layout.LONG if compensated else self._dtype
        kept = _stored(self._dtype, layer)
        if arrays.flag("compensated", compensated) and (layer.rule.decay or layer.rule.beta):
            raise ValueError(
                f"compensated: {layer.rule.name!r} forgets, so its sums stay short; only 'linear' needs it"
            )
        if compensated and self._dtype != "float32":
            raise DtypeError(f"compensated: a float32 state in two parts; got {self._dtype}")
        real = np.dtype(compute_dtype(self._dtype))
        H, N, V, F, VP = layer.H, layer.N, layer.V, layer.F, layout.padded(layer.V)
        K = layer.K if layer.phi.has_loop else F  # without a loop, kernels get φ's results and take them as they are
        positions = layout.HEADER * 8
        s = positions + aligned(B * 8)
        z = s + aligned(B * N * F * VP * kept.itemsize)
        step, prefill = (layout.packing(many, H, N, K, F, VP, real.itemsize) for many in (False, True))
        far_s = z + (aligned(B * N * F * real.itemsize) if layer.normalize else 0)
        far_z = far_s + (z - s if compensated else 0)
        work = far_z + (far_s - z if compensated else 0)
        end = work + aligned(step.work)
        self._block = aligned_bytes(end)
        header = self._block[:positions].view(np.int64)
        header[[layout.B, layout.H, layout.HK, layout.N]] = B, H, layer.HK, N
        header[[layout.K, layout.V, layout.F, layout.VP]] = K, V, F, VP
        header[layout.RULE] = LOOPS.index(layer.rule.loop)
        header[layout.PLAIN] = type(layer.phi) is Identity or not layer.phi.has_loop
        header[layout.NORMALIZE], header[layout.QK_NORM] = layer.normalize, layer.qk_norm and layer.phi.has_loop
        header[layout.EPS_ADD] = layer.eps_mode == "add"
        header[layout.CONSTANT_DECAY] = layer.decay is not None
        header[layout.TAKES_DECAY], header[layout.TAKES_BETA] = layer.rule.decay, layer.rule.beta
        header[[layout.STEP_GROUP, layout.STEP_WORK]] = step.group, step.work
        header[[layout.PREFILL_GROUP, layout.PREFILL_PIECE, layout.PREFILL_WORK]] = prefill
        header[[layout.AT_POSITION, layout.AT_S, layout.AT_Z, layout.AT_WORK, layout.END]] = positions, s, z, work, end
        header[[layout.AT_FAR_S, layout.AT_FAR_Z]] = (far_s, far_z) if compensated else 0
        header[[layout.SCALE, layout.EPS]] = np.array([layer.scale, layer.eps]).view(np.int64)
        self._position = self._block[positions : positions + B * 8].view(np.int64)
        self._bytes = B * N * F * VP * kept.itemsize

        def matrix(at: int) -> Array:
            return self._block[at:][: B * N * F * VP * kept.itemsize].view(kept).reshape(B, N, F, VP)[..., :V]

        def vector(at: int) -> Array | None:
            shape = (B, N, F)
            return self._block[at:][: B * N * F * real.itemsize].view(real).reshape(shape) if layer.normalize else None

        self._S, self._z = matrix(s), vector(z)
        self._far_S: Array | None = matrix(far_s) if compensated else None  # S and z add to these
        self._far_z: Array | None = vector(far_z) if compensated else None
        self._origin = np.zeros(B, np.int64)  # where each stream was zero; -1 where nobody knows
        tracked = arrays.flag("track_decay", track_decay) and layer.decay is None
        self._log_decay = np.zeros((B, N, F)) if tracked else None

    @property
    def S(self) -> Array:
        """The matrix state [B, N, F, V]: a writable view (of a compensated state, a copy). Assigning copies in."""
        return self._S if self._far_S is None else _sum(self._far_S, self._S)

    @S.setter
    def S(self, value: ArrayLike) -> None:
        _assign(self._S, self._far_S, "S", "B, N, F, V", value)
        self._origin[...] = -1

    @property
    def z(self) -> Array | None:
        """The normaliser [B, N, F], a writable view (of a compensated state, a copy); None for a layer without one.
        Assigning copies in."""
        return self._z if self._far_z is None or self._z is None else _sum(self._far_z, self._z)

    @z.setter
    def z(self, value: ArrayLike) -> None:
        if self._z is None:
            raise StateMismatchError("z: this layer does not normalise, so its state has no z")
        _assign(self._z, self._far_z, "z", "B, N, F", value)
        self._origin[...] = -1

    @property
    def log_decay(self) -> NDArray[np.float64] | None:
        """What all decays since the start have done to the state together, float64 [B, N, F]: the sum of g. None where
        it is not known: it is counted from `init_state(track_decay=True)` on, and always known of a constant decay."""
        if self._layer.decay is None or (self._origin < 0).any():
            return None if self._log_decay is None else self._log_decay.copy()
        count = (self._position - self._origin)[:, None, None]
        decay = np.where(count > 0, self._layer.decay, 0.0) * count
        return np.broadcast_to(decay, (self.batch_size, self._layer.N, self._layer.F)).copy()

    def _negate(self) -> None:
        """S and z change sign."""
        for part in self._parts():
            np.negative(part, out=part)

    def _parts(self) -> list[Array]:
        """All that a stream's past is kept in, [B, ...]."""
        return [part for part in (self._S, self._z, self._far_S, self._far_z) if part is not None]

    def _exact(self) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
        """S and z in float64, with all that a compensated state knows."""
        S, z = self._S.astype(np.float64), None if self._z is None else self._z.astype(np.float64)
        if self._far_S is not None:
            S += self._far_S
        if z is not None and self._far_z is not None:
            z += self._far_z
        return S, z

    def _wrote(self, given: dict[str, Array], lengths: NDArray[np.int64] | None) -> None:
        """Count the decays g [B, T, N, 1 or F] of tokens that have been written."""
        if self._log_decay is None or "g" not in given:
            return
        g = given["g"].astype(np.float64)
        if lengths is not None:
            g = np.where((np.arange(g.shape[1]) < lengths[:, None])[..., None, None], g, 0.0)
        with np.errstate(invalid="ignore"):
            self._log_decay += g.sum(axis=1)

    @property
    def position(self) -> NDArray[np.int64]:
        """Tokens seen by each stream, int64 [B]: a writable view. Assigning copies in."""
        return self._position

    @position.setter
    def position(self, value: ArrayLike) -> None:
        array = arrays.to_array("position", value)
        if array.size and array.dtype.kind not in "iu":
            raise DtypeError(f"position: expected integers, got {array.dtype}")
        if array.ndim:
            arrays.check_shape("position", array, "B", self._position.shape)
        if array.size and (array.min() < 0 or array.max() > LAST_POSITION):
            raise ValueError(f"position: expected 0 to {LAST_POSITION}, got {array.min()} to {array.max()}")
        self._position[...] = array
        self._origin[...] = -1

    @property
    def batch_size(self) -> int:
        """B, the number of streams."""
        return self._position.size

    @property
    def dtype(self) -> "np.dtype[Any]":
        """The dtype of S."""
        return self._S.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of S, z and position: what a stream costs, at any position."""
        return sum(part.nbytes for part in self._parts()) + self._position.nbytes

    def copy(self) -> "State":
        """An independent copy."""
        other = self._empty(self.batch_size)
        other._become(self)
        return other

    def _become(self, other: "State") -> None:
        """Take over the numbers of a state of the same layer, size and dtype."""
        self._block[:] = other._block
        self._origin[...] = other._origin
        if self._log_decay is not None:
            assert other._log_decay is not None
            self._log_decay[...] = other._log_decay

    def __copy__(self) -> "State":
        return self.copy()

    def __deepcopy__(self, memo: Any) -> "State":
        return self.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        log_decay = None if self._log_decay is None else self._log_decay.copy()
        parts = [part.copy() for part in self._parts()]
        rest = self._position.copy(), self._origin.copy(), log_decay, self._far_S is not None
        return _restore, (self._layer, self._dtype, parts, *rest)

    def reset(self, rows: Any = None) -> None:
        """Put streams back to the beginning, in place: all of them, or the given rows (indices or a bool mask)."""
        index = slice(None) if rows is None else arrays.row_indices(rows, self.batch_size)
        for part in self._parts():
            part[index] = 0
        self._position[index] = 0
        self._origin[index] = 0
        if self._log_decay is not None:
            self._log_decay[index] = 0

    def select(self, rows: Any) -> "State":
        """A new state of the given rows, in that order: beam reorder, fork (repeat a row), drop (leave one out)."""
        index = arrays.row_indices(rows, self.batch_size)
        other = self._empty(index.size)
        for target, source in zip(other._parts(), self._parts(), strict=True):
            target[...] = source[index]
        other._position[...] = self._position[index]
        other._origin[...] = self._origin[index]
        if other._log_decay is not None and self._log_decay is not None:
            other._log_decay[...] = self._log_decay[index]
        return other

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write S, z, position and the layer's configuration to a safetensors file, atomically."""
        S = self._S.astype(np.float32) if self._dtype == "bfloat16" else self._S  # exact; few readers know bfloat16
        tensors = {"S": S, "position": self._position}
        if self._z is not None:
            tensors["z"] = self._z
        tensors |= {
            f"{name}_total": part for name, part in (("S", self._far_S), ("z", self._far_z)) if part is not None
        }
        if self._log_decay is not None:
            tensors["log_decay"] = self._log_decay
        tensors |= {f"layer.{name}": array for name, array in self._layer.arrays().items()}
        write_file(path, tensors, self._layer.metadata() | {"dtype": self._dtype, "origin": str(self._origin.tolist())})

    @classmethod
    def load(cls, path: str | os.PathLike[str], attn: "LinearAttention") -> "State":
        """Read a state that `attn`, or a layer of the same configuration, saved.

        Raises StateMismatchError where the configurations differ or the file is not what it says.
        """
        layer = layer_of(attn)
        tensors, metadata = read_file(path, lambda metadata: layer.check_metadata(metadata, path))
        dtype = metadata.get("dtype")
        if dtype not in _DTYPES:
            raise StateMismatchError(f"{path}: expected a dtype of {', '.join(_DTYPES)} in its metadata, got {dtype!r}")
        names = {"S", "position", *(("z",) if layer.normalize else ()), *(f"layer.{n}" for n in layer.arrays())}
        tracked = "log_decay" in tensors and layer.decay is None
        if tracked:
            names.add("log_decay")
        compensated = "S_total" in tensors
        if compensated:
            names |= {f"{name}_total" for name in names & {"S", "z"}}
        if set(tensors) != names:
            raise StateMismatchError(f"{path}: expected tensors {sorted(names)}, got {sorted(tensors)}")
        S, position = tensors["S"], tensors["position"]
        if position.ndim != 1 or position.dtype != np.int64 or (position < 0).any() or (position > LAST_POSITION).any():
            raise StateMismatchError(
                f"{path}: position: expected int64 [B] of at least 0, got {position.dtype} {list(position.shape)}"
            )
        B = position.size
        expected: dict[str, tuple[int, ...]] = dict.fromkeys(("z", "z_total", "log_decay"), (B, layer.N, layer.F))
        expected |= dict.fromkeys(("S", "S_total"), (B, layer.N, layer.F, layer.V))
        for name in expected.keys() & tensors.keys():
            array = tensors[name]
            kind = "float16" if (name, dtype) == ("S", "float16") else compute_dtype(dtype)
            kind = "float64" if name == "log_decay" else kind
            if array.shape != expected[name] or array.dtype != kind:
                raise StateMismatchError(
                    f"{path}: {name}: expected {kind} {list(expected[name])}, got {array.dtype} {list(array.shape)}"
                )
            bad = np.isnan(array) | (array == np.inf) if name == "log_decay" else ~np.isfinite(array)
            if attn.check_finite and bad.any():
                raise NotFiniteError(f"{path}: {name} holds NaN or inf")
        state = State(layer, B, dtype, tracked, compensated)
        state._S[...], state._position[...] = S, position
        for part, name in ((state._z, "z"), (state._far_S, "S_total"), (state._far_z, "z_total")):
            if part is not None:
                part[...] = tensors[name]
        if state._log_decay is not None:
            state._log_decay[...] = tensors["log_decay"]
        state._origin[...] = _origins(metadata.get("origin"), position)
        return state._for(attn)

    @classmethod
    def from_arrays(
        cls,
        attn: "LinearAttention",
        S: ArrayLike,
        z: ArrayLike | None = None,
        position: ArrayLike = 0,
        dtype: Any = "float32",
    ) -> "State":
        """A state made elsewhere (fla, Hugging Face): S [B, N, F, V], z [B, N, F] where the layer normalises.

        The arrays are copied; position is one number or [B].
        """
        layer = layer_of(attn)
        array = arrays.real_array("S", S)
        arrays.check_shape("S", array, "B, N, F, V", (None, layer.N, layer.F, layer.V))
        if layer.normalize and z is None:
            raise StateMismatchError("z: this layer normalises, so its state needs z [B, N, F]")
        state = State(layer, array.shape[0], dtype)
        state.S = array
        if z is not None:
            state.z = arrays.real_array("z", z)
        state.position = arrays.to_array("position", position)
        for name, given in (("S", state.S), ("z", state.z)):
            if attn.check_finite and given is not None and not np.isfinite(given).all():
                raise NotFiniteError(f"{name} holds NaN or inf; check_finite=False would allow it")
        return state._for(attn)

    def to(self, device: str) -> "State":
        """The state on "cuda" (a new one, for layers with that backend) or "cpu" (itself)."""
        if device == "cpu":
            return self
        from linattn_edge import gpu

        gpu.device_name(device)
        return cast(State, gpu.CudaState.of(self))

    def check(self) -> None:
        """Nothing, on the CPU: what is not finite has been refused. On the GPU it is found out here."""

    def clear(self) -> None:
        """Nothing, on the CPU: there `check` has nothing to forget."""

    def _for(self, attn: "LinearAttention") -> "State":
        return self.to("cuda" if attn.backend == "cuda" else "cpu")

    def _empty(self, batch_size: int) -> "State":
        return State(self._layer, batch_size, self._dtype, self._log_decay is not None, self._far_S is not None)

    def __repr__(self) -> str:
        la = self._layer
        return f"State(B={self.batch_size}, N={la.N}, F={la.F}, V={la.V}, {self._dtype}, {self.nbytes} bytes)"


def _sum(total: Array, rest: Array) -> Array:
    """What two parts are together: a copy, which can't be written to, since the state would not know of it."""
    both = total + rest
    both.flags.writeable = False
    return both


def _assign(part: Array, total: Array | None, name: str, symbols: str, value: Any) -> None:
    """Copy `value` in; where there is a total, it takes what float32 holds of it, and `part` the rest."""
    if total is None:
        arrays.cast_into(part, name, symbols, value)
        return
    arrays.cast_into(total, name, symbols, value)
    with np.errstate(invalid="ignore"):
        part[...] = arrays.real_array(name, value).astype(np.float64) - total


def _restore(
    layer: Layer,
    dtype: str,
    parts: list[Array],
    position: NDArray[np.int64],
    origin: NDArray[np.int64],
    log_decay: Array | None,
    compensated: bool,
) -> State:
    state = State(layer, position.size, dtype, log_decay is not None, compensated)
    for target, source in zip(state._parts(), parts, strict=True):
        target[...] = source
    state._position[...] = position
    if state._log_decay is not None:
        state._log_decay[...] = log_decay
    state._origin[...] = origin
    return state


def _origins(text: str | None, position: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where the streams of a file were zero, as its metadata says; -1, for not known, where that makes no sense."""
    try:
        origin = np.array(json.loads(text or ""), np.int64)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return np.full(position.shape, -1)
    good = origin.shape == position.shape and (origin <= position).all()
    return origin if good else np.full(position.shape, -1)


def on_cpu(name: str, state: Any) -> None:
    """Refuse a state that lies on a GPU."""
    if type(state).__name__ == "CudaState":  # a class that nobody loads who has no GPU
        raise StateMismatchError(f'{name}: lies on the GPU; use state.to("cpu")')


def layer_of(attn: Any) -> Layer:
    """The configuration of a LinearAttention, and of nothing else."""
    layer = getattr(attn, "layer", None)
    if not isinstance(layer, Layer):
        raise DtypeError(f"attn: expected a LinearAttention, got {type(attn).__name__}")
    return layer


def _flush_folder(folder: Path) -> None:
    """Have a folder's names on the disk too, where the system can do that."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary name to write to, renamed to `path` at the end: a crash or an error leaves the old file whole."""
    target = Path(os.path.realpath(path))  # a link stays one
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {target.parent}")
    if target.exists() and not target.is_file():
        raise OSError(f"{path}: not a regular file, and not to be replaced by one")
    if not os.access(target.parent, os.W_OK):
        raise PermissionError(f"{path}: the folder {target.parent} can't be written to")
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        if target.exists():
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))
        os.replace(temporary, target)
        _flush_folder(target.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, str(temporary)):
            error.filename, error.filename2 = str(path), None  # the caller's name, not the temporary one
        raise


def write_file(path: str | os.PathLike[str], tensors: dict[str, Array], metadata: dict[str, str]) -> None:
    """Write a safetensors file, atomically."""
    from safetensors.numpy import save

    data = save({name: np.ascontiguousarray(a) for name, a in tensors.items()}, metadata)
    with replacing(path) as temporary, open(temporary, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read_file(
    path: str | os.PathLike[str], check: Callable[[dict[str, str] | None], Any]
) -> tuple[dict[str, Array], dict[str, str]]:
    """Tensors and metadata of a safetensors file, seen by `check` first; StateMismatchError otherwise."""
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: {'not a regular file' if Path(path).exists() else 'no such file'}")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata()
            check(metadata)
            return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118
    except (SafetensorError, TypeError) as error:  # TypeError: a dtype that NumPy does not know
        raise StateMismatchError(f"{path}: not a readable safetensors file ({error})") from None
