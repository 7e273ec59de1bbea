"""LinearAttention: configuration, checks and dispatch of one attention layer."""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from linattn_edge import arrays, reference
from linattn_edge.arrays import flag, whole
from linattn_edge.errors import DeviceError, DtypeError, ShapeError, StateMismatchError
from linattn_edge.features import MAPS, FeatureMap, restore
from linattn_edge.kernels import layout
from linattn_edge.kernels.layout import OK, READ, STEP, WORTH_SHARING, WRITE
from linattn_edge.layer import Layer, make_layer, read_metadata
from linattn_edge.softmax import SoftmaxAttention
from linattn_edge.state import State, compute_dtype, read_file, state_dtype, write_file

if TYPE_CHECKING:
    from linattn_edge.gpu import Engine

Array = NDArray[Any]

BACKENDS = ("reference", "cpu", "cuda")
MOST_THREADS = 256


class LinearAttention:
    """Causal linear attention, token by token, in constant memory.

    Args:
        num_heads: H, query heads.
        key_dim: K, width of a query/key head.
        value_dim: V, width of a value head; K by default.
        num_kv_heads: GQA: N key/value heads, each shared by H/N query heads. q [.., H, K], k and v with N heads.
        num_value_heads: GVA: N value heads, N/H of them on each key head. q and k with H heads, v with N.
        feature_map: φ, a name or a FeatureMap (`features.py`).
        update_rule: "linear", "gated", "delta" or "gated_delta" (`rules.py`).
        normalize: divide by φ(q)ᵀz. Default: True for "linear" with a positive map, else False.
        scale: multiplies the output. Default: 1 when normalised, K ** -0.5 otherwise.
        qk_norm: L2-normalise q and k before φ: x / sqrt(Σx² + 1e-6).
        decay: constant log decay [N] or [N, F] for the gated rules, instead of g (see `retnet_decay`).
        eps, eps_mode: "clamp" keeps |denominator| ≥ eps with its sign; "add" gives num / (den + eps).
        check_finite: refuse NaN and inf in q, k, v, g and beta (g = -inf, a hard reset, is legal).
        backend: "cpu" (compiled), "cuda" (the same on an NVIDIA GPU: docs/cuda.md) or "reference" (float64 NumPy).
        num_threads: threads that share a call's heads and streams, where it is large enough; no result depends on it.

    Shapes: a step takes [B, heads, width], a sequence [B, T, heads, width]; g [B, (T,) N] per head or [B, (T,) N,
    F] per channel, natural log, ≤ 0; beta [B, (T,) N]. y has max(H, N) heads and q's dtype. Everything is computed
    in the state's dtype, float32 unless asked otherwise.

    Errors are ValueError and TypeError, raised before the state is touched.
    """

    def __init__(
        self,
        num_heads: int,
        key_dim: int,
        value_dim: int | None = None,
        num_kv_heads: int | None = None,
        num_value_heads: int | None = None,
        feature_map: str | FeatureMap = "elu",
        update_rule: str = "linear",
        normalize: bool | None = None,
        scale: float | None = None,
        qk_norm: bool = False,
        decay: ArrayLike | None = None,
        eps: float = 1e-30,
        eps_mode: str = "clamp",
        check_finite: bool = True,
        backend: str = "cpu",
        num_threads: int = 1,
    ) -> None:
        self.layer: Layer = make_layer(
            num_heads,
            key_dim,
            value_dim,
            num_kv_heads=num_kv_heads,
            num_value_heads=num_value_heads,
            feature_map_=feature_map,
            update_rule=update_rule,
            normalize=normalize,
            scale=scale,
            qk_norm=qk_norm,
            decay=decay,
            eps=eps,
            eps_mode=eps_mode,
        )
        if backend not in BACKENDS:
            raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}; got {backend!r}")
        if backend == "cuda":
            from linattn_edge import gpu

            gpu.require()
            gpu.check_layer(self.layer)
        self.backend = backend
        self._check_finite = flag("check_finite", check_finite)
        self.num_threads = whole("num_threads", num_threads, 1, MOST_THREADS)
        # what a step needs at hand
        self._fingerprint = self.layer.fingerprint
        self._has_loop = self.layer.phi.has_loop
        self._outputs, self._V = self.layer.outputs, self.layer.V
        self._entries: dict[
            str, tuple[Any, ...]
        ] = {}  # by state dtype: the compiled step and what it gets for absent inputs

    @property
    def check_finite(self) -> bool:
        """Whether NaN and inf are refused: fixed when the layer is made."""
        return self._check_finite

    def init_state(
        self,
        batch_size: int = 1,
        dtype: DTypeLike = "float32",
        track_decay: bool = False,
        position: ArrayLike = 0,
        compensated: bool = False,
    ) -> State:
        """A fresh state for `batch_size` streams.

        dtype: "float32", "float64", or, for the rules that forget (gated, delta, gated_delta), "float16" or "bfloat16":
        half the memory traffic, float32 arithmetic, S rounded after each step (in a prefill, after a piece of it).
        track_decay: count what the decays do together (`state.log_decay`), which `merge` needs of the later part of a
        "gated" stream; a step then costs some µs more.
        position: of the first token, a number or [B]: where this is the later part of a stream.
        compensated: for "linear" in float32: S and z in two parts each, so that sums over hundreds of millions of
        tokens are as precise as the tokens. Twice the memory, a step up to 1.6 times the time; needed from some 1e5
        tokens on.
        """
        if self.backend == "cuda":
            from linattn_edge.gpu import CudaState

            if track_decay or compensated:
                raise ValueError("track_decay, compensated: states on a GPU have neither; use backend='cpu'")
            on_gpu = cast(State, CudaState(self.layer, batch_size, dtype))  # it has the same surface
            if not (type(position) is int and position == 0):
                on_gpu.position = position
                on_gpu._origin[...] = on_gpu.position
            return on_gpu
        state = State(self.layer, batch_size, dtype, track_decay, compensated)
        state.position = position
        state._origin[...] = state._position
        return state

    def step(
        self,
        q: ArrayLike,
        k: ArrayLike,
        v: ArrayLike,
        state: State,
        g: ArrayLike | None = None,
        beta: ArrayLike | None = None,
        active: ArrayLike | None = None,
        out: Array | None = None,
        stream: Any = None,
    ) -> Array:
        """One token of each stream: write it to the state, in place, and read it back.

        Returns y [B, heads, V], which is `out` when given; then nothing is allocated. Streams whose `active` (bool
        [B]) is False are left as they are, and their output is 0. `stream`: for `backend="cuda"`, the CUDA stream to
        work on.
        """
        y = self._quick_step(q, k, v, state, g, beta, active, out) if stream is None else None
        if y is None:
            self._check_state(state)
            if active is not None and not (self.backend == "cuda" and _on_gpu(active)):
                active = arrays.active_array(active, state.batch_size)
            y = self._run(STEP, 3, q, k, v, state, g, beta, active, out, stream)
            assert y is not None
        return y

    def prefill(
        self,
        q: ArrayLike,
        k: ArrayLike,
        v: ArrayLike,
        state: State,
        g: ArrayLike | None = None,
        beta: ArrayLike | None = None,
        lengths: ArrayLike | None = None,
        out: Array | None = None,
        stream: Any = None,
    ) -> Array:
        """Many tokens, [B, T, heads, width]: the same as T steps. The state is updated in place.

        `lengths` (integers [B]) says how many of the T tokens of each stream are real; the rest is padding on the
        right, which is not looked at, changes nothing and gives 0.
        """
        self._check_state(state)
        y = self._run(STEP, 4, q, k, v, state, g, beta, lengths, out, stream)
        assert y is not None
        return y

    def write(
        self,
        k: ArrayLike,
        v: ArrayLike,
        state: State,
        g: ArrayLike | None = None,
        beta: ArrayLike | None = None,
        lengths: ArrayLike | None = None,
        stream: Any = None,
    ) -> None:
        """The first half of a step or a prefill: fold tokens into the state, in place; no query is needed."""
        k = _take(self.backend, "k", k)
        self._check_state(state)
        self._run(WRITE, 3 if k.ndim == 3 else 4, None, k, v, state, g, beta, lengths, None, stream)

    def read(self, q: ArrayLike, state: State, out: Array | None = None, stream: Any = None) -> Array:
        """The second half: what the state answers to q. The state is left as it is; a sequence reads it T times."""
        q = _take(self.backend, "q", q)
        self._check_state(state)
        y = self._run(READ, 3 if q.ndim == 3 else 4, q, None, None, state, None, None, None, out, stream)
        assert y is not None
        return y

    def remove(self, k: ArrayLike, v: ArrayLike, state: State, position: ArrayLike | None = None) -> None:
        """Take tokens out of the state again, in place: S ← S − φ(k)vᵀ and z ← z − φ(k), for "linear" alone.

        With a `write` or `step` for each new token this is a window of the last w tokens. k and v as they were written,
        a step or a sequence. The count of tokens seen, `state.position`, stays. position: of the token, or the first
        of the sequence, a number or [B]; needed where φ reads positions. What rounding has left in S and z stays
        there: a float32 window over 1e5 tokens is right to 1e-5 of the largest it has held, a float64 one to 1e-14.

        ValueError for the other rules: a decay or a later delta write has changed what a token left behind.
        """
        if self.backend == "cuda":
            raise ValueError(
                "remove: the backend 'cuda' has none; use a layer with backend='cpu' and state.to(\"cpu\")"
            )
        self._check_state(state)
        name, phi = self.layer.rule.name, self.layer.phi
        if name != "linear":
            raise ValueError(
                f"remove: the rule {name!r} changes what older tokens left in the state, so none can be taken out; "
                "only 'linear' keeps a plain sum"
            )
        if phi.horizon is not None and position is None:
            raise ValueError(f"position: φ of {phi.name!r} depends on it, so say where the token to remove was written")
        seen, origin = state.position.copy(), state._origin.copy()
        state._negate()  # −(−S + φ(k)vᵀ), to the bit S − φ(k)vᵀ
        try:
            if position is not None:
                state.position = position
            self.write(k, v, state)
        finally:
            state._negate()
            state._position[...], state._origin[...] = seen, origin

    def _quick_step(
        self, q: Any, k: Any, v: Any, state: State, g: Any, beta: Any, active: Any, out: Array | None
    ) -> Array | None:
        """The step where the inputs are as the compiled entry takes them; None, with nothing changed, where not."""
        try:
            if active is not None or state._fingerprint is not self._fingerprint or not self._has_loop:
                return None
            if state._log_decay is not None:
                return None
            entry, plan, no_g, no_beta, _kept = self._entries[state._kind]  # the plan points to what is kept
            control = self._helpers() if self.num_threads > 1 and state._bytes >= WORTH_SHARING else 0
            if g is None:
                g = no_g
            elif no_g.size or g.ndim < 2:
                return None
            elif g.ndim == 2:
                g = g[:, :, None]
            y = out if out is not None else np.empty((q.shape[0], self._outputs, self._V), q.dtype)
            beta = no_beta if beta is None else beta
            code = entry(q, k, v, g, beta, y, state._block, plan, control)
            return y if code == OK else None
        except (TypeError, KeyError, AttributeError, IndexError):
            return None

    def _engine(self) -> "Engine":
        """The layer's kernels on the current GPU."""
        from linattn_edge.gpu import Engine, current_device

        name = f"cuda {current_device()}"
        if name not in self._entries:
            self._entries.setdefault(name, (Engine(self.layer, self._check_finite),))
        return cast("Engine", self._entries[name][0])

    def _check_state(self, state: Any) -> None:
        if self.backend == "cuda":
            from linattn_edge.gpu import CudaState

            if isinstance(state, State):
                raise StateMismatchError('state: lies on the CPU, the layer on the GPU; use state.to("cuda")')
            fits = isinstance(state, CudaState)
        else:
            fits = isinstance(state, State)
            if type(state).__name__ == "CudaState":
                raise StateMismatchError('state: lies on the GPU, the layer on the CPU; use state.to("cpu")')
        if not fits:
            raise StateMismatchError(f"state: expected a State (attn.init_state()), got {type(state).__name__}")
        if state._fingerprint != self._fingerprint:
            raise StateMismatchError(f"state: belongs to another layer: {self.layer.describe_difference(state._layer)}")

    def _helpers(self) -> int:
        """The address of the control block of the helper threads, who have been woken."""
        from linattn_edge import threads
        from linattn_edge.kernels.jit import DISABLED

        if DISABLED:  # interpreted loops are serial
            return 0
        crew = threads.get_crew(self.num_threads)
        crew.wake()
        return crew.address

    def _prepare(self, kind: str) -> None:
        """Compile or load what a step for states of that kind needs, once."""
        if self.backend != "cpu" or kind in self._entries:
            return
        from linattn_edge.kernels import cpu

        layer, dtype = self.layer, "float32" if kind == layout.LONG else kind
        real = compute_dtype(dtype)
        kept: list[Any] = []
        plan = make_plan(layer, kind, self._check_finite, kept)
        no_g = np.zeros((0, 0, int(layer.rule.decay))) if layer.decay is None else layer.decay[None]
        constants = plan, arrays.as_dtype(no_g, real), np.zeros((0, 0), real), kept
        self._entries.setdefault(kind, (cpu.step(real), *constants))  # another thread may have come first

    def _warmup(self, dtype: str) -> None:
        self._prepare(dtype)
        if self.backend == "cuda":
            from linattn_edge import gpu

            gpu.warmup(self)
        if self.backend == "cpu":
            from linattn_edge.kernels import cpu

            cpu.sequence(compute_dtype(dtype))
            if self.num_threads > 1:
                cpu.helper()

    def _run(
        self, mode: int, axes: int, q: Any, k: Any, v: Any, state: State, g: Any, beta: Any, lengths: Any, out: Any,
        stream: Any = None,
    ) -> Array | None:  # fmt: skip
        """Check everything but the state, bring it to one dtype and layout, run. axes: 3 for a step, 4 for a
        sequence; state: a State, or streams of a pool that have been taken."""
        layer, B = self.layer, state.batch_size
        taken = {STEP: {"q": q, "k": k, "v": v}, WRITE: {"k": k, "v": v}, READ: {"q": q}}[mode]
        if self.backend == "cuda":
            from linattn_edge import gpu

            if any(_on_gpu(value) for value in taken.values()):
                on_gpu = cast(Any, state)
                y = gpu.run(self, self._engine(), mode, axes, taken, on_gpu, g, beta, lengths, out, stream)
                return cast("Array | None", y)
            for name, value in (("g", g), ("beta", beta), (gpu.counts_name(mode, axes), lengths), ("out", out)):
                if _on_gpu(value):
                    other = next(iter(taken))
                    raise DtypeError(f"{name}: lies on the GPU, {other} on the CPU; nothing is copied in silence")
        elif stream is not None:
            raise ValueError(f"stream: the backend {self.backend!r} has none")
        given, lead, sizes, T = arrays.token_arrays(taken, self._shapes(), axes, B)
        output = None
        if "q" in given:
            output = arrays.output_dtype(given["q"])
            shape = (*sizes, layer.outputs, layer.V)
            if out is not None:
                arrays.check_out(out, shape, f"{lead}, heads, V", output)
        if mode != READ:
            self._check_gates(given, g, beta, lead, sizes)
        if lengths is not None:
            lengths = arrays.lengths_array(lengths, B, T)
        if out is not None:
            arrays.check_apart(out, given if self.backend == "cuda" else given | {"the state": state._block})
        dtype = "float64" if self.backend == "reference" else compute_dtype(state._dtype)
        ready = {name: arrays.as_dtype(a, dtype) for name, a in given.items()}
        if self.backend != "cuda":
            ready = {n: a.copy() if np.may_share_memory(a, state._block) else a for n, a in ready.items()}
        if "g" in ready and ready["g"].ndim == len(sizes) + 1:
            ready["g"] = ready["g"][..., None]
        if axes == 3:
            ready = {name: a[:, None] for name, a in ready.items()}
        y = None
        if output is not None:
            direct = out if out is not None and output == dtype else np.empty(shape, dtype)
            y = direct if axes == 4 else direct[:, None]
        self._call(mode, state, ready, lengths, y, stream)
        return None if output is None else arrays.deliver(direct, out, output)

    def _shapes(self) -> dict[str, tuple[Any, ...]]:
        layer = self.layer
        return {"q": ("H, K", layer.H, layer.K), "k": ("Hk, K", layer.HK, layer.K), "v": ("Hv, V", layer.N, layer.V)}

    def _checked(
        self, axes: int, tokens: dict[str, Any], B: int, out: Array | None, apart: dict[str, Array]
    ) -> tuple[dict[str, Array], tuple[int, ...]]:
        """What can be said of a step (axes 3) or prefill (axes 4) without its state, for calls that are made of
        several: the inputs as arrays that fit the layer and each other, and the shape of y."""
        inputs = {name: tokens.get(name) for name in "qkv"}
        given, lead, sizes, _ = arrays.token_arrays(inputs, self._shapes(), axes, B)
        self._check_gates(given, tokens.get("g"), tokens.get("beta"), lead, sizes)
        shape = (*sizes, self._outputs, self._V)
        if out is not None:
            arrays.check_out(out, shape, f"{lead}, heads, V", arrays.output_dtype(given["q"]))
            arrays.check_apart(out, given | apart)
        return given, shape

    def _check_gates(
        self,
        given: dict[str, Array],
        g: Any,
        beta: Any,
        lead: str,
        sizes: tuple[int | None, ...],
        take: Callable[[str, Any], Any] = arrays.real_array,
    ) -> None:
        """Add g [..., N] or [..., N, 1 or F] and beta to what is given, where the rule takes them."""
        layer = self.layer
        name = layer.rule.name
        if g is not None:
            if not layer.rule.decay:
                raise ValueError(f"g: the rule {name!r} takes none; use 'gated' or 'gated_delta'")
            if layer.decay is not None:
                raise ValueError("g: this layer has a constant decay; give one of the two")
            g = take("g", g)
            if g.ndim == len(sizes) + 1:
                arrays.check_shape("g", g, f"{lead}, N", (*sizes, layer.N))
            else:
                width = 1 if g.shape[-1:] == (1,) else layer.F
                arrays.check_shape("g", g, f"{lead}, N, F", (*sizes, layer.N, width))
            given["g"] = g
        elif layer.rule.decay and layer.decay is None:
            raise ValueError(
                f"g: the rule {name!r} needs log decays [{lead}, N] or [{lead}, N, F] (or decay= in the layer)"
            )
        if beta is not None:
            if not layer.rule.beta:
                raise ValueError(f"beta: the rule {name!r} takes none; use 'delta' or 'gated_delta'")
            beta = take("beta", beta)
            arrays.check_shape("beta", beta, f"{lead}, N", (*sizes, layer.N))
            given["beta"] = beta
        elif layer.rule.beta:
            raise ValueError(f"beta: the rule {name!r} needs write strengths [{lead}, N]")

    def _call(
        self, mode: int, state: State, ready: dict[str, Array], lengths: NDArray[np.int64] | None, y: Array | None,
        stream: Any,
    ) -> None:  # fmt: skip
        """Run checked sequences on the backend."""
        if self.backend == "cuda":
            from linattn_edge import gpu

            if self.check_finite:
                arrays.check_finite(ready, lengths)
            self._check_phi(mode, state, ready, lengths)
            gpu.run_host(self._engine(), mode, cast(Any, state), ready, lengths, y, stream)
            return
        if self.backend == "reference":
            if self.check_finite:
                kept = {name: arrays.as_dtype(a, compute_dtype(state._dtype)) for name, a in ready.items()}
                arrays.check_finite(kept, lengths)
            self._check_phi(mode, state, ready, lengths)
            reference.sequence(state, ready, lengths, y, mode)
            if mode != READ:
                state._wrote(ready, lengths)
            return
        from linattn_edge.kernels import cpu

        dtype = state._dtype
        if not self._has_loop:
            if self.check_finite:
                arrays.check_finite(ready, lengths)
            self._check_phi(mode, state, ready, lengths)
            ready = ready | self._features(mode, state, ready, lengths)
        self._prepare(state._kind)
        _, plan, no_g, no_beta, _kept = self._entries[state._kind]
        control = 0
        if self.num_threads > 1 and state._bytes * next(iter(ready.values())).shape[1] >= WORTH_SHARING:
            control = self._helpers()
        real = compute_dtype(dtype)
        none = np.zeros((0, 0, 0, 0), real)
        code = cpu.sequence(real)(
            ready.get("q", none),
            ready.get("k", none),
            ready.get("v", none),
            ready.get("g", no_g[None]),
            ready.get("beta", no_beta[None]),
            np.zeros(0, np.int64) if lengths is None else lengths,
            state._streams,
            none if y is None else y,
            state._block,
            plan,
            control,
            mode,
        )
        if code != OK:
            arrays.check_finite(ready, lengths)
            self._check_phi(mode, state, ready, lengths)
            raise AssertionError("a compiled kernel refused what was checked")
        if mode != READ:
            state._wrote(ready, lengths)

    def _check_phi(self, mode: int, state: State, ready: dict[str, Array], lengths: NDArray[np.int64] | None) -> None:
        """Refuse what φ does not take: norms beyond its range, positions beyond its horizon."""
        phi = self.layer.phi
        T = next(iter(ready.values())).shape[1]
        count = np.full(state.batch_size, T) if lengths is None else lengths
        if phi.horizon is not None:
            last = state.position + (count if mode != READ else 0)
            if (last > phi.horizon).any():
                row = int(np.argmax(last > phi.horizon))
                raise ValueError(
                    f"{phi.name}: stream {row} would reach position {last[row] - 1}; max_len = {phi.horizon} allows "
                    f"positions up to {phi.horizon - 1}"
                )
        if self.check_finite and not self.layer.qk_norm:
            for name in ("q", "k"):
                if name in ready:
                    late = np.arange(T)[:, None] >= count[:, None, None]
                    phi.check_norms(name, np.where(late[..., None], 0, ready[name]), compute_dtype(state._dtype))

    def _features(
        self, mode: int, state: State, ready: dict[str, Array], lengths: NDArray[np.int64] | None
    ) -> dict[str, Array]:
        """φ of q and k by NumPy, for maps that kernels can't compute."""
        T = next(iter(ready.values())).shape[1]
        real = np.arange(T) < (np.full(state.batch_size, T) if lengths is None else lengths)[:, None]
        now = np.maximum(state.position - 1, 0)[:, None] if mode == READ else state.position[:, None] + np.arange(T)
        position = np.where(real, now, 0)[..., None]
        made = {}
        for name, side in (("q", self.layer.phi.query), ("k", self.layer.phi.key)):
            if name in ready:
                x = np.where(real[..., None, None], ready[name], 0)  # what stands in padding is not looked at
                y = side(reference.unit(x) if self.layer.qk_norm else x, position)
                made[name] = arrays.as_dtype(np.where(real[..., None, None], y, 0), compute_dtype(state._dtype))
        if self._check_finite:
            arrays.check_finite({f"φ({name})": y for name, y in made.items()}, None)
        return made

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the configuration and φ's arrays to a safetensors file, atomically."""
        if type(self.layer.phi) not in MAPS.values():
            raise ValueError(f"feature_map: {self.layer.phi!r} is code of the caller's own and can't be saved")
        metadata = self.layer.metadata() | {"check_finite": str(self.check_finite)}
        write_file(path, dict(self.layer.arrays()), metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str], backend: str = "cpu", num_threads: int = 1) -> "LinearAttention":
        """The layer that `save` wrote."""
        tensors, metadata = read_file(path, lambda metadata: read_metadata(metadata, path))
        config = read_metadata(metadata, path)
        try:
            phi = config["feature_map"]
            options = {name: value for name, value in config.items() if name not in ("feature_map", "arrays")}
            if options["normalize"]:
                options["scale"] = None
            attn = cls(
                feature_map=restore(phi, config["key_dim"], tensors.get("feature_map.weights")),
                decay=None if "decay" not in tensors else _flat_decay(tensors["decay"]),
                check_finite=metadata.get("check_finite") != "False",
                backend=backend,
                num_threads=num_threads,
                **options,
            )
        except DeviceError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise StateMismatchError(f"{Path(path)}: not a readable layer ({error})") from None
        attn.layer.check_metadata(metadata, path)
        return attn

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_entries": {}}  # compiled code stays behind

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.__dict__.update(saved, _fingerprint=sys.intern(saved["_fingerprint"]))

    def __repr__(self) -> str:
        la = self.layer
        return (
            f"LinearAttention(H={la.H}, N={la.N}, K={la.K}, V={la.V}, {la.phi!r} (F={la.F}), {la.rule.name!r}, "
            f"normalize={la.normalize}, scale={la.scale:.6g}, backend={self.backend!r})"
        )


