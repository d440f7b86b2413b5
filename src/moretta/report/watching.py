"""A living page beside a run: a process that serves it, which the run neither waits for nor depends on."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, cast

from moretta.engines.run_folder import why
from moretta.report.page_server import address_of, listening

PROGRAM = (sys.executable, "-P", "-m", "moretta.report.page_server")
PATIENCE = 3.0  # seconds that the process has to end in, once the run has

Say = Callable[[str], None]


@contextmanager
def page_beside(folder: Path, port: int, say: Say) -> Iterator[Say]:
    """Serve the living page of a run for as long as the block lasts.

    folder: the run's, which may appear later. say: is told the address. Yields what tells the page a sentence, such as
    whom the run waits for; it never blocks and never fails. Raises `moretta.errors.ParameterError` for a port that
    cannot be had.
    """
    token = secrets.token_urlsafe(32)
    with listening(port) as found:
        process = _started(folder, found.fileno(), token)
        if process is not None:
            say(f"the run's page is at {address_of(found, token)}")
    if process is None:
        say("the run's page cannot be served, because no process could be started for it; the run goes on without")
        yield lambda sentence: None
        return
    try:
        yield lambda sentence: _tell(process, note=sentence)
    except BaseException as error:
        _tell(process, failed=why(error))
        raise
    finally:
        _end(process)


def _started(folder: Path, descriptor: int, token: str) -> subprocess.Popen[bytes] | None:
    """Start the process; its token comes by standard input, as others can read arguments."""
    try:
        process = subprocess.Popen(
            [*PROGRAM, str(folder), str(descriptor)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[descriptor],
        )
    except OSError:
        return None
    os.set_blocking(_input(process).fileno(), False)
    _write(process, f"{token}\n")
    return process


def _tell(process: subprocess.Popen[bytes], **said: str) -> None:
    _write(process, json.dumps(said) + "\n")


def _write(process: subprocess.Popen[bytes], line: str) -> None:
    with suppress(OSError):  # it has died, or does not read: then the page lacks a sentence
        os.write(_input(process).fileno(), line.encode())


def _input(process: subprocess.Popen[bytes]) -> IO[bytes]:
    return cast("IO[bytes]", process.stdin)  # `_started` asks for a pipe


def _end(process: subprocess.Popen[bytes]) -> None:
    _input(process).close()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
