"""Choosing the next token: greedy, temperature, top-k and top-p, the same for the same seed on every run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from linattn_edge.arrays import to_array, whole
from linattn_edge.errors import NotFiniteError, ShapeError
from linattn_edge.models.state import ModelState

if TYPE_CHECKING:
    from linattn_edge.models.model import Model

Logits = NDArray[np.float32]
REAL = (int, float, np.integer, np.floating)


@dataclass(frozen=True)
class Sampler:
    """How to choose from logits [vocab]. temperature 0 takes the largest, the first of equals."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        number = self.temperature
        if not isinstance(number, REAL) or isinstance(number, bool) or not 0 <= number <= 1e6:
            raise ValueError(f"temperature: expected a number from 0 to 1e6, got {number!r}")
        if self.top_k is not None:
            whole("top_k", self.top_k, 1, 2**31)
        p = self.top_p
        if p is not None and (isinstance(p, bool) or not isinstance(p, REAL) or not 0 < p <= 1):
            raise ValueError(f"top_p: expected a number above 0, at most 1, got {p!r}")

    def probabilities(self, logits: Logits) -> NDArray[np.float64]:
        """What the next token is drawn from, float64 [vocab]: first the temperature, then top_k, then top_p."""
        if not np.isfinite(logits).all():
            raise NotFiniteError("logits: the model gave NaN or inf")
        if self.temperature == 0:
            chosen = np.zeros(logits.size)
            chosen[int(np.argmax(logits))] = 1
            return chosen
        scaled = logits.astype(np.float64) / max(self.temperature, 1e-6)
        order = np.argsort(-scaled, kind="stable")
        weights = np.exp(scaled[order] - scaled[order[0]])
        if self.top_k is not None:
            weights[self.top_k :] = 0
        weights /= weights.sum()
        if self.top_p is not None:  # the fewest tokens that reach top_p together
            weights[np.cumsum(weights) - weights >= self.top_p] = 0
            weights /= weights.sum()
        found = np.empty_like(weights)
        found[order] = weights
        return found

    def choose(self, logits: Logits, random: np.random.Generator) -> int:
        """The next token."""
        if self.temperature == 0:
            if not np.isfinite(logits).all():
                raise NotFiniteError("logits: the model gave NaN or inf")
            return int(np.argmax(logits))
        edges = np.cumsum(self.probabilities(logits))
        return int(np.searchsorted(edges, random.random() * edges[-1], side="right").clip(0, logits.size - 1))


def generate(
    model: "Model",
    prompt: ArrayLike,
    max_tokens: int | None,
    sampler: Sampler,
    seed: int | None,
    stop: Sequence[int],
    state: ModelState | None,
) -> Iterator[int]:
    """Check everything at once, then give tokens one by one; see `Model.generate`."""
    ids = to_array("prompt", prompt)
    if ids.ndim != 1:
        raise ShapeError(f"prompt: expected ids [T], got shape {list(ids.shape)}")
    if ids.size == 0:
        raise ShapeError("prompt: expected at least one id")
    if max_tokens is not None:
        whole("max_tokens", max_tokens, 0)
    if not isinstance(stop, (Sequence, set, frozenset, np.ndarray)) or isinstance(stop, (str, bytes)):
        raise TypeError(f"stop: expected ids, got {stop!r}")
    if seed is not None:
        whole("seed", seed, 0)
    ends = frozenset(whole("stop", token, 0, model.vocab_size - 1) for token in stop)
    if state is None:
        state = model.init_state(1)
    elif isinstance(state, ModelState) and state.batch_size != 1:
        raise ShapeError(f"state: generate runs one stream, got {state.batch_size}")
    model._check_state(state)
    model._ids(ids[None], state.batch_size, 2)
    random = np.random.default_rng(seed)
    return _tokens(model, ids, max_tokens, sampler, random, ends, state)


def _tokens(
    model: "Model", ids: Any, most: int | None, sampler: Sampler, random: Any, ends: frozenset[int], state: ModelState
) -> Iterator[int]:
    logits = model.prefill(ids[None], state, logits="last")[0]
    made = 0
    while most is None or made < most:
        token = sampler.choose(logits, random)
        if token in ends:
            return
        yield token
        made += 1
        if made != most:
            logits = model.step([token], state)[0]
