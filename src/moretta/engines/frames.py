"""Values as the processes of one run pass them to each other: a header of JSON, and a body of bytes behind it.

A frame is both behind their lengths. The header says what is where, and the body has arrays and bytes one after the
other, each at a multiple of `ALIGNED`, so that no number goes through text and all answers of a process are one part.
Values are None, truth values, numbers, text, bytes, arrays, and mappings by text, tuples and lists of these; a message
is its tag, its stamp and its fields. Only processes that were forked from the same one read frames.

A process that was started anew may run what somebody else wrote, so named arrays travel to it and back as the codec
lays them out, behind their length: whatever the bytes, they are arrays or one error.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from moretta.contract import framing
from moretta.contract.codec import pack_arrays, unpack_arrays
from moretta.contract.framing import WIDTH
from moretta.contract.messages import Array, Message, Stamp
from moretta.errors import PeerError

ALIGNED = 16  # bytes; no number is longer
PLAIN = (str, int, float, bool, type(None))
LARGEST = 1 << 40  # bytes of arrays from a process that is trusted


class Frame(NamedTuple):
    """A value, packed. body: its parts, in order."""

    header: bytes
    body: list[bytes | memoryview]


def packed(value: Any) -> Frame:
    """Return a value as a frame. Raises TypeError for one of another kind."""
    body: list[bytes | memoryview] = []
    return Frame(json.dumps(_told(value, body), separators=(",", ":")).encode(), body)


def send(to: socket.socket, frame: Frame) -> None:
    """Send a frame. Raises OSError where the reader is gone."""
    data = b"".join(frame.body)
    to.sendall(len(frame.header).to_bytes(WIDTH, "little") + len(data).to_bytes(WIDTH, "little") + frame.header)
    to.sendall(data)


def receive(of: socket.socket) -> Any:
    """Return the next value. Raises EOFError where the writer is gone."""
    lengths = _read(of, 2 * WIDTH).tobytes()
    header = _read(of, int.from_bytes(lengths[:WIDTH], "little")).tobytes()
    body = _read(of, int.from_bytes(lengths[WIDTH:], "little"))
    return _Body(body).value(json.loads(header))


def fields_of(message: Message) -> dict[str, Any]:
    """Return a message as a value."""
    stamp = message.stamp
    fields = {name: getattr(message, name) for name in message.KINDS}
    return {"tag": message.TAG, "stamp": [stamp.run, stamp.round, stamp.attempt, stamp.take], "fields": fields}


def message_of(value: Mapping[str, Any], kinds: Mapping[str, type[Message]]) -> Message:
    """Return the message of what `fields_of` returned. kinds: by tag. Raises `moretta.errors.PeerError` as it does."""
    if value["tag"] not in kinds:
        raise PeerError(f"expected one of {sorted(kinds)}; got {value['tag']!r:.80}")
    return kinds[value["tag"]](stamp=Stamp(*value["stamp"]), **value["fields"])


def _told(value: Any, body: list[bytes | memoryview]) -> Any:
    """Return a value as JSON has it: any object is what stands for a value that JSON has not."""
    match value:
        case np.ndarray():
            _add(body, np.ascontiguousarray(value).data, value.nbytes)
            return {"array": [value.dtype.str, *value.shape]}
        case bytes():
            _add(body, value, len(value))
            return {"bytes": len(value)}
        case Mapping():
            names, values = list(value), list(value.values())
            if names and all(type(item) is bytes for item in values):  # many peers' shares are one part
                _add(body, whole := b"".join(values), len(whole))
                return {"names": names, "lengths": [len(item) for item in values]}
            if all(isinstance(item, np.ndarray) for item in values):
                return {"names": names, "arrays": [_told(item, body)["array"] for item in values]}
            return {"names": names, "values": _all_told(values, body)}
        case tuple():
            return {"tuple": _all_told(value, body)}
        case list():
            return _all_told(value, body)
    return value


def _all_told(values: Iterable[Any], body: list[bytes | memoryview]) -> list[Any]:
    return [item if type(item) in PLAIN else _told(item, body) for item in values]


@lru_cache
def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(name)


def _add(body: list[bytes | memoryview], part: bytes | memoryview, length: int) -> None:
    body.append(part)
    if length % ALIGNED:
        body.append(bytes(-length % ALIGNED))


def _read(of: socket.socket, length: int) -> Array:
    data: Array = np.empty(length, np.uint8)  # not zeroed first
    view, filled = data.data, 0
    while filled < length:
        more = of.recv_into(view[filled:], 0, socket.MSG_WAITALL)
        if not more:
            raise EOFError
        filled += more
    return data


class _Body:
    """Reads the parts of a body in the order in which they were added. Arrays are views of it."""

    def __init__(self, data: Array) -> None:
        self._data, self._position = data, 0

    def value(self, told: Any) -> Any:
        if type(told) is list:
            return self._values(told)
        if type(told) is not dict:
            return told
        if "values" in told:
            return dict(zip(told["names"], self._values(told["values"]), strict=True))
        if "arrays" in told:
            return dict(zip(told["names"], map(self._array, told["arrays"]), strict=True))
        if "array" in told:
            return self._array(told["array"])
        if "bytes" in told:
            return self._next(told["bytes"]).tobytes()
        if "tuple" in told:
            return tuple(self._values(told["tuple"]))
        return dict(zip(told["names"], self._pieces(told["lengths"]), strict=True))

    def _values(self, told: list[Any]) -> list[Any]:
        return [item if type(item) in PLAIN else self.value(item) for item in told]

    def _array(self, told: list[Any]) -> Array:
        name, *shape = told
        dtype = _dtype(name)
        return self._next(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)

    def _pieces(self, lengths: list[int]) -> list[bytes]:
        whole, start, pieces = self._next(sum(lengths)).tobytes(), 0, []
        for length in lengths:
            pieces.append(whole[start : start + length])
            start += length
        return pieces

    def _next(self, length: int) -> Array:
        start = self._position
        self._position += -(-length // ALIGNED) * ALIGNED
        return self._data[start : start + length]


def send_arrays(stream: BinaryIO, arrays: Mapping[str, Array]) -> None:
    """Write named arrays. Raises OSError where the reader is gone, and CodecError for arrays of no numbers."""
    framing.write(stream, *pack_arrays({name: np.asarray(one) for name, one in arrays.items()}))


def receive_arrays(stream: BinaryIO, largest: int = framing.LIMIT) -> dict[str, Array] | None:
    """Return the next arrays, or None at the end. Raises CodecError for anything else, or more bytes."""
    data = framing.read(stream, largest)
    return None if data is None else unpack_arrays(memoryview(data))
