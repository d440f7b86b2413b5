"""Messages to bytes and back: a short header of JSON, a closed schema, and one error.

A message is the length of its header (4 bytes, little-endian), the header, and the content behind it::

    [3, "kA3x9_", "run", 3, 0, 0, {"weight": ["f4", 3, 2], "bias": ["f4", 3]}, 32, {"anna": 48}, 0.5]

The entries are the format, the message's type, its stamp (run, round, attempt, take), and its fields in the order of
their declaration. For an array the header has dtype and shape, for bytes their length. Their content follows the header
in the same order. An array begins at a multiple of 8 bytes of the message, after a padding of zeros.

A type is the beginning of a digest of tag, fields and kinds (`type_of`), because fields' names do not travel. A reader
that declares the message differently therefore does not know its type. Class names never travel, nothing is unpickled,
and anything outside the schema is an error.
"""

import base64
import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from moretta.contract import framing
from moretta.contract.messages import Array, Message, Stamp, Tensors
from moretta.errors import CodecError, PeerError

FORMAT = 3  # 1 had no take; 1 and 2 were files of safetensors, with digests in hex and shares of self-masks by name

# Limits on a peer's bytes, checked before anything is built from them. JSON takes up to 64 bytes of memory for two
# bytes of text ("[]"), so a limit on length is not enough. Each value follows one of four marks, which are counted.
# A header of 4 MiB takes at most 48 MiB as text: 4 bytes a character, as a whole, as an entry and as the entry's texts.
# 200,000 values of up to 232 bytes (a dict of one entry has three marks) take 16 MiB. All stays below 64 MiB.
LARGEST = framing.LIMIT  # bytes of a message, unless its receiver sets another limit
HEADER_LIMIT = 4 << 20  # bytes: 10,000 tensors of four dimensions fit, or 10,000 silos' keys
LENGTH = 4  # bytes of the header's length
ALIGNED = 8  # bytes; an array's position is a multiple of it
DIMENSIONS = 64  # of an array; a product of 100,000 large numbers would take minutes
ENTRIES_LIMIT = 200_000
MARKS = b",:[{"
STAMPED = 6  # entries of a header before its fields

_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
Write = Callable[[Any, "list[bytes | Array]"], str]
"""Returns a field's entry in the header, and appends its content for behind the header."""
Read = Callable[[Any, "_Behind"], Any]
"""Returns a field's value, from its entry and the content behind the header."""
Plan = tuple[str, Sequence[tuple[str, Write, Read]]]
_PLANS: dict[type[Message], Plan] = {}  # of the messages encoded or decoded so far

# Dtypes' names in a header, in the order of the arrays of one field. No message has i2, u2 or i1, but rows may.
_NAMES = {np.dtype(name): name for name in ("u8", "i8", "f8", "f4", "u4", "i4", "f2", "i2", "u2", "u1", "i1", "b1")}
_DTYPES = {name: dtype.newbyteorder("<") for dtype, name in _NAMES.items()}
_RANKS = {dtype: rank for rank, dtype in enumerate(_NAMES)}  # by itemsize: a message's arrays then need little padding


