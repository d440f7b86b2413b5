"""Coverage-guided fuzzing of the doors in `doors.py` by atheris: pip install 'moretta[fuzz]'.

    python tests/fuzzing/fuzz.py                         a million inputs, dealt to all doors
    python tests/fuzzing/fuzz.py codec csv --inputs 20000   so many to each of these
    python tests/fuzzing/fuzz.py --keep                  writes what covers most into corpus/, a few KiB a door

Each door has a process of its own, a slice of inputs at a time. All is kept in ``--out``: after a stop, the same
command goes on where it was. A find is an input for which `Door.find` returns something, that ends the process, or that
takes more than `SECONDS` of the processor or memory beyond `MEMORY`. The smallest input of each kind is kept in
``OUT/DOOR/finds``. Exit code 1 where there are finds.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import mmap
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from moretta.errors import MorettaError

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CORPUS = HERE / "corpus"
IN_ALL = 1_000_000
SLICE = 100_000  # inputs of one process
SECONDS = 5.0  # of the processor, for one input
HANGS = 60  # seconds by the clock until a process is ended
MEMORY = 1024  # MiB that one input may reserve above what the process has reserved
LONGEST = 8192  # bytes of an input
CRASHES = 30  # of a door, until it is given up
KEPT = 4096  # bytes of a door's corpus
TAKEN = ("taken", 0)  # among lines
NAMES = ("crash-", "timeout-", "oom-")  # libFuzzer's, of inputs that ended a process


# -- one door, in a process of its own ---------------------------------------------------------------------------------


def play(name: str, out: Path, inputs: int, seed: int) -> None:
    """Play so many inputs to one door; the process ends here."""
    import atheris

    shutil.rmtree(out / "files", ignore_errors=True)
    (out / "files").mkdir()
    tempfile.tempdir = str(out / "files")
    with atheris.instrument_imports(include=["moretta", "tomllib", "zipfile", "numpy.lib"]):
        from moretta.engines import usage

        usage.give_back_code = lambda: None  # it would be most of the time of a graph, and changes no result
        from doors import DOORS

    door, counted = DOORS[name], Count(out / "count")
    for data in kept(name):  # so that what it imports as it runs is there before memory is bounded
        door.find(data)
    bound_memory()

    def one(data: bytes) -> None:
        counted.add(1)
        began = time.process_time()
        wrong = door.find(data)
        if wrong is None and time.process_time() - began > SECONDS:
            wrong = TimeoutError(f"more than {SECONDS:g} seconds")
        if wrong is not None:
            note_find(out / "finds", data, wrong)

    flags = [f"-runs={inputs}", f"-max_len={LONGEST}", f"-timeout={HANGS}", "-rss_limit_mb=6144", f"-seed={seed}"]
    flags += [f"-artifact_prefix={out}/", "-verbosity=0", "-reload=0"]
    flags += [f"-dict={out}/words"] if (out / "words").read_bytes() else []
    atheris.Setup([sys.argv[0], *flags, str(out / "corpus")], one, internal_libfuzzer=True)
    atheris.Fuzz()


class Count:
    """Inputs so far, in a file: whatever ends the process, they are counted."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8))
        with path.open("r+b") as stream:
            self._memory = mmap.mmap(stream.fileno(), 8)

    @property
    def value(self) -> int:
        return int.from_bytes(self._memory[:], "little")

    def add(self, more: int) -> None:
        self._memory[:] = (self.value + more).to_bytes(8, "little")


def bound_memory() -> None:
    """Have the system refuse memory beyond `MEMORY`, so that what asks for it raises here."""
    from moretta.engines.usage import status

    reserved = status("VmData")
    if reserved is not None:
        bound = int((reserved + MEMORY) * 2**20)
        resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))


def note_find(finds: Path, data: bytes, wrong: BaseException) -> None:
    """Keep an input, named by what is wrong and where, unless a smaller one of the kind is there."""
    frames = [one for one in traceback.extract_tb(wrong.__traceback__) if f"{os.sep}moretta{os.sep}" in one.filename]
    place = f"{Path(frames[-1].filename).stem}-{frames[-1].lineno}" if frames else "door"
    path = finds / f"{type(wrong).__name__}-{place}"
    if not path.exists() or path.stat().st_size > len(data):
        path.write_bytes(data)
        path.with_suffix(".txt").write_text("".join(traceback.format_exception(wrong))[-4000:])


# -- all doors ---------------------------------------------------------------------------------------------------------


def kept(name: str, home: Path = CORPUS) -> list[bytes]:
    """Return a door's inputs in a file of lines of base64, with words behind it perhaps; none without a file."""
    path = home / f"{name}.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [base64.b64decode(line.split()[0]) for line in lines if line.strip()]


