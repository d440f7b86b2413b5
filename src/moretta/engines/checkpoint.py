"""Checkpoints: every role's state at a round's end, written atomically; the last two are kept.

``checkpoint/round-000010/`` holds ``run.json`` (format, run id, round, session, digest of the run file) and one
``<role>.safetensors`` for each role. Its mode is 0600, because it holds the role's secret root. The folder appears by
one rename. Within a round a silo may save its own unfinished work (`HalfDone`).
"""

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from moretta.contract.messages import Array
from moretta.contract.roles import State
from moretta.engines.files import make_folder, read_file, rename, write_atomically
from moretta.errors import ParameterError
from moretta.secure_aggregation.keystream import encode_parts

log = logging.getLogger("moretta")

FORMAT = 2  # 1 lacked norms of earlier rounds and counted rows, and had pbpfl's weights in the run's dtype
KEPT = 2
MINUTE = 60.0  # seconds
_CODES = {
    "u8": "U64", "i8": "I64", "f8": "F64", "f4": "F32", "u4": "U32", "i4": "I32", "f2": "F16", "u1": "U8", "b1": "BOOL",
}  # fmt: skip
_LAID_OUT = list(_CODES)


@dataclass(frozen=True)
class CheckpointId:
    """The identity of a checkpoint: run id, last finished round, number of resumes, digest of the run file."""

    run: str
    round: int
    session: int
    digest: str


def save_checkpoint(folder: Path, place: CheckpointId, states: Mapping[str, State], kept: int | None = KEPT) -> None:
    """Write the roles' states at a round's end into the ``checkpoint`` folder, and remove older checkpoints.

    Args:
        kept: The number of checkpoints to keep; None keeps all.
    """
    make_folder(folder, 0o700)
    final, partial = folder / f"round-{place.round:06d}", folder / f".round-{place.round:06d}.partial"
    for left in folder.glob(".round-*.partial"):  # left by a crash
        shutil.rmtree(left)
    partial.mkdir(mode=0o700)
    for role, state in states.items():
        write_atomically(partial / f"{role}.safetensors", _pack(state), mode=0o600)
    _write_id(partial, place)
    if final.exists():  # of an earlier session; one rename, so that no half of it remains
        rename(final, folder / f".{final.name}.old.partial")
    rename(partial, final)
    for old in _checkpoints(folder)[:-kept] if kept else ():
        shutil.rmtree(old)
    for old in folder.glob(".round-*.partial"):
        shutil.rmtree(old)


def begin_session(folder: Path, place: CheckpointId) -> None:
    """Record in the last checkpoint, of the round of `place`, that another session has begun.

    So a session that is killed before its first checkpoint still has its own number and views.
    """
    _write_id(_checkpoints(folder)[-1], place)


def last_checkpoint(folder: Path, up_to: int | None = None) -> tuple[CheckpointId, dict[str, State]] | None:
    """Return the last whole checkpoint, or None. up_to: its latest round. A damaged one raises ParameterError."""
    folders = [path for path in _checkpoints(folder) if up_to is None or int(path.name.removeprefix("round-")) <= up_to]
    if not folders:
        return None
    path = folders[-1]
    try:
        place = _read_id(path)
        states = {file.stem: _unpack(_content(file)) for file in sorted(path.glob("*.safetensors"))}
        return place, states
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ParameterError(
            f"{path}: the checkpoint is damaged ({error}); delete it to go on from the one before"
        ) from None


def rounds_kept(folder: Path) -> frozenset[int]:
    """Return the rounds that have checkpoints, whole or damaged."""
    return frozenset(int(path.name.removeprefix("round-")) for path in _checkpoints(folder))


def _checkpoints(folder: Path) -> list[Path]:
    rounds = (path for path in folder.glob("round-*") if path.name.removeprefix("round-").isdecimal() and path.is_dir())
    return sorted(rounds, key=lambda path: (len(path.name), path))


def _write_id(path: Path, place: CheckpointId) -> None:
    write_atomically(path / "run.json", json.dumps({"format": FORMAT, **asdict(place)}).encode())