class Codec:
    """Encode and decode the messages of one schema. largest: the most bytes; a longer message is refused unparsed."""

    def __init__(self, schema: Iterable[type[Message]], largest: int = LARGEST) -> None:
        self._largest = largest
        self.kinds: Mapping[str, type[Message]] = {kind.TAG: kind for kind in schema}
        self._types = {type_of(kind): kind for kind in self.kinds.values()}

    def encode(self, message: Message) -> bytes:
        """Return the bytes of a message; equal messages give equal bytes."""
        return b"".join(self.parts(message))

    def parts(self, message: Message) -> Sequence[bytes | memoryview]:
        """Return the same bytes in parts: a header, and each array's own memory if its layout is the written one."""
        return _laid_out(*_described(message))

    def decode(self, data: bytes | bytearray | memoryview) -> Message:
        """Return the message that the bytes hold.

        Arrays of a memoryview are read-only parts of its memory, so a large message may lie in a mapped file. Arrays of
        a bytearray are writable parts of it.

        Raises:
            CodecError: The bytes are not a message of the schema; no other error is raised.
        """
        with _one_error("a message of this schema"):
            if len(data) > self._largest:
                raise CodecError(f"expected a message of at most {self._largest} bytes; got {len(data)}")
            place = framing.find(data, limit=HEADER_LIMIT, width=LENGTH, what="a header")
            header = _header_of(bytes(data[place]))
            memory = data.toreadonly() if isinstance(data, memoryview) else memoryview(bytearray(data))
            memory = memoryview(data) if isinstance(data, bytearray) else memory
            return self._build(header, _Behind(memory, place.stop))

    def _build(self, header: list[Any], behind: "_Behind") -> Message:
        _, name, run, number, attempt, take, *entries = header
        kind = self._types.get(name)
        if kind is None:
            raise CodecError(f"expected one of {sorted(self.kinds)}, as declared here; got the type {name!r:.80}")
        _, fields = _plan(kind)
        if len(entries) != len(fields):
            raise CodecError(f"{kind.TAG}: expected {len(fields)} fields; got {len(entries)}")
        values = {name: read(entry, behind) for (name, _, read), entry in zip(fields, entries, strict=True)}
        behind.end()
        return kind(stamp=Stamp(run, number, attempt, take), **values)


def pack_arrays(arrays: Tensors) -> Sequence[bytes | memoryview]:
    """Return named arrays in parts, in a message's layout, for another process of this machine.

    Their numbers may be any, NaN too.

    Raises:
        CodecError: An array has a dtype that no message has.
    """
    kinds = tuple((name, array.dtype, array.shape) for name, array in arrays.items())
    try:  # without the cache, which is for the few kinds of messages
        text, names = _arrays_entry.__wrapped__(kinds)
        return _laid_out(text.encode(), [arrays[name] for name in names])
    except KeyError as error:
        raise CodecError(f"expected arrays of {sorted(_DTYPES)}; got {error.args[0]}") from None


def unpack_arrays(data: memoryview, *, trusted: bool = False) -> dict[str, Array]:
    """Return the arrays of `pack_arrays`, as parts of its memory.

    Args:
        trusted: Whether the process is one of ours and may pass any number of arrays; a worker's frame has all its
            silos'.

    Raises:
        CodecError: The bytes are not named arrays; no other error is raised.
    """
    with _one_error("named arrays"):
        limit = len(data) if trusted else HEADER_LIMIT
        place = framing.find(data, limit=limit, width=LENGTH, what="a header")
        behind, header = _Behind(data, place.stop), bytes(data[place])
        arrays = dict(_read_arrays(json.loads(header if trusted else _few_entries(header)), behind))
        behind.end()
        return arrays


