"""Make the bundled model of trained ones: weights in float16, a sample of held-out text, and what the model card says.

    python bundle.py data runs gla

Takes runs/softmax, runs/linear_attn and runs/gla, as train.py left them, and bundles the one that is named, in
linattn_edge/models/bundled (or --out). Prints the figures of all three, and how much of what the bundled one writes are
words of the training text.
"""

import argparse
import gzip
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

import linattn_edge as la
from linattn_edge import demo
from linattn_edge.models import bundled
from linattn_edge.plots import new_figure, save

SAMPLE = 100_001  # bytes: the demo reads 100,000, and goes on from the last


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def spelling(model: la.Model, train: str, seeds: int = 10) -> list[dict[str, float]]:
    """For each seed: the share of words in 2,000 bytes that training text has, and how often a 20-byte run comes."""
    known, prompt = set(words(train)), list(b"And it came to pass")
    found = []
    for seed in range(seeds):
        text = bytes(model.generate(prompt, 2000, temperature=0.8, seed=seed)).decode("utf-8", "replace")
        made = words(text)[1:-1]  # the first may belong to the prompt, the last be cut
        runs = Counter(text[i : i + 20] for i in range(len(text) - 19))
        found.append({"words": sum(word in known for word in made) / len(made), "runs": max(runs.values())})
    return found


def bits_per_byte(model: la.Model, text: bytes) -> float:
    """Of a text read in one stream."""
    return demo.read(model, text, ())[2]


def table(runs: Path, curves: dict, data: np.ndarray) -> str:
    """What the three cost and reach, as Markdown; a softmax row has its attention alone, at two lengths."""
    early, late = 100, 100_000
    lines = [
        f"| model | bits per byte | at 4 × the length | bytes of state, {early} and {late:,} tokens | µs per token |",
        "|---|---:|---:|---:|---:|",
    ]
    for kind, found in curves.items():
        model = la.load_model(runs / (kind if kind != "softmax" else "gla"))
        states = {n: model.init_state() for n in (early, late)}
        for n, state in states.items():
            model.prefill(np.resize(data, n)[None], state, logits="last")
        rows = demo.measure(model, states)
        if kind == "softmax":
            held = " and ".join(f"{row.softmax_bytes:,}" for row in rows)
            us = " and ".join(f"{row.softmax_us:,.0f}" for row in rows) + ", attention alone"
        else:
            held, us = f"{rows[0].state_bytes:,}", " and ".join(f"{row.us_per_token:,.0f}" for row in rows)
        bits, long = found["held_out_bits_per_byte"], found["held_out_bits_per_byte_at_4x_length"]
        lines.append(f"| {kind} | {bits:.3f} | {long:.3f} | {held} | {us} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("runs", type=Path)
    parser.add_argument("kind", choices=("linear_attn", "gla"))
    parser.add_argument("--out", type=Path, default=bundled())
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    run = args.runs / args.kind
    (args.out / "config.json").write_text((run / "config.json").read_text())
    weights = load_file(run / "model.safetensors")
    save_file({name: a.astype(np.float16) for name, a in weights.items()}, args.out / "model.safetensors")
    (args.out / "model.safetensors").chmod(0o644)
    held = (args.data / "held_out.txt").read_bytes()
    (args.out / "sample.txt.gz").write_bytes(gzip.compress(held[-SAMPLE:], 9, mtime=0))

    curves = {}
    for kind in ("softmax", "linear_attn", "gla"):
        path = args.runs / kind / "curve.json"
        if path.exists():
            curves[kind] = json.loads(path.read_text())
            print(kind, {name: value for name, value in curves[kind].items() if name != "curve"})
    (args.out / "curve.json").write_text(json.dumps(curves, indent=1) + "\n")
    figure = new_figure((7, 4))
    axes = figure.subplots()
    for kind, found in curves.items():
        axes.plot([p["step"] for p in found["curve"]], [p["held_out"] for p in found["curve"]], label=kind)
    axes.set(xlabel="step", ylabel="held-out bits per byte", ylim=(None, 3))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save(figure, args.out / "curve.png")

    for weights_as in ("float32", "float16", "int8"):
        model = la.load_model(args.out, weights_as)
        print(weights_as, "bits per byte of the sample:", round(bits_per_byte(model, held[-SAMPLE:]), 4))
    print(table(args.runs, curves, np.frombuffer(held, np.uint8).astype(np.int64)))
    print(*spelling(la.load_model(args.out), (args.data / "train.txt").read_text()), sep="\n")


if __name__ == "__main__":
    main()
