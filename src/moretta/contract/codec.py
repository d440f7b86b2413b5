"""Messages to bytes and back: safetensors, a closed schema, and one error.

A message is a safetensors file whose only metadata entry, ``moretta``, is a JSON object::

    {"format": 3, "type": "fedsgd/train-on", "run": "...", "round": 3, "attempt": 0, "take": 0, "fields": {...}}

``fields`` holds the plain fields; arrays are the tensors, a field `x` as ``x`` and an entry `k` of a mapping `x` as
``x/k``. Class names never travel, nothing is ever unpickled, and what is not in the schema is an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from moretta.contract import framing
from moretta.contract.messages import Array, Message, Stamp, Tensors
from moretta.errors import CodecError, PeerError

FORMAT = 3  # 1 had no take, 2 had shares of self-masks by name

# What a peer's bytes may be, all looked at before anything is made of them. JSON takes up to 64 bytes of memory for two
# of text ("[]"), so its length alone bounds little: each of its values follows one of four marks, which are counted.
# A header of 4 MiB takes at most 4 bytes a character as text, as an entry's text and as that entry's own texts, 48 MiB,
# and 200,000 values up to 232 bytes each (a dict of one entry has three marks), 16 MiB: under 64 MiB in all.
LARGEST = framing.LIMIT  # bytes of a message, unless who receives it says otherwise
HEADER_LIMIT = 4 << 20  # bytes of safetensors header: 10,000 tensors of four dimensions fit, or 10,000 silos' keys
ENTRIES_LIMIT = 200_000
MARKS = b",:[{"

_DTYPE_CODES = {
    np.dtype(name): code
    for name, code in {
        "bool": "BOOL", "uint8": "U8", "int32": "I32", "int64": "I64", "uint32": "U32", "uint64": "U64",
        "float16": "F16", "float32": "F32", "float64": "F64",
    }.items()
}  # fmt: skip

_DTYPES = {code: dtype.newbyteorder("<") for dtype, code in _DTYPE_CODES.items()}

# The order in which safetensors lays arrays out, before their names: by itemsize, then by its own list of dtypes.
_LAID_OUT = ("U64", "I64", "F64", "F32", "U32", "I32", "F16", "U8", "BOOL")

# How plain values travel in JSON, where JSON has no such kind.
_TO_JSON: Mapping[Any, Callable[[Any], Any]] = {
    bytes: bytes.hex,
    tuple[str, ...]: list,
    Mapping[str, bytes]: lambda value: {name: item.hex() for name, item in value.items()},
    Mapping[str, int]: dict,
    Mapping[str, float]: dict,
    Mapping[str, str]: dict,
}
_FROM_JSON: Mapping[Any, Callable[[Any], Any]] = {
    bytes: bytes.fromhex,
    tuple[str, ...]: lambda value: tuple(value) if isinstance(value, list) else value,  # text is no list of letters
    Mapping[str, bytes]: lambda value: {name: bytes.fromhex(item) for name, item in value.items()},
}


NOTHING: Mapping[str, Any] = {}


class Codec:
    """Encode and decode the messages of one schema, a closed list of message classes.

    largest: the most bytes of a message that is decoded; a longer one is refused before it is looked into.
    """

    def __init__(self, schema: Iterable[type[Message]], largest: int = LARGEST) -> None:
        self._largest = largest
        self._schema = {kind.TAG: kind for kind in schema}

    @property
    def kinds(self) -> Mapping[str, type[Message]]:
        """The message classes of the schema, by tag."""
        return self._schema

    def encode(self, message: Message) -> bytes:
        """Return the bytes of a message; equal messages give equal bytes."""
        return b"".join(self.parts(message))

    def parts(self, message: Message) -> Sequence[bytes | memoryview]:
        """Return the same in parts: a header, and each array's own memory where that lies as it is written."""
        return file_parts(_arrays(message), _metadata(message))

    def decode(self, data: bytes | bytearray | memoryview) -> Message:
        """Return the message that the bytes hold. Raises only `moretta.errors.CodecError`, whatever the bytes.

        Of a memoryview, arrays are parts of that memory, read-only: so a large message may lie in a mapped file. Of a
        bytearray they are parts of it too, and may be written to.
        """
        try:
            if len(data) > self._largest:
                raise CodecError(f"expected a message of at most {self._largest} bytes; got {len(data)}")
            metadata, arrays = _open(data)
            return self._build(metadata, arrays)
        except CodecError:
            raise
        except (
            PeerError,
            SafetensorError,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            RecursionError,
        ) as error:
            raise CodecError(f"expected a message of this schema: {error}") from None

    def _build(self, metadata: dict[str, Any], arrays: dict[str, Array]) -> Message:
        version = metadata.get("format")  # first: another format has other entries
        if type(version) is not int or version != FORMAT:
            raise CodecError(f"expected wire format {FORMAT}; got {version!r:.40}; update the older side")
        expected = {"format", "type", "run", "round", "attempt", "take", "fields"}
        if set(metadata) != expected:
            raise CodecError(f"expected the header entries {sorted(expected)}; got {sorted(metadata)!r:.200}")
        kind = self._schema.get(metadata["type"])
        if kind is None:
            raise CodecError(f"expected one of {sorted(self._schema)}; got {metadata['type']!r:.80}")
        stamp = Stamp(metadata["run"], metadata["round"], metadata["attempt"], metadata["take"])
        plain = metadata["fields"]
        values: dict[str, Any] = {}
        for name, field in kind.KINDS.items():
            if field == Array:
                values[name] = arrays.pop(name)
            elif field == Tensors:
                keys = [key for key in arrays if key.startswith(f"{name}/")]
                values[name] = {key[len(name) + 1 :]: arrays.pop(key) for key in keys}
            else:
                values[name] = _FROM_JSON.get(field, lambda value: value)(plain.pop(name))
        if plain or arrays:
            raise CodecError(f"{kind.TAG}: unexpected fields {sorted([*plain, *arrays])!r:.200}")
        return kind(stamp=stamp, **values)


