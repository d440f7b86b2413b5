"""Recorded views: exactly the messages that a role saw, as the codec's bytes, a file for each role and round.

``views/<role>/round-000012.0.bin`` holds round 12 as seen in session 0 (a resumed run is in its next session). Each
record is the length of a JSON line and the line (``{"direction": "sent" | "received", "peer": ..}``), then the length
of the message and the message; lengths are 8 bytes, little-endian. A file begins with `MAGIC`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moretta.engines.files import write_atomically
from moretta.errors import ParameterError

MAGIC = b"moretta views 1\n"


@dataclass(frozen=True)
class Seen:
    """One message in a role's view."""

    direction: str
    peer: str
    data: bytes


class Recorder:
    """Keeps what each role sees in the rounds that are wanted.

    folder: the run's ``views``. rounds: True for all, or their numbers. session: how often the run was resumed.
    """

    def __init__(self, folder: Path, rounds: bool | tuple[int, ...], session: int = 0) -> None:
        self._folder, self._rounds, self._session = folder, rounds, session
        self._pending: defaultdict[tuple[str, int], list[bytes]] = defaultdict(list)
        self._round = 0

    def wants(self, number: int) -> bool:
        """Return whether a round is recorded; the set-up before the first round counts with it."""
        self._round = number
        return self._rounds if isinstance(self._rounds, bool) else number in self._rounds

    def saw(self, role: str, direction: str, peer: str, data: bytes) -> None:
        """Note one message of the present round."""
        line = json.dumps({"direction": direction, "peer": peer}).encode()
        record = len(line).to_bytes(8, "little") + line + len(data).to_bytes(8, "little") + data
        self._pending[role, self._round].append(record)

    def flush(self) -> None:
        """Write what was noted, at the end of a round."""
        for (role, number), records in self._pending.items():
            path = self._folder / role / f"round-{number:06d}.{self._session}.bin"
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(path, MAGIC + b"".join(records), mode=0o600)  # uploads in the clear may be among them
        self._pending.clear()


def read(path: Path) -> Iterator[Seen]:
    """Return the messages of one file, in order. Raises `moretta.errors.ParameterError` for a file that is no view."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ParameterError(f"{path}: expected recorded views; {error.strerror}") from None
    if not data.startswith(MAGIC):
        raise ParameterError(f"{path}: expected recorded views of format 1; was it recorded by another version?")
    position = len(MAGIC)

    def take() -> bytes:
        nonlocal position
        end = position + 8 + int.from_bytes(data[position : position + 8], "little")
        if end > len(data) or position + 8 > len(data):
            raise ParameterError(f"{path}: the recorded view ends in the middle of a message; the file is damaged")
        part, position = data[position + 8 : end], end
        return part

    while position < len(data):
        try:
            line = json.loads(take())
            seen = Seen(line["direction"], line["peer"], take())
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ParameterError(f"{path}: the recorded view is damaged ({error})") from None
        if seen.direction not in ("sent", "received") or not isinstance(seen.peer, str):
            raise ParameterError(f"{path}: the recorded view is damaged (a message neither sent nor received)")
        yield seen
