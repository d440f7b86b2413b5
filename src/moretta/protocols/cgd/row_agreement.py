"""The participants of one row of the grid hold the same rows in one order: how the aggregator sees to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moretta.contract.messages import Stamp
from moretta.contract.roles import Aborted, Ask, Exchange, Missing, Reason
from moretta.data.alignment.exchange import relay
from moretta.errors import ParameterError
from moretta.protocols.cgd.group_keys import at, row_group
from moretta.protocols.cgd.messages import AlignmentUsed, DescribeRows, RowsDescribed, UseAlignment
from moretta.protocols.cgd.side_by_side import all_of

Rows = Mapping[str, Sequence[str]]  # the participants of each row of the grid, the head first


def align(now: Stamp, rows: Rows) -> Exchange[Aborted | None]:
    """Have the holders of each row align their rows, unless all of them still have the alignment they found.

    Raises `moretta.errors.ParameterError` where rows are wrong before the first round.
    """
    rows = {row: names for row, names in rows.items() if names[1:]}
    if not rows:
        return None
    used = yield from _alignments(now, rows, found=False)
    if isinstance(used, Aborted):
        return used
    stale = {row: names for row, names in rows.items() if not _is_one(used, names)}
    aborted = yield from all_of({row: relay(at(now, row), names) for row, names in stale.items()})
    if aborted is None and stale:
        used = yield from _alignments(now, stale, found=True)
        if isinstance(used, Aborted):
            aborted = used
        elif apart := [name for names in stale.values() if not _is_one(used, names) for name in names[1:]]:
            said = "it does not have the alignment of its row's head"
            aborted = Aborted(dict.fromkeys(apart, Missing(Reason.MALFORMED, said)))
    if aborted is not None and now.round <= 1:
        wrong = [missing.detail for missing in aborted.missing.values() if missing.reason is Reason.BAD_INPUT]
        if wrong:
            raise ParameterError("; ".join(dict.fromkeys(wrong)))
    return aborted


def compare(now: Stamp, rows: Rows) -> Exchange[Aborted | None]:
    """Compare the number of rows and the ids of the participants of each row of the grid.

    Raises `moretta.errors.ParameterError` where they differ before the first round.
    """
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
            if said := _misaligned(called, head, replies.answers[head], name, replies.answers[name]):
                wrong[name] = Missing(Reason.BAD_INPUT, said)
    if wrong and now.round <= 1:
        raise ParameterError("; ".join(missing.detail for missing in wrong.values()))
    return Aborted(wrong) if wrong else None


def _alignments(now: Stamp, rows: Rows, *, found: bool) -> Exchange[Mapping[str, AlignmentUsed] | Aborted]:
    """Ask which alignment the holders of some rows use."""
    asks = {name: UseAlignment(stamp=at(now, row), found=found) for row, names in rows.items() for name in names}
    replies = yield Ask(asks, AlignmentUsed)
    return Aborted(replies.missing) if replies.missing else replies.answers


def _is_one(used: Mapping[str, AlignmentUsed], names: Sequence[str]) -> bool:
    """Whether all of these use one alignment."""
    marks = {used[name].digest for name in names}
    return len(marks) == 1 and marks != {b""}


def _misaligned(row: str, head: str, expected: RowsDescribed, name: str, found: RowsDescribed) -> str:
    """Return in what two holders of the same rows differ; nothing if they do not."""
    if found.rows != expected.rows:
        return (
            f"row `{row}`: `{name}` has {found.rows} rows and `{head}` {expected.rows}; expected the same rows in the "
            "same order"
        )
    if bool(found.digest) != bool(expected.digest):
        without = name if not found.digest else head
        return f"row `{row}`: `{without}` has no ids to compare; give each of its participants the id column, or none"
    if found.digest != expected.digest:
        return (
            f"row `{row}`: the ids of `{name}` are not those of `{head}` in the same order; sort both by id, and keep "
            "the rows that both have"
        )
    return ""