def size(message: Message, without: Collection[str] = ()) -> int:
    """Return the length of the message's bytes without making them. without: plain fields that are not counted."""
    entries, _, content = _laid_out(_arrays(message))
    emptied = {name: _EMPTIED[kind] for name, kind in message.KINDS.items() if kind in _EMPTIED and name not in without}
    header = len(_header(_metadata(message, without, emptied), entries))
    for name in emptied:
        match getattr(message, name):
            case bytes() as octets:
                header += 2 * len(octets)
            case tuple() as names:
                header += _names_length(names)
            case items:
                header += _hex_length(tuple(items), tuple(map(len, items.values())))
    return 8 + -(-header // 8) * 8 + content


# What silos' names, keys and shares are in metadata without them: they come by the hundred, their lengths are known.
_EMPTIED: Mapping[Any, Any] = {bytes: "", tuple[str, ...]: [], Mapping[str, bytes]: {}}


@lru_cache(maxsize=4096)
def _hex_length(names: tuple[str, ...], lengths: tuple[int, ...]) -> int:
    """Return how much longer named bytes make the metadata than none."""
    items = {name: "0" * (2 * length) for name, length in zip(names, lengths, strict=True)}
    return len(json.dumps(json.dumps(items, separators=(",", ":")))) - len(json.dumps("{}"))


@lru_cache(maxsize=256)
def _names_length(names: tuple[str, ...]) -> int:
    """Return how much longer names make the metadata than none."""
    return len(json.dumps(json.dumps(names, separators=(",", ":")))) - len(json.dumps("[]"))


def file_parts(arrays: Tensors, metadata: str) -> Sequence[bytes | memoryview]:
    """Return a safetensors file of arrays in parts, its only metadata entry ``moretta``: see `Codec.parts`."""
    entries, names, _ = _laid_out(arrays)
    text = _header(metadata, entries)
    padded = text.ljust(-(-len(text) // 8) * 8)
    little = (np.ascontiguousarray(arrays[name], dtype=arrays[name].dtype.newbyteorder("<")) for name in names)
    return [
        len(padded).to_bytes(8, "little") + padded,
        *(array.reshape(-1).view(np.uint8).data for array in little if array.size),
    ]


def _header(metadata: str, entries: str) -> bytes:
    told = json.dumps({"moretta": metadata}, separators=(",", ":"), ensure_ascii=False)
    return f'{{"__metadata__":{told}{entries}}}'.encode()


def _laid_out(arrays: Tensors) -> tuple[str, Sequence[str], int]:
    """Return the arrays' entries of a header, their names in order, and how many bytes they take."""
    return _entries(tuple((name, array.dtype, array.shape) for name, array in arrays.items()))


@lru_cache(maxsize=256)
def _entries(arrays: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]) -> tuple[str, Sequence[str], int]:
    """Do what `_laid_out` does; a run has few kinds of messages.

    safetensors: 8 bytes of length, a JSON header padded to a multiple of 8, then the arrays. Their order matters: it
    decides the offsets, and so how many digits those take in the header.
    """
    entries: dict[str, Any] = {}
    offset = 0
    for name, dtype, shape in sorted(arrays, key=lambda one: (_LAID_OUT.index(_DTYPE_CODES[one[1]]), one[0])):
        length = math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _DTYPE_CODES[dtype], "shape": shape, "data_offsets": [offset, offset + length]}
        offset += length
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False)[1:-1]
    return f",{text}" if entries else "", tuple(entries), offset


