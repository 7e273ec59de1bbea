"""Tables on standard output: by rich on a terminal where it is installed, plain text otherwise."""

import shutil
import sys
import textwrap
from typing import Any

from linattn_edge.bench.record import Report
from linattn_edge.bench.views import Table
from linattn_edge.terminal import table as plain_table
from linattn_edge.terminal import write

WIDEST = 120
HEADER = 9  # letters of a header in one line, where its column needs no more


def show(table: Table) -> None:
    """Print a table with its title and what it says."""
    console = _console()
    if console is None:
        write(f"{plain(table)}\n\n")
        return
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    rich = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for i, name in enumerate(table.header):
        widest = max([len(row[i].text) for row in table.rows], default=0)
        lines = textwrap.fill(name, max(widest, HEADER), break_long_words=False)
        rich.add_column(lines, justify="left" if i < table.left else "right", no_wrap=True)
    for row in table.rows:
        rich.add_row(*(Text(cell.text) for cell in row))
    console.print(Text(table.title, style="bold"))
    if table.text:
        console.print(Text(table.text, style="dim"), width=min(console.width, WIDEST))
    console.print()
    if table.rows:
        console.print(rich)
        console.print()


def _console() -> Any:
    """rich's console on a terminal; None in a pipe, or without rich."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(highlight=False)


def plain(table: Table) -> str:
    """The same in characters that every terminal has."""
    text = wrapped(table.text)
    if not table.rows:
        return f"{table.title}\n{'=' * len(table.title)}\n{text}"
    body = plain_table(table.header, [[cell.text for cell in row] for row in table.rows], table.left)
    return "\n".join([table.title, "=" * len(table.title), *([text] if text else []), "", body])


def wrapped(text: str) -> str:
    """Text as wide as the terminal, but not wider than can be read."""
    return textwrap.fill(text, min(shutil.get_terminal_size((WIDEST, 24)).columns, WIDEST))


def heading(report: Report) -> list[str]:
    """Where and when this was measured."""
    about = report.machine
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    revision = f", revision {about['revision']}" if about.get("revision") else ""
    cores = report.method["pinned_to_cores"]
    pinned = f"pinned to core {', then '.join(map(str, cores))}" if cores else "no core pinned"
    card = f"; GPU: {about['gpu']}" if about.get("gpu") else ""
    loads = " to ".join(f"{load[0]:.1f}" for load in (about["load"], report.load_after) if load) or "not known"
    return [
        f"{about['cpu']} ({about['llvm_cpu']}), {about['cores']} cores, {about['system']}{card}",
        f"{versions}{revision}",
        f"{report.date}, load average {loads}, {pinned}",
    ]
