"""As much of protobuf's encoding as it takes to read an ONNX file and to write it anew.

Only the canonical encoding is read: numbers of the fewest bytes, tags within 32 bits, values within 64. Other readers
of protobuf cut longer ones off, each in its own way, and would see another field or value than this one.
"""

from __future__ import annotations

from collections.abc import Iterator

from moretta.errors import ParameterError

FIXED = {1: 8, 5: 4}  # bytes of what wire types of one length take
TEXT = 2  # the wire type of bytes, strings and messages
MOST = 1 << 31  # bytes of a field, beyond which protobuf reads none

Field = tuple[int, int, int, memoryview, memoryview]


def fields(data: memoryview) -> Iterator[Field]:
    """Yield a message's fields: number, wire type, value of a whole number, bytes of any other, and all its bytes.

    Raises ParameterError for bytes that are no message in canonical encoding.
    """
    at = 0
    while at < len(data):
        start = at
        tag, at = _number(data, at)
        wire, value, part = tag & 7, 0, data[:0]
        if not 8 <= tag < 1 << 32:
            raise no_file()
        if wire == 0:
            value, at = _number(data, at)
        else:
            length, at = _number(data, at) if wire == TEXT else (FIXED.get(wire, MOST), at)
            part, at = data[at : at + length], at + length
            if at > len(data) or length >= MOST:
                raise no_file()
        yield tag >> 3, wire, value, part, data[start:at]


def numbers(data: memoryview) -> Iterator[int]:
    """Yield the whole numbers of a packed field. Raises as `fields`."""
    at = 0
    while at < len(data):
        value, at = _number(data, at)
        yield value


def written(number: int, value: int | bytes) -> bytes:
    """Return a field: of a whole number, or of bytes."""
    if isinstance(value, int):
        return octets(number << 3) + octets(value)
    return head(number, len(value)) + value


def head(number: int, length: int, wire: int = TEXT) -> bytes:
    """Return what comes before so many bytes of a field. wire: `TEXT`, or one of `FIXED`, which has no length."""
    return octets(number << 3 | wire) + (octets(length) if wire == TEXT else b"")


def octets(value: int) -> bytes:
    """Return a whole number, 0 or more, as it is written."""
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def no_file() -> ParameterError:
    """Return the error of bytes that are no ONNX file."""
    return ParameterError("these bytes are no ONNX file; have the server export it again")


def _number(data: memoryview, at: int) -> tuple[int, int]:
    """Return the varint at a place, and the place after it."""
    value = shift = 0
    while at < len(data) and shift < 70:
        octet = data[at]
        value |= (octet & 127) << shift
        at, shift = at + 1, shift + 7
        if octet < 128:
            if value >> 64 or (not octet and shift > 7):
                break
            return value, at
    raise no_file()