def _arrays(message: Message) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    for name, kind in message.KINDS.items():
        value = getattr(message, name)
        if kind == Array:
            arrays[name] = value
        elif kind == Tensors:
            arrays.update((f"{name}/{key}", item) for key, item in value.items())
    return arrays


def _metadata(message: Message, without: Collection[str] = (), instead: Mapping[str, Any] = NOTHING) -> str:
    """Return the metadata as JSON. without: fields that are left out. instead: what stands in the place of others."""
    plain = {
        name: instead[name] if name in instead else _TO_JSON.get(kind, lambda value: value)(getattr(message, name))
        for name, kind in message.KINDS.items()
        if kind not in (Array, Tensors) and name not in without
    }
    stamp = message.stamp
    header = {
        "format": FORMAT, "type": message.TAG, "run": stamp.run, "round": stamp.round, "attempt": stamp.attempt,
        "take": stamp.take, "fields": plain,
    }  # fmt: skip
    return json.dumps(header, separators=(",", ":"), sort_keys=True, allow_nan=False)


def _open(data: bytes | bytearray | memoryview) -> tuple[dict[str, Any], dict[str, Array]]:
    """Read the metadata, which safetensors' own loader does not hand out, then the arrays."""
    place = framing.find(data, limit=HEADER_LIMIT, what="a header")
    text = bytes(data[place])
    entries = sum(text.count(mark) for mark in MARKS)
    if entries > ENTRIES_LIMIT:
        raise CodecError(f"expected a header of at most {ENTRIES_LIMIT} entries; got {entries}")
    outer = json.loads(text, parse_constant=_refuse_constant)
    metadata = json.loads(outer["__metadata__"]["moretta"], parse_constant=_refuse_constant)
    if set(outer["__metadata__"]) != {"moretta"} or not isinstance(metadata["fields"], dict):
        raise CodecError("expected one metadata entry, `moretta`, with an object of fields")
    known = set(_DTYPE_CODES.values())
    for name, entry in outer.items():
        if name != "__metadata__" and entry["dtype"] not in known:
            raise CodecError(f"expected arrays of {sorted(known)}; got {entry['dtype']!r:.20}")
    if isinstance(data, bytes):
        return metadata, load(data)
    del outer["__metadata__"]
    memory = memoryview(data)[place.stop :]
    return metadata, _views(outer, memory if isinstance(data, bytearray) else memory.toreadonly())


def _views(entries: dict[str, Any], memory: memoryview) -> dict[str, Array]:
    """Return the arrays as parts of the memory behind a header, which they fill one after the other."""
    arrays, end = dict[str, Array](), 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        (begin, stop), shape, dtype = entry["data_offsets"], entry["shape"], _DTYPES[entry["dtype"]]
        if type(shape) is not list or any(type(number) is not int or number < 0 for number in (begin, stop, *shape)):
            raise CodecError("expected whole numbers as shapes and offsets")
        if begin != end or stop - begin != math.prod(shape) * dtype.itemsize:
            raise CodecError("expected arrays that lie one after the other, each as long as its shape says")
        arrays[name], end = np.ndarray(shape, dtype, buffer=memory[begin:stop]), stop
    if end != len(memory):
        raise CodecError("expected arrays, and nothing behind them")
    return arrays


def _refuse_constant(text: str) -> float:
    raise CodecError(f"expected finite numbers; got {text}")
