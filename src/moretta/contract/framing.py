"""Parts of bytes, each behind its length: the common framing of files, envelopes and pipes.

A length is little-endian, and has 8 bytes unless a format sets another width. It is compared with a limit and with the
present bytes before any memory is allocated for it.
"""

from typing import BinaryIO

from moretta.errors import CodecError

WIDTH = 8  # bytes of a length
LIMIT = 1 << 30  # bytes of a part, unless its reader sets another limit


def framed(*parts: bytes) -> bytes:
    """Return the parts joined, each behind its length."""
    return b"".join(piece for part in parts for piece in (length_of(part), part))


def length_of(part: bytes | memoryview, width: int = WIDTH) -> bytes:
    """Return the length of a part, in the form that precedes the part."""
    return len(part).to_bytes(width, "little")


def find(
    data: bytes | bytearray | memoryview,
    start: int = 0,
    *,
    limit: int = LIMIT,
    width: int = WIDTH,
    gap: int = 0,
    what: str = "a part",
) -> slice:
    """Return the slice of `data` with the part whose length is at `start`.

    Args:
        limit: The most bytes of the part.
        width: Bytes of the length.
        gap: Bytes between the length and the part.
        what: The part's name, for an error.

    Raises:
        CodecError: The part is longer than `limit`, or than the rest of `data`.
    """
    begin = start + width + gap
    length = int.from_bytes(data[start : start + width], "little")
    if length > min(limit, len(data) - begin):
        raise CodecError(f"expected {what} of at most {limit} bytes within {len(data)}; got {length}")
    return slice(begin, begin + length)


def write(stream: BinaryIO, *pieces: bytes | memoryview) -> None:
    """Write a part, whole or in pieces, behind its length. Raises OSError if the reader is gone."""
    stream.write(sum(map(len, pieces)).to_bytes(WIDTH, "little"))
    for piece in pieces:
        stream.write(piece)
    stream.flush()


def read(stream: BinaryIO, limit: int = LIMIT) -> bytes | None:
    """Return the next part, or None at the end. Raises CodecError for one that is too long or cut short."""
    head = stream.read(WIDTH)
    if not head:
        return None
    if len(head) < WIDTH:
        raise CodecError(f"expected a frame's length of {WIDTH} bytes, got {len(head)}")
    length = int.from_bytes(head, "little")
    if length > limit:
        raise CodecError(f"expected a frame of at most {limit} bytes, got {length}")
    data = stream.read(length)  # reserves the memory now; the system provides it as bytes arrive
    if len(data) < length:
        raise CodecError(f"expected a frame of {length} bytes, got {len(data)}")
    return data
