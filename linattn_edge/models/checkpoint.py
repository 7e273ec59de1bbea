"""Reading a checkpoint folder: config.json, and one or several safetensors files. Nothing in it is trusted."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn_edge.errors import CheckpointError

F32 = NDArray[np.float32]

DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
MAX_HEADER = 100 << 20


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as a dictionary."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file; expected a folder in Hugging Face format")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"{path}: expected an object with a model_type")
    return config


class Tensors:
    """The tensors of a folder by name, read as float32 when asked for. `take` marks what was used."""

    def __init__(self, folder: Path) -> None:
        self._where: dict[str, tuple[Path, str, list[int], int, int]] = {}
        for path in _files(folder):
            for name, entry in _header(path).items():
                if name in self._where:
                    raise CheckpointError(f"{path}: tensor {name} is in {self._where[name][0].name} too")
                self._where[name] = entry
        self._left = set(self._where)
        self._folder = folder

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def take(self, name: str, shape: Iterable[int]) -> F32:
        """A tensor of exactly that shape, as float32."""
        path, dtype, found, start, size = self._entry(name)
        expected = list(shape)
        if found != expected:
            raise CheckpointError(f"{path}: tensor {name} has shape {found}, expected {expected}")
        if dtype not in DTYPES:
            raise CheckpointError(f"{path}: tensor {name} is {dtype}, expected one of {', '.join(DTYPES)}")
        with path.open("rb") as file:
            file.seek(start)
            raw = file.read(size)
        if len(raw) != size:
            raise CheckpointError(f"{path}: cut off in tensor {name}")
        array = np.frombuffer(raw, DTYPES[dtype]).reshape(expected)
        if dtype == "BF16":
            array = (array.astype(np.uint32) << 16).view(np.float32)
        array = np.ascontiguousarray(array, np.float32)
        if not np.isfinite(array).all():
            raise CheckpointError(f"{path}: tensor {name} holds NaN or inf")
        self._left.discard(name)
        return array

    def ignore(self, name: str) -> None:
        """Say that a tensor is known, and not needed."""
        self._left.discard(name)

    def check_all_taken(self, folder: Path) -> None:
        """Refuse a checkpoint with tensors that nothing has asked for."""
        if self._left:
            names = sorted(self._left)
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            raise CheckpointError(f"{folder}: unknown tensors: {', '.join(names[:8])}{more}")

    def _entry(self, name: str) -> tuple[Path, str, list[int], int, int]:
        if name not in self._where:
            raise CheckpointError(f"{self._folder}: tensor {name} is missing")
        return self._where[name]


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index}: not a readable index ({error})") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise CheckpointError(f"{index}: names a file outside the folder: {name!r}")
    return [folder / name for name in sorted(names)]


def _header(path: Path) -> dict[str, tuple[Path, str, list[int], int, int]]:
    """Where each tensor of a safetensors file is: (file, dtype, shape, first byte, bytes)."""
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file")
    try:
        total = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if total < 8 or length > min(total - 8, MAX_HEADER):
                raise CheckpointError(f"{path}: not a safetensors file, or cut off")
            header = json.loads(file.read(length))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: not a safetensors file")
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            sizes = [n for n in shape if isinstance(n, int) and not isinstance(n, bool) and n >= 0]
            count = int(np.prod(sizes, dtype=object)) if sizes else 1
            good = type(begin) is int and type(end) is int and isinstance(dtype, str)
            good = good and len(sizes) == len(shape) and 0 <= begin <= end <= total - 8 - length
            if dtype in DTYPES:
                good = good and end - begin == count * np.dtype(DTYPES[dtype]).itemsize
        except (KeyError, TypeError, ValueError):
            good = False
        if not good:
            raise CheckpointError(
                f"{path}: tensor {name}: dtype, shape and place do not fit together, or the file is cut"
            )
        found[name] = (path, dtype, shape, 8 + length + begin, end - begin)
    return found
