"""Drive an exported file in ONNX Runtime, token by token.

    python examples/onnx_stream.py                      # exports a small layer and streams through it
    python examples/onnx_stream.py layer.onnx
    python examples/onnx_stream.py model.onnx --prompt "In the beginning"

`Stream` is for copying: it needs numpy and onnxruntime and no more. All names, shapes, dtypes and initial values come
from the file's metadata. Buffers are bound once, the state has two that take turns, and a token allocates nothing.
"""

import argparse
import codecs
import json
import sys
import tempfile
from pathlib import Path
from time import perf_counter_ns

import numpy as np
import onnxruntime as ort

BYTES = 256  # a model with such a vocabulary reads and writes the bytes of UTF-8


def open_session(path):
    """The session of a file, on one thread: for one token at a time, more threads cost more than they bring."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors are kinds of RuntimeError, or of nothing
        raise ValueError(str(error).strip()) from None


def read_contract(session):
    """What the file says of itself: its inputs, outputs and state tensors."""
    metadata = session.get_modelmeta().custom_metadata_map
    if "linattn_edge" not in metadata:
        raise SystemExit("not written by linattn_export: the file has no contract in its metadata")
    contract = json.loads(metadata["linattn_edge"])
    if contract["format_version"] != 1:
        raise SystemExit(f"format_version {contract['format_version']}: this script reads version 1")
    return contract


class Stream:
    """A file and the state of its streams.

    call = stream.call(1)            # buffers for calls of one token
    call.inputs["query"][...] = q    # write into them ...
    stream.run(call)                 # ... and run: the state moves on
    call.outputs["output"]           # overwritten by the next run
    """

    def __init__(self, session, batch_size=1):
        self.session = session
        self.contract = read_contract(session)
        self.batch_size = self.contract["batch_size"] or batch_size
        self.states = [{s["past"]: self._array(s) for s in self.contract["states"]} for _ in range(2)]
        self.turn = 0  # self.states[self.turn] is the state as it is now
        self.calls = {}
        self.reset()

    def reset(self):
        """Begin anew."""
        for state in self.contract["states"]:
            self.states[self.turn][state["past"]].fill(state["initial"])

    def call(self, tokens):
        """The buffers for calls of that many tokens, made and bound the first time."""
        if tokens not in self.calls:
            self.calls[tokens] = Call(self, tokens)
        return self.calls[tokens]

    def run(self, call):
        """One call; what was the new state is the old one of the next."""
        self.session.run_with_iobinding(call.bindings[self.turn])
        self.turn = 1 - self.turn

    def lengths(self, total):
        """How to feed that many tokens: the lengths of the calls."""
        most = self.contract["tokens"] or self.contract["block_length"] or total
        if self.contract["tokens"] and total % most:
            raise SystemExit(f"the file takes {most} tokens a call; {total} is no multiple of that")
        return [min(most, total - start) for start in range(0, total, most)]

    def _array(self, tensor, tokens=1):
        sizes = {"B": self.batch_size, "T": tokens}
        return np.zeros([sizes.get(size, size) for size in tensor["shape"]], tensor["dtype"])


class Call:
    """The inputs and outputs for one length, bound to the state once for either turn."""

    def __init__(self, stream, tokens):
        contract = stream.contract
        self.inputs = {t["name"]: stream._array(t, tokens) for t in contract["inputs"]}
        self.outputs = {t["name"]: stream._array(t, tokens) for t in contract["outputs"]}
        present = {s["past"]: s["present"] for s in contract["states"]}
        self.bindings = []
        for old, new in (stream.states, stream.states[::-1]):
            binding = stream.session.io_binding()
            for name, array in (self.inputs | old).items():
                binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
            for name, array in (self.outputs | {present[past]: array for past, array in new.items()}).items():
                binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
            self.bindings.append(binding)


def fill_wave(contract, inputs, t):
    """Token t of a made-up signal for a layer: waves of different speeds, keys short enough for delta rules."""
    width = contract["layers"][0]["key_dim"]
    for number, (name, array) in enumerate(inputs.items(), start=1):
        wave = np.sin(0.37 * number * t + 0.11 * np.arange(array.shape[-1]))
        amplitude, middle = {"key": (width**-0.5, 0), "decay": (0.08, -0.1), "beta": (0.4, 0.5)}.get(name, (1, 0))
        array[...] = amplitude * wave + middle


def choose(logits, temperature, random):
    """The next id."""
    if temperature == 0:
        return int(np.argmax(logits))
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    return int(np.searchsorted(np.cumsum(weights), random.random() * weights.sum()).clip(0, logits.size - 1))


def run_layer(stream, count, most_kept=32):
    """Stream a made-up signal through a layer: microseconds per token, and the first outputs."""
    call, times, kept = stream.call(stream.contract["tokens"] or 1), [], []
    output = next(iter(call.outputs.values()))
    for t in range(count):
        fill_wave(stream.contract, call.inputs, t)
        start = perf_counter_ns()
        stream.run(call)
        times.append((perf_counter_ns() - start) / 1_000)
        if t < most_kept:
            kept.append(output.ravel().tolist())
    return times, {"outputs": kept}


def run_model(stream, ids, count, temperature, seed, show=True):
    """Feed a prompt to a model and let it go on: microseconds per token, the ids it gave and the prompt's logits."""
    start, logits = 0, None
    for length in stream.lengths(len(ids)):
        call = stream.call(length)
        call.inputs["input_ids"][...] = ids[start : start + length]
        stream.run(call)
        start, logits = start + length, call.outputs["logits"][0, -1]
    first = logits.tolist()
    random, times, made = np.random.default_rng(seed), [], []
    text = codecs.getincrementaldecoder("utf-8")(errors="replace")
    call = stream.call(1)
    for _ in range(count):
        token = choose(logits, temperature, random)
        made.append(token)
        if show:
            print(text.decode(bytes([token])) if logits.size == BYTES else f"{token} ", end="", flush=True)
        call.inputs["input_ids"][...] = token
        begin = perf_counter_ns()
        stream.run(call)
        times.append((perf_counter_ns() - begin) / 1_000)
        logits = call.outputs["logits"][0, -1]
    if show:
        print()
    return times, {"logits": first, "ids": made}


