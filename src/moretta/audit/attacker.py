"""The process of one attack: reads its case on stdin, writes its claim on stdout, and reaches nothing else.

It is sent a case and no path: no argument, variable or working directory names the run folder. It is confined
(`moretta.engines.confinement`) before the attack's own module is imported. The kernel, where it can, refuses it files,
TCP and signals, but not UDP, Unix sockets or forks. What it forks ends with it, except what leaves its session.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from moretta.contract.codec import pack_arrays, unpack_arrays
from moretta.engines.confinement import confine, empty_folder, readable, watch
from moretta.engines.process import command, environment
from moretta.errors import CodecError, RunFailed
from moretta.protocols.common.entry import packages

if TYPE_CHECKING:
    from moretta.audit.evidence.attack import Attack, Claim
    from moretta.audit.evidence.case import Case

PROGRAM = ("-m", "moretta.audit.attacker")  # of an attack's process


class AttackFailed(Exception):
    """An attack came to no claim; the message is one sentence."""


def claim_of(
    attack: Attack,
    case: Case,
    seconds: float,
    started: Callable[[subprocess.Popen[bytes]], None] = lambda process: None,
) -> Claim:
    """Run an attack in a process of its own and return its claim.

    started: is called with the process, so that the caller can end it.
    Raises `AttackFailed` where it comes to no claim in that time.
    """
    by_name = attack.module.partition(".")[0] in ("moretta", *packages())
    file = "" if by_name else _file(attack.module)
    header = json.dumps({"module": attack.module, "function": attack.attack.__name__, "file": file}).encode()
    pipe = subprocess.PIPE
    with (
        empty_folder() as folder,
        subprocess.Popen(
            command(*PROGRAM, *dict.fromkeys(str(one.parent) for one in packages().values())),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            cwd=folder,
            env=environment(),
            start_new_session=True,
        ) as process,
    ):
        try:
            started(process)
            out, said = process.communicate(len(header).to_bytes(8, "little") + header + case.pack(), timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AttackFailed(f"it had not ended after {seconds:.0f} s") from None
        finally:
            end(process)
    if process.returncode:
        lines = said.decode(errors="replace").strip().splitlines()
        raise AttackFailed(f"it ended with {lines[-1]:.300}" if lines else f"its process ended ({process.returncode})")
    try:
        return unpack_arrays(memoryview(out))
    except CodecError as error:
        raise AttackFailed(f"its claim cannot be read: {error}") from None


def end(process: subprocess.Popen[bytes]) -> None:
    """End an attack's process and what it started, which are a group of their own."""
    with contextlib.suppress(ProcessLookupError):  # nothing of it is left
        os.killpg(process.pid, signal.SIGKILL)


def _file(module: str) -> str:
    file = sys.modules[module].__file__
    if file is None:
        raise RunFailed(f"{module}: expected an attack in a file")
    return str(Path(file).resolve())


def main() -> None:
    """Read a case, attack, write the claim. Arguments: where packages lie that add protocols or attacks."""
    sys.path += [one for one in sys.argv[1:] if one not in sys.path]
    from moretta.audit.evidence.case import Case
    from moretta.models.catalogue import BUILT_IN

    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what an attack prints is no claim
    data = sys.stdin.buffer.read()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    case = Case.unpack(data[8 + size :])
    try:
        if case.architecture.source not in ("", *BUILT_IN):
            case.model()  # imports the user's module while that can be read
        folders = [*readable(), *packages().values(), *map(Path, filter(None, [header["file"]]))]
        confine(folders)
        watch(folders)
        claim = getattr(_imported(header["module"], header["file"]), header["function"])(case)
        packed = b"".join(pack_arrays({name: np.asarray(value) for name, value in claim.items()}))
    except Exception as error:  # noqa: BLE001  # said in one line to the process that waits
        traceback.print_exc()
        print(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)
    out.write(packed)
    out.flush()
    os._exit(0)  # so that nothing that an attack left behind runs


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
