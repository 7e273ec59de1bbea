"""Model: a decoder stack with a state of fixed size for each stream."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from linattn_edge import arrays
from linattn_edge.errors import CheckpointError, StateMismatchError
from linattn_edge.kernels import layout, program
from linattn_edge.models.architectures import ARCHITECTURES, Config
from linattn_edge.models.assembly import WEIGHTS, Assembly, Matrix
from linattn_edge.models.checkpoint import Tensors, read_config
from linattn_edge.models.generate import Sampler, generate
from linattn_edge.models.state import ModelState, digest

Array = NDArray[Any]
F32 = NDArray[np.float32]

BLOCK = 64  # tokens of each stream that one call of a prefill takes


class Model:
    """A language model: token ids in, logits out, one compiled call for a token or a block of them.

    Made by `load_model`. `vocab_size`, `hidden_size`, `layers` (the attention layers' configurations), `nbytes` (of the
    weights) and `eos` (ids that end a text, for `stop` of `generate`) describe it; so do `convolutions` (for each layer
    channels and tokens kept) and `listing` (its operations), for those who translate it.
    A model may be used by several threads, a state by one at a time.
    """

    def __init__(self, config: Config, tensors: Tensors, architecture: str, weights: str) -> None:
        hidden, vocab = config.size("hidden_size", 2048), config.size("vocab_size", 32000)
        depth = config.size("num_hidden_layers", 24)
        eps = config.number("norm_eps", 1e-6, 0, 1e3)
        assert eps is not None
        tied = config.take("tie_word_embeddings", False, bool)
        affine = bool(config.take("elementwise_affine", True, (bool, type(None))))
        config.only("hidden_act", "swish", "silu")
        build = Assembly(tensors, hidden, eps, weights, affine, config.inner(hidden))
        build.buffer(hidden, "h")
        build.buffer(hidden, "x")
        embedding = build.embed("model.embeddings.weight", vocab)
        for index in range(depth):
            build.block(index, ARCHITECTURES[architecture], config)
        self._body = len(build.operations)
        build.norm("model.norm", "h", "x", hidden, eps)
        head = embedding
        if not tied:
            head = Matrix.pack("lm_head.weight", tensors.take("lm_head.weight", (vocab, hidden)), weights)
        elif "lm_head.weight" in tensors:
            tensors.ignore("lm_head.weight")
        self._logits = build.buffer(vocab)
        build.matmul(head, "x", self._logits, vocab, hidden, None)
        self._width = max(build.width, build.most)
        self._operations = np.concatenate(build.operations)
        self.listing = tuple(build.listing)
        self._kept = build.kept
        self.convolutions = build.convolutions
        self.layers = tuple(build.layers)
        self.vocab_size, self.hidden_size = vocab, hidden
        self.weights = weights
        self.eos = _ends(config, vocab)
        self._digest = digest(self.layers, self.convolutions)
        self._work: dict[int, F32] = {}

    def init_state(self, batch_size: int = 1) -> ModelState:
        """A fresh state for `batch_size` streams."""
        return ModelState(self.layers, self.convolutions, batch_size)

    def step(self, tokens: ArrayLike, state: ModelState) -> F32:
        """One token of each stream, ids [B]: the state is updated in place. Returns logits [B, vocab]."""
        self._check_state(state)
        return self._step(self._ids(tokens, state.batch_size, 1), state)

    def _step(self, ids: NDArray[np.int64], state: Any) -> F32:
        work = self._run(ids, state, 1, None, len(self._operations) // program.WIDTH)
        logits = self._take(work, self._logits, self.vocab_size, len(ids)).copy()
        self._keep(len(ids), work)
        return logits

    def prefill(
        self, tokens: ArrayLike, state: ModelState, lengths: ArrayLike | None = None, logits: str = "all"
    ) -> F32:
        """Tokens [B, T] of each stream, `lengths` [B] of them real. The state is updated in place.

        Returns logits [B, T, vocab], 0 where there is padding; with logits="last" only those of each stream's last real
        token, [B, vocab], and memory does not grow with T.
        """
        if logits not in ("all", "last"):
            raise ValueError(f"logits: expected 'all' or 'last', got {logits!r}")
        self._check_state(state)
        shape = self._token_array(tokens, state.batch_size, 2).shape
        real = None if lengths is None else arrays.lengths_array(lengths, *shape)
        return self._prefill(self._ids(tokens, state.batch_size, 2, real), state, real, logits)

    def _prefill(self, ids: NDArray[np.int64], state: Any, real: NDArray[np.int64] | None, logits: str) -> F32:
        B, T = ids.shape
        out = np.zeros((B, T, self.vocab_size) if logits == "all" else (B, self.vocab_size), np.float32)
        last = np.zeros((B, self.hidden_size), np.float32)
        if B == 0 or T == 0:
            return out
        operations = len(self._operations) // program.WIDTH
        for start in range(0, T, BLOCK):
            block = ids[:, start : start + BLOCK]
            n = block.shape[1]
            count = None if real is None else np.clip(real - start, 0, n)
            work = self._run(block.ravel(), state, n, count, operations if logits == "all" else self._body)
            if logits == "all":
                out[:, start : start + n] = self._take(work, self._logits, self.vocab_size, B * n).reshape(B, n, -1)
            else:
                h = self._take(work, 0, self.hidden_size, B * n).reshape(B, n, -1)
                ends = (T if real is None else real) - 1 - start
                here = np.broadcast_to((ends >= 0) & (ends < n), B)
                last[here] = h[np.flatnonzero(here), np.broadcast_to(ends, B)[here]]
            self._keep(B * n, work)
        if logits == "all":
            if real is not None:
                out[np.arange(T) >= real[:, None]] = 0
            return out
        work = self._buffers(B)
        self._take(work, 0, self.hidden_size, B)[...] = last
        head = self._operations[self._body * program.WIDTH :]
        self._call(head, work, np.zeros(B, np.int64), state, 1, None, len(head) // program.WIDTH)
        out[...] = self._take(work, self._logits, self.vocab_size, B)
        if real is not None:
            out[real == 0] = 0
        return out

    def generate(
        self,
        prompt: ArrayLike,
        max_tokens: int | None = None,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: Sequence[int] = (),
        state: ModelState | None = None,
    ) -> Iterator[int]:
        """Read the ids `prompt` [T] and give the tokens that follow, one by one, for ever unless told otherwise.

        temperature 0 is greedy; top_k keeps the likeliest k, top_p the fewest that have that probability together. A
        seed makes the same tokens on every run. Ends before a token in `stop`. `state` (one stream) goes on from there
        and is updated in place; the token given last has not been read into it.
        """
        return generate(self, prompt, max_tokens, Sampler(temperature, top_k, top_p), seed, stop, state)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as they are kept."""
        return sum({id(a): a.nbytes for a in self._kept if isinstance(a, np.ndarray)}.values())

    def load_state(self, path: str | os.PathLike[str]) -> ModelState:
        """The state that `ModelState.save` wrote; refused where it belongs to another model."""
        return ModelState.load(path, self.layers, self.convolutions)

    def _check_state(self, state: Any) -> None:
        if not isinstance(state, ModelState):
            raise StateMismatchError(f"state: expected a ModelState (model.init_state()), got {type(state).__name__}")
        if state._digest != self._digest:
            raise StateMismatchError("state: belongs to another model")

    def _token_array(self, tokens: Any, batch_size: int, axes: int) -> Array:
        """Integers [B] or [B, T]."""
        ids = arrays.to_array("tokens", tokens)
        arrays.check_shape("tokens", ids, "B, T" if axes == 2 else "B", (batch_size, None)[:axes])
        if ids.size and ids.dtype.kind not in "iu":
            raise TypeError(f"tokens: expected integers, got {ids.dtype}")
        return ids

    def _ids(
        self, tokens: Any, batch_size: int, axes: int, lengths: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64]:
        """Tokens that the model knows, as int64; what stands in padding is not looked at, and becomes 0."""
        ids = self._token_array(tokens, batch_size, axes)
        if lengths is not None:
            ids = np.where(np.arange(ids.shape[1]) < lengths[:, None], ids, 0)
        if ids.size and not (ids.min() >= 0 and ids.max() < self.vocab_size):
            raise ValueError(f"tokens: expected ids from 0 to {self.vocab_size - 1}, got {ids.min()} to {ids.max()}")
        return np.ascontiguousarray(ids, np.int64)

    def _buffers(self, rows: int) -> F32:
        """Room for all buffers: what the last call of that size left, unless another thread has it."""
        room = self._work.pop(rows, None)
        return np.empty(rows * self._width + program.LANES, np.float32) if room is None else room

    def _keep(self, rows: int, work: F32) -> None:
        """Leave room for later calls of that size: of one token, and of the last block."""
        if len(self._work) > 1:
            self._work.clear()
        self._work[rows] = work

    def _take(self, work: F32, at: int, width: int, rows: int) -> F32:
        return work[at * rows : (at + width) * rows].reshape(rows, width)

    def _run(self, ids: NDArray[np.int64], state: Any, T: int, lengths: NDArray[np.int64] | None, count: int) -> F32:
        work = self._buffers(len(ids))
        if len(ids):
            self._call(self._operations, work, ids, state, T, lengths, count)
        return work

    def _call(self, operations: Any, work: F32, ids: Any, state: Any, T: int, lengths: Any, count: int) -> None:
        from linattn_edge.kernels import decoder

        lengths = np.zeros(0, np.int64) if lengths is None else np.ascontiguousarray(lengths, np.int64)
        code = decoder.decode()(
            operations,
            count,
            ids,
            lengths,
            state._streams,
            state._places,
            work,
            state._scratch,
            state.batch_size,
            T,
        )
        assert code == layout.OK

    def __copy__(self) -> "Model":
        return self  # it never changes, and its operations hold addresses

    def __deepcopy__(self, memo: dict[int, Any]) -> "Model":
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a Model can't be pickled: load_model its folder in the other process")

    def __repr__(self) -> str:
        return f"Model({len(self.layers)} layers, hidden {self.hidden_size}, vocab {self.vocab_size}, {self.weights})"


