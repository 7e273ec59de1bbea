"""A live stream's state, from the Python runtime to a graph's inputs and back."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from linattn_edge.arrays import check_shape, to_array
from linattn_edge.errors import DtypeError, NotFiniteError, StateMismatchError
from linattn_edge.layer import Layer
from linattn_edge.state import State, layer_of
from linattn_export.contract import Carried, Contract, read_contract
from linattn_export.graph import Array

Path = str | os.PathLike[str]


def state_feeds(state: Any, path: Path) -> dict[str, Array]:
    """The past-state inputs of the graph in `path`, by name, that hold a runtime state. The arrays are copies.

    Raises StateMismatchError where the file is of another layer, or fixes another batch size.
    """
    contract = read_contract(path)
    if not isinstance(state, State):
        raise DtypeError(f"state: expected a State of linattn_edge, got {type(state).__name__}")
    layer = state._layer
    check_same(contract, layer, path)
    if contract.batch_size not in (None, state.batch_size):
        raise StateMismatchError(f"state: {path} takes {contract.batch_size} streams, the state has {state.batch_size}")
    held = {"recurrent": joined(state), "position": state.position.copy()}
    return {entry.past: held[entry.holds] for entry in contract.states}


def state_from_outputs(
    outputs: Mapping[str, ArrayLike], attn_or_model: Any, path: Path, position: ArrayLike = 0
) -> State:
    """The runtime state that present-state outputs of the graph in `path` hold; `outputs` may hold others too.

    position: how many tokens each stream has seen, one number or [B], for graphs that do not count them themselves.

    Raises StateMismatchError where the file is of another layer or outputs lack a name, ShapeError, DtypeError and
    NotFiniteError where one is not what the file says.
    """
    contract = read_contract(path)
    layer = layer_of(attn_or_model)
    check_same(contract, layer, path)
    missing = [entry.present for entry in contract.states if entry.present not in outputs]
    if missing:
        raise StateMismatchError(f"outputs: {', '.join(missing)} not among them; got {', '.join(outputs) or 'none'}")
    held: dict[str, Array] = {}
    B = contract.batch_size
    for entry in contract.states:
        array = _checked(entry, outputs[entry.present], B)
        held[entry.holds] = array
        B = array.shape[0]
    S = held["recurrent"]
    state = State(layer, S.shape[0])
    state.S = S[..., : layer.V]
    if layer.normalize:
        state.z = S[..., layer.V]
    state.position = held.get("position", position)
    return state


def joined(state: State) -> Array:
    """S with z as its last column, where there is one: float32 [B, N, F, V] or [B, N, F, V + 1]."""
    S = state.S if state.z is None else np.concatenate([state.S, state.z[..., None].astype(state.S.dtype)], axis=-1)
    return np.array(S, np.float32)


def _checked(entry: Carried, value: ArrayLike, B: int | None) -> Array:
    """One present-state output, refused where it is not what the contract says."""
    name = entry.present
    array = to_array(name, value)
    if array.dtype != entry.dtype:
        raise DtypeError(f"{name}: expected {entry.dtype}, got {array.dtype}")
    sizes = tuple(B if s == "B" else int(s) for s in entry.shape if s is not None)
    check_shape(name, array, ", ".join(str(s) for s in entry.shape), sizes)
    if entry.holds == "position":
        if array.size and array.min() < 0:
            raise ValueError(f"{name}: expected positions of at least 0, got {array.min()}")
    elif not np.isfinite(array).all():
        raise NotFiniteError(f"{name}: holds NaN or inf")
    return array


def check_same(contract: Contract, layer: Layer, path: Any) -> None:
    """Refuse the file of another layer, or of a model."""
    if contract.kind != "layer" or len(contract.layers) != 1:
        raise StateMismatchError(f"{path}: holds a {contract.kind} of {len(contract.layers)} layers, not a layer")
    theirs, mine = contract.layers[0], layer.config()
    if theirs != mine:
        named = [f"{n}: {theirs.get(n)!r} instead of {mine[n]!r}" for n in mine if theirs.get(n) != mine[n]]
        raise StateMismatchError(f"{path}: belongs to another layer: {'; '.join(named)}")
