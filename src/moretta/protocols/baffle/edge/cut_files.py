"""The files of a model that was cut into blocks, one behind the other: what a silo that runs ONNX is sent at set-up."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence

from moretta.errors import ParameterError
from moretta.protocols.baffle.silo.blocks import LayerBlock

BLOCKS = "moretta.blocks"  # the entry of the first file's metadata that says what the others are
MAGIC = b"moretta blocks 1"
MOST = 1 << 16
LENGTH = struct.Struct("<Q")


def packed(files: Sequence[bytes]) -> bytes:
    """Return files as one array of bytes."""
    lengths = b"".join(LENGTH.pack(len(file)) for file in files)
    return b"".join([MAGIC, LENGTH.pack(len(files)), lengths, *files])


def unpacked(data: bytes) -> list[bytes]:
    """Return the files of `packed`. Raises ParameterError for anything else."""
    at = len(MAGIC) + LENGTH.size
    if data[: len(MAGIC)] == MAGIC and len(data) >= at:
        (count,) = LENGTH.unpack_from(data, len(MAGIC))
        first = at + count * LENGTH.size
        if 1 <= count <= MOST and first <= len(data):
            lengths = [LENGTH.unpack_from(data, at + number * LENGTH.size)[0] for number in range(count)]
            if first + sum(lengths) == len(data):
                files, start = list[bytes](), first
                for length in lengths:
                    files.append(data[start : start + length])
                    start += length
                return files
    raise ParameterError("these bytes are no model that was cut into blocks; have the server export it again")


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
