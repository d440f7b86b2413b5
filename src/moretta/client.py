"""A training script as FLARE's Client API has it, as the loop of a silo: `init`, `receive`, `send`, `is_running`.

    import moretta.client as flare

    flare.init()
    while flare.is_running():
        sent = flare.receive()
        net.load_state_dict(sent.params)
        ...                                     # train, on rows of its own or on `flare.rows()`
        flare.send(flare.FLModel(params=net.cpu().state_dict(), meta={"NUM_STEPS_CURRENT_ROUND": steps}))

Such a script becomes a loop by `FedAvg(fit=Script("client.py", "--epochs", "2"))`, or for one silo by `Silo(fit=...)`.
In a run file `fit = "module:function"` names a `Script` that a module beside it makes. Each silo's script is a process
of its own, which lives from its first round to the end of the run; one that has ended is started again in the next
round. What it prints goes to standard error. It is trusted as any loop: it sees the silo's rows.

Only weights are summed, and of `meta` NUM_STEPS_CURRENT_ROUND, the number of rows that they count as, all the silo's
where it is left out. `metrics` stay at the silo.

    silo                                                the script
      round: parameters, silo, number, rounds      -->    receive
                                                   <--    the word "rows", if it wants them
      inputs and targets                           -->    rows
                                                   <--    weights and meta: send
"""

import contextlib
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moretta.engines import frames
from moretta.engines.process import kill_group
from moretta.errors import MisuseError, ParameterError, RowsError

SOCKET = "MORETTA_CLIENT_SOCKET"  # of the environment: the number of the script's end
PATIENCE = 5.0  # seconds that a script has to end in
STEPS = "NUM_STEPS_CURRENT_ROUND"


class ParamsType:
    """What `FLModel.params` are: the weights, or their difference to what was received."""

    FULL, DIFF = "FULL", "DIFF"


@dataclass
class FLModel:
    """Weights by name, tensors or arrays, and what goes with them; the fields of FLARE's class of that name."""

    params_type: str | None = None
    params: Any = None
    optimizer_params: Any = None
    metrics: dict[str, Any] | None = None
    start_round: int | None = 0
    current_round: int | None = None
    total_rounds: int | None = None
    meta: dict[str, Any] = field(default_factory=dict)


class Script:
    """A script that trains at silos. path: of it. arguments: words of its command line.

    Raises `moretta.errors.ParameterError` where there is no such file.
    """

    def __init__(self, path: str | Path, *arguments: str) -> None:
        self.path, self.arguments = Path(path).absolute(), arguments
        if not self.path.is_file():
            raise ParameterError(f"Script: expected a file, and {self.path} is not one; name a script of Python")
        self.__qualname__ = self.path.name  # how the record names it

    def at(self, silo: str, rounds: int) -> "_Running":
        """Return the loop of one silo. rounds: of the run."""
        return _Running(self, silo, rounds)

    def __call__(self, model: Any, x: Any, y: Any, number: int) -> tuple[Mapping[str, Any], int]:
        """Train for one round, in a process for it alone."""
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
            if not began and ended.endswith(" 0"):  # it was done after its last round, as one without a loop is
                return self(model, x, y, number)
            raise RowsError(f"the script {self._script.path.name} {ended} before it sent a model") from None
        except BaseException:  # such as ctrl-c: its answer must not be the next round's
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
        """End the process, if there is one; return how it ended."""
        end, self._socket, self._end = self._end, None, None
        return "was not started" if end is None else end() or ""


def _ended(popen: subprocess.Popen[bytes], ours: socket.socket) -> str:
    """Let a script see that nothing more comes, and end what is left of it and of what it started."""
    ours.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        popen.wait(PATIENCE)
    kill_group(popen.pid)
    return f"ended with exit code {popen.wait()}"


def _arrays(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors or arrays as arrays, of dtypes that arrays have."""
    arrays = {}
    for name, value in tensors.items():
        array = value.detach().cpu() if hasattr(value, "detach") else value
        array = array.float() if str(array.dtype) == "torch.bfloat16" else array
        arrays[str(name)] = np.require(array, requirements="C")  # a number stays one
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
            raise MisuseError("moretta.client: this script was not started by Moretta; give it as fit=Script(PATH)")
        self._socket = socket.socket(fileno=int(number))
        self._held: FLModel | None = None
        self._ended = False
        self.silo = ""

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
        answer = {"params": _arrays(model.params), "difference": kind == ParamsType.DIFF, "steps": steps}
        frames.send(self._socket, frames.packed(answer))
        self._held = None


_silo: _Silo | None = None


def init(rank: str | int | None = None, config_file: str | None = None) -> None:
    """Connect to the silo; further calls do nothing. rank, config_file: of FLARE's, not used.

    Raises `moretta.errors.MisuseError` in a process that Moretta has not started.
    """
    global _silo
    _silo = _silo or _Silo()


def _current() -> _Silo:
    if _silo is None:
        raise MisuseError("moretta.client: call init() first")
    return _silo


def receive(timeout: float | None = None) -> FLModel | None:
    """Return the round's model, `params` tensors by name, `current_round` from 0; None at the end of the run.

    timeout: of FLARE's, not used.
    """
    return _current().receive()


def send(model: Any, clear_cache: bool = True) -> None:
    """Send the weights that the script ends with, an `FLModel` of ours or of FLARE's.

    clear_cache: of FLARE's, not used.
    """
    _current().send(model)


def is_running() -> bool:
    """Wait for the next round; return whether there is one."""
    return _current().receive() is not None


def rows() -> tuple[Any, Any]:
    """Return the silo's prepared inputs and targets as tensors; inputs of several arrays are a dict."""
    return _current().rows()


def get_site_name() -> str:
    """Return the silo's name."""
    _current().receive()
    return _current().silo


def get_job_id() -> str:
    """Return a word; runs have no number here."""
    return "moretta"


def get_task_name() -> str:
    """Return "train", the one task."""
    return "train"


def system_info() -> dict[str, str]:
    """Return the silo's name and the job's, by FLARE's keys."""
    return {"site_name": get_site_name(), "job_id": get_job_id()}


def is_train() -> bool:
    """Return True: each round is training."""
    return True


def is_evaluate() -> bool:
    """Return False."""
    return False


def is_submit_model() -> bool:
    """Return False."""
    return False
