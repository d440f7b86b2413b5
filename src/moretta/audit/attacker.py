"""The process of one attack: reads its case on stdin, writes its claim on stdout, and reaches nothing else.

It is a fork of a process that has imported PyTorch once for all attacks of an audit (`AttackOrigin`) and sees no case:

    auditor                       origin                  a fork that waits        the attack
    a case, and three files  -->  forks               -->  forks                -->  confines itself, reads the case
                             <--------------------------------------------------   its number, so that it can be ended
                             <--------------------------  how it ended

It receives a case and no path: no argument, variable or working directory names the run folder. It is confined
(`moretta.engines.confinement`) before the attack's own module is imported. The kernel, where it can, refuses it files,
TCP and signals, but not UDP, Unix sockets or forks. Its forks end with it, unless they leave its session.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, NoReturn

import numpy as np

from moretta.contract.codec import pack_arrays, unpack_arrays
from moretta.engines.confinement import confine, empty_folder, readable, watch
from moretta.engines.process import command, environment, kill_group, last_line
from moretta.errors import CodecError, RunFailed
from moretta.protocols.common.entry import packages

if TYPE_CHECKING:
    from moretta.audit.evidence.attack import Attack, Claim
    from moretta.audit.evidence.case import Case

PROGRAM = ("-m", "moretta.audit.attacker")  # of the process that attacks fork from
_NUMBER = struct.Struct("<i")


class AttackFailed(Exception):
    """An attack made no claim; the message is one sentence."""


class AttackOrigin:
    """The process that attacks fork from, started by the first of them; they end with it, by `close`."""

    def __init__(self) -> None:
        self._held = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._line: socket.socket | None = None
        self._running: set[int] = set()

    def close(self) -> None:
        """End it, and all attacks that have not ended."""
        for number in tuple(self._running):
            kill_group(number)
        self._held.close()

    def _start(self) -> socket.socket:
        line, far = map(self._held.enter_context, socket.socketpair())
        words = [str(far.fileno()), *dict.fromkeys(str(path.parent) for path in packages().values())]
        process = subprocess.Popen(
            command(*PROGRAM, *words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[far.fileno()],
            cwd=self._held.enter_context(empty_folder()),
            env=environment(),
            start_new_session=True,
        )
        self._held.enter_context(process)
        self._held.callback(kill_group, process.pid)
        far.close()
        return line

    def play(self, files: Sequence[IO[bytes]], seconds: float) -> int | None:
        """Run one attack on the first file, writing the others; return its exit code, None if it is late."""
        read, write = os.pipe()
        with open(read, "rb", buffering=0) as status, open(write, "wb", buffering=0) as far:
            with self._lock:
                self._line = self._line or self._start()
                socket.send_fds(self._line, [b"-"], [*(file.fileno() for file in files), write])
            far.close()
            until = time.monotonic() + seconds
            number = _number(status, until)
            if number is None:
                return None
            self._running.add(number)
            try:
                return _number(status, until)
            finally:
                kill_group(number)
                self._running.discard(number)


def _number(status: IO[bytes], until: float) -> int | None:
    """Return the next number on a pipe, None if none arrives in time; the pipe may also end."""
    if not select.select([status], [], [], max(0.0, until - time.monotonic()))[0]:
        return None
    data = status.read(_NUMBER.size)
    if len(data) != _NUMBER.size:
        raise AttackFailed("the process that attacks are forks of ended")
    return int(_NUMBER.unpack(data)[0])


def claim_of(attack: Attack, case: Case, seconds: float, origin: AttackOrigin) -> Claim:
    """Run an attack in a process of its own and return its claim. Raises `AttackFailed` without one in time."""
    by_name = attack.module.partition(".")[0] in ("moretta", *packages())
    file = "" if by_name else _file(attack.module)
    header = json.dumps({"module": attack.module, "function": attack.attack.__name__, "file": file}).encode()
    with contextlib.ExitStack() as stack:
        request, out, errors = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        request.write(len(header).to_bytes(8, "little") + header + case.pack())
        request.seek(0)
        code = origin.play((request, out, errors), seconds)
        if code is None:
            raise AttackFailed(f"it had not ended after {seconds:.0f} s")
        out.seek(0)
        claim, line = out.read(), last_line(errors)
    if code:
        raise AttackFailed(f"it ended with {line}" if line else f"its process ended ({code})")
    try:
        return unpack_arrays(memoryview(claim))
    except CodecError as error:
        raise AttackFailed(f"its claim cannot be read: {error}") from None


def _file(module: str) -> str:
    file = sys.modules[module].__file__
    if file is None:
        raise RunFailed(f"{module}: expected an attack in a file")
    return str(Path(file).resolve())


def main() -> None:
    """Fork an attack per request on the socket of the first argument; the others are folders of plugin packages."""
    line = socket.socket(fileno=int(sys.argv[1]))
    sys.path += [path for path in sys.argv[2:] if path not in sys.path]
    import moretta.audit.evidence.case
    import moretta.models.catalogue  # noqa: F401  # so that no attack has to import PyTorch

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for these forks
    while (received := socket.recv_fds(line, 1, 4))[0]:
        if not os.fork():
            line.close()  # with it an attack could start another that is not confined
            _wait(*received[1])
        for descriptor in received[1]:
            os.close(descriptor)


def _wait(request: int, out: int, errors: int, status: int) -> NoReturn:
    """Fork an attack, and report its number and how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    number = os.fork()
    if not number:
        os.setsid()
        os.write(status, _NUMBER.pack(os.getpid()))
        for descriptor, at in ((request, 0), (out, 1), (errors, 2)):
            os.dup2(descriptor, at)
        for descriptor in (request, out, errors, status):
            os.close(descriptor)
        _attack()
    os.write(status, _NUMBER.pack(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])))
    os._exit(0)


def _attack() -> NoReturn:
    """Read a case, attack, write the claim."""
    from moretta.audit.evidence.case import Case
    from moretta.models.catalogue import BUILT_IN

    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # an attack's prints are no claim
    try:
        data = os.fdopen(0, "rb").read()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        case = Case.unpack(data[8 + size :])
        if case.architecture.source not in ("", *BUILT_IN):
            case.model()  # imports the user's module while it is readable
        folders = [*readable(), *packages().values(), *map(Path, filter(None, [header["file"]]))]
        confine(folders)
        watch(folders)
        claim = getattr(_imported(header["module"], header["file"]), header["function"])(case)
        packed = b"".join(pack_arrays({name: np.asarray(value) for name, value in claim.items()}))
    except Exception as error:  # noqa: BLE001  # reported in one line to the waiting process
        traceback.print_exc()
        print(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)
    out.write(packed)
    out.flush()
    os._exit(0)  # so that no code that an attack left behind runs


def _imported(name: str, file: str) -> ModuleType:
    """Return an attack's module: one of this package, or one in a file of its own."""
    if not file:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise RunFailed(f"{name}: expected a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
