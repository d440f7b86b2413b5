"""How many rows at a time keep this process under a limit of memory, in MiB, 2^20 bytes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Array
from moretta.engines.usage import peak_mib, peak_of, status
from moretta.errors import RowsError

if TYPE_CHECKING:
    from collections.abc import Callable

    from moretta.protocols.baffle.edge.onnx_blocks import OnnxBlocks
    from moretta.protocols.baffle.edge.onnx_forward import OnnxForward

SPARE = 1.25  # what an allocator may round up: measured steps are up to 1.16 times the one before, a row


def fit(
    forward: OnnxForward | OnnxBlocks,
    x: Array,
    limit_mib: float,
    parameters: NDArray[np.floating],
    besides: str = "",
    run: Callable[[Array], object] | None = None,
) -> int:
    """Set and return the largest micro-batch of 1, 2, 4, ... rows, up to len(x), that stays within `limit_mib`.

    Runs the model at each and reads what it really takes. It goes upwards only, and takes a step only where the rows so
    far, extrapolated along a line, say that it will stay a MiB below the limit.
    parameters: one flat array of `forward.layout`; its values do not matter. besides: words for the error about memory
    that the caller holds meanwhile. run: what is run of some rows; None runs the model once.
    Raises ParameterError, with what would be needed, if one row at a time does not fit.
    """
    run = run or (lambda some: forward.outputs(parameters[None], some))
    peaks = [status("VmRSS") or peak_mib(), _peak_at(forward, x, 1, run)]
    if (most := peak_mib()) > limit_mib:
        needed = math.ceil(most)
        raise RowsError(
            f"memory-limit-mib = {limit_mib:g}: the client needs at least {needed} MiB for one row at a time{besides}; "
            f"give at least {needed + 1}"
        )
    rows, slope = 1, peaks[1] - peaks[0]  # MiB a row
    while (more := min(rows, len(x) - rows)) and peaks[-1] + SPARE * slope * more <= limit_mib - 1:
        peaks.append(_peak_at(forward, x, rows + more, run))
        if peaks[-1] > limit_mib:
            break
        rows, slope = rows + more, (peaks[-1] - peaks[-2]) / more
    forward.micro_batch = rows
    return rows


def _peak_at(forward: OnnxForward | OnnxBlocks, x: Array, rows: int, run: Callable[[Array], object]) -> float:
    forward.micro_batch = rows

    def twice() -> None:
        for _ in range(2):  # the second time, sizes known from the first may be allocated at once
            run(x[:rows])

    return peak_of(twice)
