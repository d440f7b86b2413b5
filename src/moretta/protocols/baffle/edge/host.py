"""The life of an edge client's process: it receives its settings, and answers one message after the other.

`fit` computes the number of rows at a time that stays under a memory limit, in MiB, 2^20 bytes.
"""

import hashlib
import math
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from moretta.contract import framing
from moretta.contract.codec import Codec
from moretta.contract.messages import Array, Message
from moretta.contract.roles import answered
from moretta.engines.child import LOCAL, SENTENCE, Acknowledged, AnswerHeader, BeSilo, Restore, as_arrays, as_bytes
from moretta.engines.child import MESSAGES as OF_PROCESS
from moretta.engines.confinement import confine, readable
from moretta.engines.frames import LARGEST, receive_arrays
from moretta.engines.usage import Clock, cap, give_back_code, peak_mib, peak_of, status
from moretta.errors import CodecError, MisuseError, MorettaError, ParameterError, RowsError
from moretta.protocols.baffle.edge.onnx_blocks import OnnxBlocks
from moretta.protocols.baffle.edge.onnx_forward import OnnxForward
from moretta.protocols.baffle.silo import work
from moretta.protocols.baffle.silo.client import Client
from moretta.protocols.baffle.silo.estimate import differences, directions_of
from moretta.protocols.baffle.silo.messages import MESSAGES
from moretta.protocols.baffle.silo.recipe import EdgeSettings
from moretta.protocols.common.silo_rows import schema_of
from moretta.protocols.common.silo_setup import SiloSetup
from moretta.secure_aggregation.keystream import SecretRoot

SCHEMA = (*schema_of(MESSAGES), *OF_PROCESS)
# An estimate's arrays of the parameters' length, beside the perturbed ones: the server's, their signs, and a direction.
# Gaussian ones come from a table by 64-bit numbers. A silo that sums its own estimate also holds sums, and for Adam two
# moments, those of the round's start, and copies of all for its checkpoint and on their way there. Noise on a whole
# difference takes 44 bytes an entry at its peak, 16 more for its removable parts, beside the sums.
BESIDE, BESIDE_GAUSSIAN, BESIDE_SUMS, BESIDE_NOISE, BESIDE_ADAM = 6, 10, 14, 20, 36
# Bytes of an estimate for each row in each direction, and for each direction. At its peak it holds four arrays of
# losses and their differences, float64[K, rows], and before they are joined one object for each direction.
ROW, DIRECTION = 4 * 8, 256
DEVIATIONS = 6  # by which a random lot may exceed its expected size
OWN = Path("/proc/self")
SLACK = 4 << 20  # bytes for the rest, such as code that was freed and is needed for an upload
SPARE = 1.25  # an allocator's rounding: measured steps are up to 1.16 times the previous one, a row


