"""What a reader of figures must know of the machine, and how the process is held still on it."""

import contextlib
import ctypes
import gc
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

from linattn_edge.info import collect_info


def load() -> list[float]:
    """Load averages of 1, 5 and 15 minutes, where the system tells them."""
    return [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else []


def machine(device: str = "cpu") -> dict[str, Any]:
    """CPU, cores, system, versions of all that takes part, date and load; the GPU where that is measured."""
    info = collect_info()
    versions = {"linattn_edge": info["version"], "python": platform.python_version()}
    versions |= {
        name: found
        for name, found in {**info["packages"], **info["optional_packages"]}.items()
        if found and name in ("numpy", "numba", "llvmlite", "onnxruntime", "torch", "numba-cuda")
    }
    cpu = info["cpu"]
    return {
        "cpu": cpu["name"],
        "gpu": info["gpu"] if device == "cuda" else None,
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


class Pin:
    """Keeps the calling thread on one core: a number, "auto" for the one that is quickest now, or "none".

    Where as much is running as there are cores, "auto" leaves the thread to the system, which moves it to where it is
    let run at all. Within `with`, `renew` chooses anew; `cores` are those that were used, none where the system can't.
    """

    def __init__(self, core: str = "auto") -> None:
        self.cores: list[int] = []
        self._core = core
        self._allowed = os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") and core != "none" else set()
        if self._allowed and core != "auto" and not (core.isdecimal() and int(core) in self._allowed):
            known = ", ".join(map(str, sorted(self._allowed)))
            raise ValueError(f"--pin: expected auto, none or one of the cores {known}; got {core}")

    def __enter__(self) -> "Pin":
        return self

    def __exit__(self, *_: object) -> None:
        if self._allowed:
            os.sched_setaffinity(0, self._allowed)

    def renew(self) -> None:
        """Stay where it is quickest now: what else the machine does moves about."""
        if self._core == "auto" and self._allowed and max(load()[:1], default=0) >= len(self._allowed):
            os.sched_setaffinity(0, self._allowed)
        elif self._allowed:
            core = _quickest(sorted(self._allowed)) if self._core == "auto" else int(self._core)
            os.sched_setaffinity(0, {core})
            if core not in self.cores:
                self.cores.append(core)


def _quickest(cores: list[int], most: int = 16) -> int:
    """The core on which short loops take least: one that nobody else is using, if there is one."""
    seconds = dict.fromkeys(cores[:most], 0.0)
    for _ in range(3):
        for core in seconds:
            os.sched_setaffinity(0, {core})
            start = time.perf_counter()
            sum(range(200_000))
            seconds[core] += time.perf_counter() - start
    return min(seconds, key=seconds.__getitem__)


def collector() -> str:
    """The state of Python's garbage collector."""
    return "off while timing" if gc.isenabled() else "off"
