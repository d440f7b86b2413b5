"""Recorded views: exactly the messages that a role saw, as the codec's bytes, in a file for each role and round.

``views/<role>/round-000012.0.bin`` holds round 12 of session 0 (a resumed run is in its next session). It begins with
`MAGIC`. Each record is two parts behind their lengths (`moretta.contract.framing`): a JSON line (``{"direction": "sent"
| "received", "peer": ..}``) and the message.

``views/index.jsonl`` names the run, and has a line for each file with its SHA-256; ``result.json`` has the digest of
the index. A file without a line belongs to an unfinished round.
"""

import hashlib
import io
import json
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moretta.contract import framing
from moretta.engines.files import read_present, write_atomically
from moretta.engines.journal import Journal
from moretta.errors import CodecError, ParameterError

MAGIC = b"moretta views 2\n"
FORMAT = 2  # 1 had messages that were files of safetensors
INDEX = "index.jsonl"
_NAME = re.compile(r"(?P<role>[A-Za-z0-9_-][A-Za-z0-9._-]{0,63})/round-(?P<round>\d{6,})\.(?P<session>\d+)\.bin")


@dataclass(frozen=True)
class Seen:
    """One message in a role's view."""

    direction: str
    peer: str
    data: bytes


class Recorder:
    """Record the messages that each role sees in the selected rounds.

    Args:
        folder: The run's ``views``.
        rounds: True for all, or their numbers.
        session: The number of resumes.
        run: The run's id.
    """

    def __init__(self, folder: Path, rounds: bool | tuple[int, ...], session: int = 0, run: str = "") -> None:
        self._folder, self._rounds, self._session, self._run = folder, rounds, session, run
        self._pending: defaultdict[tuple[str, int], list[bytes]] = defaultdict(list)
        self._round = 0
        self._index = Journal(folder / INDEX, "the index of the recorded views", "restore it, or begin another run")
        self._indexed = bool(self._index.lines())

    def wants(self, number: int) -> bool:
        """Return whether a round is recorded; the set-up before the first round counts with it."""
        self._round = number
        return self._rounds if isinstance(self._rounds, bool) else number in self._rounds

    def saw(self, role: str, direction: str, peer: str, data: bytes) -> None:
        """Keep one message of the present round."""
        self._pending[role, self._round].append(_record(direction, peer, data))

    def flush(self) -> None:
        """Write the round's messages at its end."""
        lines = []
        for (role, number), records in self._pending.items():
            name, data = _file(role, number, self._session), MAGIC + b"".join(records)
            path = self._folder / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(path, data, mode=0o600)  # the messages may include uploads in the clear
            lines.append(json.dumps({"file": name, "sha256": hashlib.sha256(data).hexdigest()}))
        if lines:
            if not self._indexed:
                lines.insert(0, json.dumps({"format": FORMAT, "run": self._run}))
            self._index.append(*lines)
            self._indexed = True
        self._pending.clear()


def note(folder: Path, role: str, number: int, messages: Sequence[Seen]) -> None:
    """Append messages to the view of a role in another framework in one round, unless an index lists it."""
    if not messages:
        return
    path = folder / _file(role, number, 0)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as file:
        records = [_record(seen.direction, seen.peer, seen.data) for seen in messages]
        file.write((b"" if file.tell() else MAGIC) + b"".join(records))


def noted(folder: Path, role: str) -> Iterator[tuple[int, Path]]:
    """Yield the rounds and files that `note` made of a role, in order."""
    for path in sorted((folder / role).glob("round-*.0.bin")):
        yield int(path.name.removeprefix("round-").partition(".")[0]), path


def _file(role: str, number: int, session: int) -> str:
    return f"{role}/round-{number:06d}.{session}.bin"


def _record(direction: str, peer: str, data: bytes) -> bytes:
    return framing.framed(json.dumps({"direction": direction, "peer": peer}).encode(), data)


def digest(folder: Path) -> str:
    """Return the SHA-256 of the index of a run's views, in hex; empty without views."""
    index = folder / INDEX
    return hashlib.sha256(_content(folder, INDEX)).hexdigest() if index.exists() else ""