class EdgeSilo:
    """A silo's role in this process, and the model that it runs."""

    def __init__(self, begin: BeSilo, x: Array, y: Array) -> None:
        self._settings = settings = EdgeSettings.load(begin.settings, x, y)
        if settings.memory_limit_mib is not None:
            cap(settings.memory_limit_mib)
        self._graph = b""  # the digest of the loaded graph
        self._forward: OnnxForward | OnnxBlocks | None = None
        self._too_large: ParameterError | None = None
        insecure = SecretRoot(begin.insecure) if begin.insecure else None
        self._client = Client(
            settings.setup,
            replace(settings.recipe, checkpoint_minutes=None),  # a confined process can make no file
            insecure=insecure,
            load=self._load,
            runs=settings.precision,
        )
        self._sent_state = as_bytes(begin.state)
        self._client.restore(self._sent_state)
        self.clock = Clock()
        self._client.phase = self.clock.phase
        _confine(settings.setup)  # all files are read by now, and no graph is loaded yet

    def answer(self, message: Message) -> Message:
        """Answer a message; refuse once the memory limit was exceeded."""
        if isinstance(message, Restore):
            self._sent_state = as_bytes(message.state)
            self._client.restore(self._sent_state)
            return Acknowledged(stamp=LOCAL)
        try:
            answer = answered(self._client, message)
        except MemoryError:  # of `cap`; the allocation was freed
            if self._settings.memory_limit_mib is None:
                raise
            raise RowsError(
                f"memory-limit-mib = {self._settings.memory_limit_mib:g}: the client asked for more memory than it "
                f"may have, and had {peak_mib():.1f} MiB; set a larger limit, or a smaller k, batch-size or model"
            ) from None
        limit, peak = self._settings.memory_limit_mib, peak_mib()
        if limit is not None and peak > limit and self._forward is not None:  # earlier the need is unknown
            raise RowsError(
                f"memory-limit-mib = {limit:g}: the client has taken {peak:.1f} MiB; set at least "
                f"{math.ceil(peak) + 1}, or a smaller micro-batch, k or batch-size"
            )
        return answer

    def news(self) -> dict[str, bytes]:
        """Return the role's state if it changed since the last call, else nothing."""
        state = dict(self._client.state())
        if state == self._sent_state:
            return {}
        self._sent_state = state
        return state

    def _load(self, graph: bytes) -> OnnxForward | OnnxBlocks:
        """Return the runner of a graph. A known graph is not loaded again, because two might not fit."""
        digest, settings = hashlib.sha256(graph).digest(), self._settings
        if digest == self._graph and self._too_large is not None:
            raise self._too_large
        if digest == self._graph and self._forward is not None:
            return self._forward
        self._graph, self._forward, self._too_large = digest, None, None
        rule = settings.recipe.rule
        forward = OnnxForward(graph) if rule is None else OnnxBlocks(graph, rule)
        if settings.micro_batch is not None:
            forward.micro_batch = settings.micro_batch
        elif settings.memory_limit_mib is not None:
            try:
                self._fit(forward, settings.memory_limit_mib)
            except ParameterError as error:
                self._too_large = error
                raise
        self._forward = forward
        return forward

    def _fit(self, forward: OnnxForward | OnnxBlocks, limit: float) -> None:
        """Compute the number of rows at a time that fits the limit, beside an estimate's other memory.

        Raises ParameterError, with the needed limit, if not even one row at a time fits.
        """
        layout, recipe = forward.layout, self._settings.recipe
        inputs, targets = self._client.first_batch(layout.dtype)
        at = np.full(layout.size, 0.01, layout.dtype)
        seed = b"to be measured".ljust(32)
        if isinstance(forward, OnnxBlocks):
            recipe = recipe.by(forward.blocks, layout.shapes)
        directions = recipe.directions(2, layout.size, seed)

        def run(x: Array) -> None:
            y = targets[: len(x)]
            if isinstance(forward, OnnxBlocks):
                work.differences(recipe, forward, at, [(x, y)], recipe.keys(seed))
            else:
                differences(recipe.form, recipe.sigma, directions, forward, recipe.loss, at, x, y)

        run(inputs[:1])  # a small estimate first, as that loads code
        rows, setup, itemsize = len(inputs), self._settings.setup, np.dtype(layout.dtype).itemsize
        beside = max(
            BESIDE_GAUSSIAN if recipe.direction == "gaussian" else BESIDE,
            BESIDE_SUMS if recipe.local_epochs or recipe.own_directions or recipe.clip_entry or recipe.blocks else 0,
            BESIDE_NOISE if recipe.local_epochs and setup.privacy is not None else 0,
            BESIDE_ADAM if recipe.adam else 0,  # at the epoch level alone
        )
        if setup.privacy is not None and not recipe.local_epochs:  # of a drawn lot
            lot = setup.batch_size or len(setup.x)
            rows = min(len(setup.x), math.ceil(lot + DEVIATIONS * math.sqrt(lot)))
        count = recipe.most if recipe.blocks else directions_of(recipe.form, recipe.most)
        scalars = count * (rows * ROW + DIRECTION)
        besides = f", also for K = {recipe.most}" if scalars > 2**20 else ""
        # An estimate's memory while the model runs, and afterwards, while ONNX Runtime keeps its own.
        taken = np.ones(beside * layout.size * itemsize + scalars + SLACK, np.uint8)
        fit(forward, inputs, limit, at, besides, run if recipe.blocks else None)
        del taken


