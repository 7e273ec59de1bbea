"""The command `linattn-edge`. A command is one entry of `COMMANDS`.

Exit status: 0 success, 1 failure, 2 wrong usage, 130 interrupted, 141 the reader of the output went away.
Each command's module is loaded for its options, and loads what is heavy when it runs: `--help` and `--version` never
load Numba, ONNX or rich.
"""

import argparse
import io
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from linattn_edge import __version__, compare, demo, generate, info
from linattn_edge.bench import commands as bench
from linattn_edge.errors import one_line
from linattn_export import commands as export

PROGRAM = "linattn-edge"


@dataclass(frozen=True)
class Command:
    """A subcommand: `run` prints to stdout and raises on failure."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


COMMANDS = (
    Command("demo", "read, write and measure with the bundled model", demo.add_arguments, demo.run),
    Command("generate", "write text after a prompt of any length", generate.add_arguments, generate.run),
    Command("bench", "measure what a token costs on this machine", bench.add_arguments, bench.run),
    Command("compare", "compare feature maps with softmax: cost and error", compare.add_arguments, compare.run),
    Command("export", "write a layer or model as an ONNX file", export.add_export_arguments, export.run_export),
    Command("verify", "run an ONNX file beside the Python runtime", export.add_verify_arguments, export.run_verify),
    Command("info", "show versions, CPU, kernel cache, backends, rules and maps", info.add_arguments, info.run),
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{PROGRAM}: error: {message} (see {self.prog} --help)\n")


def _parser() -> _Parser:
    parser = _Parser(prog=PROGRAM, description="Linear attention, token by token, with a state of fixed size.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    # An absent option after the command must not overwrite the one before it.
    common = _Parser(add_help=False)
    common.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )
    common.add_argument("--json", action="store_true", help="print JSON, for machines")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        sub = commands.add_parser(command.name, help=command.help, description=command.help, parents=[common])
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return parser


def _drop_output() -> None:
    """Send what is still buffered nowhere, so that the interpreter's last flush can't fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _flush() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        _drop_output()
        raise


def _prepare_output() -> None:
    """What a terminal's encoding lacks becomes a question mark, warnings one line, and a closed stderr nothing."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (as long as the process)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    warnings.formatwarning = lambda message, *_, **__: f"{PROGRAM}: warning: {message}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and give its exit status; wrong usage raises SystemExit(2), as argparse does."""
    debug = False
    _prepare_output()
    if sys.stdout is None:
        print(f"{PROGRAM}: error: standard output is closed", file=sys.stderr)
        return 1
    try:
        try:
            args = _parser().parse_args(argv)
            debug = args.debug
            args.run(args)
        finally:
            _flush()
    except BrokenPipeError:
        return 141  # as if ended by SIGPIPE
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if debug:
            traceback.print_exc()
        else:
            print(f"{PROGRAM}: error: {one_line(error)}", file=sys.stderr)
        return 1
    return 0
