"""What passes between a process of `moretta.edge` and who runs it, on the process's standard input and output.

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
from collections.abc import Mapping
from typing import BinaryIO

import numpy as np

from moretta import errors
from moretta.errors import CodecError, MorettaError
from moretta.protocol import Array, Message, Stamp, message

HERE = Stamp("edge", 0, 0)  # of messages that do not leave the machine
LENGTH = 8
LIMIT = 1 << 30  # bytes of a message
SENTENCE = 10_000  # characters


@message("edge/be-silo")
class BeSilo(Message):
    """Be this silo: its settings (`moretta.edge.settings`) and its state; its rows come in frames of their own.

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


def receive(stream: BinaryIO) -> bytes | None:
    """Return the bytes of the next frame, or None at the end. Raises CodecError for a long frame or half of one."""
    length = _length(stream)
    if length is None:
        return None
    if length > LIMIT:
        raise CodecError(f"expected a frame of at most {LIMIT} bytes, got {length}")
    data = stream.read(length)
    if len(data) < length:
        raise CodecError(f"expected a frame of {length} bytes, got {len(data)}")
    return data


def send_array(stream: BinaryIO, array: Array) -> None:
    """Write an array of numbers, as two frames."""
    send(stream, json.dumps([array.dtype.str, array.shape]).encode())
    send(stream, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def receive_array(stream: BinaryIO) -> Array:
    """Return the array that `send_array` wrote. Raises CodecError for anything else."""
    try:
        dtype, shape = json.loads(receive(stream) or b"")
        array: Array = np.empty(shape, np.dtype(dtype))
        octets = array.reshape(-1).view(np.uint8)
    except (ValueError, TypeError) as error:
        raise CodecError(f"expected an array's dtype and shape: {error}") from None
    length = _length(stream)
    if array.dtype.kind not in "biuf" or length != octets.size:
        raise CodecError(f"expected an array of {octets.size} bytes of numbers, got {length} of {array.dtype}")
    filled, view = 0, octets.data
    while filled < length:
        more = stream.readinto(view[filled:])  # type: ignore[attr-defined]  # every binary stream has it
        if not more:
            raise CodecError(f"expected an array of {length} bytes, got {filled}")
        filled += more
    return array


def _length(stream: BinaryIO) -> int | None:
    head = stream.read(LENGTH)
    if not head:
        return None
    if len(head) < LENGTH:
        raise CodecError(f"expected a frame's length of {LENGTH} bytes, got {len(head)}")
    return int.from_bytes(head, "little")
