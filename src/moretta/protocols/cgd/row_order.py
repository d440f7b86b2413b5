"""A participant's rows in the order that the holders of its row of the grid have agreed on (`moretta.data.alignment`).

Lists travel sealed under the row's key, so whoever relays them learns their lengths and nothing else. The alignment is
found once a run and kept in the participant's state: a resumed run or another session goes on with the same rows, and
a participant whose ids have changed is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Message
from moretta.contract.roles import State
from moretta.data.alignment.exchange import Aligner
from moretta.data.alignment.messages import MESSAGES, Blind
from moretta.data.alignment.result import Alignment, Disclosed
from moretta.errors import MisuseError, ParameterError, PeerError
from moretta.protocols.cgd.group_keys import GroupKeys, group_of
from moretta.protocols.cgd.messages import AlignmentUsed, UseAlignment
from moretta.protocols.common.enrolment import SiloRows

RowsIn = Callable[[NDArray[np.int64] | None], SiloRows]
ALIGNED_ORDER = "alignment/order"
"""Under which name a participant's state has its rows' order."""


class RowOrder:
    """The rows of one participant.

    me: its name. rows_in: gives them in an order by row number, None for all as they stand. ids: of all rows. aligner:
    its half of the alignment; None where rows are in order already. group: of its row of the grid, among those that
    have a key (`group_keys.row_group`).
    """

    def __init__(
        self,
        me: str,
        rows_in: RowsIn,
        ids: NDArray[np.str_] | None,
        aligner: Aligner | None,
        keys: GroupKeys,
        group: str,
    ) -> None:
        self._where, self._rows_in, self._all, self._aligner, self._keys = f"silo `{me}`", rows_in, ids, aligner, keys
        self._group = group
        self._used: Alignment | None = None
        self.rows = rows_in(None)

    @property
    def ids(self) -> Sequence[str] | None:
        """The ids of the rows, in order: once aligned, as all holders write them."""
        if self._all is None:
            return None
        found = self._all if self._used is None else self._used.normalised(self._all, self._where)
        return [str(one) for one in found]

    def check(self) -> None:
        """Raise `moretta.errors.MisuseError` while rows are still to be aligned."""
        if self._aligner is not None and self._used is None:
            raise MisuseError(
                f"{self._where}: its rows are not aligned with the other holders' yet; expected that first"
            )

    def answer(self, message: Message) -> Message | None:
        """Answer a message of the alignment; None to any other, and where rows are in order already."""
        if self._aligner is None:
            return None
        if isinstance(message, (UseAlignment, *MESSAGES)):
            self._check_partners(message)
        if isinstance(message, UseAlignment):
            return AlignmentUsed(stamp=message.stamp, digest=self._use(message))
        return self._aligner.answer(message)

    def _check_partners(self, message: Message) -> None:
        """Raise `moretta.errors.PeerError` for an exchange that is not with holders of this participant's row.

        Under the key of another group, members of other rows would be shown its list.
        """
        if group_of(message.stamp) != self._group:
            raise PeerError(f"expected to align rows in group `{self._group}`, was asked to in another")
        if isinstance(message, Blind):
            self._keys.membership.check(self._group, [message.peer])

    def _use(self, ask: UseAlignment) -> bytes:
        """Take up an alignment that was just found; return the mark of the one in use, empty where there is none.

        One whose exchange was broken off is not taken up: it may be of some partners only.
        """
        found = self._aligner.alignment if self._aligner is not None and ask.found else None
        if found is not None:
            if self._used is not None and not np.array_equal(found.order, self._used.order):
                raise ParameterError(
                    f"{self._where}: the rows that the holders share are others than this run began with; restore the "
                    "ids of all of them, or begin another run"
                )
            self._take(found)
        return b"" if self._used is None else self._keys.digest(ask.stamp, [self._used.digest.hex()])

    def _take(self, alignment: Alignment | None) -> None:
        self._used = alignment
        if self._aligner is not None:
            self._aligner.alignment = alignment
        self.rows = self._rows_in(None if alignment is None else alignment.order)

    def state(self) -> State:
        """Return the alignment, if there is one."""
        used = self._used
        if used is None:
            return {}
        steps = np.array(used.steps, dtype=np.int64)
        named = {"digest": used.digest, "source": used.source, "steps": steps}
        return {ALIGNED_ORDER: used.order, **{f"alignment/{name}": value for name, value in named.items()}}

    def restore(self, state: State) -> None:
        """Take up what `state` returned. Raises `moretta.errors.ParameterError` where ids have changed since."""
        if self._aligner is None:
            return
        if ALIGNED_ORDER not in state:
            self._take(None)
            return
        steps = tuple(Disclosed(*map(int, one)) for one in state["alignment/steps"])
        found = Alignment(
            self._aligner.rules,
            state[ALIGNED_ORDER],
            bytes(state["alignment/digest"]),
            bytes(state["alignment/source"]),
            steps,
        )
        found.check(self._all, self._where)
        self._take(found)