@contextmanager
def _one_error(expected: str) -> Iterator[None]:
    try:
        yield
    except CodecError:
        raise
    except (PeerError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        # The text may contain a peer's names, and may reach a terminal or a log.
        why = "".join(character if character.isprintable() else " " for character in str(error))
        raise CodecError(f"expected {expected}: {why}") from None


def size(message: Message, without: Collection[str] = ()) -> int:
    """Return the length of the message's bytes without encoding them. without: fields to omit from the count."""
    header, behind = _described(message, without)
    at = LENGTH + len(header)
    for part in behind:
        at += -at % ALIGNED + part.nbytes if isinstance(part, np.ndarray) else len(part)
    return at


def type_of(kind: type[Message]) -> str:
    """Return a message's type in headers: 6 characters of a digest of its tag, its fields and their kinds."""
    return _plan(kind)[0]


def _plan(kind: type[Message]) -> Plan:
    """Return a message's type, and the functions that write and read each of its fields."""
    if kind not in _PLANS:
        fields = [[name, _KINDS[field_kind][0]] for name, field_kind in kind.KINDS.items()]
        digest = hashlib.sha256(_json([kind.TAG, *fields]).encode()).digest()
        steps = [(name, *_KINDS[field_kind][1:]) for name, field_kind in kind.KINDS.items()]
        _PLANS[kind] = base64.urlsafe_b64encode(digest).decode()[:6], steps
    return _PLANS[kind]


# Writing


def _laid_out(header: bytes, behind: Sequence[bytes | Array]) -> Sequence[bytes | memoryview]:
    """Return a header and the content behind it, in parts."""
    pieces: list[bytes | memoryview] = [framing.length_of(header, LENGTH) + header]
    at = len(pieces[0])
    for part in behind:
        if isinstance(part, np.ndarray):
            pieces += [bytes(-at % ALIGNED), _memory(part)]
            at += -at % ALIGNED + part.nbytes
        else:
            pieces.append(part)
            at += len(part)
    return pieces


def _described(message: Message, without: Collection[str] = ()) -> tuple[bytes, list[bytes | Array]]:
    """Return a message's header, and the bytes and arrays for behind it. without: fields to omit."""
    stamp, behind = message.stamp, list[bytes | Array]()
    name, fields = _plan(type(message))
    texts = [_beginning(name, stamp.run), f"{stamp.round},{stamp.attempt},{stamp.take}"]
    for name, write, _ in fields:
        if name not in without:
            texts.append(write(getattr(message, name), behind))
    return f"[{','.join(texts)}]".encode(), behind


@lru_cache(maxsize=256)
def _beginning(name: str, run: str) -> str:
    return f"{FORMAT},{_json(name)},{_json(run)}"


def _write_array(value: Array, behind: list[bytes | Array]) -> str:
    behind.append(value)
    return _array_entry(value.dtype, value.shape)


@lru_cache(maxsize=1024)
def _array_entry(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    return _json([_NAMES[dtype], *shape])


def _write_arrays(value: Tensors, behind: list[bytes | Array]) -> str:
    text, names = _arrays_entry(tuple((name, array.dtype, array.shape) for name, array in value.items()))
    behind += [value[name] for name in names]
    return text


@lru_cache(maxsize=256)
def _arrays_entry(arrays: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]) -> tuple[str, Sequence[str]]:
    """Return the entry of named arrays, and their names in its order; a run has few kinds of messages."""
    ordered = sorted(arrays, key=lambda array: (_RANKS[array[1]], array[0]))
    return _json({name: [_NAMES[dtype], *shape] for name, dtype, shape in ordered}), [array[0] for array in ordered]


def _write_bytes(value: bytes, behind: list[bytes | Array]) -> str:
    behind.append(value)
    return str(len(value))


def _write_several(value: Mapping[str, bytes], behind: list[bytes | Array]) -> str:
    text, names = _lengths_entry(tuple(value), tuple(map(len, value.values())))
    behind += [value[name] for name in names]
    return text


@lru_cache(maxsize=512)
def _lengths_entry(names: tuple[str, ...], lengths: tuple[int, ...]) -> tuple[str, Sequence[str]]:
    """Return the entry of named bytes, and their names in its order; silos' keys and shares come by the hundred."""
    ordered = dict(sorted(zip(names, lengths, strict=True)))
    return _json(ordered), list(ordered)


def _write_named(value: Mapping[str, Any], behind: list[bytes | Array]) -> str:
    return _json(dict(sorted(value.items())))


def _write_plain(value: Any, behind: list[bytes | Array]) -> str:
    return _json(value)


def _memory(array: Array) -> memoryview:
    """Return an array's bytes, little-endian and in the order of its indices; copied only from another layout."""
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return little.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


# Reading


class _Behind:
    """The content behind a header, read once from beginning to end. at: its position in the message's memory."""

    def __init__(self, memory: memoryview, at: int) -> None:
        self._memory, self._at = memory, at

    def octets(self, length: object) -> bytes:
        """Return this many bytes."""
        if type(length) is not int or not 0 <= length <= len(self._memory) - self._at:
            raise CodecError("expected as many bytes after the header as it declares")
        self._at += length
        return bytes(self._memory[self._at - length : self._at])

    def array(self, entry: object) -> Array:
        """Return the array that an entry of the header describes, as a part of the memory."""
        if type(entry) is not list or not 1 <= len(entry) <= 1 + DIMENSIONS or not all(map(_is_length, entry[1:])):
            raise CodecError(f"expected an array's dtype, and its shape: up to {DIMENSIONS} whole numbers of 63 bits")
        name, *shape = entry
        if name not in _DTYPES:
            raise CodecError(f"expected arrays of {sorted(_DTYPES)}; got {name!r:.20}")
        if self.octets(-self._at % ALIGNED).strip(b"\0"):
            raise CodecError("expected zeros before an array")
        begin, dtype = self._at, _DTYPES[name]
        self._at += math.prod(shape) * dtype.itemsize
        if self._at > len(self._memory):
            raise CodecError("expected arrays of the length that their shapes require")
        array: Array = np.ndarray(shape, dtype, buffer=self._memory[begin : self._at])
        if name == "b1" and array.view(np.uint8).max(initial=0) > 1:  # numpy's functions disagree on other values
            raise CodecError("expected flags of 0 or 1")
        return array if dtype.isnative else array.astype(dtype.newbyteorder("="))

    def end(self) -> None:
        """Raise CodecError if content is left."""
        if self._at != len(self._memory):
            raise CodecError("expected no bytes after the last field")


def _is_length(number: object) -> bool:
    return type(number) is int and 0 <= number < 2**63


def _header_of(text: bytes) -> list[Any]:
    try:
        header = json.loads(_few_entries(text).decode(), parse_constant=_refuse_constant)
    except ValueError as error:
        raise CodecError(f"expected a header of wire format {FORMAT}: {error}; update the older side") from None
    version = header[0] if isinstance(header, list) and header else None  # first: another format has other entries
    if type(version) is not int or version != FORMAT:
        raise CodecError(f"expected wire format {FORMAT}; got {version!r:.40}; update the older side")
    if len(header) < STAMPED:
        raise CodecError(f"expected a header of at least {STAMPED} entries; got {len(header)}")
    return list(header)


def _few_entries(text: bytes) -> bytes:
    """Return a header. Raises CodecError if its JSON could take much memory."""
    entries = sum(text.count(mark) for mark in MARKS)
    if entries > ENTRIES_LIMIT:
        raise CodecError(f"expected a header of at most {ENTRIES_LIMIT} entries; got {entries}")
    return text


def _refuse_constant(text: str) -> float:
    raise CodecError(f"expected finite numbers; got {text}")


def _read_arrays(entry: Any, behind: _Behind) -> Tensors:
    return {name: behind.array(form) for name, form in entry.items()}


def _read_several(entry: Any, behind: _Behind) -> Mapping[str, bytes]:
    return {name: behind.octets(length) for name, length in entry.items()}


def _read_plain(entry: Any, behind: _Behind) -> Any:
    return entry


# Each kind of field: its name in a type's digest, the function that writes it, and the one that reads it.
_KINDS: Mapping[Any, tuple[str, Write, Read]] = {
    Array: ("array", _write_array, lambda entry, behind: behind.array(entry)),
    Tensors: ("arrays", _write_arrays, _read_arrays),
    int: ("integer", _write_plain, _read_plain),
    float: ("number", _write_plain, _read_plain),
    bool: ("flag", _write_plain, _read_plain),
    str: ("text", _write_plain, _read_plain),
    bytes: ("bytes", _write_bytes, lambda entry, behind: behind.octets(entry)),
    # A text must not pass as a list of its letters.
    tuple[str, ...]: ("names", _write_plain, lambda entry, _: tuple(entry) if isinstance(entry, list) else entry),
    Mapping[str, int]: ("integers", _write_named, _read_plain),
    Mapping[str, float]: ("numbers", _write_named, _read_plain),
    Mapping[str, str]: ("texts", _write_named, _read_plain),
    Mapping[str, bytes]: ("several bytes", _write_several, _read_several),
}
