"""The metadata of an ONNX file for BAFFLE's clients, which give the layout of its weights without torch.

A model cut into blocks has several files, concatenated (`packed`), which a silo receives at set-up.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence

from moretta.contract.framing import find, framed
from moretta.errors import CodecError, ParameterError
from moretta.protocols.baffle.silo.blocks import LayerBlock
from moretta.protocols.baffle.silo.forward import Layout

FORMAT = "1"


def written(layout: Layout, precision: str) -> dict[str, str]:
    """Return the entries that `read` needs."""
    return {
        "moretta.format": FORMAT,
        "moretta.layout": layout.digest,
        "moretta.precision": precision,
        "moretta.shapes": json.dumps([[name, list(shape)] for name, shape in layout.shapes.items()]),
        "moretta.dtype": layout.dtype,
        "moretta.fixed": layout.fixed.hex(),
    }


def read(metadata: Mapping[str, str]) -> tuple[Layout, str]:
    """Return the layout of a file's trained weights and the precision it was exported with.

    Raises:
        ParameterError: The entries are missing, have another format, or contradict their digest.
    """
    if "moretta.format" not in metadata:
        raise ParameterError("this ONNX file is not a model for BAFFLE's clients: its metadata lack moretta.format")
    if metadata["moretta.format"] != FORMAT:
        raise ParameterError(
            f"expected an ONNX file of moretta.format {FORMAT}, got {metadata['moretta.format']!r:.20}; "
            "use the same version of Moretta everywhere"
        )
    try:
        shapes = {str(name): tuple(map(int, shape)) for name, shape in json.loads(metadata["moretta.shapes"])}
        layout = Layout(shapes, metadata["moretta.dtype"], bytes.fromhex(metadata["moretta.fixed"]))
        same = metadata["moretta.layout"] == layout.digest and layout.dtype in ("float32", "float64")
        precision = metadata["moretta.precision"]
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        same = False
    if not same:
        raise ParameterError("this ONNX file's metadata contradict its digest of them; have the server export it again")
    return layout, precision


BLOCKS = "moretta.blocks"  # the entry of the first file's metadata that describes the others
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
        raise ParameterError("these bytes are not a model that was cut into blocks; have the server export it again")
    return files


def described(text: str) -> list[tuple[LayerBlock, str, str, list[str]]]:
    """Return each block, its layer's input and output, and the further inputs of the part after it.

    Args:
        text: The entry `BLOCKS`.

    Raises:
        KeyError, TypeError, ValueError, OverflowError, RecursionError: The text is another.
    """
    return [
        (
            LayerBlock(
                str(entry["name"]),
                entry["kind"],
                tuple(map(str, entry["tensors"])),
                int(entry["repeats"]),
                int(entry["pieces"]),
            ),
            str(entry["reads"]),
            str(entry["moves"]),
            list(map(str, entry["kept"])),
        )
        for entry in json.loads(text)
    ]
