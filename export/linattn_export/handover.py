"""A live stream's state, from the Python runtime to a graph's inputs and back."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from linattn_edge.arrays import check_shape, to_array
from linattn_edge.errors import DtypeError, NotFiniteError, StateMismatchError
from linattn_edge.layer import Layer
from linattn_edge.models import Model, ModelState
from linattn_edge.state import State, layer_of, on_cpu
from linattn_export.contract import Carried, Contract, read_contract
from linattn_export.graph import Array

Path = str | os.PathLike[str]


def state_feeds(state: Any, path: Path) -> dict[str, Array]:
    """The past-state inputs of the graph in `path`, by name, that hold a runtime state. The arrays are copies.

    Raises StateMismatchError where the file is of another layer or model, or fixes another batch size.
    """
    contract = read_contract(path)
    on_cpu("state", state)
    if not isinstance(state, State | ModelState):
        raise DtypeError(f"state: expected a State or ModelState of linattn_edge, got {type(state).__name__}")
    layers = state.layers if isinstance(state, ModelState) else (state,)
    check_same(contract, "model" if isinstance(state, ModelState) else "layer", [s._layer for s in layers], path)
    if contract.batch_size not in (None, state.batch_size):
        raise StateMismatchError(f"state: {path} takes {contract.batch_size} streams, the state has {state.batch_size}")
    feeds = feeds_of(contract, state)
    for name, array in feeds.items():
        if not np.isfinite(array).all():
            raise NotFiniteError(f"state: it holds NaN, inf or numbers beyond float32 ({name})")
    return feeds


def feeds_of(contract: Contract, state: State | ModelState) -> dict[str, Array]:
    """The past-state inputs that hold a state which is known to fit."""
    layers = state.layers if isinstance(state, ModelState) else (state,)

    def held(entry: Carried) -> Array:
        if entry.holds == "position":
            return np.array(state.position)
        if entry.holds == "conv" and isinstance(state, ModelState):
            return np.concatenate(state.convolutions[_layer(entry)], axis=1)
        return joined(layers[_layer(entry)])

    return {entry.past: held(entry) for entry in contract.states}


def state_from_outputs(
    outputs: Mapping[str, ArrayLike], attn_or_model: Any, path: Path, position: ArrayLike = 0
) -> State | ModelState:
    """The runtime state that present-state outputs of the graph in `path` hold; `outputs` may hold others too.

    position: how many tokens each stream has seen, one number or [B], for graphs that do not count them themselves.

    Raises StateMismatchError where the file is of another layer or model or outputs lack a name, ShapeError, DtypeError
    and NotFiniteError where one is not what the file says.
    """
    contract = read_contract(path)
    check_belongs(contract, attn_or_model, path)
    if not isinstance(outputs, Mapping):
        raise TypeError(f"outputs: expected a dictionary of arrays by name, got {type(outputs).__name__}")
    missing = [entry.present for entry in contract.states if entry.present not in outputs]
    if missing:
        raise StateMismatchError(f"outputs: {', '.join(missing)} not among them; got {', '.join(outputs) or 'none'}")
    held: list[tuple[Carried, Array]] = []
    B = contract.batch_size
    for entry in contract.states:
        array = _checked(entry, outputs[entry.present], B)
        held.append((entry, array))
        B = array.shape[0]
    assert B is not None
    if isinstance(attn_or_model, Model):
        made = attn_or_model.init_state(B)
        for entry, array in held:
            if entry.holds == "conv":
                start = 0
                for past in made.convolutions[_layer(entry)]:
                    past[...] = array[:, start : start + past.shape[1]]
                    start += past.shape[1]
            else:
                _fill(made.layers[_layer(entry)], array)
        for each in made.layers:
            each.position = position
        return made
    state = State(layer_of(attn_or_model), B)
    state.position = position
    for entry, array in held:
        if entry.holds == "position":
            state.position = array
        else:
            _fill(state, array)
    return state


def _layer(entry: Carried) -> int:
    """Which layer a state is of, counted from 0."""
    return entry.layer or 0


def _fill(state: State, array: Array) -> None:
    """Put S, and z where it is the last column, into a state."""
    state.S = array[..., : state._layer.V]
    if state._layer.normalize:
        state.z = array[..., state._layer.V]


def joined(state: State) -> Array:
    """S with z as its last column, where there is one: float32 [B, N, F, V] or [B, N, F, V + 1]."""
    S = state.S if state.z is None else np.concatenate([state.S, state.z[..., None].astype(state.S.dtype)], axis=-1)
    with np.errstate(over="ignore"):
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


def check_belongs(contract: Contract, attn_or_model: Any, path: Any) -> None:
    """Refuse the file of anything but this layer or model."""
    if isinstance(attn_or_model, Model):
        check_same(contract, "model", attn_or_model.layers, path)
        mine, theirs = attn_or_model.weights, contract.more.get("weights")
        if mine != theirs:
            raise StateMismatchError(f"{path}: has weights as {theirs}, the model as {mine}")
        convolutions = [sum(c for c, kept in each if kept) for each in attn_or_model.convolutions]
        found = {_layer(entry): entry.shape[1] for entry in contract.states if entry.holds == "conv"}
        if found != {i: channels for i, channels in enumerate(convolutions) if channels}:
            raise StateMismatchError(f"{path}: belongs to a model with other convolutions")
    else:
        check_same(contract, "layer", [layer_of(attn_or_model)], path)


def check_same(contract: Contract, kind: str, layers: Sequence[Layer], path: Any) -> None:
    """Refuse the file of another layer, or of a model with others."""
    if contract.kind != kind or len(contract.layers) != len(layers):
        many = "a layer" if contract.kind == "layer" else f"a model of {len(contract.layers)} layers"
        wanted = "a layer" if kind == "layer" else f"a model of {len(layers)} layers"
        raise StateMismatchError(f"{path}: holds {many}, not {wanted}")
    for theirs, layer in zip(contract.layers, layers, strict=True):
        mine = layer.config()
        if theirs != mine:
            named = [f"{n}: {theirs.get(n)!r} instead of {mine[n]!r}" for n in mine if theirs.get(n) != mine[n]]
            raise StateMismatchError(f"{path}: belongs to another {kind}: {'; '.join(named)}")
