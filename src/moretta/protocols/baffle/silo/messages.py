"""The arrows of BAFFLE's figure; the answer to `Estimate` is an upload of the secure sum."""

from __future__ import annotations

from collections.abc import Mapping

from moretta.contract.messages import Array, Message, message
from moretta.errors import PeerError

SEED_BYTES = 32
RUNS_TORCH = "torch"
RUNS = (RUNS_TORCH, "float32", "float16", "int8-activations")
"""What a silo may run: PyTorch, or of an ONNX graph a precision of `onnx_export`."""


def check_seeds(what: str, values: Mapping[str, bytes]) -> None:
    """Raise `moretta.errors.PeerError` unless each value is one of 32 bytes."""
    wrong = sorted(name for name, value in values.items() if len(value) != SEED_BYTES)
    if wrong:
        raise PeerError(f"{what}: expected {SEED_BYTES} bytes, got another number from {wrong!r:.200}")


@message("baffle/commit")
class Commit(Message):
    """Commit to a contribution to the seed of this cohort's directions."""

    cohort: tuple[str, ...]


@message("baffle/committed")
class Committed(Message):
    """The commitment, and what the silo runs: "torch", or the precision of the ONNX graph that it needs."""

    commitment: bytes
    runs: str

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` for a commitment of another length, or a silo that runs something else."""
        check_seeds(self.TAG, {"the commitment": self.commitment})
        if self.runs not in RUNS:
            raise PeerError(f"{self.TAG}: expected a silo that runs {', '.join(RUNS)}, got {self.runs!r:.80}")


@message("baffle/reveal")
class Reveal(Message):
    """Everybody is committed, the server too: reveal your contribution."""

    commitments: Mapping[str, bytes]

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` for a commitment of another length."""
        check_seeds(self.TAG, self.commitments)


@message("baffle/revealed")
class Revealed(Message):
    """The contribution."""

    contribution: bytes

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` for a contribution of another length."""
        check_seeds(self.TAG, {"the contribution": self.contribution})


@message("baffle/agree")
class Agree(Message):
    """All contributions, from which the seed follows, and what is trained.

    layout: `moretta.protocols.baffle.silo.forward.Layout.digest`. graph: uint8[bytes], for a silo that runs ONNX.
    """

    contributions: Mapping[str, bytes]
    layout: str
    graph: Array

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` for a contribution of another length, or a graph that is no bytes."""
        check_seeds(self.TAG, self.contributions)
        if self.graph.dtype != "uint8" or self.graph.ndim != 1:
            raise PeerError(f"{self.TAG}: expected a graph uint8[bytes]")


@message("baffle/agreed")
class Agreed(Message):
    """The silo has the same seed: a digest of it."""

    digest: bytes


@message("baffle/estimate")
class Estimate(Message):
    """Run forward at the parameters, perturbed in K directions, and upload the loss differences.

    parameters: the trained tensors as one flat array (`moretta.protocols.baffle.silo.forward.Layout`).
    parameter_hash: of the model's layout and the parameters (`moretta.protocols.baffle.silo.seeds.parameter_hash`).
    """

    parameters: Array
    parameter_hash: bytes
    k: int
    encoding: Mapping[str, int]

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` for parameters that are no flat array of floats, or an impossible K."""
        if self.parameters.ndim != 1 or self.parameters.dtype.name not in ("float32", "float64"):
            raise PeerError(f"{self.TAG}: expected flat parameters of float32 or float64")
        if not 2 <= self.k < 2**16:
            raise PeerError(f"{self.TAG}: expected a K from 2 to 2^16 - 1, got {self.k}")


SET_UP = (Commit, Committed, Reveal, Revealed, Agree, Agreed)
MESSAGES = (*SET_UP, Estimate)
