"""`linattn-edge demo`: the bundled model reads a book, writes on, and shows what a token costs at every position."""

import argparse
import gzip
import itertools
import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from linattn_edge import plots
from linattn_edge.models import Model, ModelState, bundled, load_model, load_tokenizer
from linattn_edge.softmax import SoftmaxAttention
from linattn_edge.terminal import progress, readable, size, table, write

POSITIONS = (100, 1_000, 10_000, 100_000)
TURNS = 40  # alternations of a measurement; the least time of each counts


@dataclass(frozen=True)
class Row:
    """What a token costs when `position` tokens have been read."""

    position: int
    us_per_token: float
    state_bytes: int
    softmax_us: float  # its attention alone: the scan of all layers' caches
    softmax_bytes: int


@dataclass(frozen=True)
class Onnx:
    """The model as an ONNX file, run in ONNX Runtime beside the Python runtime."""

    file_bytes: int
    worst_relative_error: float


@dataclass(frozen=True)
class Result:
    """All that the demo shows."""

    weights_bytes: int
    text_bytes: int
    bits_per_byte: float
    reading_us_per_token: float
    continuation: str
    tokens_per_second: float
    rows: list[Row]
    onnx: "Onnx | None"  # None where the packages for it are not installed


def sample_text() -> bytes:
    """Some 100 kB of the books that the bundled model has not seen in training."""
    return gzip.decompress((bundled() / "sample.txt.gz").read_bytes())


def read(model: Model, text: bytes, positions: Sequence[int]) -> tuple[ModelState, dict[int, ModelState], float, float]:
    """Read the text: its state, copies from the positions, bits per byte, and seconds."""
    ids = np.frombuffer(text, np.uint8).astype(np.int64)
    state, kept = model.init_state(), {}
    bits, seconds = 0.0, 0.0
    cuts = sorted({0, len(ids), *positions, *range(0, len(ids), 2000)})
    for start, end in progress(list(itertools.pairwise(cuts)), "reading"):
        begin = time.perf_counter()
        logits = model.prefill(ids[None, start:end], state)[0].astype(np.float64)
        seconds += time.perf_counter() - begin
        following = ids[start + 1 : end + 1]
        logits = logits[: len(following)]
        top = logits.max(axis=1)
        logs = np.log(np.exp(logits - top[:, None]).sum(axis=1)) + top
        bits += float((logs - logits[np.arange(len(following)), following]).sum()) / math.log(2)
        if end in positions:
            kept[end] = state.copy()
    return state, kept, bits / (len(ids) - 1), seconds


def write_on(model: Model, state: ModelState, last: int, tokens: int, show: Callable[[str], None]) -> tuple[str, float]:
    """Write `tokens` more bytes after the byte `last`: the text, and tokens per second."""
    text, times = [], [time.perf_counter()]
    tokenizer = load_tokenizer(bundled(), model.vocab_size)
    for part in tokenizer.stream(model.generate([last], tokens, temperature=0.8, seed=0, state=state)):
        times.append(time.perf_counter())
        text.append(part)
        show(part)
    return "".join(text), (len(times) - 2) / (times[-1] - times[1])


def measure(model: Model, states: dict[int, ModelState]) -> list[Row]:
    """A step of the model at each position, and softmax attention with the same heads over as many tokens."""
    from linattn_edge.bench.turns import alternate, timed

    layer = model.layers[0]
    attn = SoftmaxAttention(layer.H, layer.K, layer.V)
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, layer.H, layer.K), dtype=np.float32)
    cache = attn.init_state(1, capacity=max(states))
    piece = rng.standard_normal((2, 1, 1000, layer.H, max(layer.K, layer.V)), dtype=np.float32)
    steps = {str(position): timed(partial(model.step, [32], state)) for position, state in states.items()}
    ours = alternate(steps, 5 * TURNS, turn=0)
    rows = []
    for position, state in states.items():
        while (missing := position - int(cache.position[0])) > 0:
            attn.write(piece[0, :, :missing, :, : layer.K], piece[1, :, :missing, :, : layer.V], cache)
        scan = alternate({"scan": timed(partial(attn.read, q, cache))}, TURNS, turn=0)["scan"]["min"]
        layers = len(model.layers)
        memory = 4 * position * layer.H * (layer.K + layer.V) * layers
        rows.append(Row(position, ours[str(position)]["min"], state.nbytes, scan * layers, memory))
    return rows


