"""What a stream of a layer and one of a model are made of, and how a pool steps, rewinds, fills and copies them.

Both have the same methods: one more sort of stream is one more class here.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from linattn_edge import arrays, snapshots
from linattn_edge.attention import LinearAttention
from linattn_edge.errors import SnapshotError, StateMismatchError
from linattn_edge.kernels import layout, program
from linattn_edge.kernels.layout import LAPSED, OK, REFUSED, STEP, WORTH_SHARING
from linattn_edge.layer import FORMAT_VERSION
from linattn_edge.models import Model, ModelState
from linattn_edge.records import NO_IDS, Array, Ids, Jobs, Part, Records, Slab, job_header, place_layer
from linattn_edge.state import LAST_POSITION, State, aligned, compute_dtype, state_dtype

Taken = Callable[[Ids], AbstractContextManager[Records]]
Checked = tuple[dict[str, Any], tuple[int, ...], "np.dtype[Any]"]


class LayerStreams:
    """How streams of a layer are kept and stepped."""

    def __init__(self, attn: LinearAttention, dtype: DTypeLike, window: int, compensated: bool) -> None:
        if attn.backend != "cpu":
            raise ValueError(f"layer_or_model: a pool runs compiled kernels, not the backend {attn.backend!r}")
        self.attn, self.layer, self.window = attn, attn.layer, window
        empty = State(attn.layer, 0, dtype, compensated=compensated)
        self.dtype, self.kind, self.compensated = empty._dtype, empty._kind, compensated
        self.parts, places = place_layer(empty, "", layout.RECORD * 8)
        self.size = places.end
        self.positions = [0]
        self.headers = [job_header(empty, 0, places, window)]
        self.metadata = self.layer.metadata() | {"dtype": self.dtype, "compensated": str(compensated)}
        self.real = np.dtype(compute_dtype(self.dtype))
        H = self.headers[0]
        numbers = H[layout.HK] * H[layout.K] + H[layout.N] * (self.layer.V + self.layer.F + 1)
        self.image_at = window * 8 + -(-window * int(numbers) * self.real.itemsize // 8) * 8
        attn._prepare(self.kind)
        _, self.plan, no_g, no_beta, self._kept = attn._entries[self.kind]
        self.no_g, self.no_beta = no_g, no_beta
        self.constant = np.array(no_g.reshape(-1))
        self.entry: Callable[..., int] | None = None
        self.jobs = Jobs(self.headers)

    def step(self, slab: Slab, ids: Ids, q: Any, k: Any, v: Any, g: Any, beta: Any, out: Any) -> Any:
        """y, where the inputs are as the compiled step takes them and nothing is wrong; else a layout code."""
        attn, entry = self.attn, self.entry
        if not attn._has_loop:
            return REFUSED
        if entry is None:
            from linattn_edge.kernels import streams

            entry = self.entry = streams.step(self.real.name)
        job = self.jobs.take()
        try:
            control = attn._helpers() if attn.num_threads > 1 and slab.words * 8 * ids.size >= WORTH_SHARING else 0
            if g is None:
                g = self.no_g
            elif self.no_g.size or g.ndim < 2:
                return REFUSED
            elif g.ndim == 2:
                g = g[:, :, None]
            y = out if out is not None else np.empty((ids.size, attn._outputs, attn._V), q.dtype)
            beta = self.no_beta if beta is None else beta
            room = job.room(ids.size)
            code = entry(ids, slab.table, q, k, v, g, beta, y, room, job.block, self.plan, control, slab.words)
            return y if code == OK else code
        except (TypeError, AttributeError, IndexError):
            return REFUSED
        finally:
            self.jobs.give(job)

    def keep(self, records: Records, given: dict[str, Array], lengths: NDArray[np.int64] | None) -> None:
        from linattn_edge.kernels import streams

        k = given["k"]
        streams.keep(self.real.name)(
            k,
            given["v"],
            given.get("g", self.no_g[None]),
            given.get("beta", self.no_beta[None]),
            NO_IDS if lengths is None else lengths,
            records._streams,
            records._block,
            k.shape[1],
        )

    def run(self, records: Records, axes: int, given: dict[str, Any], lengths: Any, out: Array | None) -> Array:
        """A step (axes 3) or prefill (axes 4) of streams that have been taken."""
        g, beta = given.get("g"), given.get("beta")
        y = self.attn._run(STEP, axes, given.get("q"), given.get("k"), given.get("v"), records, g, beta, lengths, out)  # type: ignore[arg-type]
        assert y is not None
        return y

    def checked(self, axes: int, given: dict[str, Any], out: Array | None, B: int) -> Checked:
        """What can be said of a call before its streams are taken: errors that are not those of one row, the inputs as
        arrays, and shape and dtype of y."""
        inputs, shape = self.attn._checked(axes, given, B, out, {})
        return inputs, shape, arrays.output_dtype(inputs["q"])

    def check_metadata(self, path: Any, metadata: dict[str, str]) -> None:
        """Refuse a file that another layer's pool wrote, or one of states of another kind."""
        try:
            self.layer.check_metadata(metadata, path)
        except StateMismatchError as error:
            raise SnapshotError(str(error)) from None
        for name, value in self.metadata.items():
            if name not in self.layer.metadata() and metadata.get(name) != value:
                raise SnapshotError(f"{path}: {name} is {metadata.get(name)!r} in the file, {value!r} here")

    def wrong(self, axes: int, given: dict[str, Any], lengths: Any, position: Ids) -> dict[int, ValueError]:
        """The rows that would be refused, and why."""
        ready = {n: arrays.as_dtype(arrays.real_array(n, a), self.real) for n, a in given.items() if a is not None}
        ready = {n: a[:, None] if axes == 3 else a for n, a in ready.items()}
        suspects = arrays.rows_not_finite(ready, lengths) if self.attn.check_finite else []
        try:  # all at once, before one by one: of many rows few are wrong
            self.attn._check_phi(STEP, _Row(position, self.dtype), ready, lengths)  # type: ignore[arg-type]
        except ValueError:
            suspects = list(range(position.size))
        found: dict[int, ValueError] = {}
        for row in suspects:
            mine = {name: a[row : row + 1] for name, a in ready.items()}
            length = None if lengths is None else lengths[row : row + 1]
            try:
                if self.attn.check_finite:
                    arrays.check_finite(mine, length, one=True)
                self.attn._check_phi(STEP, _Row(position[row : row + 1], self.dtype), mine, length)  # type: ignore[arg-type]
            except ValueError as error:
                found[row] = error
        return found

    def release(self, slab: Slab, records: Records, given: Any, lengths: Any) -> None:
        slab.entry("release")(records._streams, NO_IDS, NO_IDS, 0, 0)

    def rollback(self, slab: Slab, ids: Ids, n: int, taken: Taken, journal: NDArray[np.uint8] | None) -> int:
        from linattn_edge.kernels import streams

        job = self.jobs.take()
        try:
            return streams.rollback(self.real.name)(
                ids, slab.table, job.room(1), self.constant, job.block, self.plan, slab.words, n
            )
        finally:
            self.jobs.give(job)

    def new_state(self) -> State:
        return State(self.layer, 1, self.dtype, compensated=self.compensated)

    def arrays_of(self, state: Any) -> tuple[int, list[Array]]:
        """Position and parts of a State of one stream."""
        self.attn._check_state(state)
        if state._kind != self.kind:
            raise StateMismatchError(f"state: expected one of {self.kind}, as the pool is, got {state._kind}")
        return checked_position(state), [part[0] for part in state._parts()]

    def fill(self, state: Any, position: int, parts: list[Array]) -> None:
        for target, part in zip(state._parts(), parts, strict=True):
            target[0] = part
        state.position = position  # which forgets where the stream began, as the pool does


