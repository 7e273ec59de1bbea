"""Drawing to a file: the option `--plot`, and what all figures share. Needs matplotlib, which is imported late."""

import argparse
import os
from pathlib import Path
from typing import Any

from linattn_edge.state import replacing

FORMATS = (".png", ".pdf", ".svg")


def add_plot_option(parser: argparse.ArgumentParser) -> None:
    """`--plot FILE`"""
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw it to this .png, .pdf or .svg")


def check_plot(path: Path | None) -> None:
    """Refuse a file that can't be drawn to, before any work is done."""
    if path is None:
        return
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"--plot: expected a file that ends in .png, .pdf or .svg, got {path}")
    if path.is_dir() or not os.access(path.resolve().parent, os.W_OK):
        raise OSError(f"--plot: {path} can't be written to")
    new_figure((1, 1))


def new_figure(inches: tuple[float, float]) -> Any:
    """An empty figure of that size."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("--plot needs matplotlib: pip install 'linattn-edge[plot]'") from None
    return Figure(figsize=inches, layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Write it, whole or not at all."""
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=140, format=path.suffix[1:].lower())
