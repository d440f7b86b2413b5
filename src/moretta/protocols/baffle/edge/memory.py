"""How many rows at a time keep this process under a limit of memory, in MiB, 2^20 bytes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array
from moretta.engines.memory import peak_mib, status
from moretta.errors import ParameterError

if TYPE_CHECKING:
    from moretta.protocols.baffle.edge.onnx_forward import OnnxForward

SPARE = 1.25  # what an allocator may round up: measured steps are up to 1.16 times the one before, a row


def fit(forward: OnnxForward, x: Array, limit_mib: float, parameters: NDArray[np.floating], besides: str = "") -> int:
    """Set and return the largest micro-batch of 1, 2, 4, ... rows, up to len(x), that stays within `limit_mib`.

    Runs the model at each and reads the real peaks of this process. Since those never fall, it goes upwards only, and
    takes a step only where the rows so far, extrapolated along a line, say that it will stay a MiB below the limit.
    parameters: one flat array of `forward.layout`; its values do not matter. besides: words for the error about memory
    that the caller holds meanwhile.
    Raises ParameterError, with what would be needed, if one row at a time does not fit.
    """
    before = _resident()
    peaks = [peak_mib(), _peak_at(forward, x, 1, parameters)]
    if peaks[-1] > limit_mib:
        needed = math.ceil(peaks[-1])
        raise ParameterError(
            f"memory-limit-mib = {limit_mib:g}: the client needs at least {needed} MiB for one row at a time{besides}; "
            f"give at least {needed + 1}"
        )
    # MiB a row: ONNX Runtime keeps what a run took, which counts where an earlier peak hides the run's own
    rows, slope = 1, _resident() - before
    while (more := min(rows, len(x) - rows)) and peaks[-1] + SPARE * slope * more <= limit_mib - 1:
        peaks.append(_peak_at(forward, x, rows + more, parameters))
        if peaks[-1] > limit_mib:
            break
        rows += more
        seen = peaks[-1] > peaks[-2] > peaks[-3]  # both ends of the last step are true peaks
        slope = (peaks[-1] - peaks[-2]) / more if seen else (_resident() - before) / rows
    forward.micro_batch = rows
    return rows


def _resident() -> float:
    found = status("VmRSS")
    return peak_mib() if found is None else found


def _peak_at(forward: OnnxForward, x: Array, rows: int, parameters: NDArray[np.floating]) -> float:
    forward.micro_batch = rows
    for _ in range(2):  # the second time, sizes known from the first may be allocated at once
        forward.outputs(parameters[None], x[:rows])
    return peak_mib()