def export(model: Model) -> Onnx | None:
    """Write the model as an ONNX file and verify it, where the packages for that are installed."""
    import linattn_export

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        try:
            linattn_export.export_model(model, path)
            report = linattn_export.verify(path, model)
        except ImportError:
            return None
        return Onnx(path.stat().st_size, max(figure.error for figure in report.figures))


def plot(result: Result, path: Path) -> None:
    """Time and memory against position."""
    figure = plots.new_figure((11, 4.5))
    left, right = figure.subplots(1, 2)
    at = [row.position for row in result.rows]
    for axes, ours, theirs, what in (
        (left, "us_per_token", "softmax_us", "µs per token"),
        (right, "state_bytes", "softmax_bytes", "memory of the past"),
    ):
        axes.plot(at, [getattr(row, ours) for row in result.rows], marker="o", label="this model, whole")
        axes.plot(at, [getattr(row, theirs) for row in result.rows], "k:", marker="s", label="softmax, attention alone")
        axes.set(xscale="log", yscale="log", xlabel="position, tokens", ylabel=what)
        axes.grid(alpha=0.3)
    right.set_yscale("log", base=16)
    right.yaxis.set_major_formatter(lambda value, _: size(value))
    left.legend(frameon=False)
    figure.suptitle("What a token costs, by how many came before it")
    plots.save(figure, path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `linattn-edge demo`."""
    plots.add_plot_option(parser)


def run(args: argparse.Namespace) -> None:
    """The command."""
    plots.check_plot(args.plot)

    def say(line: str) -> None:
        if not args.json:
            write(readable(line))

    text = sample_text()
    model = load_model()
    heads = model.layers[0].H
    say(
        f"A byte-level language model: {len(model.layers)} layers of {heads} heads, {size(model.nbytes)} of weights,\n"
        f"trained on public-domain books. It reads {len(text):,} bytes that were not among them.\n\n"
    )
    model.prefill([[32] * 3], model.init_state())  # compile, or load what was compiled
    state, states, bits, seconds = read(model, text[:-1], POSITIONS)
    us = seconds / (len(text) - 1) * 1e6
    say(f"Read in {seconds:.1f} s, {us:.0f} µs and {bits:.2f} bits a byte. Its end, and how the model goes on:\n\n")
    say(text[-300:].decode("utf-8", "replace") + "▮")
    continuation, rate = write_on(model, state, text[-1], 300, say)
    say(f"\n\n{rate:,.0f} bytes a second. What the next byte costs, by how many came before it:\n\n")
    rows = measure(model, states)
    result = Result(model.nbytes, len(text), bits, us, continuation, rate, rows, export(model))
    if args.json:
        print(json.dumps(asdict(result), indent=2))
    else:
        print(describe(result))
    if args.plot is not None:
        plot(result, args.plot)
        say(f"drawn to {args.plot}\n")


def describe(result: Result) -> str:
    """The measurements as a table."""
    header = ["position", "model, µs", "its state", "softmax, µs", "its cache"]
    rows = [
        [f"{r.position:,}", f"{r.us_per_token:.0f}", size(r.state_bytes), f"{r.softmax_us:.0f}", size(r.softmax_bytes)]
        for r in result.rows
    ]
    note = "model: the whole of it. softmax: only the attention of as many heads and layers, over a key/value cache."
    if result.onnx is None:
        onnx = "To see it exported as ONNX as well: pip install 'linattn-edge[export]'"
    else:
        onnx = (
            f"As an ONNX file ({size(result.onnx.file_bytes)}), ONNX Runtime gives the same numbers: relative error at "
            f"most {result.onnx.worst_relative_error:.0e}."
        )
    return f"{table(header, rows)}\n\n{note}\n{onnx}"