@dataclass(frozen=True)
class Views:
    """The recorded views of a finished run, each file checked against its recorded digest.

    Attributes:
        files: The file's name by role and round, from the last session that finished the round.
        digests: SHA-256 by a file's name, in hex.
    """

    folder: Path
    files: Mapping[str, Mapping[int, str]]
    digests: Mapping[str, str]

    @classmethod
    def open(cls, folder: Path, run: str, expected: str) -> "Views":
        """Open a run's ``views``.

        Args:
            run: The run's id, from ``result.json``.
            expected: The digest of the views' index, from ``result.json``.

        Raises:
            ParameterError: Views are missing or changed, or belong to another run or version.
        """
        index = folder / INDEX
        if not index.exists() and any(folder.glob("*/round-*.bin")):
            raise ParameterError(
                f"{folder} has views and no {INDEX}, by which they are checked: another version recorded them, or it "
                "was removed; restore it, or run again"
            )
        if not index.exists():
            raise ParameterError(
                f"{folder.parent} has no recorded views; run it again with record-views in [run], true for all rounds "
                "or a list of rounds (from Python: Federation record_views)"
            )
        if not expected:
            raise ParameterError(f"{folder.parent}: result.json says nothing of views; was it written by this version?")
        if digest(folder) != expected:
            raise ParameterError(
                f"{index} is not the index that this run ended with; restore the views as they were recorded"
            )
        head, *lines = _index(index)
        if head.get("format") != FORMAT:
            raise ParameterError(f"{index}: expected views of format {FORMAT}; were they recorded by another version?")
        if head.get("run") != run:
            raise ParameterError(f"{index}: expected the views of this run, these are of another one")
        files: defaultdict[str, dict[int, str]] = defaultdict(dict)
        digests = {}
        for line in lines:  # later sessions follow, and their repetition of a round counts
            name, hashed = line.get("file"), line.get("sha256")
            if not isinstance(name, str) or not isinstance(hashed, str):
                raise ParameterError(f"{index} is damaged (a line without a file and its SHA-256)")
            match = _NAME.fullmatch(name)
            if match is None:
                raise ParameterError(f"{index}: expected names of views, got {name!r:.80}")
            files[match["role"]][int(match["round"])] = name
            digests[name] = hashed
        return cls(folder, files, digests)

    @property
    def rounds(self) -> tuple[int, ...]:
        """The rounds of which the server's view was recorded."""
        return tuple(sorted(self.files.get("server", {})))

    def data(self, role: str, number: int) -> bytes:
        """Return one file's bytes. Raises `moretta.errors.ParameterError` if they differ from the record."""
        name = self.files[role][number]
        path = self.folder / name
        data = _content(self.folder, name)
        if hashlib.sha256(data).hexdigest() != self.digests[name]:
            raise ParameterError(f"{path} is not as it was recorded (SHA-256 differs); restore the file")
        return data

    def check(self, roles: Collection[str] | None = None) -> None:
        """Read every file of some roles, or of all. Raises as `data`."""
        for role in self.files if roles is None else roles:
            for number in self.files[role]:
                self.data(role, number)


def _content(folder: Path, name: str) -> bytes:
    """Return the bytes of a file below ``views`` of a run folder."""
    return read_present(folder.parent, f"{folder.name}/{name}", "a recorded view")


def _index(path: Path) -> list[dict[str, Any]]:
    try:
        lines = [json.loads(line) for line in _content(path.parent, path.name).decode().splitlines()]
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"{path} is damaged ({error})") from None
    if lines and not isinstance(lines[0], dict):
        lines[0] = {}  # of no format
    if not lines or not all(isinstance(line, dict) for line in lines):
        raise ParameterError(f"{path} is damaged (a line that is no object)")
    return lines


def read(path: Path) -> Iterator[Seen]:
    """Return the messages of one file, in order. Raises `moretta.errors.ParameterError` if it is not a view."""
    return parse(_content(path.parents[1], f"{path.parent.name}/{path.name}"), str(path))


def parse(data: bytes, where: str) -> Iterator[Seen]:
    """Return the messages in one file's bytes, in order. where: the file, for an error; raises as `read`."""
    if not data.startswith(MAGIC):
        raise ParameterError(
            f"{where}: expected recorded views of format {FORMAT}; was it recorded by another version?"
        )
    stream = io.BytesIO(data)
    stream.seek(len(MAGIC))
    try:
        while (line := framing.read(stream, len(data))) is not None:
            header, message = json.loads(line), framing.read(stream, len(data))
            if message is None:
                raise CodecError("expected a message behind its line")
            if header["direction"] not in ("sent", "received") or not isinstance(header["peer"], str):
                raise ValueError("a message neither sent nor received")
            yield Seen(header["direction"], header["peer"], message)
    except CodecError:
        raise ParameterError(
            f"{where}: the recorded view ends in the middle of a message; the file is damaged"
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ParameterError(f"{where}: the recorded view is damaged ({error})") from None
