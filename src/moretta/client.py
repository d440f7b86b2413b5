"""FLARE's Client API for a training script, which then is a silo's loop: `init`, `receive`, `send`, `is_running`.

    import moretta.client as flare

    flare.init()
    while flare.is_running():
        sent = flare.receive()
        net.load_state_dict(sent.params)
        ...                                     # train, on rows of its own or on `flare.rows()`
        flare.send(flare.FLModel(params=net.cpu().state_dict(), meta={"NUM_STEPS_CURRENT_ROUND": steps}))

A script becomes a loop by `FedAvg(fit=Script("client.py", "--epochs", "2"))`, or for one silo by `Silo(fit=...)`. In a
run file `fit = "module:function"` names a `Script` in a module beside the run file. Each silo's script has its own
process, from the silo's first round to the end of the run; a script that has ended is started again in the next round.
Its output goes to standard error. It is trusted as any loop: it sees the silo's rows.

Only weights are summed, and from `meta` NUM_STEPS_CURRENT_ROUND: the number of rows that the weights count as, by
default all the silo's. `metrics` stay at the silo.

    silo                                                the script
      round: parameters, silo, number, rounds      -->    receive
                                                   <--    the word "rows", if it needs them
      inputs and targets                           -->    rows
                                                   <--    weights and meta: send
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moretta.engines import frames
from moretta.engines.process import kill_group
from moretta.errors import MisuseError, ParameterError, RowsError

SOCKET = "MORETTA_CLIENT_SOCKET"  # environment variable with the number of the script's socket
PATIENCE = 5.0  # seconds for a script to end
STEPS = "NUM_STEPS_CURRENT_ROUND"


class ParamsType:
    """The content of `FLModel.params`: the weights, or their difference from the received ones."""

    FULL, DIFF = "FULL", "DIFF"


@dataclass
class FLModel:
    """Hold weights, with the fields of FLARE's class of that name.

    Args:
        params_type: `ParamsType.FULL`, the default, or `ParamsType.DIFF`.
        params: Tensors or arrays by name.
        current_round, total_rounds: The round, from 0, and the number of rounds.
        meta: Its NUM_STEPS_CURRENT_ROUND is the number of rows that the weights count as.
        optimizer_params, metrics, start_round: Fields of FLARE's; they are not sent.
    """

    params_type: str | None = None
    params: Any = None
    optimizer_params: Any = None
    metrics: dict[str, Any] | None = None
    start_round: int | None = 0
    current_round: int | None = None
    total_rounds: int | None = None
    meta: dict[str, Any] = field(default_factory=dict)


class Script:
    """Train at silos by a script. Raises ParameterError if the file does not exist.

    Args:
        path: Of the script.
        arguments: Words of its command line.
    """

    def __init__(self, path: str | Path, *arguments: str) -> None:
        self.path, self.arguments = Path(path).absolute(), arguments
        if not self.path.is_file():
            raise ParameterError(f"Script: {self.path} is not a file; name a Python script")
        self.__qualname__ = self.path.name  # how the record names it

    def at(self, silo: str, rounds: int) -> "_Running":
        """Return the loop of one silo. rounds: the number of the run's rounds."""
        return _Running(self, silo, rounds)

    def __call__(self, model: Any, x: Any, y: Any, number: int) -> tuple[Mapping[str, Any], int]:
        """Train for one round, in a process for this round alone."""
        running = self.at("silo", number)
        try:
            return running(model, x, y, number)
        finally:
            running.close()


