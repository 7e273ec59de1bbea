"""`linattn-edge info`: versions, CPU, kernel cache, backends, rules and maps."""

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import sys
from typing import Any

from linattn_edge import __version__
from linattn_edge.errors import one_line

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
        return one_line(error)
    return None


def _card() -> str:
    """The GPU, in words."""
    from linattn_edge import gpu

    try:
        return gpu.card()
    except ValueError as error:
        return one_line(error)


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


def text(info: dict[str, Any]) -> str:
    """It as lines, for people."""
    cpu, cache = info["cpu"], info["kernel_cache"]
    kernels = cache["folder"] or "no folder can be written: kernels are compiled in each process (set NUMBA_CACHE_DIR)"
    if not cache["jit"]:
        kernels = "not used: NUMBA_DISABLE_JIT is set and the loops are interpreted"
    rows = [
        ("linattn-edge", info["version"]),
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
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def run(args: argparse.Namespace) -> None:
    """The command."""
    info = collect_info()
    if args.json:
        print(json.dumps(info, indent=2))
    else:
        print(text(info))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has no options of its own."""
