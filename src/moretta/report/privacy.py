"""What a run hid from whom: plain sentences by role, and whether an attack has tested each.

The sentences are those of the design's sections "What it hides, honestly", put plainly, and nothing beyond them: a
protocol or a scheme for which there is no such section gets a sentence saying so. A value is called obfuscated where
the design calls it obfuscated; stronger words are for what a proof or an accountant supports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moretta.report.folder import RunRecord

Role = Literal["Server", "A silo", "An eavesdropper"]

_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")

UNTESTED = "not yet tested by an attack on this run"


@dataclass(frozen=True)
class Statement:
    """What one role sees or can work out. tested: the attack on this run that tested it, None for none yet."""

    role: Role
    text: str
    tested: str | None = None

    @property
    def evidence(self) -> str:
        """How well the sentence is supported, in words."""
        return UNTESTED if self.tested is None else f"tested by {self.tested}"


def privacy_statements(record: RunRecord) -> tuple[Statement, ...]:
    """The sentences that hold for the protocol, loss and aggregation of this run, the server's first."""
    match record.protocol:
        case "pbpfl":
            server, silo = _pbpfl_server(record), _pbpfl_silo(record)
        case "fedsgd" | "fedavg":
            server = [_sum(record, "gradient" if record.protocol == "fedsgd" else "weight change"), "Holds the model."]
            silo = ["Receives the model itself, every round."]
        case "local":
            server = ["Takes no part: it receives no rows, no gradients and no models."]
            silo = ["Sees its own rows and its own model, and nothing of any other silo."]
        case "centralised":
            server = ["Holds every row of every silo, and the model: nothing is hidden from it."]
            silo = ["Hands over its rows; nothing of them is hidden from whoever trains on them."]
        case other:
            server = silo = [f"This version of the report has no sentence about the protocol {other}."]
    return (
        *(Statement("Server", text) for text in server),
        *(Statement("A silo", text) for text in silo),
        Statement("An eavesdropper", _eavesdropper(record)),
    )


def reading_notes(record: RunRecord) -> tuple[str, ...]:
    """What a reader of the sentences has to know besides; neither a claim nor in need of a test."""
    notes = []
    if record.protocol == "pbpfl":
        notes.append(
            "Where silos must not hold the function of the model at all, PBPFL is not the way: inference-only silos in "
            "an enclave (BAFFLE) are."
        )
    if record.setting("engine", "name") == "in-process":
        notes.append(
            "All roles of this run were played by one process on one machine; “sees” means the messages of a role, "
            "not the memory of that machine, whose owner sees everything."
        )
    return tuple(notes)


def _pbpfl_server(record: RunRecord) -> list[str]:
    said = [_sum(record, "upload")]
    if _cross_entropy(record):
        said.append("In the cross-entropy exchange, sees the softmax of each sample.")
    return said


def _pbpfl_silo(record: RunRecord) -> list[str]:
    parts = record.setting("protocol", "partitions")
    here = f" (here m = {parts})" if isinstance(parts, int) else ""
    said = [
        "Receives a noisy model: its parameter values are obfuscated.",
        "Sees the hidden layers up to the network’s own scaling and permutation symmetry, so the function that they "
        "compute is plain to it.",
        f"The offset of the last layer has m unknowns{here}, and a silo that has labels fits them by least squares "
        "(to a relative error of 10⁻⁴ after 20 rounds on the digits data).",
        "The released model is the true function.",
    ]
    if _cross_entropy(record):
        said.insert(
            3,
            "Because probabilities sum to one, works out the true softmax exactly once its batch has at least m "
            "samples, and then the differences between the last layer’s offsets from a single sample.",
        )
    return said


def _cross_entropy(record: RunRecord) -> bool:
    return record.setting("protocol", "loss") == "cross-entropy"


def _sum(record: RunRecord, upload: str) -> str:
    used = record.secure_aggregation
    if used is None or used.scheme == "none":
        return f"Sees the {upload} of each silo by itself: no secure aggregation was used."
    if used.scheme == "pairwise":
        ring = f" (modulo 2{str(used.ring_bits).translate(_RAISED)})" if used.ring_bits else ""
        return f"Sees only the ring sum{ring} of the silos’ {upload}s, not the {upload} of any one of them."
    return f"This version of the report has no sentence about the aggregation scheme {used.scheme}."


def _eavesdropper(record: RunRecord) -> str:
    if record.setting("engine", "name") == "in-process":
        return "Nothing travelled over a network in this run; the report says nothing about one."
    return "The report says nothing about what someone who listens to the network learns."