def _on_gpu(value: Any) -> bool:
    from linattn_edge import gpu

    return gpu.is_device_array(value)


def _take(backend: str, name: str, value: Any) -> Array:
    """An array as it is where the GPU takes it, else as a NumPy array."""
    return cast(Array, value) if backend == "cuda" and _on_gpu(value) else arrays.real_array(name, value)


def make_plan(layer: Layer, kind: str, check_finite: bool, kept: list[Any]) -> NDArray[np.int64]:
    """What a layer adds to every compiled call for states of that kind (layout.PLAN); arrays that it points to go to
    `kept`, to be held as long as the plan is used."""
    from linattn_edge.kernels import advance, columns, phi

    dtype = "float32" if kind == layout.LONG else kind
    real = compute_dtype(dtype)
    weights = np.ascontiguousarray(layer.weights, real)
    kept.append(weights)
    plan = np.zeros(layout.PLAN_SIZE, np.int64)
    plan[[layout.ADVANCE, layout.PACK]] = advance.advance(dtype), phi.pack(layer.phi, real)
    VP = layout.padded(layer.V)
    wide = plan[layout.COLUMNS] = columns.width(VP)
    if kind == layout.LONG:
        plan[layout.FOLD_Z] = columns.fold_z()
    sweep = columns.long_columns if kind == layout.LONG else partial(columns.columns, dtype)
    if wide <= VP:
        plan[layout.COLUMNS_WIDE] = sweep(wide)
    if VP % wide:
        plan[layout.COLUMNS_NARROW] = sweep(layout.NARROW)
    plan[layout.WEIGHTS] = weights.ctypes.data
    plan[[layout.SIDES, layout.HEADS, layout.P]] = weights.shape
    plan[layout.CHECK] = check_finite
    limit = layer.phi.limit(layer.K, float(np.finfo(real).max))
    if check_finite and limit < np.inf and layer.phi.has_loop and not layer.qk_norm:
        plan[layout.LIMIT] = np.float64(limit).view(np.int64)
    plan[layout.HORIZON] = layer.phi.horizon or 0
    return plan


