"""Frames between processes of this machine: named arrays, and other values around them.

Named arrays have the codec's layout, behind their length. Any bytes are read as arrays or as one error, so the process
may have run another party's code.

Processes forked from the same one also pass None, truth values, numbers, text, bytes, and mappings by text, tuples and
lists of these. A frame is a header of JSON, which locates everything, and the arrays, behind their lengths. So no array
is converted to text, and all answers of a process are one part. A message is its tag, its stamp and its fields.
"""

import json
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from moretta.contract import framing
from moretta.contract.codec import pack_arrays, unpack_arrays
from moretta.contract.framing import WIDTH
from moretta.contract.messages import Array, Message, Stamp
from moretta.errors import CodecError, PeerError

LARGEST = 1 << 40  # bytes of arrays from a process that is trusted
PLAIN = (str, int, float, bool, type(None))


def send_arrays(stream: BinaryIO, arrays: Mapping[str, Array]) -> None:
    """Write named arrays. Raises OSError if the reader is gone, and CodecError for arrays that are not numeric."""
    framing.write(stream, *pack_arrays({name: np.asarray(array) for name, array in arrays.items()}))


def receive_arrays(stream: BinaryIO, largest: int = framing.LIMIT) -> dict[str, Array] | None:
    """Return the next arrays, read-only, or None at the end. Raises CodecError for anything else, or more bytes."""
    data = framing.read(stream, largest)
    return None if data is None else unpack_arrays(memoryview(data))


class Frame(NamedTuple):
    """A value, packed. body: its arrays, in parts."""

    header: bytes
    body: Sequence[bytes | memoryview]


def packed(value: Any) -> Frame:
    """Return a value as a frame. Raises TypeError for one of another kind."""
    arrays: dict[str, Array] = {}
    header = json.dumps(_as_json(value, arrays), separators=(",", ":")).encode()
    try:
        return Frame(header, pack_arrays(arrays))
    except CodecError as error:
        raise TypeError(str(error)) from None


def send(to: socket.socket, frame: Frame) -> None:
    """Send a frame. Raises OSError if the reader is gone."""
    data = b"".join(frame.body)
    to.sendall(len(frame.header).to_bytes(WIDTH, "little") + len(data).to_bytes(WIDTH, "little") + frame.header)
    to.sendall(data)


def receive(of: socket.socket) -> Any:
    """Return the next value. Raises EOFError if the writer is gone."""
    lengths = _read(of, 2 * WIDTH).tobytes()
    header = _read(of, int.from_bytes(lengths[:WIDTH], "little")).tobytes()
    body = _read(of, int.from_bytes(lengths[WIDTH:], "little"))
    return _value(json.loads(header), unpack_arrays(body.data, trusted=True))


def fields_of(message: Message) -> dict[str, Any]:
    """Return a message as a value."""
    stamp = message.stamp
    fields = {name: getattr(message, name) for name in message.KINDS}
    return {"tag": message.TAG, "stamp": [stamp.run, stamp.round, stamp.attempt, stamp.take], "fields": fields}


def message_of(value: Mapping[str, Any], kinds: Mapping[str, type[Message]]) -> Message:
    """Undo `fields_of`.

    Args:
        kinds: The classes of messages, by tag.

    Raises:
        PeerError: The tag is unknown, or the message's class refuses the fields.
    """
    if value["tag"] not in kinds:
        raise PeerError(f"expected one of {sorted(kinds)}; got {value['tag']!r:.80}")
    return kinds[value["tag"]](stamp=Stamp(*value["stamp"]), **value["fields"])


def _as_json(value: Any, arrays: dict[str, Array]) -> Any:
    """Return a value as JSON, with objects for values that JSON lacks."""
    match value:
        case np.ndarray():
            return {"array": _add(arrays, value)}
        case bytes():
            return {"bytes": _add(arrays, np.frombuffer(value, np.uint8))}
        case Mapping():
            names, values = list(value), list(value.values())
            if names and all(type(item) is bytes for item in values):  # joined, because peers' shares are many
                whole = np.frombuffer(b"".join(values), np.uint8)
                return {"names": names, "lengths": [len(item) for item in values], "bytes": _add(arrays, whole)}
            return {"names": names, "values": _all_as_json(values, arrays)}
        case tuple():
            return {"tuple": _all_as_json(value, arrays)}
        case list():
            return _all_as_json(value, arrays)
    return value


def _all_as_json(values: Iterable[Any], arrays: dict[str, Array]) -> list[Any]:
    return [item if type(item) in PLAIN else _as_json(item, arrays) for item in values]


def _add(arrays: dict[str, Array], value: Array) -> str:
    arrays[name := str(len(arrays))] = value
    return name


def _read(of: socket.socket, length: int) -> Array:
    data: Array = np.empty(length, np.uint8)  # `empty` saves filling with zeros
    view, filled = data.data, 0
    while filled < length:
        more = of.recv_into(view[filled:], 0, socket.MSG_WAITALL)
        if not more:
            raise EOFError
        filled += more
    return data


def _value(packed_value: Any, arrays: Mapping[str, Array]) -> Any:
    """Undo `_as_json`. Arrays are parts of the received frame."""
    match packed_value:
        case list():
            return [item if type(item) in PLAIN else _value(item, arrays) for item in packed_value]
        case {"names": names, "values": values}:
            return dict(zip(names, _value(values, arrays), strict=True))
        case {"names": names, "lengths": lengths, "bytes": name}:
            whole, start, pieces = arrays[name].tobytes(), 0, []
            for length in lengths:
                pieces.append(whole[start : start + length])
                start += length
            return dict(zip(names, pieces, strict=True))
        case {"array": name}:
            return arrays[name]
        case {"bytes": name}:
            return arrays[name].tobytes()
        case {"tuple": values}:
            return tuple(_value(values, arrays))
    return packed_value
