"""A participant's rows in the order that the holders of its row of the grid have agreed on (`moretta.data.alignment`).

Lists travel sealed under the seed of the two that align, so their relay learns only their lengths, and no other member
of the row can pose as one of the two. A run aligns once and keeps the alignment in the participant's state: a resumed
run or another session continues with the same rows, and a participant whose ids have changed is refused. Its secrets
are kept there too, and digests of lists in the record of what it answers once (`moretta.secure_aggregation.one_sum`):
an interrupted exchange is repeated with the same lists and no other.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from moretta.contract.messages import Message, Stamp
from moretta.contract.roles import Aborted, Ask, Exchange, Missing, Reason, State, all_of, over
from moretta.data.alignment.exchange import MESSAGES, Aligner, Blind, Narrow, relay
from moretta.data.alignment.partner import Alignment, Disclosed
from moretta.errors import MisuseError, ParameterError, PeerError, RowsError
from moretta.protocols.cgd.group_keys import GroupKeys, at, group_of, row_group
from moretta.protocols.cgd.messages import AlignmentUsed, DescribeRows, RowsDescribed, UseAlignment
from moretta.protocols.common.enrolment import SiloRows
from moretta.secure_aggregation.keystream import SecretRoot

RowsIn = Callable[[NDArray[np.int64] | None], SiloRows]
ALIGNED_ORDER = "alignment/order"
"""The name of the rows' order in a participant's state."""
_ROOT = "alignment/root"


class RowOrder:
    """The rows of one participant.

    Args:
        rows_in: Returns them in an order by row number, None for the present order.
        ids: Of all rows.
        aligner: Its half of the alignment; None if rows are in order already.
        group: Of its row of the grid, among those with a key (`group_keys.row_group`).
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
        self._me, self._where, self._rows_in, self._all = me, f"silo `{me}`", rows_in, ids
        self._aligner, self._keys, self._group = aligner, keys, group
        self._used: Alignment | None = None
        self.rows = rows_in(None)

    @property
    def ids(self) -> Sequence[str] | None:
        """The ids of the rows, in order; once aligned, in the form that all holders share."""
        if self._all is None:
            return None
        ids = self._all if self._used is None else self._used.normalised(self._all, self._where)
        return [str(identifier) for identifier in ids]

    def check(self) -> None:
        """Raise `moretta.errors.MisuseError` while rows are still to be aligned."""
        if self._aligner is not None and self._used is None:
            raise MisuseError(
                f"{self._where}: its rows are not aligned with the other holders' yet; expected that first"
            )

    def answer(self, message: Message) -> Message | None:
        """Answer a message of the alignment; None for any other, and if rows are in order already."""
        if self._aligner is None:
            return None
        if isinstance(message, (UseAlignment, *MESSAGES)):
            self._check_partners(message)
        if isinstance(message, UseAlignment):
            return AlignmentUsed(stamp=message.stamp, digest=self._use(message))
        return self._aligner.answer(message)

    def check_group(self, stamp: Stamp) -> None:
        """Raise `moretta.errors.PeerError` for another group than the row's: its members would open sealed lists."""
        if group_of(stamp) != self._group:
            raise PeerError(f"expected to work in group `{self._group}`, was asked to in another")

    def _check_partners(self, message: Message) -> None:
        """Raise `moretta.errors.PeerError` for an exchange with others than holders of this participant's row.

        The row's head aligns with each other holder in turn, the others with it alone. A relay cannot change that.
        """
        self.check_group(message.stamp)
        if isinstance(message, Blind):
            self._keys.membership.check(self._group, [message.peer])
            self._check_turn(message)
        if isinstance(message, Narrow) and message.maker != self._chain[0]:
            raise PeerError(f"expected `{self._chain[0]}`, the head of the row, to name the rows that are left")

    @property
    def _chain(self) -> Sequence[str]:
        return self._keys.membership.groups[self._group]  # the head first

    def _check_turn(self, ask: Blind) -> None:
        head, *others = self._chain
        place = others.index(ask.peer) if self._me == head and ask.peer in others else 0
        if ask.peer == self._me or head not in (self._me, ask.peer) or ask.onward != (place > 0):
            raise PeerError(f"expected `{head}`, the head of the row, to align with each of the others in turn")
        alignment = self._aligner.alignment if self._aligner is not None and ask.onward else None
        if ask.onward and (alignment is None or len(alignment.steps) != place):
            raise PeerError(f"expected `{head}` to be aligned with those before `{ask.peer}` first")

    def _use(self, ask: UseAlignment) -> bytes:
        """Use the latest alignment; return the mark of the one in use, empty without one.

        An alignment whose exchange was interrupted is not used: it may be of some partners only.
        """
        alignment = self._aligner.alignment if self._aligner is not None and ask.found else None
        if alignment is not None:
            if self._used is not None and not np.array_equal(alignment.order, self._used.order):
                raise RowsError(
                    f"{self._where}: the rows that the holders share have changed since this run began; restore the "
                    "ids of all of them, or begin another run"
                )
            self._take(alignment)
        return b"" if self._used is None else self._keys.digest(ask.stamp, [self._used.digest.hex()])

    def _take(self, alignment: Alignment | None) -> None:
        self._used = alignment
        if self._aligner is not None:
            self._aligner.alignment = alignment
        self.rows = self._rows_in(None if alignment is None else alignment.order)

    def state(self) -> State:
        """Return the alignment, if any, and as bytes the secrets, which must never be reset."""
        if self._aligner is None:
            return {}
        lasting: State = {_ROOT: self._aligner.root.reveal()}
        used = self._used
        if used is None:
            return lasting
        named = {"digest": used.digest, "source": used.source, "steps": np.array(used.steps, dtype=np.int64)}
        return {**lasting, ALIGNED_ORDER: used.order, **over("alignment/", named)}

    def restore(self, state: State) -> None:
        """Restore what `state` returned. Raises `moretta.errors.ParameterError` if ids have changed since."""
        if self._aligner is None:
            return
        if _ROOT in state:
            self._aligner.root = SecretRoot(state[_ROOT])
        if ALIGNED_ORDER not in state:
            self._take(None)
            return
        steps = tuple(Disclosed(*map(int, step)) for step in state["alignment/steps"])
        alignment = Alignment(
            self._aligner.rules,
            state[ALIGNED_ORDER],
            bytes(state["alignment/digest"]),
            bytes(state["alignment/source"]),
            steps,
        )
        alignment.check(self._all, self._where)
        self._take(alignment)


