"""One z a take: in a take of a round a participant repeats its answer, or refuses.

A row's z is masked by keystreams of its stamp. Two z under one stamp would give their difference, X_ij (D - D'), to
whoever relays them; two under two attempts, or in two sessions, would give it to the row's head. Whoever can choose D
then has X_ij. Two Delta under one sum give the difference of what this participant adds to it, and the head chooses
Delta. So all that z follows from (rows, weights and encoding), what is joined to it, and Delta stay as they first were
in a take. What z follows from is held, and not z: else a refusal would tell whether a change of D changes it. Where all
rows are used, all takes of a round have the same rows, and the round has one z; Delta follows dropout too, which each
take draws anew.

A digest of each is recorded before the answer leaves (`moretta.secure_aggregation.answers`), so a restart, an earlier
checkpoint or another session changes nothing. A round that is played again from the same state has the same z.
"""

from __future__ import annotations

import hashlib

import numpy as np

from moretta.contract.messages import Array, Stamp
from moretta.errors import PeerError, SumSpent
from moretta.secure_aggregation.answers import Answers


class Takes:
    """What was answered in each take. answers: the participant's record."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def hold(self, stamp: Stamp, name: str, *content: Array | bytes, whole: bool) -> None:
        """Hold a take to this content, before what follows from it leaves.

        Args:
            name: what it is.
            whole: whether all takes of the round have the same content.

        Raises:
            moretta.errors.SumSpent: the take has another content; the next one is free.
            moretta.errors.PeerError: the same where `whole`, as no take is free.
        """
        take = 0 if whole else stamp.take
        if self._answers.hold(stamp.run, f"{name} of round {stamp.round}, take {take}", *map(_digest, content)):
            return
        if not whole:
            raise SumSpent(stamp.take + 1, (), False)
        raise PeerError(
            f"{stamp}: {name} was another before in this take, and all takes of a round of all rows have one; expected "
            "the same, as from the state that the round was played from before"
        )


def _digest(content: Array | bytes) -> bytes:
    return hashlib.sha256(content if isinstance(content, bytes) else np.ascontiguousarray(content).data).digest()