def _confine(setup: SiloSetup) -> None:
    """Deny this process all files but those that run a graph and record which sums it has helped to open.

    Its own folder of /proc, which reports its memory, stays open, so that the kernel's rule for it stays too.
    """
    written = [OWN] if OWN.is_dir() else []
    if setup.helped is not None:
        setup.helped.begin(begun=setup.helped.begun)
        written.append(Path(setup.helped.path))
    if written[:1] == [OWN]:
        os.open(OWN, os.O_RDONLY | os.O_DIRECTORY)
    confine(readable(), written)


def fit(
    forward: OnnxForward | OnnxBlocks,
    x: Array,
    limit_mib: float,
    parameters: NDArray[np.floating],
    besides: str = "",
    run: Callable[[Array], object] | None = None,
) -> int:
    """Set and return the largest micro-batch of 1, 2, 4, ... rows, up to len(x), that stays within a limit.

    Runs the model at each size and reads the memory. It grows only while the measured sizes, extrapolated along a line,
    stay a MiB below the limit.

    Args:
        limit_mib: The process's largest memory, in MiB.
        parameters: One flat array of `forward.layout`, with any values.
        besides: Words for the error about the caller's other memory.
        run: Runs some rows; None runs the model once.

    Raises:
        ParameterError: One row at a time does not fit; the sentence has the needed limit.
    """
    run = run or (lambda some: forward.outputs(parameters[None], some))
    peaks = [status("VmRSS") or peak_mib(), _peak_at(forward, x, 1, run)]
    if (most := peak_mib()) > limit_mib:
        needed = math.ceil(most)
        raise RowsError(
            f"memory-limit-mib = {limit_mib:g}: the client needs at least {needed} MiB for one row at a "
            f"time{besides}; set at least {needed + 1}"
        )
    rows, slope = 1, peaks[1] - peaks[0]  # MiB per row
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
        for _ in range(2):  # the second time, known sizes may be allocated at once
            run(x[:rows])

    return peak_of(twice)


class Host:
    """Reads a message, lets the silo answer, and writes the answer. source, sink: the two pipes."""

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self._source, self._sink, self._codec = source, sink, Codec(SCHEMA)
        self._silo: EdgeSilo | None = None

    def turn(self) -> bool:
        """Answer once; return whether a message came. Raises CodecError for half a frame: nothing can follow it."""
        data = framing.read(self._source)
        if data is None:
            return False
        answer: Message | None = None
        error: Exception | None = None
        try:
            asked = self._codec.decode(data)
            del data  # its parameters are in the message now
            answer = self._answer(asked)
        except MorettaError as caught:
            error = caught
        except Exception as caught:  # noqa: BLE001  # the process survives: an error costs the silo this exchange only
            traceback.print_exc()
            error = caught
        framing.write(self._sink, self._codec.encode(self._envelope(error)))
        if answer is not None:
            framing.write(self._sink, self._codec.encode(answer))
        return True

    def _answer(self, asked: Message) -> Message:
        if isinstance(asked, BeSilo):
            rows = receive_arrays(self._source, LARGEST)
            if rows is None or rows.keys() != {"x", "y"}:
                raise CodecError("expected the silo's rows, as arrays x and y")
            self._silo = EdgeSilo(asked, **rows)
            return Acknowledged(stamp=LOCAL)
        if self._silo is None:
            raise MisuseError(f"expected to receive first which silo this is, got `{asked.TAG}`")
        return self._silo.answer(asked)

    def _envelope(self, error: Exception | None) -> AnswerHeader:
        silo = self._silo
        return AnswerHeader(
            stamp=LOCAL,
            seconds={} if silo is None else dict(silo.clock.take()),
            peak_mib=peak_mib(),
            state={} if silo is None else as_arrays(silo.news()),
            error="" if error is None else type(error).__name__,
            sentence=str(error or "")[:SENTENCE].encode(errors="replace").decode(),
        )


def main() -> None:
    """Serve on standard input and output."""
    give_back_code()
    own = os.dup(1)
    os.dup2(2, 1)  # all other prints go to standard error
    host = Host(sys.stdin.buffer, os.fdopen(own, "wb"))
    try:
        while host.turn():
            pass
    except CodecError as error:
        sys.exit(f"moretta.edge: {error}")
    except (BrokenPipeError, KeyboardInterrupt):  # the parent process has ended, or will
        sys.exit(1)