def checked_position(state: Any) -> int:
    """The position of a state of one stream; refused where it can't be one."""
    position = int(state.position[0]) if state.position.size else 0
    return arrays.whole("state: position", position, 0, LAST_POSITION)


@dataclass
class _Row:
    """Streams, for checks."""

    position: Ids
    _dtype: str

    @property
    def batch_size(self) -> int:
        return self.position.size


class ModelStreams:
    """How streams of a model are kept and stepped."""

    dtype = kind = "float32"

    def __init__(self, model: Model, dtype: DTypeLike, window: int, compensated: bool) -> None:
        if state_dtype(dtype) != "float32":
            raise ValueError(f"dtype: the states of a model are float32; got {dtype!r}")
        if compensated:
            raise ValueError("compensated: of a pool of a layer; a model's states are in one part")
        self.model, self.window = model, window
        self.parts: list[Part] = []
        self.headers, self.positions = [], []
        self.places = np.zeros(len(model.layers) * program.PLACES, np.int64)
        at = aligned((layout.RECORD + len(model.layers)) * 8)
        for i, (layer, past) in enumerate(zip(model.layers, model.convolutions, strict=True)):
            position_at = 0 if i == 0 else (layout.RECORD + i) * 8
            self.positions.append(position_at // 8)
            empty = State(layer, 0, self.dtype)
            parts, places = place_layer(empty, f"layers.{i}.", at)
            self.parts += parts
            self.headers.append(job_header(empty, position_at, places, 0))
            start = at = places.end
            for j, (channels, kept) in enumerate(past):
                self.places[i * program.PLACES + 1 + j] = at
                at += channels * kept * 4
            if past:
                shape = (sum(channels for channels, _ in past), past[0][1])
                self.parts.append(Part(snapshots.Row(f"layers.{i}.conv", np.dtype(np.float32), shape), start, shape))
            at = aligned(at)
        self.size = at
        self.image_at = window * 8
        self.jobs = Jobs(self.headers, self.places)
        self.metadata = {"format_version": FORMAT_VERSION, "layers": model._digest}

    def step(self, slab: Slab, ids: Ids, *given: Any) -> Any:
        return REFUSED  # there is one way to step a model, `run`

    def run(self, records: Records, axes: int, given: dict[str, Any], lengths: Any, out: Any) -> Array:
        self.checked(axes, given, out, records.batch_size)
        given["tokens"] = tokens = self.model._ids(given["tokens"], records.batch_size, axes - 2, lengths)
        if axes == 3:
            y = self.model._step(tokens, records)
        else:
            y = self.model._prefill(tokens, records, lengths, given["logits"])
        if out is None:
            return y
        out[...] = y
        return out

    def keep(self, records: Records, given: dict[str, Array], lengths: NDArray[np.int64] | None) -> None:
        """Nothing: `release` keeps the tokens."""

    def checked(self, axes: int, given: dict[str, Any], out: Array | None, B: int) -> Checked:
        tokens = self.model._token_array(given["tokens"], B, axes - 2)
        shape = *tokens.shape, self.model.vocab_size
        if given.get("logits") == "last":
            shape = B, self.model.vocab_size
        dtype = np.dtype(np.float32)
        if out is not None:
            arrays.check_out(out, shape, "B, T, vocab" if len(shape) == 3 else "B, vocab", dtype)
        return given | {"tokens": tokens}, shape, dtype

    def check_metadata(self, path: Any, metadata: dict[str, str]) -> None:
        if any(metadata.get(name) != value for name, value in self.metadata.items()):
            raise SnapshotError(f"{path}: belongs to another model, a layer or another version")

    def wrong(self, axes: int, given: dict[str, Any], lengths: Any, position: Ids) -> dict[int, ValueError]:
        """The rows that would be refused, and why."""
        tokens = arrays.to_array("tokens", given["tokens"])
        found: dict[int, ValueError] = {}
        for row in range(position.size):
            mine = tokens[row : row + 1]
            try:
                self.model._ids(mine, 1, axes - 2, None if lengths is None else lengths[row : row + 1])
            except ValueError as error:
                found[row] = error
        return found

    def release(self, slab: Slab, records: Records, given: dict[str, Any] | None, lengths: Any) -> None:
        tokens = NO_IDS if given is None else given["tokens"].reshape(-1)
        T = tokens.size // max(1, records.batch_size)
        slab.entry("release")(records._streams, tokens, NO_IDS if lengths is None else lengths, T, self.window)

    def rollback(self, slab: Slab, ids: Ids, n: int, taken: Taken, journal: NDArray[np.uint8] | None) -> int:
        with taken(ids) as records:
            record = slab.record(int(ids[0]))
            fields = record[: layout.RECORD * 8].view(np.int64)
            if fields[layout.JOURNAL] == 0 or journal is None or fields[layout.LOGGED] < n:
                return LAPSED
            image = journal[self.image_at :][: slab.words * 8]
            record[layout.RECORD * 8 :] = image[layout.RECORD * 8 :]
            fields[layout.POSITION] = image[: layout.RECORD * 8].view(np.int64)[layout.POSITION]
            fields[layout.LOGGED] -= n
            count = int(fields[layout.LOGGED])
            if count:
                tokens = journal[: count * 8].view(np.int64)
                self.model._prefill(tokens[None].copy(), records, None, "last")
        return OK

    def new_state(self) -> ModelState:
        return self.model.init_state(1)

    def arrays_of(self, state: Any) -> tuple[int, list[Array]]:
        self.model._check_state(state)
        parts: list[Array] = []
        for layer, past in zip(state.layers, state.convolutions, strict=True):
            parts += [layer.S[0], *([] if layer.z is None else [layer.z[0]])]
            if past:
                parts.append(np.concatenate([a[0] for a in past]))
        return checked_position(state), parts

    def fill(self, state: Any, position: int, parts: list[Array]) -> None:
        rest = iter(parts)
        for layer, past in zip(state.layers, state.convolutions, strict=True):
            layer.S, layer.position = next(rest)[None], position
            if layer.z is not None:
                layer.z = next(rest)[None]
            if past:
                kept, start = next(rest), 0
                for a in past:
                    a[0] = kept[start : start + a.shape[1]]
                    start += a.shape[1]
