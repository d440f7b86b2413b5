"""The metadata of an ONNX file for BAFFLE's clients, by which its weights can be laid out without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping

from moretta.errors import ParameterError
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

    Raises ParameterError for a file without these entries, of another format, or whose entries contradict its digest.
    """
    if "moretta.format" not in metadata:
        raise ParameterError("this ONNX file is no model for BAFFLE's clients: its metadata have no moretta.format")
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