def begin(name: str, out: Path) -> None:
    """Write what a door begins with: its seeds, its kept corpus, and the words of its dictionary."""
    from doors import DOORS

    for part in ("corpus", "finds"):
        (out / part).mkdir(parents=True, exist_ok=True)
    for data in [*DOORS[name].seeds(), *kept(name)]:
        (out / "corpus" / hashlib.sha1(data).hexdigest()).write_bytes(data)  # as libFuzzer names them
    escaped = ("".join(f"\\x{one:02x}" for one in word.encode()) for word in DOORS[name].words())
    (out / "words").write_text("".join(f'"{word}"\n' for word in escaped if word))


def started(name: str, out: Path, inputs: int, seed: int) -> int:
    words = [sys.executable, __file__, name, "--inputs", str(inputs), "--out", str(out), "--play", str(seed)]
    with (out / "log").open("ab") as log:
        told = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(words, stdout=log, stderr=log, env=told, check=False).returncode


def fuzzed(name: str, wanted: int, out: Path) -> dict[str, object]:
    """Play one door until it has had so many inputs, and return what that came to."""
    begin(name, out)
    counted, crashes = Count(out / "count"), 0
    while counted.value < wanted and crashes < CRASHES:
        at, began = counted.value, time.monotonic()
        if code := started(name, out, min(SLICE, wanted - at), at + 1):
            crashes += 1
            ended = [path for path in out.iterdir() if path.name.startswith(NAMES)]
            for path in ended:
                path.rename(out / "finds" / path.name)
            if not ended:
                raise SystemExit(f"{name}: the process ended with {code} and no input of it is known; see {out}/log")
        speed, found = (counted.value - at) / (time.monotonic() - began), found_in(out)
        print(f"{name}: {counted.value:,} of {wanted:,} inputs, {speed:,.0f} a second, {len(found)} finds", flush=True)
    return {"inputs": counted.value, "corpus": len(list((out / "corpus").iterdir())), "finds": found_in(out)}


def found_in(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "finds").iterdir() if path.suffix != ".txt")


def keep(name: str, out: Path) -> None:
    """Write the inputs that cover most lines of the package for their size into the corpus, up to `KEPT` bytes."""
    from doors import DOORS

    every = {path.read_bytes() for path in (out / "corpus").iterdir()}
    left = {data for data in every if DOORS[name].find(data) is None}
    covered = {data: lines_of(DOORS[name].opened, data) for data in left}
    chosen, seen, room = list[bytes](), set[tuple[str, int]](), KEPT
    while left:
        best = max(left, key=lambda data: (TAKEN in covered[data] - seen, len(covered[data] - seen), -len(data)))
        left.discard(best)
        if not covered[best] - seen:
            break
        if len(best) <= room or not chosen:
            chosen.append(best)
            seen |= covered[best]
            room -= len(best)
    CORPUS.mkdir(exist_ok=True)
    (CORPUS / f"{name}.txt").write_text("".join(base64.b64encode(data).decode() + "\n" for data in sorted(chosen)))


def lines_of(call: Callable[[bytes], object], data: bytes) -> set[tuple[str, int]]:
    """Return which lines of the package run in a call, and whether it is taken: other readers have no lines."""
    found = set[tuple[str, int]]()

    def traced(frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        if f"{os.sep}moretta{os.sep}" not in name:
            return None
        found.add((name, frame.f_lineno))
        return traced

    sys.settrace(traced)
    try:
        call(data)
        found.add(TAKEN)
    except MorettaError:
        found.add(("refused", 0))
    finally:
        sys.settrace(None)
    return found


def shares(names: Iterable[str], inputs: int | None) -> dict[str, int]:
    """Return how many inputs each door has: so many, or its share of a million."""
    from doors import DOORS

    whole = sum(door.share for door in DOORS.values())
    return {name: inputs or -(-IN_ALL * DOORS[name].share // whole) for name in names}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("doors", nargs="*", metavar="DOOR", help="left out, all of them")
    parser.add_argument("--inputs", type=int, help="of each door; left out, its share of a million")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "fuzzing", help="where a run goes on")
    parser.add_argument("--keep", action="store_true", help="write what covers most into tests/fuzzing/corpus")
    parser.add_argument("--json", action="store_true", help="print one object in the end")
    parser.add_argument("--play", type=int, help=argparse.SUPPRESS)  # of the processes that this one starts
    given = parser.parse_args()
    if given.play is not None:
        play(given.doors[0], given.out, given.inputs, given.play)
    from doors import DOORS

    if unknown := set(given.doors) - set(DOORS):
        parser.error(f"{', '.join(sorted(unknown))}: expected doors of {', '.join(DOORS)}")
    told = dict[str, dict[str, object]]()
    for name, inputs in shares(given.doors or DOORS, given.inputs).items():
        told[name] = fuzzed(name, inputs, given.out / name)
        if given.keep:
            keep(name, given.out / name)
    if given.json:
        print(json.dumps({"doors": told, "command": shlex.join(["python", "tests/fuzzing/fuzz.py", *sys.argv[1:]])}))
    return int(any(one["finds"] for one in told.values()))


if __name__ == "__main__":
    raise SystemExit(main())
