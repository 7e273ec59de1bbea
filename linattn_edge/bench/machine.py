"""What a reader of figures must know of the machine, and how the process is held still on it."""

import contextlib
import ctypes
import gc
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def load() -> list[float]:
    """Load averages of 1, 5 and 15 minutes, where the system tells them."""
    return [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else []


def machine() -> dict[str, Any]:
    """CPU, cores, system, versions of all that takes part, date and load."""
    from linattn_edge.cli import collect_info

    info = collect_info()
    versions = {"linattn_edge": info["version"], "python": platform.python_version()}
    versions |= {
        name: found
        for name, found in {**info["packages"], **info["optional_packages"]}.items()
        if found and name in ("numpy", "numba", "llvmlite", "onnxruntime", "torch")
    }
    cpu = info["cpu"]
    return {
        "cpu": cpu["name"],
        "llvm_cpu": cpu["llvm_name"],
        "simd": cpu["simd"],
        "cores": cpu["usable_cores"],
        "system": f"{platform.system()} {platform.machine()}",
        "memory_bytes": total_memory(),
        "versions": versions,
        "revision": revision(),
        "date": time.strftime("%Y-%m-%d"),
        "time": time.strftime("%H:%M:%S%z"),
        "load": load(),
    }


def revision(folder: Path = Path(__file__).parents[2]) -> str | None:
    """The git revision of the checkout that this package runs from, "+" where files were changed; None elsewhere."""
    if not (folder / ".git").exists():
        return None

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def total_memory() -> int | None:
    """Bytes of memory in the machine, where the system tells it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def free_memory() -> int:
    """Bytes that can be used without swapping; half a GiB where the system does not tell."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 1 << 29


def resident_memory() -> int | None:
    """Bytes of memory that this process holds now, where the system tells it."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def one_blas_thread() -> bool:
    """Hold NumPy's own OpenBLAS to one thread; whether that could be done. (Its variables are read at import only.)"""
    import numpy as np

    for path in sorted(Path(np.__file__).parent.parent.glob("numpy.libs/*openblas*")):
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(str(path))
            for prefix, suffix in (("scipy_", "64_"), ("scipy_", ""), ("", "64_"), ("", "")):
                name = f"{prefix}openblas_set_num_threads{suffix}"
                if hasattr(library, name):
                    getattr(library, name)(ctypes.c_int(1))
                    return True
    return False


@contextlib.contextmanager
def pinned(core: str = "auto") -> Iterator[int | None]:
    """Keep the calling thread on one core meanwhile: a number, "auto" for the one that is quickest now, or "none".

    Gives the core, or None where it stays free: not asked for, or the system can't.
    """
    if core == "none" or not hasattr(os, "sched_setaffinity"):
        yield None
        return
    allowed = os.sched_getaffinity(0)
    if core == "auto":
        chosen = _quickest(sorted(allowed))
    else:
        chosen = int(core) if core.isdecimal() else -1
        if chosen not in allowed:
            known = ", ".join(map(str, sorted(allowed)))
            raise ValueError(f"--pin: expected auto, none or one of the cores {known}; got {core}")
    try:
        os.sched_setaffinity(0, {chosen})
        yield chosen
    finally:
        os.sched_setaffinity(0, allowed)


def _quickest(cores: list[int], most: int = 16) -> int:
    """The core on which a short loop takes least: one that nobody else is using, if there is one."""

    def seconds(core: int) -> float:
        os.sched_setaffinity(0, {core})
        start = time.perf_counter()
        sum(range(400_000))
        return time.perf_counter() - start

    return min(cores[:most], key=seconds)


def collector() -> str:
    """The state of Python's garbage collector."""
    return "off while timing" if gc.isenabled() else "off"
