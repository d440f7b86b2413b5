"""What passes between a silo's own process and who runs it, on the process's standard input and output.

A frame is 8 bytes of length, little-endian, and as many bytes: a message of the codec, or of an array what lies in its
memory. Nothing else is ever on standard output, and nothing secret is on the command line or in the environment.

    whoever runs it                                 the process
      BeSilo(settings, its state), x, y         -->   makes its role
      Restore(state)                            -->   takes it up
      any message of the protocol               -->   answers it
                                                <--   Envelope, and unless it tells of an error, Done or the answer

An array is two frames: dtype and shape as JSON, and its bytes, which are read where they are to stay.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np

from moretta import errors
from moretta.contract.messages import Array, Message, Stamp, message
from moretta.errors import CodecError, MorettaError

HERE = Stamp("edge", 0, 0)  # of messages that do not leave the machine
LENGTH = 8
LIMIT = 1 << 30  # bytes of a message, or of an array
ABOUT_ARRAY = 1 << 10  # bytes that say what an array is
DIMENSIONS = 32
SENTENCE = 10_000  # characters


@message("edge/be-silo")
class BeSilo(Message):
    """Be this silo: its settings (`moretta.protocols.baffle.edge.settings`) and its state; its rows come in frames of
    their own.

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
class Done(Message):
    """It is done."""


@message("edge/envelope")
class Envelope(Message):
    """What comes before an answer, and of which protocols know nothing.

    seconds: by phase. peak_mib: the most memory the process has had resident. state: the silo's, where it has changed.
    error: the class of what went wrong, of `moretta.errors` or any other, and its sentence; then no answer follows.
    """

    seconds: Mapping[str, float]
    peak_mib: float
    state: Mapping[str, bytes]
    error: str
    sentence: str


MESSAGES = (BeSilo, Restore, Done, Envelope)

_ERRORS = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, MorettaError)
}


def error_of(envelope: Envelope) -> Exception:
    """Return the error that an envelope tells of, of the same class if it is one of ours."""
    kind = _ERRORS.get(envelope.error)
    return RuntimeError(f"{envelope.error}: {envelope.sentence}") if kind is None else kind(envelope.sentence)


def send(stream: BinaryIO, data: bytes | memoryview) -> None:
    """Write a frame. Raises OSError where nobody reads."""
    stream.write(len(data).to_bytes(LENGTH, "little"))
    stream.write(data)
    stream.flush()


def receive(stream: BinaryIO, limit: int = LIMIT) -> bytes | None:
    """Return the bytes of the next frame, or None at the end. Raises CodecError for a long frame or half of one."""
    length = _length(stream)
    if length is None:
        return None
    if length > limit:
        raise CodecError(f"expected a frame of at most {limit} bytes, got {length}")
    data = stream.read(length)  # memory is asked for at once, and taken as bytes come
    if len(data) < length:
        raise CodecError(f"expected a frame of {length} bytes, got {len(data)}")
    return data


def send_array(stream: BinaryIO, array: Array) -> None:
    """Write an array of numbers, as two frames."""
    send(stream, json.dumps([array.dtype.str, array.shape]).encode())
    send(stream, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def receive_array(stream: BinaryIO) -> Array:
    """Return the array that `send_array` wrote. Raises CodecError for anything else, before it takes memory for it."""
    dtype, shape = _about_array(stream)
    size, length = math.prod(shape) * dtype.itemsize, _length(stream)
    if length != size or size > LIMIT:
        raise CodecError(f"expected an array of {size} bytes of numbers, and at most {LIMIT}; got {length}")
    array: Array = np.empty(shape, dtype)
    filled, view = 0, array.reshape(-1).view(np.uint8).data
    while filled < length:
        more = stream.readinto(view[filled:])  # type: ignore[attr-defined]  # every binary stream has it
        if not more:
            raise CodecError(f"expected an array of {length} bytes, got {filled}")
        filled += more
    return array


def _about_array(stream: BinaryIO) -> tuple[np.dtype[Any], list[int]]:
    try:
        name, shape = json.loads(receive(stream, ABOUT_ARRAY) or b"")
        dtype = np.dtype(name)
    except (ValueError, TypeError, SyntaxError, RecursionError) as error:
        raise CodecError(f"expected an array's dtype and shape: {error}") from None
    whole = isinstance(shape, list) and all(type(one) is int and one >= 0 for one in shape)
    if dtype.kind not in "biuf" or not whole or len(shape) > DIMENSIONS:
        raise CodecError(f"expected an array of numbers in at most {DIMENSIONS} dimensions, got {name!r:.40}")
    return dtype, shape


def _length(stream: BinaryIO) -> int | None:
    head = stream.read(LENGTH)
    if not head:
        return None
    if len(head) < LENGTH:
        raise CodecError(f"expected a frame's length of {LENGTH} bytes, got {len(head)}")
    return int.from_bytes(head, "little")
