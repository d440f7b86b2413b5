"""What a door is: a function that takes bytes of somebody else, with one error.

A door returns, or raises its own kind of error. Anything else is a find: another exception, a crash, more time or
memory than `fuzz` allows. Seeds are what the door takes, made by the code that writes it.
Where bytes are compressed, counted or signed, the door does that itself, so that a change of one byte gets past it.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from moretta.contract import framing
from moretta.errors import MorettaError

ROOT = Path(__file__).parents[2]
BETWEEN = b"\n\x00\n"  # the parts of one input
LONGEST = 3000  # characters of a sentence


@dataclass(frozen=True)
class Door:
    """One way in.

    opened: takes the bytes, or raises `error`. seeds: inputs that it takes. words: for libFuzzer's dictionary.
    share: of the inputs of a whole run, in parts; doors that write files or start a runtime have fewer.
    peer: whether another machine's bytes come in here, so that the sentence must be short and printable.
    """

    opened: Callable[[bytes], object]
    error: type[MorettaError]
    seeds: Callable[[], Sequence[bytes]]
    words: Callable[[], Sequence[str]] = list
    share: int = 2
    peer: bool = False

    def find(self, data: bytes) -> BaseException | None:
        """Return what is wrong with how the door took the bytes, or None."""
        try:
            self.opened(data)
        except self.error as error:
            text = str(error)
            if self.peer and (len(text) > LONGEST or not text.isprintable()):
                error.add_note(f"expected at most {LONGEST} printable characters, as a peer had a say in them")
                return error
        except Exception as error:  # noqa: BLE001  # what is looked for
            return error
        return None


@cache
def folder() -> Path:
    """Return a folder of this process for the files that doors read."""
    return Path(tempfile.mkdtemp(prefix="moretta-doors-"))


def written(name: str, data: bytes) -> Path:
    path = folder() / name
    path.write_bytes(data)
    return path


@contextlib.contextmanager
def never(error: type[MorettaError]) -> Iterator[None]:
    """Make a find of the door's own error: what was taken once is taken again as it was written."""
    try:
        yield
    except error as found:
        raise AssertionError("what was taken is refused as it was written again") from found


def parts(data: bytes, count: int) -> list[bytes]:
    """Return so many parts of one input; those that it lacks are empty."""
    found = data.split(BETWEEN, count - 1)
    return found + [b""] * (count - len(found))


def counted(data: bytes, width: int, gap: bytes = b"") -> bytes:
    """Return a header behind its length, a gap, and what follows it: the two parts of one input."""
    head, rest = parts(data, 2)
    return framing.length_of(head, width) + gap + head + rest


def uncounted(data: bytes, width: int, gap: int = 0) -> bytes:
    """Return the input of which `counted` makes these bytes."""
    head = framing.find(data, width=width, gap=gap)
    return data[head] + BETWEEN + data[head.stop :]