def _flat_decay(decay: Array) -> Array:
    return decay[:, 0] if decay.ndim == 2 and decay.shape[1] == 1 else decay


def linear_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    *,
    feature_map: str | FeatureMap = "elu",
    update_rule: str = "linear",
    initial_state: State | ArrayLike | tuple[ArrayLike, ArrayLike] | None = None,
    lengths: ArrayLike | None = None,
    normalize: bool | None = None,
    scale: float | None = None,
    qk_norm: bool = False,
    decay: ArrayLike | None = None,
    eps: float = 1e-30,
    eps_mode: str = "clamp",
    check_finite: bool = True,
    backend: str = "cpu",
    num_threads: int = 1,
    dtype: DTypeLike | None = None,
) -> tuple[Array, State]:
    """Attention over whole sequences as a pure function: returns (o, final state) and changes nothing it is given.

    q [B, T, H, K], k [B, T, Hk, K], v [B, T, Hv, V]: Hk = Hv = H is MHA, Hk = Hv < H GQA, Hk = H < Hv GVA.
    `initial_state` is a State, an array S [B, N, F, V], or a tuple (S, z). The options are those of
    `LinearAttention`; dtype is the state's, float32 or the initial state's unless given.
    """
    arrays_ = [_take(backend, name, a) for name, a in (("q", q), ("k", k), ("v", v))]
    for name, a in zip("qkv", arrays_, strict=True):
        if a.ndim != 4:
            raise ShapeError(f"{name}: expected shape [B, T, heads, width], got {list(a.shape)}")
    (B, _, H, K), (_, _, HK, _), (_, _, HV, V) = (a.shape for a in arrays_)
    attn = LinearAttention(
        H,
        K,
        V,
        num_kv_heads=HK if HK != H else None,
        num_value_heads=HV if HK == H and HV != H else None,
        feature_map=feature_map,
        update_rule=update_rule,
        normalize=normalize,
        scale=scale,
        qk_norm=qk_norm,
        decay=decay,
        eps=eps,
        eps_mode=eps_mode,
        check_finite=check_finite,
        backend=backend,
        num_threads=num_threads,
    )
    if initial_state is None:
        state = attn.init_state(B, "float32" if dtype is None else dtype)
    elif isinstance(initial_state, State) or type(initial_state).__name__ == "CudaState":
        start: Any = initial_state
        if backend == "cuda":
            start = start.to("cuda")
        attn._check_state(start)
        state = start.copy()
        if dtype is not None and state_dtype(dtype) != state._dtype:
            host = state.to("cpu")
            state = State.from_arrays(attn, host.S, host.z, host.position, dtype)
    else:
        pair = initial_state if isinstance(initial_state, tuple) else (initial_state, None)
        if len(pair) != 2:
            raise ShapeError(f"initial_state: expected a State, an array S or a pair (S, z), got {len(pair)} arrays")
        S, z = pair
        state = State.from_arrays(attn, S, z, dtype="float32" if dtype is None else dtype)
    o = attn.prefill(arrays_[0], arrays_[1], arrays_[2], state, g, beta, lengths)
    return o, state


def warmup(attn: LinearAttention | SoftmaxAttention, dtype: DTypeLike = "float32") -> None:
    """Compile, or load from the cache, all that `attn` needs for states of that dtype: its first token then costs
    what the others do. With `backend="cuda"` lengths, `active` and a g for each channel still compile at their first
    call."""
    if not isinstance(attn, (LinearAttention, SoftmaxAttention)):
        raise TypeError(f"attn: expected a LinearAttention or a SoftmaxAttention, got {type(attn).__name__}")
    attn._warmup(state_dtype(dtype))
