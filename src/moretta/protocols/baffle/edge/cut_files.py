"""The files of a model that was cut into blocks, one behind the other: what a silo that runs ONNX is sent at set-up."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence

from moretta.contract.framing import find, framed
from moretta.errors import CodecError, ParameterError
from moretta.protocols.baffle.silo.blocks import LayerBlock

BLOCKS = "moretta.blocks"  # the entry of the first file's metadata that says what the others are
MAGIC = b"moretta blocks 2"
MOST = 1 << 16  # files


def packed(files: Sequence[bytes]) -> bytes:
    """Return files as one array of bytes."""
    return MAGIC + framed(*files)


def unpacked(data: bytes) -> list[bytes]:
    """Return the files of `packed`. Raises ParameterError for anything else."""
    files, at = list[bytes](), len(MAGIC)
    with contextlib.suppress(CodecError):
        while data[: len(MAGIC)] == MAGIC and at < len(data) and len(files) < MOST:
            part = find(data, at, what="a file")
            files.append(data[part])
            at = part.stop
    if not files or at != len(data):
        raise ParameterError("these bytes are no model that was cut into blocks; have the server export it again")
    return files


def described(text: str) -> list[tuple[LayerBlock, str, str, list[str]]]:
    """Return each block, what its layer reads and makes, and the further values that what comes after it reads.

    text: the entry `BLOCKS`. Raises KeyError, TypeError or ValueError for any other text.
    """
    return [
        (
            LayerBlock(
                str(one["name"]), one["kind"], tuple(map(str, one["tensors"])), int(one["repeats"]), int(one["pieces"])
            ),
            str(one["reads"]),
            str(one["moves"]),
            list(map(str, one["kept"])),
        )
        for one in json.loads(text)
    ]