def _read_id(path: Path) -> CheckpointId:
    content = json.loads(_content(path / "run.json"))
    if content.pop("format") != FORMAT:
        raise ParameterError(f"{path}: expected a checkpoint of format {FORMAT}; was it written by another version?")
    place = CheckpointId(**content)
    if [type(value) for value in astuple(place)] != [str, int, int, str] or place.session < 0:
        raise ValueError("run.json names no checkpoint")
    if path.name != f"round-{place.round:06d}":
        raise ValueError(f"run.json is of round {place.round}")
    return place


def _pack(state: State) -> Sequence[bytes | memoryview]:
    arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
    plain = {name: value for name, value in state.items() if name not in arrays}
    return _file_parts(arrays, json.dumps(plain, default=lambda octets: {"bytes": octets.hex()}))


def _file_parts(arrays: Mapping[str, Array], metadata: str) -> Sequence[bytes | memoryview]:
    """Return a safetensors file with one metadata entry, ``moretta``: a header, and each array's own memory.

    The header is 8 bytes of length and JSON, padded to a multiple of 8. `safetensors.numpy.save` would copy the arrays
    twice. They are sorted by itemsize, then by safetensors' own list of dtypes, then by name.
    """
    entries: dict[str, Any] = {"__metadata__": {"moretta": metadata}}
    pieces, offset = list[bytes | memoryview](), 0
    for name, array in sorted(arrays.items(), key=lambda item: (_LAID_OUT.index(item[1].dtype.str[1:]), item[0])):
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        place = [offset, offset + array.nbytes]
        entries[name] = {"dtype": _CODES[array.dtype.str[1:]], "shape": array.shape, "data_offsets": place}
        pieces += [little.reshape(-1).view(np.uint8).data] if array.size else []
        offset += array.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    padded = text.ljust(-(-len(text) // 8) * 8)
    return [len(padded).to_bytes(8, "little") + padded, *pieces]


def _content(path: Path) -> bytes:
    """Return the bytes of a file ``checkpoint/round-000010/NAME`` of a run folder."""
    folder = path.parents[2]
    return read_file(folder, str(path.relative_to(folder)))


def _unpack(content: bytes) -> State:
    arrays = dict(sorted(load(content).items()))  # sorted, because the order of `load` varies
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    plain = json.loads(header["__metadata__"]["moretta"])
    restored = {name: bytes.fromhex(v["bytes"]) if isinstance(v, dict) else v for name, v in plain.items()}
    return arrays | restored


class HalfDone:
    """A silo's unfinished local work of a round, in a file of its own (0600), which never leaves the silo.

    Nothing is saved without a path or minutes.

    Args:
        minutes: The minutes between two writes.
    """

    def __init__(self, path: Path | None = None, minutes: float | None = None) -> None:
        self._path, self._pause = None if minutes is None else path, MINUTE * (minutes or 0.0)
        self._of, self._last = b"", 0.0
        self.keeps = self._path is not None  # whether anything is saved

    def begin(self, *of: int | str | bytes) -> State:
        """Return the saved state of this work, else an empty one. of: everything that determines the work."""
        if self._path is None:
            return {}
        self._of, self._last = hashlib.sha256(encode_parts(*of)).digest(), time.monotonic()
        try:
            state = dict(_unpack(read_file(self._path.parent, self._path.name)))
            if state.pop("of") == self._of:
                return state
        except FileNotFoundError:
            return {}
        except (ParameterError, OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            log.warning("%s is damaged (%s), so the round's work begins anew", self._path, error)
        with suppress(OSError):
            self._path.unlink()
        return {}

    def keep(self, state: Callable[[], State]) -> None:
        """Save the state if it is due; work continues if the disk refuses it."""
        if self._path is None or time.monotonic() < self._last + self._pause:
            return
        self._last = time.monotonic()
        try:
            write_atomically(self._path, _pack({**state(), "of": self._of}), mode=0o600)
        except OSError as error:
            log.warning(
                "%s cannot be written (%s), so the work done in this round is not kept", self._path, error.strerror
            )
