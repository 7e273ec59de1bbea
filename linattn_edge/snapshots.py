"""Files of many streams: safetensors, each stream under a checksum of its own, read through a memory map.

The tensors are `ids`, `position` and `checksums` [n], and what a stream is made of, [n, ...] (`S`, `z`; of a model
`layers.{i}.S`, `layers.{i}.z`, `layers.{i}.conv`). A checksum is the CRC-32 of a stream's id, position and rows, in the
order of the header. The header has one too, of itself with that checksum as zeros: no byte of a file is outside.
"""

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
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
_OWN = {"ids": np.int64, "position": np.int64, "checksums": np.uint32}


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
    most: int,
    streams: Iterable[tuple[int, int, list[Array]]],
) -> None:
    """Write streams, which come one after another as (id, position, parts as `rows` has them), atomically. There may be
    fewer of them than `most`, for which room is made first."""
    with replacing(path) as temporary:
        count, starts = _fill(temporary, metadata, rows, most, streams)
        if count < most:
            with replacing(temporary) as smaller:
                data = np.memmap(temporary, np.uint8, "r")
                kept = (stream[:3] for stream in _each(data, rows, range(count), most, starts))
                _fill(smaller, metadata, rows, count, kept)
                del data, kept


def _fill(
    path: Path, metadata: dict[str, str], rows: list[Row], most: int, streams: Iterable[tuple[int, int, list[Array]]]
) -> tuple[int, dict[str, int]]:
    """A file of streams laid out for `most`; returns how many came, and where each tensor begins."""
    head, starts = _header(rows, most, metadata)
    ids, positions, checksums = np.zeros(most, np.int64), np.zeros(most, np.int64), np.zeros(most, np.uint32)
    count = 0
    with open(path, "xb") as file:
        file.write(head)
        for id_, position, parts in streams:
            sum_ = _begun(id_, position)
            for row, part in zip(rows, parts, strict=True):
                data = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
                sum_ = zlib.crc32(data, sum_)
                file.seek(starts[row.name] + count * row.nbytes)
                file.write(data)
            ids[count], positions[count], checksums[count] = id_, position, sum_
            count += 1
        own: tuple[Array, ...] = ids, positions, checksums
        for name, array in zip(_OWN, own, strict=True):
            file.seek(starts[name])
            file.write(array.tobytes())
        file.truncate(starts[""])
        file.flush()
        os.fsync(file.fileno())
    return count, starts


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
        raise FileNotFoundError(f"{path}: {'not a regular file' if Path(path).exists() else 'no such file'}")
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
    places: Sequence[int] = range(count)
    if wanted is not None:
        found = {int(id_): i for i, id_ in enumerate(_column(data, starts, "ids", count))}
        for id_ in wanted:
            if id_ not in found:
                raise SnapshotError(f"{path}: stream {id_} is not in it")
        places = [found[id_] for id_ in wanted]
    for id_, position, parts, good in _each(data, rows, places, count, starts):
        if not good or position < 0:
            raise SnapshotError(f"{path}: stream {id_} is damaged: its checksum is not that of its bytes")
        take(id_, position, parts)


def _column(data: Any, starts: dict[str, int], name: str, count: int) -> Array:
    """`ids`, `position` or `checksums` of a file."""
    kind = np.dtype(_OWN[name])
    column: Array = data[starts[name] : starts[name] + count * kind.itemsize].view(kind)
    return column


def _each(
    data: Any, rows: list[Row], places: Iterable[int], count: int, starts: dict[str, int]
) -> Iterator[tuple[int, int, list[Array], bool]]:
    """Streams of a file of `count`, by their places: id, position, parts, and whether the checksum is theirs."""
    ids, positions, checksums = (_column(data, starts, name, count) for name in _OWN)
    for i in places:
        id_, position = int(ids[i]), int(positions[i])
        sum_ = _begun(id_, position)
        parts = []
        for row in rows:
            start = starts[row.name] + i * row.nbytes
            part = data[start : start + row.nbytes]
            sum_ = zlib.crc32(part.data, sum_)
            parts.append(part.view(row.dtype).reshape(row.shape))
        yield id_, position, parts, sum_ == checksums[i]


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
