"""A process that computes with somebody else's graph: it is sent arrays, and sends arrays back.

`ConfinedProcess` is the parent's half, and `serve` the process's own. A request and an answer are one part each
(`moretta.contract.framing`) of named arrays in safetensors' format; nothing is pickled.

    parent                                  the process
                                            is confined (`moretta.engines.confinement`)
      arrays by name                   -->  computes
                                       <--  arrays by name, or the one array `error`: its class and its sentence
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from moretta.contract import framing
from moretta.contract.messages import Array
from moretta.engines.child import LONGEST, START, Process
from moretta.engines.confinement import confine, readable
from moretta.errors import CodecError, MorettaError, ParameterError

ERROR = "error"
SENTENCE = 1000  # characters
LARGEST = 1 << 40  # bytes of what the parent sends, whom the process trusts


def command(*program: str) -> list[str]:
    """Return how Python is started for a confined process. program: its further words, such as ``-m module``."""
    return [sys.executable, "-E", "-P", "-W", "ignore", *program]


def environment(threads: int = 1) -> dict[str, str]:
    """Return a confined process's environment, which has nothing of this one's but where programs are."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "PATH": os.environ.get("PATH", ""),
        "LANG": "C.UTF-8",
        "TORCHINDUCTOR_CACHE_DIR": "/",  # there already, so that torch.optim finds it and makes none
    }


class ConfinedProcess:
    """A process that calls `serve`, started with the first request. It ends with this object, or by `close`.

    Threads wait for each other, and a fork of this process starts its own: an answer belongs to the request before it.

    Args:
        module: the process's, run by ``python -m``.
        threads: of its computations.
    """

    def __init__(self, module: str, threads: int = 1) -> None:
        self._module, self._threads = module, threads
        self._process: Process | None = None
        self._lock, self._owner = threading.Lock(), os.getpid()

    def __reduce__(self) -> tuple[Any, ...]:
        return ConfinedProcess, (self._module, self._threads)  # a copy has a process of its own

    def ask(self, arrays: Mapping[str, Array], seconds: float = LONGEST) -> dict[str, Array]:
        """Return what the process answers.

        Raises:
            ParameterError: what it raised; or it ended, took longer, or sent what is no answer.
        """
        if self._owner != os.getpid():  # a fork: the process and the lock are the parent's
            if self._process is not None:
                self._process.leave()
            self._process, self._lock, self._owner = None, threading.Lock(), os.getpid()
        with self._lock:
            found = self._asked(arrays, seconds)
        if ERROR in found:
            text = found[ERROR].tobytes()[: 4 * SENTENCE].decode(errors="replace")
            raise ParameterError("".join(one if one.isprintable() else " " for one in text))
        return found

    def _asked(self, arrays: Mapping[str, Array], seconds: float) -> dict[str, Array]:
        if self._process is None:
            self._process = Process(command("-m", self._module), environment(self._threads), leads=True)
            seconds += START
        self._process.wait_until(time.monotonic() + seconds)
        try:
            framing.write(self._process.input, save({name: np.asarray(one, order="C") for name, one in arrays.items()}))
            data = framing.read(self._process.output)
            if data is None:
                raise BrokenPipeError
            found: dict[str, Array] = load(data)
        except TimeoutError:
            self._process.kill()
            raise self._gone(f"did not end within {seconds:g} s") from None
        except OSError:
            raise self._gone("ended the process that ran it") from None
        except (CodecError, SafetensorError, KeyError, ValueError) as error:
            raise self._gone(f"gave what is no answer ({type(error).__name__})") from None
        except BaseException:  # such as ctrl-c: its answer must not be the next request's
            self._process.kill()
            self.close()
            raise
        return found

    def close(self) -> str:
        """End the process, if there is one; return how it ended."""
        process, self._process = self._process, None
        return "" if process is None else process.close()

    def _gone(self, what: str) -> ParameterError:
        how = "".join(one if one.isprintable() else " " for one in self.close())
        return ParameterError(f"the model's graph {what} ({how})")


def serve(answer: Callable[[dict[str, Array]], Mapping[str, Array]]) -> None:
    """Confine this process, then answer on standard input and output until they end."""
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what else is printed is no answer
    confine(readable())
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):  # the parent is gone, or about to end
        while (data := framing.read(sys.stdin.buffer, LARGEST)) is not None:
            framing.write(sink, save(_answered(answer, data)))


def _answered(answer: Callable[[dict[str, Array]], Mapping[str, Array]], data: bytes) -> dict[str, Array]:
    try:
        return {name: np.asarray(one, order="C") for name, one in answer(load(data)).items()}
    except Exception as error:  # noqa: BLE001  # whatever a graph does; the process lives on
        said = str(error) if isinstance(error, MorettaError) else f"{type(error).__name__}: {error}"
        line = next((line for line in said.splitlines() if line.strip()), type(error).__name__)
        return {ERROR: np.frombuffer(line[:SENTENCE].encode(errors="replace"), np.uint8)}
