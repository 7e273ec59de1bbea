"""How commands show things: text and tables on standard output, progress on a terminal and nothing of it in a pipe."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def progress(items: Sequence[Item], label: str, describe: Callable[[Item], str] | None = None) -> Iterator[Item]:
    """The items, with a bar on standard error while they are worked on, if that is a terminal.

    describe: what an item is, shown beside the bar; then the bar moves between items only, so that nothing disturbs
    what is measured within one.
    """
    if not sys.stderr.isatty():
        yield from items
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield from _plain(items, label, describe)
        return
    with Progress(console=Console(stderr=True), transient=True, auto_refresh=describe is None) as bar:
        task = bar.add_task(label, total=len(items))
        for item in items:
            if describe is not None:
                bar.update(task, description=f"{label}: {describe(item)}", refresh=True)
            yield item
            bar.advance(task)


def _plain(items: Sequence[Item], label: str, describe: Callable[[Item], str] | None) -> Iterator[Item]:
    try:
        for done, item in enumerate(items):
            what = "" if describe is None else f": {describe(item)}"
            print(f"\r{f'{label} {done}/{len(items)}{what} ':<79}", end="", file=sys.stderr, flush=True)
            yield item
    finally:
        print("\r" + " " * 79 + "\r", end="", file=sys.stderr, flush=True)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Columns as wide as they need to be, the first `left` of them to the left, the others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    out = []
    for line in lines:
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        out.append("  ".join(cells).rstrip())
    out.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(out)


def size(count: float) -> str:
    """A number of bytes, for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def status(text: str) -> None:
    """What is being done, on the last line of a terminal, over what was there; nothing in a pipe."""
    if sys.stderr.isatty():
        print(f"\r{text:<60}" if text else "\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)


def readable(text: str) -> str:
    """Text that a model made, safe to show: on a terminal without control characters but line ends and tabs."""
    if not sys.stdout.isatty():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def write(text: str) -> None:
    """Show a piece of text at once."""
    print(text, end="", flush=True)
