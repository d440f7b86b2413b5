"""What a silo's own process and its parent send each other, on the process's standard input and output.

Each part follows its length (`moretta.contract.framing`): a message of the codec, or the bytes of an array. Nothing
else is ever on standard output, and nothing secret is on the command line or in the environment.

    parent                                          the process
      BeSilo(settings, its state), x, y         -->   makes its role
      Restore(state)                            -->   restores it
      any message of the protocol               -->   answers it
                                                <--   AnswerHeader, and unless it has an error, the answer, or
                                                      Acknowledged where the message needs none

An array is two parts: dtype and shape as JSON, and its bytes, which are read straight into place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np

from moretta import errors
from moretta.contract import framing
from moretta.contract.messages import Array, Message, Stamp, message
from moretta.errors import CodecError, MorettaError

HERE = Stamp("edge", 0, 0)  # of messages that do not leave the machine
ABOUT_ARRAY = 1 << 10  # bytes that say what an array is
DIMENSIONS = 32
SENTENCE = 10_000  # characters


@message("edge/be-silo")
class BeSilo(Message):
    """Be this silo: its settings (`moretta.protocols.baffle.edge.settings`) and state; its rows follow as arrays.

    insecure: for tests, the root from which its keys follow; no bytes: the operating system draws them.
    """

    settings: str
    state: Mapping[str, bytes]
    insecure: bytes


@message("edge/restore")
class Restore(Message):
    """Take up a state."""

    state: Mapping[str, bytes]


@message("edge/done")
class Acknowledged(Message):
    """It is done."""


@message("edge/envelope")
class AnswerHeader(Message):
    """What comes before an answer; protocols do not see it.

    seconds: by phase. peak_mib: the most memory the process has had resident. state: the silo's, where it has changed.
    error: the error's class, of `moretta.errors` or any other, and its sentence; then no answer follows.
    """

    seconds: Mapping[str, float]
    peak_mib: float
    state: Mapping[str, bytes]
    error: str
    sentence: str


MESSAGES = (BeSilo, Restore, Acknowledged, AnswerHeader)

_ERRORS = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, MorettaError)
}


def error_of(envelope: AnswerHeader) -> Exception:
    """Return the error in an envelope, of the same class if it is one of ours."""
    kind = _ERRORS.get(envelope.error)
    return RuntimeError(f"{envelope.error}: {envelope.sentence}") if kind is None else kind(envelope.sentence)


def send_array(stream: BinaryIO, array: Array) -> None:
    """Write an array of numbers, as two parts."""
    framing.write(stream, json.dumps([array.dtype.str, array.shape]).encode())
    framing.write(stream, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def receive_array(stream: BinaryIO) -> Array:
    """Return the array that `send_array` wrote. Raises CodecError for anything else, before it takes memory for it."""
    dtype, shape = _about_array(stream)
    size, length = math.prod(shape) * dtype.itemsize, framing.read_length(stream)
    if length != size or size > framing.LIMIT:
        raise CodecError(f"expected an array of {size} bytes of numbers, and at most {framing.LIMIT}; got {length}")
    array: Array = np.empty(shape, dtype)
    framing.fill(stream, array.reshape(-1).view(np.uint8).data)
    return array


def _about_array(stream: BinaryIO) -> tuple[np.dtype[Any], list[int]]:
    try:
        name, shape = json.loads(framing.read(stream, ABOUT_ARRAY) or b"")
        dtype = np.dtype(name)
    except (ValueError, TypeError, SyntaxError, RecursionError) as error:
        raise CodecError(f"expected an array's dtype and shape: {error}") from None
    whole = isinstance(shape, list) and all(type(one) is int and one >= 0 for one in shape)
    if dtype.kind not in "biuf" or not whole or len(shape) > DIMENSIONS:
        raise CodecError(f"expected an array of numbers in at most {DIMENSIONS} dimensions, got {name!r:.40}")
    return dtype, shape
