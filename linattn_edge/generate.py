"""`linattn-edge generate`: text from a model, as it comes, after a prompt of any length."""

import argparse
import codecs
import itertools
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from linattn_edge.arrays import whole
from linattn_edge.models import WEIGHTS, Model, ModelState, Tokenizer, bundled, load_model, load_tokenizer
from linattn_edge.models.generate import Sampler
from linattn_edge.terminal import readable, size, status, write

PIECE = 1 << 16  # bytes of a prompt that are read at once
BLOCK = 1 << 12  # tokens between two signs of life


def standard_input() -> Iterator[str]:
    """The text on standard input, piece by piece, each but the last to the end of a line where there is one."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")
    rest = ""
    while raw := sys.stdin.buffer.read(PIECE):
        rest += decoder.decode(raw)
        end = rest.rfind("\n") + 1 or (len(rest) if len(rest) > PIECE else 0)
        if end:
            yield rest[:end]
            rest = rest[end:]
    rest += decoder.decode(b"", final=True)
    if rest:
        yield rest


def read(model: Model, tokenizer: Tokenizer, pieces: Iterator[str], state: ModelState) -> list[int]:
    """Read a text into the state, all but its last token: that one is returned, and empty if there was none."""
    first, end = tokenizer.marks()
    last: list[int] = []
    try:
        for ids in itertools.chain([first], map(tokenizer.encode, pieces), [end]):
            ids, last = (last + ids)[:-1], (last + ids)[-1:]
            for start in range(0, len(ids), BLOCK):
                model.prefill([ids[start : start + BLOCK]], state, logits="last")
                status(f"reading: {int(state.position[0])} tokens")
    finally:
        status("")
    return last


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `linattn-edge generate`."""
    parser.add_argument("--prompt", metavar="TEXT", help="what to go on from (default: the text on standard input)")
    parser.add_argument("--model", metavar="FOLDER", help="a checkpoint (default: the small model that comes along)")
    parser.add_argument("--weights", choices=WEIGHTS, default="float32", help="how matrices are kept")
    parser.add_argument("--tokens", type=int, default=400, metavar="N", help="how many tokens (default 400)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest (default 0.8)")
    parser.add_argument("--top-k", type=int, metavar="K", help="choose from the K likeliest")
    parser.add_argument("--top-p", type=float, metavar="P", help="choose from the fewest with that probability")
    parser.add_argument("--seed", type=int, help="the same seed gives the same text")


def run(args: argparse.Namespace) -> None:
    """The command."""
    Sampler(args.temperature, args.top_k, args.top_p)  # refuse what can't be before anything is loaded or read
    whole("--tokens", args.tokens, 0)
    if args.seed is not None:
        whole("--seed", args.seed, 0)
    if args.prompt is None and (sys.stdin is None or sys.stdin.isatty()):
        raise ValueError("no prompt: give --prompt TEXT, or text on standard input")
    folder = bundled() if args.model is None else args.model
    model = load_model(folder, args.weights)
    tokenizer = load_tokenizer(folder, model.vocab_size)
    state = model.init_state()

    start = time.perf_counter()
    pieces = standard_input() if args.prompt is None else iter([args.prompt])
    last = read(model, tokenizer, pieces, state)
    if not last:
        raise ValueError("the prompt is empty")
    sampling: dict[str, Any] = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    made, times = [], [start]

    def tokens() -> Iterator[int]:
        for token in model.generate(last, args.tokens, **sampling, seed=args.seed, stop=model.eos, state=state):
            times.append(time.perf_counter())
            made.append(token)
            yield token

    text = []
    try:
        for part in tokenizer.stream(tokens()):
            if args.json:
                text.append(part)
            else:
                write(readable(part))
    except KeyboardInterrupt:
        write("\n")
        raise
    read_tokens = int(state.position[0]) - max(len(made) - 1, 0)
    first = (times[1] if made else time.perf_counter()) - start
    rest = np.diff(times[1:])
    rate = len(rest) / rest.sum() if len(rest) else None
    if args.json:
        figures = {
            "text": "".join(text),
            "tokens": len(made),
            "prompt_tokens": read_tokens,
            "seconds_to_first_token": first,
            "tokens_per_second": rate,
            "state_bytes": state.nbytes,
        }
        print(json.dumps(figures, indent=2))
        return
    write("\n")
    sys.stdout.flush()
    speed = "" if rate is None else f", {rate:,.0f} tokens/s"
    print(
        f"{len(made)} tokens after {read_tokens} of the prompt: the first in {first:.2f} s{speed}; "
        f"state {size(state.nbytes)}, at any length",
        file=sys.stderr,
    )
