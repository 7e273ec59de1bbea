"""The command `linattn-edge`. A command is one entry of `COMMANDS`.

Exit status: 0 success, 1 failure, 2 wrong usage, 130 interrupted, 141 the reader of the output went away.
Only what a command needs is imported, and only when it runs: `--help` and `--version` never load Numba.
"""

import argparse
import importlib
import importlib.metadata
import io
import json
import os
import platform
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from linattn_edge import __version__, compare, demo, generate
from linattn_export import commands as export

PROGRAM = "linattn-edge"


@dataclass(frozen=True)
class Command:
    """A subcommand: `run` prints to stdout and raises on failure."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


# What the kernels can use, by LLVM's names for it.
SIMD = (
    *("sse4.2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512bf16", "avx512fp16"),
    *("neon", "fullfp16", "bf16", "sve", "sve2"),  # Arm
    *("v", "zvfh"),  # RISC-V
)

OPTIONAL_PACKAGES = ("onnx", "onnxruntime", "rich", "matplotlib", "numba-cuda", "torch", "ml_dtypes")


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    """The name on the box, where the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _why_not(backend: str) -> str | None:
    """Why a backend can't be used here, or None."""
    from linattn_edge.attention import BACKENDS

    if backend not in BACKENDS:
        return "not in this version"
    try:
        if backend == "cuda":
            from linattn_edge import gpu

            return gpu.why_not()
        if backend != "reference":  # plain NumPy
            importlib.import_module(f"linattn_edge.kernels.{backend}")
    except Exception as error:
        return _one_line(error)
    return None


def _card() -> str:
    """The GPU, in words."""
    from linattn_edge import gpu

    try:
        return gpu.card()
    except ValueError as error:
        return _one_line(error)


def collect_info() -> dict[str, Any]:
    """What `linattn-edge info` shows, as plain data."""
    import llvmlite.binding as llvm

    from linattn_edge.features import MAPS
    from linattn_edge.kernels import jit
    from linattn_edge.rules import RULES

    features = llvm.get_host_cpu_features()
    folder = jit.cache_folder()
    backends = {name: _why_not(name) for name in ("reference", "cpu", "cuda")}
    return {
        "version": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()}, {sys.platform})",
        "packages": {name: _version_of(name) for name in ("numpy", "numba", "llvmlite", "safetensors")},
        "optional_packages": {name: _version_of(name) for name in OPTIONAL_PACKAGES},
        "cpu": {
            "name": _cpu_name(),
            "llvm_name": llvm.get_host_cpu_name(),
            "simd": [name for name in SIMD if features.get(name)],
            "cores": os.cpu_count() or 1,
            "usable_cores": _cores(),
        },
        "gpu": _card() if backends["cuda"] is None else None,
        "kernel_cache": {"folder": folder, "writable": folder is not None, "jit": not jit.DISABLED},
        "backends": {name: {"available": reason is None, "reason": reason} for name, reason in backends.items()},
        "feature_maps": {name: {"positive": bool(phi.positive)} for name, phi in MAPS.items()},
        "update_rules": list(RULES),
    }


def _print_info(info: dict[str, Any]) -> None:
    cpu, cache = info["cpu"], info["kernel_cache"]
    kernels = cache["folder"] or "no folder can be written: kernels are compiled in each process (set NUMBA_CACHE_DIR)"
    if not cache["jit"]:
        kernels = "not used: NUMBA_DISABLE_JIT is set and the loops are interpreted"
    rows = [
        (PROGRAM, info["version"]),
        ("Python", info["python"]),
        *((name, version or "not found") for name, version in info["packages"].items()),
        ("CPU", f"{cpu['name']} ({cpu['llvm_name']})"),
        ("SIMD", " ".join(cpu["simd"]) or "none known"),
        ("cores", f"{cpu['usable_cores']} usable of {cpu['cores']}"),
        *((("GPU", info["gpu"]),) if info["gpu"] else ()),
        ("kernel cache", kernels),
        *(
            (f"backend {name}", "yes" if backend["available"] else f"no: {backend['reason']}")
            for name, backend in info["backends"].items()
        ),
        ("update rules", " ".join(info["update_rules"])),
        ("feature maps", " ".join(info["feature_maps"])),
        *((f"optional {name}", version or "no") for name, version in info["optional_packages"].items()),
    ]
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        print(f"{label:<{width}}  {value}")


def _run_info(args: argparse.Namespace) -> None:
    info = collect_info()
    if args.json:
        print(json.dumps(info, indent=2))
    else:
        _print_info(info)


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    """For commands that have no options of their own."""


COMMANDS = (
    Command("demo", "read, write and measure with the bundled model", demo.add_arguments, demo.run),
    Command("generate", "write text after a prompt of any length", generate.add_arguments, generate.run),
    Command("compare", "compare feature maps with softmax: cost and error", compare.add_arguments, compare.run),
    Command("export", "write a layer or model as an ONNX file", export.add_export_arguments, export.run_export),
    Command("verify", "run an ONNX file beside the Python runtime", export.add_verify_arguments, export.run_verify),
    Command("info", "show versions, CPU, kernel cache, backends, rules and maps", _no_arguments, _run_info),
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


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, (ValueError, TypeError, OSError, NotImplementedError)) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


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
            print(f"{PROGRAM}: error: {_one_line(error)}", file=sys.stderr)
        return 1
    return 0
