"""The server's keys, which the scorer alone reads."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from moretta.contract.messages import Stamp
from moretta.errors import ParameterError

if TYPE_CHECKING:
    from moretta.audit.evidence.truth import Truth
    from moretta.protocols.pbpfl.perturbation import Key


@lru_cache(maxsize=64)  # one audit long
def key_of(truth: Truth, number: int) -> Key:
    """Return the key of a round. Raises `moretta.errors.ParameterError` for a run of another protocol."""
    from moretta.protocols.pbpfl.server import Server

    server = truth.roles(number).server
    if not isinstance(server, Server):
        raise ParameterError("only pbpfl has a key; this is another protocol")
    return server.key(Stamp(truth.place.run, number, 0, *truth.drawn(number)[1:]))
