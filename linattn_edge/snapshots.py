"""Files of many streams: safetensors, each stream under a checksum of its own, read through a memory map.

The tensors are `ids`, `position` and `checksums` [n], and what a stream is made of, [n, ...] (`S`, `z`; of a model
`layers.{i}.S`, `layers.{i}.z`, `layers.{i}.conv`). A checksum is the CRC-32 of a stream's id, position and rows, in the
order of the header. The header has one too, of itself with that checksum as zeros: no byte of a file is outside.
"""

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from linattn_edge.errors import SnapshotError
from linattn_edge.state import replacing

Array = NDArray[Any]

SNAPSHOT_VERSION = "1"
_KINDS = {"float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "uint32": "U32"}
_BLANK = "00000000"
_OWN = ("ids", "position", "checksums")


class Row(NamedTuple):
    """What a stream is made of: a tensor's name, and dtype and shape of a stream's part."""

    name: str
    dtype: "np.dtype[Any]"
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of a stream's part."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def _header(rows: list[Row], count: int, metadata: dict[str, str]) -> tuple[bytes, dict[str, int]]:
    """The header of a file, its length before it, and where each tensor begins."""
    entries: dict[str, Any] = {"__metadata__": metadata | {"snapshot_version": SNAPSHOT_VERSION, "header": _BLANK}}
    starts, at = {}, 0
    own = [Row("ids", np.dtype(np.int64), ()), Row("position", np.dtype(np.int64), ())]
    for row in [*own, *rows, Row("checksums", np.dtype(np.uint32), ())]:
        size = row.nbytes * count
        shape = [count, *row.shape]
        entries[row.name] = {"dtype": _KINDS[row.dtype.name], "shape": shape, "data_offsets": [at, at + size]}
        starts[row.name] = at
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    text = text.replace(f'"header":"{_BLANK}"'.encode(), f'"header":"{zlib.crc32(text):08x}"'.encode(), 1)
    starts = {name: 8 + len(text) + start for name, start in starts.items()}
    return len(text).to_bytes(8, "little") + text, starts | {"": 8 + len(text) + at}


def write(
    path: str | os.PathLike[str],
    metadata: dict[str, str],
    rows: list[Row],
    ids: list[int],
    streams: Iterator[tuple[int, list[Array]]],
) -> None:
    """Write n streams, which come one after another as (position, parts as `rows` has them), atomically."""
    head, starts = _header(rows, len(ids), metadata)
    checksums, positions = np.zeros(len(ids), np.uint32), np.zeros(len(ids), np.int64)
    with replacing(path) as temporary, open(temporary, "xb") as file:
        file.write(head)
        for i, (id_, (position, parts)) in enumerate(zip(ids, streams, strict=True)):
            positions[i] = position
            sum_ = _begun(id_, position)
            for row, part in zip(rows, parts, strict=True):
                data = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
                sum_ = zlib.crc32(data, sum_)
                file.seek(starts[row.name] + i * row.nbytes)
                file.write(data)
            checksums[i] = sum_
        own: tuple[Array, ...] = np.array(ids, np.int64), positions, checksums
        for name, array in zip(_OWN, own, strict=True):
            file.seek(starts[name])
            file.write(array.tobytes())
        file.truncate(starts[""])
        file.flush()
        os.fsync(file.fileno())


def read(
    path: str | os.PathLike[str],
    check: Callable[[dict[str, str]], None],
    rows: list[Row],
    wanted: list[int] | None,
    take: Callable[[int, int, list[Array]], None],
) -> None:
    """Give streams of a file to `take(id, position, parts)`, all or those whose ids are `wanted`.

    `check` sees the metadata first. The parts are views of the file, good during the call; SnapshotError, before `take`
    gets a stream, where it is damaged.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file")
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8 or length > 1 << 26:
            raise SnapshotError(f"{path}: not a whole file of streams: {size} bytes, a header of {length}")
        text = file.read(length)
        metadata = _checked(path, text)
        check(metadata)
        entries = json.loads(text)
        count = entries.get("ids", {}).get("shape", [0])[0]
        given = {name: value for name, value in metadata.items() if name not in ("snapshot_version", "header")}
        want, starts = _header(rows, count, given)
        if want[8:] != text:
            raise SnapshotError(f"{path}: its tensors are not those of these streams")
        if size != starts[""]:
            raise SnapshotError(f"{path}: expected {starts['']} bytes, got {size}: it was cut or added to")
        _streams(path, np.memmap(file, np.uint8, "r"), rows, count, starts, wanted, take)


def _streams(
    path: Any,
    data: Any,
    rows: list[Row],
    count: int,
    starts: dict[str, int],
    wanted: list[int] | None,
    take: Callable[[int, int, list[Array]], None],
) -> None:
    ids, position, checksums = (
        data[starts[name] : starts[name] + count * np.dtype(kind).itemsize].view(kind)
        for name, kind in zip(_OWN, (np.int64, np.int64, np.uint32), strict=True)
    )
    places = list(range(count))
    if wanted is not None:
        found = {int(id_): i for i, id_ in enumerate(ids)}
        for id_ in wanted:
            if id_ not in found:
                raise SnapshotError(f"{path}: stream {id_} is not in it")
        places = [found[id_] for id_ in wanted]
    for i in places:
        sum_ = _begun(int(ids[i]), int(position[i]))
        parts = []
        for row in rows:
            start = starts[row.name] + i * row.nbytes
            part = data[start : start + row.nbytes]
            sum_ = zlib.crc32(part.data, sum_)
            parts.append(part.view(row.dtype).reshape(row.shape))
        if sum_ != checksums[i] or position[i] < 0:
            raise SnapshotError(f"{path}: stream {ids[i]} is damaged: its checksum is not that of its bytes")
        take(int(ids[i]), int(position[i]), parts)


def _begun(id_: int, position: int) -> int:
    """The checksum of a stream's id and position: its rows follow."""
    return zlib.crc32(struct.pack("<qq", id_, position))


def _checked(path: Any, text: bytes) -> dict[str, str]:
    """The metadata of a header that is whole."""
    try:
        metadata = json.loads(text)["__metadata__"]
        sum_, version = metadata["header"], metadata["snapshot_version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise SnapshotError(f"{path}: not a file of streams, or its header is damaged") from None
    blank = text.replace(f'"header":"{sum_}"'.encode(), f'"header":"{_BLANK}"'.encode(), 1)
    if sum_ != f"{zlib.crc32(blank):08x}":
        raise SnapshotError(f"{path}: its header is damaged: its checksum is not that of its bytes")
    if version != SNAPSHOT_VERSION:
        raise SnapshotError(f"{path}: snapshot_version {version!r} is not readable; expected {SNAPSHOT_VERSION!r}")
    return metadata
