"""Which message some bytes begin with: headers have a digest of its kind in the place of its tag."""

from __future__ import annotations

import re
from collections.abc import Iterator

from moretta.contract.codec import Codec, type_of
from moretta.contract.messages import Array, Message, Tensors
from moretta.protocols.registry import ENTRIES

HEADER = re.compile(rb'\[3,"([\w-]{6})","[^"]*",(\d+),')


def tag_of(data: bytes) -> str:
    """Return the tag of the first message in bytes, empty where there is none."""
    return next((tag for tag, _ in messages_in(data)), "")


def arrays_of(data: bytes) -> bytes:
    """Return the arrays of a message's bytes, one behind the other."""
    assert all(entry.own_messages() for entry in ENTRIES.values())
    message, found = Codec(Message.__subclasses__()).decode(data), list[bytes]()
    for name, kind in message.KINDS.items():
        value = getattr(message, name)
        if kind == Array:
            found.append(value.tobytes())
        elif kind == Tensors:
            found += [value[key].tobytes() for key in sorted(value)]
    return b"".join(found)


def messages_in(data: bytes) -> Iterator[tuple[str, int]]:
    """Yield tag and round of each message in bytes."""
    assert all(entry.own_messages() for entry in ENTRIES.values())  # which imports all protocols there are
    tags = {type_of(kind).encode(): kind.TAG for kind in Message.__subclasses__()}
    for found in HEADER.finditer(data):
        if found[1] in tags:
            yield tags[found[1]], int(found[2])
