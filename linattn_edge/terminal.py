"""What commands show beside their output: a progress bar on a terminal, nothing in a pipe."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def progress(items: Sequence[Item], label: str) -> Iterator[Item]:
    """The items, with a bar on standard error while they are worked on, if that is a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        yield from _plain(items, label)
        return
    yield from track(items, description=label, console=Console(stderr=True), transient=True)


def _plain(items: Sequence[Item], label: str) -> Iterator[Item]:
    try:
        for done, item in enumerate(items):
            print(f"\r{label} {done}/{len(items)} ", end="", file=sys.stderr, flush=True)
            yield item
    finally:
        print("\r" + " " * (len(label) + 24) + "\r", end="", file=sys.stderr, flush=True)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as they need to be, the first to the left, the others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    out = []
    for line in lines:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        out.append("  ".join(cells).rstrip())
    out.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(out)