def small_layer(folder):
    """A file to try this with: 8 heads of 64, elu + 1, normalised."""
    import linattn_edge as la
    import linattn_export as lx

    path = Path(folder, "layer.onnx")
    lx.export_layer(la.LinearAttention(num_heads=8, key_dim=64), path)
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("file", nargs="?", help="an exported .onnx file; without it a small layer is exported")
    parser.add_argument("--tokens", type=int, default=1000, help="how many tokens to time (default: 1000)")
    parser.add_argument("--prompt", default="In the beginning", help="for a model: text, or ids with spaces between")
    parser.add_argument("--temperature", type=float, default=0.8, help="for a model; 0 takes the likeliest")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the times and first outputs there, to compare runtimes")
    options = parser.parse_args()
    if options.tokens < 1 or not options.prompt:
        parser.error("--tokens must be at least 1, and --prompt must not be empty")

    with tempfile.TemporaryDirectory() as folder:
        stream = Stream(open_session(options.file or small_layer(folder)))
    contract = stream.contract
    nbytes = sum(array.nbytes for array in stream.states[0].values())
    print(f"{options.file or 'a small layer'}: {contract['kind']}, {contract['flavor']}, opset {contract['opset']}")
    print(f"state: {len(contract['states'])} tensors, {nbytes:,} bytes, the same at every position")
    if contract["kind"] == "layer":
        times, found = run_layer(stream, options.tokens)
    else:
        vocabulary = contract["outputs"][0]["shape"][-1]
        ids = list(options.prompt.encode()) if vocabulary == BYTES else [int(i) for i in options.prompt.split()]
        times, found = run_model(stream, ids, options.tokens, options.temperature, options.seed)
    p50, p99 = np.percentile(times, [50, 99])
    print(f"onnxruntime {ort.__version__}: {p50:.1f} µs a token (median of {len(times)}), 99 % below {p99:.1f}")
    if options.json:
        report = {"runtime": f"onnxruntime {ort.__version__}", "microseconds": p50, **found}
        Path(options.json).write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except (OSError, ValueError) as error:
        sys.exit(f"onnx_stream.py: {error}")
