"""How much memory this process takes, how many rows at a time keep it under a limit, and what stops it far above one.

In MiB, 2^20 bytes.
"""

from __future__ import annotations

import math
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array
from moretta.errors import ParameterError

if TYPE_CHECKING:
    from moretta.protocols.baffle.edge.onnx_forward import OnnxForward  # it needs ONNX Runtime, and `cap` does not

HEADROOM = 64  # MiB above a limit in which an overrun is measured, and told of with what would do, instead of stopped
SPARE = 1.25  # what an allocator may round up: measured steps are up to 1.16 times the one before, a row


def peak_mib() -> float:
    """Return the most memory that this process has had resident since it began; it never falls."""
    found = _status("VmHWM")
    if found is not None:
        return found  # on Linux ru_maxrss begins with the parent's peak, so it is the last resort
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def cap(limit_mib: float) -> None:
    """Have the system refuse this process memory far above a limit, as a graph could ask for gigabytes at once.

    What counts is memory reserved for writing, used or not: measured with ONNX Runtime it is up to 8 MiB more than what
    is resident. The bound is `HEADROOM` above the limit, or above what is reserved already if that is more. Only Linux
    bounds all of it.
    """
    bound = int((max(limit_mib, _status("VmData") or 0.0) + HEADROOM) * 2**20)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (bound if hard < 0 else min(bound, hard), hard))


def fit(forward: OnnxForward, x: Array, limit_mib: float, parameters: NDArray[np.floating], besides: str = "") -> int:
    """Set and return the largest micro-batch of 1, 2, 4, ... rows, up to len(x), that stays within `limit_mib`.

    Runs the model at each and reads the real peaks of this process. Since those never fall, it goes upwards only, and
    takes a step only where the rows so far, extrapolated along a line, say that it will stay a MiB below the limit.
    parameters: one flat array of `forward.layout`; its values do not matter. besides: what is told of memory that the
    caller holds meanwhile.
    Raises ParameterError, with what would be needed, if one row at a time does not fit.
    """
    before = _status("VmRSS") or 0.0
    peaks = [peak_mib(), _peak_at(forward, x, 1, parameters)]
    if peaks[-1] > limit_mib:
        needed = math.ceil(peaks[-1])
        raise ParameterError(
            f"memory-limit-mib = {limit_mib:g}: the client needs at least {needed} MiB for one row at a time{besides}; "
            f"give at least {needed + 1}"
        )
    rows, slope = 1, peaks[-1] - before  # MiB a row; an upper bound, since what came before may hide the true peak
    while (more := min(rows, len(x) - rows)) and peaks[-1] + SPARE * slope * more <= limit_mib - 1:
        peaks.append(_peak_at(forward, x, rows + more, parameters))
        if peaks[-1] > limit_mib:
            break
        rows += more
        seen = peaks[-1] > peaks[-2] > peaks[-3]  # both ends of the last step are true peaks
        slope = (peaks[-1] - peaks[-2]) / more if seen else (peaks[-1] - before) / rows
    forward.micro_batch = rows
    return rows


def _peak_at(forward: OnnxForward, x: Array, rows: int, parameters: NDArray[np.floating]) -> float:
    forward.micro_batch = rows
    for _ in range(2):  # the second time, what the first one learnt of sizes may be set aside at once
        forward.outputs(parameters[None], x[:rows])
    return peak_mib()


def _status(field: str) -> float | None:
    """Return a figure of /proc/self/status, or None where there is none (not Linux)."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:")), None)