def _ends(config: Config, vocab: int) -> tuple[int, ...]:
    """Ids that end a text, as the config has them: none, one or several; not those that the model never gives."""
    found = config.take("eos_token_id", None, (int, list, type(None)))
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(token) is int for token in ids):
        config.fail(f"eos_token_id: expected ids, got {found!r}")
    return tuple(token for token in ids if 0 <= token < vocab)


def bundled() -> Path:
    """The folder of the small byte-level language model that comes along."""
    return Path(__file__).parent / "bundled"


def load_model(folder: str | os.PathLike[str] | None = None, weights: str = "float32") -> Model:
    """Load a checkpoint in flash-linear-attention's Hugging Face format: config.json and model.safetensors (or shards).

    folder: by default that of the small byte-level model that comes along. weights: "float32", "float16" or "int8" (a
    scale for each output channel, made here): how matrices are kept.
    Settings and tensors that are not understood are refused by name. Nothing in the folder is executed.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"weights: expected one of {', '.join(WEIGHTS)}; got {weights!r}")
    folder = bundled() if folder is None else Path(folder)
    settings = read_config(folder)
    architecture = settings["model_type"]
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"{folder / 'config.json'}: model_type {architecture!r} is not supported; known: {known}")
    config, tensors = Config(settings, folder / "config.json"), Tensors(folder)
    model = Model(config, tensors, architecture, weights)
    config.check_all_taken()
    tensors.check_all_taken(folder)
    return model