Rows = Mapping[str, Sequence[str]]  # the participants of each row of the grid, the head first


def align(now: Stamp, rows: Rows) -> Exchange[Aborted | None]:
    """Have each row's holders align, unless all still are. Raises ParameterError for wrong rows at the start."""
    rows = {row: names for row, names in rows.items() if names[1:]}
    if not rows:
        return None
    used = yield from _alignments(now, rows, fresh=False)
    if isinstance(used, Aborted):
        return used
    stale = {row: names for row, names in rows.items() if not _is_one(used, names)}
    aborted = yield from all_of({row: relay(at(now, row), names) for row, names in stale.items()})
    if aborted is None and stale:
        used = yield from _alignments(now, stale, fresh=True)
        if isinstance(used, Aborted):
            aborted = used
        elif members := [name for names in stale.values() if not _is_one(used, names) for name in names[1:]]:
            reason = "it does not have the alignment of its row's head"
            aborted = Aborted(dict.fromkeys(members, Missing(Reason.MALFORMED, reason)))
    if aborted is not None and now.round <= 1:
        wrong = [missing.detail for missing in aborted.missing.values() if missing.reason is Reason.BAD_INPUT]
        if wrong:
            raise ParameterError("; ".join(dict.fromkeys(wrong)))
    return aborted


def compare(now: Stamp, rows: Rows) -> Exchange[Aborted | None]:
    """Compare numbers of rows and ids within each row. Raises ParameterError if they differ at the start."""
    rows = {row: names for row, names in rows.items() if names[1:]}
    if not rows:
        return None
    asks = {name: DescribeRows(stamp=at(now, row)) for row, names in rows.items() for name in names}
    replies = yield Ask(asks, RowsDescribed)
    if replies.missing:
        return Aborted(replies.missing)
    wrong = dict[str, Missing]()
    for row, (head, *others) in rows.items():
        for name in others:
            called = row.removeprefix(row_group(""))
            if difference := _misaligned(called, head, replies.answers[head], name, replies.answers[name]):
                wrong[name] = Missing(Reason.BAD_INPUT, difference)
    if wrong and now.round <= 1:
        raise ParameterError("; ".join(missing.detail for missing in wrong.values()))
    return Aborted(wrong) if wrong else None


def _alignments(now: Stamp, rows: Rows, *, fresh: bool) -> Exchange[Mapping[str, AlignmentUsed] | Aborted]:
    asks = {name: UseAlignment(stamp=at(now, row), found=fresh) for row, names in rows.items() for name in names}
    replies = yield Ask(asks, AlignmentUsed)
    return Aborted(replies.missing) if replies.missing else replies.answers


def _is_one(used: Mapping[str, AlignmentUsed], names: Sequence[str]) -> bool:
    marks = {used[name].digest for name in names}
    return len(marks) == 1 and marks != {b""}


def _misaligned(row: str, head: str, expected: RowsDescribed, name: str, described: RowsDescribed) -> str:
    """Return how two holders of the same rows differ; empty if they do not."""
    if described.rows != expected.rows:
        return (
            f"row `{row}`: `{name}` has {described.rows} rows and `{head}` {expected.rows}; expected the same rows in "
            "the same order"
        )
    if bool(described.digest) != bool(expected.digest):
        without = name if not described.digest else head
        return f"row `{row}`: `{without}` has no ids to compare; give each of its participants the id column, or none"
    if described.digest != expected.digest:
        return (
            f"row `{row}`: the ids of `{name}` are not those of `{head}` in the same order; sort both by id, and keep "
            "the rows that both have"
        )
    return ""
