"""As much of protobuf's encoding as it takes to look into an ONNX file and to put it together anew."""

from __future__ import annotations

from collections.abc import Iterator

from moretta.errors import ParameterError

FIXED = {1: 8, 5: 4}  # bytes of what wire types of one length take
TEXT = 2  # the wire type of bytes, strings and messages

Field = tuple[int, int, int, memoryview, memoryview]


def fields(data: memoryview) -> Iterator[Field]:
    """Yield a message's fields: number, wire type, value of a whole number, bytes of any other, and all its bytes.

    Raises ParameterError for bytes that are no message.
    """
    at = 0
    while at < len(data):
        start = at
        tag, at = _number(data, at)
        wire, value, part = tag & 7, 0, data[:0]
        if wire == 0:
            value, at = _number(data, at)
        else:
            length, at = _number(data, at) if wire == TEXT else (FIXED.get(wire, len(data) + 1), at)
            part, at = data[at : at + length], at + length
            if at > len(data):
                raise no_file()
        yield tag >> 3, wire, value, part, data[start:at]


def written(number: int, value: int | bytes) -> bytes:
    """Return a field: of a whole number, or of bytes."""
    if isinstance(value, int):
        return _octets(number << 3) + _octets(value)
    return head(number, len(value)) + value


def head(number: int, length: int) -> bytes:
    """Return what comes before so many bytes of a field."""
    return _octets(number << 3 | TEXT) + _octets(length)


def no_file() -> ParameterError:
    """Return the error of bytes that are no ONNX file."""
    return ParameterError("these bytes are no ONNX file; have the server export it again")


def _number(data: memoryview, at: int) -> tuple[int, int]:
    """Return the varint at a place, and the place after it."""
    value = shift = 0
    while at < len(data) and shift < 70:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at
    raise no_file()


def _octets(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])