class _Running:
    """One silo's script, as a loop (`moretta.protocols.fedsgd.own_loop`)."""

    def __init__(self, script: Script, silo: str, rounds: int) -> None:
        self._script, self._silo, self._rounds = script, silo, rounds
        self.__module__, self.__qualname__ = Script.__module__, script.path.name
        self._socket: socket.socket | None = None
        self._end: Any = None

    def __call__(self, model: Any, x: Any, y: Any, number: int) -> tuple[Mapping[str, Any], int]:
        before = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
        sent = {"round": number, "rounds": self._rounds, "silo": self._silo, "params": _arrays(before)}
        began = self._socket is None
        try:
            answer = self._asked(sent, x, y)
        except (OSError, EOFError):
            ended = self.close()
            if not began and ended.endswith(" 0"):  # a script without a loop ends after each round
                return self(model, x, y, number)
            raise RowsError(f"the script {self._script.path.name} {ended} before it sent a model") from None
        except BaseException:  # such as ctrl-c: its answer must not become the next round's
            self.close()
            raise
        weights = answer["params"]
        if answer["difference"]:
            weights = {
                name: before[name].numpy() + difference for name, difference in weights.items() if name in before
            }
        steps = answer["steps"]
        return weights, len(y) if steps is None else steps

    def _asked(self, sent: Mapping[str, Any], x: Any, y: Any) -> dict[str, Any]:
        own = self._socket = self._socket or self._started()
        frames.send(own, frames.packed(sent))
        while (answer := frames.receive(own)) == "rows":
            frames.send(
                own, frames.packed({"x": _arrays(x if isinstance(x, Mapping) else {"": x}), **_arrays({"y": y})})
            )
        return dict(answer)

    def _started(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            popen = subprocess.Popen(
                [sys.executable, "-u", str(self._script.path), *self._script.arguments],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env={**os.environ, SOCKET: str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._end = weakref.finalize(self, _ended, popen, ours)
        return ours

    def close(self) -> str:
        """End the process, if any; return how it ended."""
        end, self._socket, self._end = self._end, None, None
        return "was not started" if end is None else end() or ""


def _ended(popen: subprocess.Popen[bytes], ours: socket.socket) -> str:
    """Close the script's socket, so that it sees the end; then kill what is left of it and its children."""
    ours.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        popen.wait(PATIENCE)
    kill_group(popen.pid)
    return f"ended with exit code {popen.wait()}"


def _arrays(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors or arrays as arrays, with dtypes that numpy has."""
    arrays = {}
    for name, value in tensors.items():
        array = value.detach().cpu() if hasattr(value, "detach") else value
        array = array.float() if str(array.dtype) == "torch.bfloat16" else array
        arrays[str(name)] = np.require(array, requirements="C")  # a number stays without axes
    return arrays


def _tensors(arrays: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


# -- what a script calls -----------------------------------------------------------------------------------------------


class _Silo:
    """The script's end."""

    def __init__(self) -> None:
        number = os.environ.get(SOCKET, "")
        if not number.isdigit():
            raise MisuseError("moretta.client: this script was not started by Moretta; pass it as fit=Script(PATH)")
        self._socket = socket.socket(fileno=int(number))
        self._held: FLModel | None = None
        self._ended = False
        self.silo = ""
        threading.Thread(target=self._end_with_silo, daemon=True).start()

    def _end_with_silo(self) -> None:
        """End this process and its children if the silo ends within a round, such as by ctrl-c: no one takes a result.

        What a script does after its last round is left to it.
        """
        poll = select.poll()
        poll.register(self._socket, 0)
        poll.poll()  # until the other end is closed
        while True:
            time.sleep(PATIENCE)
            if self._held is not None:
                os.killpg(0, signal.SIGTERM)  # `Script` makes it the leader of a session

    def receive(self) -> FLModel | None:
        """Return the round's model, the same until one is sent; None at the end of the run."""
        if self._held is None and not self._ended:
            try:
                message = frames.receive(self._socket)
            except (OSError, EOFError):
                self._ended = True
                return None
            self.silo = message["silo"]
            numbers = message["round"] - 1, message["rounds"]
            self._held = FLModel(ParamsType.FULL, _tensors(message["params"]), None, None, 0, *numbers)
        return self._held

    def rows(self) -> tuple[Any, Any]:
        """Return the silo's inputs and targets."""
        if self.receive() is None:
            raise MisuseError("moretta.client: the run has ended; ask for rows while is_running()")
        frames.send(self._socket, frames.packed("rows"))
        message = frames.receive(self._socket)
        x, y = _tensors(message["x"]), _tensors({"y": message["y"]})["y"]
        return x.get("", x), y

    def send(self, model: Any) -> None:
        """Send the result of the script."""
        if self._held is None:
            raise MisuseError("moretta.client: send follows receive, once a round")
        if not isinstance(model.params, Mapping):
            raise MisuseError("moretta.client: expected FLModel(params=..) with tensors by name; got none")
        steps: Any = (model.meta or {}).get(STEPS)
        steps = steps.item() if hasattr(steps, "item") else steps
        kind = getattr(model.params_type, "value", model.params_type)
        if kind not in (None, ParamsType.FULL, ParamsType.DIFF):
            raise MisuseError(f'moretta.client: params_type is {kind!r:.40}; expected "FULL" (or None) or "DIFF"')
        answer = {"params": _arrays(model.params), "difference": kind == ParamsType.DIFF, "steps": steps}
        frames.send(self._socket, frames.packed(answer))
        self._held = None


_silo: _Silo | None = None


def init(rank: str | int | None = None, config_file: str | None = None) -> None:
    """Connect to the silo; further calls do nothing.

    Args:
        rank, config_file: Arguments of FLARE's; ignored.

    Raises:
        moretta.errors.MisuseError: Moretta did not start this process.
    """
    global _silo
    _silo = _silo or _Silo()


def _current() -> _Silo:
    if _silo is None:
        raise MisuseError("moretta.client: call init() first")
    return _silo


def receive(timeout: float | None = None) -> FLModel | None:
    """Return the round's model, or None at the end of the run: `params` as tensors, `current_round` from 0.

    Args:
        timeout: An argument of FLARE's; ignored.
    """
    return _current().receive()


def send(model: Any, clear_cache: bool = True) -> None:
    """Send the trained weights.

    Args:
        model: An `FLModel`, of this module or of FLARE.
        clear_cache: An argument of FLARE's; ignored.

    Raises:
        MisuseError: No model was received in this round, or `params` is not a mapping.
    """
    _current().send(model)


def is_running() -> bool:
    """Wait for the next round; return False at the end of the run."""
    return _current().receive() is not None


def rows() -> tuple[Any, Any]:
    """Return the silo's prepared inputs and targets as tensors; inputs of several arrays are a dict."""
    return _current().rows()


def get_site_name() -> str:
    """Return the silo's name."""
    _current().receive()
    return _current().silo


def get_job_id() -> str:
    """Return the fixed word "moretta", because runs have no job id here."""
    return "moretta"


def get_task_name() -> str:
    """Return "train", the only task."""
    return "train"


def system_info() -> dict[str, str]:
    """Return the names of the silo and the job, by FLARE's keys."""
    return {"site_name": get_site_name(), "job_id": get_job_id()}


def is_train() -> bool:
    """Return True, because each round is training."""
    return True


def is_evaluate() -> bool:
    """Return False."""
    return False


def is_submit_model() -> bool:
    """Return False."""
    return False
