"""BAFFLE's messages (figure: `moretta.protocols.baffle`); the answer to `Estimate` is an upload of the secure sum."""

from collections.abc import Mapping
from typing import Annotated

from moretta.contract.messages import Array, Digest, Digests, Message, Octets, message, shaped, within
from moretta.errors import PeerError

RUNS_TORCH = "torch"
RUNS = (RUNS_TORCH, "float32", "float16", "int8-activations")
"""A silo's possible runners: PyTorch, or an ONNX graph in a precision of `onnx_export`."""


@message("baffle/commit")
class Commit(Message):
    """Commit to a contribution to the seed of this cohort's directions."""

    cohort: tuple[str, ...]


@message("baffle/committed")
class Committed(Message):
    """The commitment, and the silo's runner: "torch", or the precision of the ONNX graph that it needs."""

    commitment: Digest
    runs: str

    def check(self) -> None:
        """Raise `moretta.errors.PeerError` for a silo with another runner."""
        if self.runs not in RUNS:
            raise PeerError(f"{self.TAG}: expected a silo that runs {', '.join(RUNS)}, got {self.runs!r:.80}")


@message("baffle/reveal")
class Reveal(Message):
    """All roles, the server too, have committed: reveal your contribution."""

    commitments: Digests


@message("baffle/revealed")
class Revealed(Message):
    """The silo's contribution to the seed."""

    contribution: Digest


@message("baffle/agree")
class Agree(Message):
    """All contributions, from which the seed follows, and the model to train.

    Attributes:
        layout: `moretta.protocols.baffle.silo.forward.Layout.digest`.
        graph: uint8[bytes], for a silo that runs ONNX.
        graphs: The digests of all silos' graphs, by precision.
    """

    contributions: Digests
    layout: str
    graph: Octets
    graphs: Digests


@message("baffle/agreed")
class Agreed(Message):
    """The digest of the seed that the silo derived."""

    digest: bytes


@message("baffle/estimate")
class Estimate(Message):
    """Run forward at the parameters, perturbed in K directions, and upload the loss differences.

    Attributes:
        parameters: The trained tensors as one flat array (`moretta.protocols.baffle.silo.forward.Layout`).
        parameter_hash: Of the model's layout and the parameters (`moretta.protocols.baffle.silo.seeds.parameter_hash`).
        k: K, from 2 to 2^16 - 1.
        encoding: Fraction bits by the names of the uploads.
    """

    parameters: Annotated[Array, shaped(1, "float32", "float64")]
    parameter_hash: bytes
    k: Annotated[int, within(2, 2**16 - 1)]
    encoding: Mapping[str, int]


SET_UP = (Commit, Committed, Reveal, Revealed, Agree, Agreed)
MESSAGES = (*SET_UP, Estimate)
