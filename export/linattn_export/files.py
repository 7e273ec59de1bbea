"""Writing a file: checked, and replaced as a whole or not at all."""

import hashlib
import os
from pathlib import Path
from typing import Any

from linattn_edge.state import replacing
from linattn_export.graph import need

LIMIT = 2_000_000_000  # bytes: protobuf has no more than 2 GiB in a message
ALIGNED = 64


def write(model: Any, path: str | os.PathLike[str]) -> None:
    """Check a model and write it; constants that are too large for one file go to a second one beside it.

    That one is named after its content, so that an old file never finds new weights.
    """
    onnx = need("onnx")
    path = Path(path)
    if sum(len(tensor.raw_data) for tensor in model.graph.initializer) < LIMIT:
        onnx.checker.check_model(model, full_check=True)
        with replacing(path) as temporary:
            _dump(temporary, model.SerializeToString())
        return
    _move_out(model, path)
    with replacing(path) as temporary:
        _dump(temporary, model.SerializeToString())
        onnx.checker.check_model(os.fspath(temporary), full_check=True)


def _move_out(model: Any, path: Path) -> None:
    """Put the constants of some size into a file of their own, and say in the model where they are."""
    large = [tensor for tensor in model.graph.initializer if len(tensor.raw_data) >= 1024]
    digest = hashlib.sha256()
    for tensor in large:
        digest.update(tensor.raw_data)
    target = path.with_name(f"{path.name}.{digest.hexdigest()[:8]}.data")
    proto = need("onnx").TensorProto
    with replacing(target) as temporary, open(temporary, "xb") as file:
        for tensor in large:
            file.write(bytes(-file.tell() % ALIGNED))
            place = {"location": target.name, "offset": str(file.tell()), "length": str(len(tensor.raw_data))}
            file.write(tensor.raw_data)
            tensor.ClearField("raw_data")
            tensor.data_location = proto.EXTERNAL
            for key, value in place.items():
                tensor.external_data.add(key=key, value=value)
        file.flush()
        os.fsync(file.fileno())


def _dump(path: str | os.PathLike[str], data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
