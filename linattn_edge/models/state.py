"""ModelState: the states of all layers, and the past tokens of their convolutions."""

import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from linattn_edge.arrays import row_indices, whole
from linattn_edge.errors import NotFiniteError, StateMismatchError
from linattn_edge.kernels import layout, program
from linattn_edge.layer import FORMAT_VERSION, Layer
from linattn_edge.state import State, read_file, write_file


class ModelState:
    """The state of a model for `batch_size` streams: made by `Model.init_state`, changed by its methods.

    layers: a State for each layer; convolutions: for each layer float32 arrays [B, channels, tokens kept]. They can be
    written to, not replaced: the compiled decoder knows where they are.
    """

    _streams = np.zeros(0, np.int64)  # all are in one block: see `kernels/layout.py`, and streams.py for others

    def __init__(
        self, layers: Sequence[Layer], convolutions: Sequence[Sequence[tuple[int, int]]], batch_size: int
    ) -> None:
        B = whole("batch_size", batch_size, 0)
        self._own(
            [State(layer, B) for layer in layers],
            [[np.zeros((B, *shape), np.float32) for shape in each] for each in convolutions],
            digest(layers, convolutions),
        )

    def _own(
        self, layers: Sequence[State], convolutions: Sequence[Sequence[NDArray[np.float32]]], digest_: str
    ) -> None:
        """Take these, and write down where everything is."""
        self._digest = digest_
        self._layers = tuple(layers)
        self._convolutions = tuple(map(tuple, convolutions))
        places = np.zeros((len(self.layers), program.PLACES), np.int64)
        most = 0
        for row, state, past in zip(places, self.layers, self.convolutions, strict=True):
            row[0] = state._block.ctypes.data
            row[1 : 1 + len(past)] = [array.ctypes.data for array in past]
            most = max(most, int(state._block[: layout.HEADER * 8].view(np.int64)[layout.PREFILL_WORK]))
        self._places = places.ravel()
        self._scratch = np.empty(most, np.uint8)

    @property
    def layers(self) -> tuple[State, ...]:
        """The state of each layer."""
        return self._layers

    @property
    def convolutions(self) -> tuple[tuple[NDArray[np.float32], ...], ...]:
        """The past tokens of each layer's convolutions: of q, k and v, or none."""
        return self._convolutions

    @property
    def batch_size(self) -> int:
        """B, the number of streams."""
        return self.layers[0].batch_size

    @property
    def position(self) -> NDArray[np.int64]:
        """Tokens seen by each stream, int64 [B]."""
        return self.layers[0].position

    @property
    def nbytes(self) -> int:
        """Bytes of all states: what the streams cost, at any position."""
        return sum(s.nbytes for s in self.layers) + sum(a.nbytes for each in self.convolutions for a in each)

    @classmethod
    def _made(cls, layers: Sequence[State], convolutions: Sequence[Sequence[Any]], digest_: str) -> "ModelState":
        other = object.__new__(cls)
        other._own(layers, convolutions, digest_)
        return other

    def copy(self) -> "ModelState":
        """An independent copy."""
        past = [[a.copy() for a in each] for each in self.convolutions]
        return self._made([s.copy() for s in self.layers], past, self._digest)

    def __copy__(self) -> "ModelState":
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelState":
        return self.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelState._made, (self._layers, self._convolutions, self._digest)

    def select(self, rows: ArrayLike) -> "ModelState":
        """The streams of these rows, in that order, repeats allowed: beam reorder, fork, drop."""
        chosen = row_indices(rows, self.batch_size)
        past = [[np.ascontiguousarray(a[chosen]) for a in each] for each in self.convolutions]
        return self._made([s.select(rows) for s in self.layers], past, self._digest)

    def reset(self, rows: ArrayLike | None = None) -> None:
        """Start these streams anew (all by default), in place."""
        chosen: Any = slice(None) if rows is None else row_indices(rows, self.batch_size)
        for state in self.layers:
            state.reset(rows)
        for each in self.convolutions:
            for a in each:
                a[chosen] = 0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write S, z and the past tokens of each layer to a safetensors file, atomically."""
        tensors: dict[str, NDArray[Any]] = {"position": self.position}
        for i, (state, past) in enumerate(zip(self.layers, self.convolutions, strict=True)):
            tensors[f"layers.{i}.S"] = state.S
            if state.z is not None:
                tensors[f"layers.{i}.z"] = state.z
            if past:
                tensors[f"layers.{i}.conv"] = np.concatenate(past, axis=1)
        write_file(path, tensors, {"format_version": FORMAT_VERSION, "layers": self._digest})

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], layers: Sequence[Layer], convolutions: Sequence[Sequence[tuple[int, int]]]
    ) -> "ModelState":
        """The state that `save` wrote, of a model with these layers."""

        def check(metadata: dict[str, str] | None) -> None:
            if metadata is None or metadata.get("format_version") != FORMAT_VERSION or "layers" not in metadata:
                raise StateMismatchError(f"{path}: not the state of a model")

        tensors, metadata = read_file(path, check)
        position = tensors.get("position")
        good = position is not None and position.ndim == 1 and position.dtype == np.int64
        if position is None or not good or (position < 0).any() or (position > 2**62).any():
            raise StateMismatchError(f"{path}: position: expected int64 [B] of at least 0")
        state = cls(layers, convolutions, position.size)
        if metadata["layers"] != state._digest:
            raise StateMismatchError(f"{path}: belongs to another model")
        expected: dict[str, tuple[int, ...]] = {"position": position.shape}
        for i, (layer, past) in enumerate(zip(state.layers, state.convolutions, strict=True)):
            expected[f"layers.{i}.S"] = layer.S.shape
            if layer.z is not None:
                expected[f"layers.{i}.z"] = layer.z.shape
            if past:
                expected[f"layers.{i}.conv"] = (position.size, sum(a.shape[1] for a in past), past[0].shape[2])
        if tensors.keys() != expected.keys():
            raise StateMismatchError(f"{path}: expected tensors {', '.join(expected)}; got {', '.join(tensors)}")
        for name, shape in expected.items():
            array = tensors[name]
            if array.shape != shape or (name != "position" and array.dtype != np.float32):
                raise StateMismatchError(
                    f"{path}: {name}: expected float32 {list(shape)}, got {array.dtype} {list(array.shape)}"
                )
            if not np.isfinite(array).all():
                raise NotFiniteError(f"{path}: {name} holds NaN or inf")
        for i, (layer, past) in enumerate(zip(state.layers, state.convolutions, strict=True)):
            layer.S, layer.position = tensors[f"layers.{i}.S"], position
            if layer.z is not None:
                layer.z = tensors[f"layers.{i}.z"]
            start = 0
            for kept in past:
                kept[...] = tensors[f"layers.{i}.conv"][:, start : start + kept.shape[1]]
                start += kept.shape[1]
        return state

    def __repr__(self) -> str:
        return f"ModelState(B={self.batch_size}, {len(self.layers)} layers, {self.nbytes} bytes)"


def digest(layers: Sequence[Layer], convolutions: Sequence[Sequence[tuple[int, int]]]) -> str:
    """What a state must have in common with a model."""
    kinds = [(layer.fingerprint, list(map(list, each))) for layer, each in zip(layers, convolutions, strict=True)]
    return hashlib.sha256(json.dumps(kinds).encode()).hexdigest()
