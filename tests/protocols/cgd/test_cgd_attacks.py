"""A relay that follows no protocol, and one participant on its side: these once gave it keys or raw features."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grids import FIRST, SEED, Fault, Seen, both, failing, furthest, grid, make, oracle, participants, run, watched
from hypothesis import example, given
from hypothesis import strategies as st

from moretta import CGD
from moretta.contract.codec import Codec
from moretta.contract.messages import Array, Message, Stamp
from moretta.contract.roles import State
from moretta.data.holders import grid_of
from moretta.data.tables.preparation import Preparation
from moretta.engines.checkpoint import CheckpointId
from moretta.engines.driver import Driver
from moretta.engines.in_process import InProcess
from moretta.engines.run_folder import RunFolder
from moretta.errors import MisuseError, PeerError, RunFailed, SumSpent
from moretta.protocols.cgd.client import Client, _displacement_after
from moretta.protocols.cgd.group_keys import NAME, GroupKeys, Membership, at, group_of
from moretta.protocols.cgd.messages import (
    Backward,
    CatchUp,
    Contribute,
    Descend,
    DescribeRows,
    Done,
    DrawKey,
    Forward,
    GroupKey,
    Join,
    KeyTaken,
    StepAlone,
    TakeKey,
)
from moretta.protocols.common.roles import Roles
from moretta.protocols.common.silo_rows import Begin
from moretta.protocols.registry import build
from moretta.secure_aggregation.agreement import PeerKeys
from moretta.secure_aggregation.encoding import Ring
from moretta.secure_aggregation.masks import TAG, add_masks
from moretta.secure_aggregation.pairwise import MaskedUpload
from moretta.secure_aggregation.unmasking import SelfMaskShares, Unmask

SILOS = grid([6, 4, 7], [3, 2])
VICTIM, OUTSIDER = "silo-0-1", "silo-1-0"  # of another row, with other columns
HEAD, MEMBER = "silo-0-0", "silo-1-1"  # of the victim's row; of the victim's columns, in another row
GROUPS = ("columns-2", "row=row-0")  # the victim's, of which the outsider is in neither
BITS = 30
SCALE = 2.0**20  # of the chosen D; what is found is as much more accurate than the ring
SETUP = Stamp("run", 1, 0)
NEXT = Stamp("run", 4, 0)


@pytest.fixture(scope="module")
def after_three() -> dict[str, Client]:
    """Participants after a set-up and three rounds, which a relay goes on to ask what they refuse."""
    return READY


@pytest.fixture
def fresh() -> dict[str, Client]:
    """The same, for a relay that is answered."""
    return played(3)


def played(rounds: int, protocol: CGD | None = None) -> dict[str, Client]:
    made = of(protocol or CGD(delta=(0.1, 0.3)), rounds)
    clients = participants(made)
    engine = InProcess(made.clients, Codec(made.messages), strict=True)
    assert list(Driver(made.server, list(made.clients), "run", engine, made.least).rounds(1, rounds))
    return clients


def of(protocol: CGD, rounds: int, silos: Sequence[Any] | None = None) -> Roles:
    return build(make(silos or SILOS, protocol, insecure_secret_seed=None)._setting(SEED, rounds))


def corrupted(outsider: Client) -> GroupKeys:
    """The keys of a participant that takes itself for a member of the victim's groups."""
    honest = outsider._group_keys
    true = honest.membership
    lies = dict.fromkeys(GROUPS, (OUTSIDER, VICTIM))
    return GroupKeys(OUTSIDER, honest._set_up, Membership(true.grid, {**true.groups, **lies}))


# Keys for somebody who is not in the group.


@pytest.mark.parametrize("group", GROUPS)
def test_an_outsider_is_drawn_no_key(after_three: dict[str, Client], group: str) -> None:
    """The relay asks a member for a key for the outsider too."""
    stamp = at(SETUP, group)
    members = after_three[VICTIM]._group_keys.membership.groups[group]
    maker = after_three[members[0]]
    for wanted in ((members[0], OUTSIDER), (*members, OUTSIDER), (OUTSIDER, *members)):
        with pytest.raises(PeerError, match="its members of the grid"):
            maker.answer(DrawKey(stamp=stamp, members=wanted))


@pytest.mark.parametrize("group", GROUPS)
def test_no_key_is_taken_that_an_outsider_drew(after_three: dict[str, Client], group: str) -> None:
    """The relay hands the victim a key that the outsider made, under which it would seal D and blind its sums."""
    before = after_three[VICTIM]._group_keys.key(group)
    forged = corrupted(after_three[OUTSIDER]).draw(at(SETUP, group), (OUTSIDER, VICTIM))[VICTIM]
    with pytest.raises(PeerError, match=r"expected `silo-0-.` to draw the key"):
        after_three[VICTIM].answer(TakeKey(stamp=at(SETUP, group), maker=OUTSIDER, sealed=forged))
    assert after_three[VICTIM]._group_keys.key(group) == before


def test_a_member_that_is_not_the_first_draws_no_key(after_three: dict[str, Client]) -> None:
    members = after_three[MEMBER]._group_keys.membership.groups["columns-2"]
    with pytest.raises(PeerError, match="expected `silo-0-1` to draw"):
        after_three[MEMBER].answer(DrawKey(stamp=at(SETUP, "columns-2"), members=tuple(members)))


@given(st.lists(st.sampled_from([silo.name for silo in SILOS] + ["nobody"]), max_size=6), st.sampled_from(GROUPS))
@example([VICTIM, MEMBER, "silo-2-1"], "columns-2")
def test_a_key_is_for_the_grids_members_in_order_and_for_nobody_else(members: list[str], group: str) -> None:
    for name, client in READY.items():
        expected = tuple(client._group_keys.membership.groups[group])
        try:
            answer = client.answer(DrawKey(stamp=at(SETUP, group), members=tuple(members)))
        except PeerError:
            assert (name, tuple(members)) != (expected[0], expected)
        else:
            assert isinstance(answer, GroupKey)
            assert (name, tuple(members)) == (expected[0], expected)
            assert set(answer.sealed) == set(expected[1:])


def test_strangers_agree_on_no_seeds(after_three: dict[str, Client]) -> None:
    """Whoever is not in a group shares no mask of its sums; a relay that invents a participant is refused."""
    for group, names in (("columns-2", (VICTIM, OUTSIDER)), (NAME, (VICTIM, "nobody"))):
        keys = {name: bytes([number + 1]) * 32 for number, name in enumerate(names)}
        message = PeerKeys(stamp=at(NEXT, group), keys=keys, signatures=dict.fromkeys(names, b""))
        with pytest.raises(PeerError, match=f"expected members of group `{group}`"):
            after_three[VICTIM].answer(message)


def test_keys_are_of_the_set_up_and_of_no_other_time(after_three: dict[str, Client]) -> None:
    members = tuple(after_three[VICTIM]._group_keys.membership.groups["columns-2"])
    for stamp in (NEXT, dataclasses.replace(SETUP, attempt=1), Stamp("other", 1, 0)):
        with pytest.raises(PeerError, match="expected a key of the set-up"):
            after_three[VICTIM].answer(DrawKey(stamp=at(stamp, "columns-2"), members=members))


# One draw a set-up, and no nonce twice.


@pytest.mark.parametrize("group", GROUPS)
def test_a_second_draw_gives_the_same_bytes(after_three: dict[str, Client], group: str) -> None:
    """Two keys under one nonce: the difference of what was sealed was that of the keys."""
    members = tuple(after_three[VICTIM]._group_keys.membership.groups[group])
    ask = DrawKey(stamp=at(SETUP, group), members=members)
    first, second = (after_three[members[0]].answer(ask) for _ in range(2))
    assert isinstance(first, GroupKey)
    assert isinstance(second, GroupKey)
    assert first.sealed == second.sealed


def test_a_second_key_of_a_set_up_is_not_taken(after_three: dict[str, Client]) -> None:
    """Not by a first member that is on the relay's side either."""
    first = after_three[VICTIM]._group_keys
    again = GroupKeys(VICTIM, first._set_up, first.membership)
    members, stamp = first.membership.groups["columns-2"], at(SETUP, "columns-2")
    other = again.draw(stamp, members)[MEMBER]
    taken = after_three[MEMBER].answer(TakeKey(stamp=stamp, maker=VICTIM, sealed=other))
    assert isinstance(taken, KeyTaken)
    assert not taken.opened
    assert after_three[MEMBER]._group_keys.key("columns-2") == first.key("columns-2")


@given(st.binary(min_size=32, max_size=64), st.binary(min_size=32, max_size=64))
def test_two_contents_under_one_stamp_share_no_keystream(one: bytes, other: bytes) -> None:
    keyring, stamp = READY[VICTIM]._group_keys, at(NEXT, "columns-2")
    sealed = [keyring.seal(stamp, "delta", VICTIM, content).tobytes() for content in (one, other)]
    if one == other:
        assert sealed[0] == sealed[1]
        return
    assert sealed[0][:12] != sealed[1][:12]
    length = min(len(one), len(other))
    assert _xor(sealed[0][12 : 12 + length], sealed[1][12 : 12 + length]) != _xor(one, other)


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=False))


# D from a member that has more of it.


def forged(member: Client, stamp: Stamp, steps: int, columns: int = 2) -> CatchUp:
    """D that a relay with a member of the victim's columns chooses: it moves one unit of the first layer a column."""
    chosen = member.displacement[FIRST].copy()
    chosen[:columns, :columns] += SCALE * np.eye(columns)
    sealed = member._group_keys.seal(stamp, _displacement_after(steps), MEMBER, chosen.tobytes())
    return CatchUp(stamp=stamp, maker=MEMBER, sealed=sealed, steps=steps)


def test_d_of_as_many_steps_is_not_taken(after_three: dict[str, Client]) -> None:
    victim, stamp = after_three[VICTIM], at(NEXT, "columns-2")
    before = victim.displacement[FIRST].copy()
    with pytest.raises(PeerError, match="after a round later than 3 and before 4"):
        victim.answer(forged(after_three[MEMBER], stamp, victim._steps["columns-2"]))
    assert (victim.displacement[FIRST] == before).all()


@given(st.integers(0, 12), st.integers(1, 12))
def test_d_is_taken_if_it_has_more_steps_and_none_of_this_round(steps: int, number: int) -> None:
    victim, stamp = READY[VICTIM], at(Stamp("run", number, 0), "columns-2")
    kept, before = victim.state(), dict(victim._steps)
    message = forged(READY[MEMBER], stamp, steps)
    try:
        victim.answer(message)
    except PeerError:
        assert not 3 < steps < number
        assert victim._steps == before
    else:
        assert 3 < steps < number
        assert victim._steps["columns-2"] == steps
    victim.restore(kept)


@pytest.mark.parametrize("maker", [OUTSIDER, HEAD, "nobody", VICTIM])
def test_d_by_nobody_else_of_the_group_is_not_taken(after_three: dict[str, Client], maker: str) -> None:
    victim, stamp = after_three[VICTIM], at(Stamp("run", 6, 0), "columns-2")
    message = dataclasses.replace(forged(after_three[MEMBER], stamp, 4), maker=maker)
    with pytest.raises(PeerError, match=r"expected (members of group `columns-2`|another member's D)"):
        victim.answer(message)


# Two z of one take.


def raw_features(clients: Mapping[str, Client], move: Message, later: Stamp) -> Array:
    """Return the victim's features by the difference of its parts of z, before and after D moved as the relay chose."""
    row, victim = at(NEXT, "row=row-0"), clients[VICTIM]
    words = []
    for stamp in (row, later):
        words.append(victim.answer(Forward(stamp=stamp, fraction_bits=BITS)).words)  # type: ignore[attr-defined]
        if stamp is row:
            victim.answer(move)
    return Ring(64).decode(words[1] - words[0], BITS)[:, :2] / SCALE


def test_what_a_second_z_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control of the attacks below: without the record of what a take has answered, raw features."""
    monkeypatch.setattr(Client, "_hold", lambda *of, whole: None)
    clients = played(2)
    found = raw_features(clients, forged(clients[MEMBER], at(NEXT, "columns-2"), 3), at(NEXT, "row=row-0"))
    rows = clients[VICTIM]._rows
    x = np.asarray(rows.x[rows.batches.of_round(NEXT.round)])  # type: ignore[index]
    assert np.linalg.norm(found - x) < 1e-12 * np.linalg.norm(x)


LATER = {
    "the same stamp": at(NEXT, "row=row-0"),
    "another attempt": at(dataclasses.replace(NEXT, attempt=1), "row=row-0"),
}


@pytest.mark.parametrize("later", LATER)
def test_a_relay_and_a_member_of_the_same_columns_get_no_second_z(later: str) -> None:
    """The relay keeps round 3's sum from the victim, so that it is behind, and takes what it is handed as D."""
    clients = played(2)
    move = forged(clients[MEMBER], at(NEXT, "columns-2"), 3)
    with pytest.raises(PeerError, match="z differs from an earlier answer in this take"):
        raw_features(clients, move, LATER[later])


@pytest.mark.parametrize("later", LATER)
def test_a_relay_that_reads_sums_gets_no_second_z(later: str) -> None:
    """Without blind sums it needs nobody: it chooses the step of an earlier round, and so D."""
    clients = played(2, CGD(delta=(0.1, 0.3), blind=False))
    victim = clients[VICTIM]
    chosen = np.zeros_like(victim.displacement[FIRST])
    chosen[:2, :2] = -SCALE / victim._params.rate(3, 2) * np.eye(2)
    step = Descend(
        stamp=at(Stamp("run", 3, 0), "columns-2"),
        tensors={FIRST: chosen},
        weight=np.array(17),
        silos=tuple(sorted(victim._position.groups["columns-2"].members)),
        encoding={},
    )
    with pytest.raises(PeerError, match="z differs from an earlier answer in this take"):
        raw_features(clients, step, LATER[later])


def test_an_earlier_round_does_not_make_room_for_a_second_z(fresh: dict[str, Client]) -> None:
    row, victim = at(Stamp("run", 9, 0), "row=row-0"), fresh[VICTIM]
    first = victim.answer(Forward(stamp=row, fraction_bits=BITS))
    victim.answer(Forward(stamp=dataclasses.replace(row, round=8), fraction_bits=BITS))  # as after a resume
    assert (victim.answer(Forward(stamp=row, fraction_bits=BITS)).words == first.words).all()  # type: ignore[attr-defined]
    with pytest.raises(PeerError, match="z differs from an earlier answer"):
        victim.answer(Forward(stamp=row, fraction_bits=BITS - 1))


@pytest.mark.parametrize("bits", [45, 60, 2**62])
def test_a_relay_chooses_no_range_of_z(fresh: dict[str, Client], bits: int) -> None:
    """A holder's refusals of its own z would be a search for its largest value."""
    with pytest.raises(PeerError, match="expected an encoding of z of at most"):
        fresh[VICTIM].answer(Forward(stamp=at(Stamp("run", 9, 0), "row=row-0"), fraction_bits=bits))


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_head_takes_one_z_a_take(fresh: dict[str, Client], attempt: int) -> None:
    """A relay may add to a sum of z what it likes, and with a partner of the row reads what comes of it."""
    row = at(NEXT, "row=row-0")
    part = fresh[VICTIM].answer(Forward(stamp=row, fraction_bits=BITS))
    fresh[HEAD].answer(Join(stamp=row, words=part.words, fraction_bits=BITS))  # type: ignore[attr-defined]
    again = dataclasses.replace(row, attempt=attempt)
    words = fresh[VICTIM].answer(Forward(stamp=again, fraction_bits=BITS)).words.copy()  # type: ignore[attr-defined]
    fresh[HEAD].answer(Join(stamp=again, words=words, fraction_bits=BITS))
    words[0, 0] += np.uint64(1 << BITS)
    with pytest.raises(PeerError, match="z differs from an earlier answer in this take"):
        fresh[HEAD].answer(Join(stamp=again, words=words, fraction_bits=BITS))


@pytest.mark.parametrize("group", ["heads", "everybody", "columns-2", "row=row-1"])
def test_a_rows_passes_are_sealed_for_that_row_alone(fresh: dict[str, Client], group: str) -> None:
    """Asked for them in a group that has participants of other rows, a head sealed Delta under their key too."""
    row = at(NEXT, "row=row-0")
    words = fresh[VICTIM].answer(Forward(stamp=row, fraction_bits=BITS)).words  # type: ignore[attr-defined]
    wider = at(NEXT, group)
    sealed = fresh[HEAD]._group_keys.seal(row, "delta", HEAD, b"")
    for who, message in (
        (VICTIM, Forward(stamp=wider, fraction_bits=BITS)),
        (HEAD, Join(stamp=wider, words=words, fraction_bits=BITS)),
        (VICTIM, Backward(stamp=wider, sealed=sealed)),
        (VICTIM, DescribeRows(stamp=wider)),
    ):
        with pytest.raises(PeerError, match="expected to work in group `row=row-0`, was asked to in another"):
            fresh[who].answer(message)


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_holder_takes_one_delta_a_take(fresh: dict[str, Client], attempt: int) -> None:
    row, victim, head = at(NEXT, "row=row-0"), fresh[VICTIM], fresh[HEAD]._group_keys
    z = victim.answer(Forward(stamp=row, fraction_bits=BITS)).words  # type: ignore[attr-defined]
    deltas = [np.full(z.shape, value).tobytes() for value in (1.0, 2.0)]
    victim.answer(Backward(stamp=row, sealed=head.seal(row, "delta", HEAD, deltas[0])))
    again = dataclasses.replace(row, attempt=attempt)
    victim.answer(Forward(stamp=again, fraction_bits=BITS))
    victim.answer(Backward(stamp=again, sealed=head.seal(again, "delta", HEAD, deltas[0])))
    with pytest.raises(SumSpent, match="or take 1"):
        victim.answer(Backward(stamp=again, sealed=head.seal(again, "delta", HEAD, deltas[1])))


def test_a_head_plays_no_other_of_its_row(after_three: dict[str, Client]) -> None:
    """Asked as the others are, it would show a partner of a row of two its own part of z."""
    row, head = at(NEXT, "row=row-0"), after_three[HEAD]
    with pytest.raises(MisuseError, match="which the head of a row joins"):
        head.answer(Forward(stamp=row, fraction_bits=BITS))
    with pytest.raises(MisuseError, match="which the head of its row makes itself"):
        head.answer(Backward(stamp=row, sealed=np.zeros(28, np.uint8)))


# Sites that were told different grids.


def test_of_different_grids_no_key_opens_and_no_masks_cancel(after_three: dict[str, Client]) -> None:
    true, stamp = after_three[VICTIM]._group_keys, at(SETUP, "columns-2")
    members = true.membership.groups["columns-2"]
    other = GroupKeys(MEMBER, after_three[MEMBER]._group_keys._set_up, Membership(bytes(32), true.membership.groups))
    assert not other.take(stamp, VICTIM, true.draw(stamp, members)[MEMBER])
    masks = true.row_masks(stamp, [MEMBER], (2, 2), BITS), other.row_masks(stamp, [VICTIM], (2, 2), BITS)
    assert masks[0][0][1] != masks[1][0][1]


def test_digests_of_grids_tell_rows_columns_heads_and_forms_apart() -> None:
    grids = [SILOS, grid([6, 4, 7], [2, 3]), grid([6, 4], [3, 2]), grid([6, 4, 7], [3, 2], holders=1)]
    moved = [dataclasses.replace(one, row="row-1") if one.name == VICTIM else one for one in SILOS]
    made = [grid_of(silos) for silos in [*grids, moved, SILOS[::-1]]]
    assert len({one.digest(joint=joint) for one in made for joint in (True, False)}) == 12
    assert made[0].digest(joint=True) == grid_of(SILOS).digest(joint=True)


READY = played(3)


# A round whose sum may have been opened is not played again.


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("silos", [grid([6, 4, 7, 5], [5]), grid([6, 4, 7, 5], [3, 2])], ids=["rows", "joint"])
def test_no_sum_is_asked_to_be_opened_twice_in_a_round(silos: list[Any]) -> None:
    """Answers to Unmask that come late open the first sum; a second one over fewer gave what lies between."""
    group = "heads" if silos[0].columns else "all"
    names = [silo.name for silo in silos if silo.holds_labels]
    faults = [Fault(name, 2, Unmask, "after", group) for name in names[:2]]  # two of four, and three are needed
    seen = Seen()
    found = run(silos, 4, CGD(delta=0.2, blind=False), wrap=both(watched(seen), failing(*faults)))
    asked = {(message.stamp.round, message.stamp.run) for _, message in seen.asked(Unmask)}
    opened = {message.stamp for _, message in seen.asked(Unmask)}
    assert all(fault.happened == 1 for fault in faults)
    given = [answer for _, answer in seen.answered(SelfMaskShares) if answer.stamp.round == 2]
    assert len([one for one in given if one.stamp.run.startswith(f"{group}/")]) == 4  # so the relay can open it
    assert len(opened) == len(asked)
    assert [line["attempt"] for line in found.result.history] == [0, 0, 0, 0]
    assert [line["groups_left_out"] for line in found.result.history] == [0, 1, 0, 0]
    assert set(found.dropped) == {(2, name) for name in names[:2]}


@pytest.mark.usefixtures("quiet")
def test_a_run_whose_sums_are_never_opened_says_who_withholds() -> None:
    silos, names = grid([6, 4, 7, 5], [5]), ("silo-0", "silo-1")
    faults = [Fault(name, number, Unmask) for name in names for number in (2, 4, 5)]
    with pytest.raises(RunFailed, match=r"round 6: in the last 2 rounds no group's sum .*silo-0: .*; silo-1: "):
        run(silos, 7, CGD(delta=0.2), wrap=failing(*faults))
    assert all(fault.happened == 1 for fault in faults)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("silos", [grid([6, 4, 7, 5], [5]), grid([6, 4, 7, 5], [3, 2])], ids=["rows", "joint"])
def test_a_round_is_played_again_while_nothing_can_have_been_opened(silos: list[Any]) -> None:
    """Also a row's passes: under other masks, of the same z. Of additive shares, which bear no loss."""
    group = "heads" if silos[0].columns else "all"
    names = [silo.name for silo in silos if silo.holds_labels]
    faults = [Fault(name, 2, Contribute, group=group) for name in names[:2]]
    found = run(silos, 4, CGD(delta=0.2), wrap=failing(*faults), scheme="additive-shares")
    assert [line["attempt"] for line in found.result.history] == [0, 1, 0, 0]
    assert [line["groups_left_out"] for line in found.result.history] == [0, 0, 0, 0]
    owners = [silo.row or silo.name for silo in silos if silo.holds_labels]
    models, _ = oracle(found.starts, silos, [0.5] * 4, absent=[(2, owner, "") for owner in owners[:2]])
    assert all(furthest(found.models[owner], models[owner]) < 1e-9 for owner in models)


def spoiling(client: Client, group: str, rounds: Sequence[int], chosen: float | None = None) -> None:
    """Have a member add one to its upload's tag in these rounds, say that it stepped, and hold a D of its choice."""
    honest = client.answer

    def answer(message: Message) -> Message:
        spoilt = message.stamp.round in rounds and group_of(message.stamp) == group
        if isinstance(message, Descend) and spoilt and chosen is None:
            return Done(stamp=message.stamp)
        if isinstance(message, Descend) and spoilt:
            client.displacement[FIRST] = np.full_like(client.displacement[FIRST], chosen)
            client._steps[group] = message.stamp.round
            return Done(stamp=message.stamp)
        reply = honest(message)
        if isinstance(message, Contribute) and spoilt:
            assert isinstance(reply, MaskedUpload)
            reply = dataclasses.replace(reply, tensors={**reply.tensors, TAG: reply.tensors[TAG] + np.uint64(1)})
        return reply

    client.answer = answer  # type: ignore[method-assign]


@pytest.mark.usefixtures("quiet")
def test_no_member_that_spoils_a_sum_gives_the_others_its_displacement() -> None:
    """The relay is honest. A false tag makes all others refuse; the one that says it stepped was not to be believed."""
    made = of(CGD(delta=(0.1, 0.3)), 4, grid([6, 4, 7, 5, 6, 4], [3, 2]))
    clients = participants(made)
    group = clients[VICTIM]._position.groups["columns-2"]
    liar = next(name for name in group.members if name != VICTIM)
    spoiling(clients[liar], "columns-2", [2], 123.0)
    engine = InProcess(made.clients, Codec(made.messages), strict=True)
    driver = Driver(made.server, list(clients), "run", engine, made.least)
    left_out = [end.report.figures["groups_left_out"] for end in driver.rounds(1, 4)]
    assert left_out[1] == 1.0
    honest = [clients[name].displacement[FIRST] for name in group.members if name != liar]
    assert all(np.abs(d).max() < 10 and (d == honest[0]).all() for d in honest)
    assert {clients[name]._steps["columns-2"] for name in group.members} == {4}
    assert (clients[liar].displacement[FIRST] == honest[0]).all()  # it took theirs, after the next step


@pytest.mark.usefixtures("quiet")
def test_a_sum_that_as_many_take_as_refuse_ends_the_run() -> None:
    """Of three, one spoils it and says that it stepped, one is lost: nobody can tell whom to believe."""
    made = of(CGD(delta=(0.1, 0.3)), 4, grid([6, 4, 7], [3, 2]))
    clients = participants(made)
    members = list(clients[VICTIM]._position.groups["columns-2"].members)
    liar, lost = [name for name in members if name != VICTIM]
    spoiling(clients[liar], "columns-2", [2], 123.0)
    honest = clients[lost].answer

    def answer(message: Message) -> Message:
        if isinstance(message, Descend) and message.stamp == at(Stamp("run", 2, 0), "columns-2"):
            raise ConnectionError("the line is dead")
        return honest(message)

    clients[lost].answer = answer  # type: ignore[method-assign]
    engine = InProcess(made.clients, Codec(made.messages))
    driver = Driver(made.server, list(clients), "run", engine, made.least)
    with pytest.raises(RunFailed, match=rf"round 2: as many members of group `columns-2` .*{VICTIM}: the sum is not"):
        list(driver.rounds(1, 4))
    assert np.abs(clients[VICTIM].displacement[FIRST]).max() < 10


@pytest.mark.usefixtures("quiet")
def test_a_run_whose_sums_are_never_read_says_why() -> None:
    """In the one group of a split by rows, a member with a false tag in each round."""
    made = of(CGD(delta=0.2), 5, grid([6, 4, 7], [5]))
    clients = participants(made)
    first, *_ = clients
    spoiling(clients[first], "all", range(1, 6))
    engine = InProcess(made.clients, Codec(made.messages), strict=True)
    driver = Driver(made.server, list(clients), "run", engine, made.least)
    with pytest.raises(
        RunFailed, match=r"round 3: in the last 2 rounds no group's sum .*the sum is not that of its silos"
    ):
        list(driver.rounds(1, 5))


# After a restart.


def restarted(folder: Path, states: Mapping[str, State] | None = None, rounds: int = 0) -> dict[str, Client]:
    """Participants in new processes, on the records of those before, which a relay has play some rounds."""
    protocol = CGD(delta=(0.1, 0.3), blind=False)
    made = build(make(SILOS, protocol, insecure_secret_seed=None)._setting(
        SEED, 4, CheckpointId("run", 0, 0, ""), RunFolder(folder).helped
    ))  # fmt: skip
    clients = participants(made)
    for name, client in clients.items():
        if states is not None:
            client.restore(states[name])
    driver = Driver(made.server, list(clients), "run", InProcess(made.clients, Codec(made.messages)), made.least)
    assert all(
        driver.rounds(1, rounds)
        if rounds
        else [driver._tried(Stamp("run", 3, 0), list(clients), nothing, {}) == (None, None)]
    )
    return clients


def nothing(now: Stamp) -> Any:
    yield from ()


def seen_by_the_head(clients: Mapping[str, Client], row: Stamp) -> Array:
    """The victim's part of z, which a relay and the head of its row unmask."""
    words = np.array(clients[VICTIM].answer(Forward(stamp=row, fraction_bits=BITS)).words)  # type: ignore[attr-defined]
    add_masks(words, clients[HEAD]._group_keys.row_masks(row, [VICTIM], words.shape, BITS))
    return Ring(64).decode(words, BITS)


def chosen_step(victim: Client, number: int) -> Descend:
    """A sum that nobody uploaded, by which D moves as the relay chose."""
    chosen = np.zeros_like(victim.displacement[FIRST])
    chosen[:2, :2] = -SCALE / victim._params.rate(number, 4) * np.eye(2)
    silos = tuple(sorted(victim._position.groups["columns-2"].members))
    now = at(Stamp("run", number, 0), "columns-2")
    return Descend(stamp=now, tensors={FIRST: chosen}, weight=np.array(17), silos=silos, encoding={})


@pytest.mark.parametrize("take", [0, 1])
def test_a_restarted_participant_gives_no_second_z(tmp_path: Path, take: int) -> None:
    """The server names an older round, has D moved by a step of it, and asks for z of the younger one again."""
    clients, row = restarted(tmp_path, rounds=1), at(Stamp("run", 3, 0), "row=row-0")
    old = {name: client.state() for name, client in clients.items()}
    seen_by_the_head(clients, row)
    again = restarted(tmp_path, old)
    assert seen_by_the_head(again, row).any()  # the very same is answered: so a resumed run goes on
    again = restarted(tmp_path, old)
    again[VICTIM].answer(chosen_step(again[VICTIM], 2))
    with pytest.raises(PeerError, match="z differs from an earlier answer in this take"):
        seen_by_the_head(again, dataclasses.replace(row, take=take, attempt=1))


def test_a_restarted_participant_takes_no_second_delta(tmp_path: Path) -> None:
    """The sum of its gradients would be opened twice, and the head chose by what they differ."""
    clients, row = restarted(tmp_path, rounds=1), at(Stamp("run", 3, 0), "row=row-0")
    old = {name: client.state() for name, client in clients.items()}
    shape = seen_by_the_head(clients, row).shape

    def delta(clients: Mapping[str, Client], value: float) -> None:
        sealed = clients[HEAD]._group_keys.seal(row, "delta", HEAD, np.full(shape, value).tobytes())
        clients[VICTIM].answer(Backward(stamp=row, sealed=sealed))

    delta(clients, 1.0)
    again = restarted(tmp_path, old)
    seen_by_the_head(again, row)
    delta(again, 1.0)
    with pytest.raises(SumSpent):
        delta(again, 2.0)


# A relay that chooses what is none of its choices.


def prepared(silo: Client, number: int, mean: list[float]) -> Begin:
    figures = Preparation(np.zeros(2), np.array(mean), np.ones(2))
    return Begin.of(at(Stamp("run", number, 0), "columns-2"), silo._rows.of.schema, "", figures)


@pytest.mark.parametrize("standardise", [False, True])
def test_a_relay_prepares_rows_once_and_only_where_the_run_does(standardise: bool) -> None:
    """By other means in each round, the head of a row had a holder's first layer to 1e-15 and its rows to 1e-13."""
    federation = make(SILOS, CGD(delta=(0.1, 0.3)), insecure_secret_seed=None, standardise=standardise)
    made = build(federation._setting(SEED, 4))
    clients = participants(made)
    engine = InProcess(made.clients, Codec(made.messages), strict=True)
    assert list(Driver(made.server, list(clients), "run", engine, made.least).rounds(1, 2))
    for mean in ([1000.0, 0.0], [0.0, 1000.0]):
        with pytest.raises(PeerError, match="preparation of columns that this run began with"):
            clients[VICTIM].answer(prepared(clients[VICTIM], 3, mean))


def test_a_relay_chooses_no_first_preparation_where_the_run_has_none() -> None:
    clients = participants(build(make(SILOS, CGD(delta=(0.1, 0.3)))._setting(SEED, 4)))
    with pytest.raises(PeerError, match="expected inputs to stay as they are"):
        clients[VICTIM].answer(prepared(clients[VICTIM], 1, [1.0, 0.0]))


@pytest.mark.parametrize("silos", [SILOS, grid([6, 4, 7, 5], [5])], ids=["2-d", "rows"])
def test_no_member_of_a_group_steps_by_its_own_gradient(silos: list[Any]) -> None:
    """A colluding member that catches up with such a step had the gradient, with no sum opened."""
    made = build(make(silos, CGD(delta=(0.1, 0.3)), insecure_secret_seed=None)._setting(SEED, 4))
    clients = participants(made)
    engine = InProcess(made.clients, Codec(made.messages), strict=True)
    assert list(Driver(made.server, list(clients), "run", engine, made.least).rounds(1, 2))
    for client in clients.values():
        for group, shared in client._position.groups.items():
            if len(shared.members) > 1:
                with pytest.raises(PeerError, match="which others share, got a step alone"):
                    client.answer(StepAlone(stamp=at(Stamp("run", 3, 0), group)))


@pytest.mark.parametrize("form", ["rows", "independent"])
def test_a_holder_of_whole_rows_does_not_say_how_many(form: str) -> None:
    silos = grid([6, 4, 7], [5]) if form == "rows" else grid([6, 4, 7], [3, 2], joint=False)
    protocol = CGD(delta=(0.1, 0.3), vertical="joint" if form == "rows" else "independent")
    for client in participants(build(make(silos, protocol, insecure_secret_seed=None)._setting(SEED, 3))).values():
        with pytest.raises(PeerError, match="another holder of them"):
            client.answer(DescribeRows(stamp=at(SETUP, client._order._group)))


def test_no_member_takes_a_sum_that_its_relay_shifted() -> None:
    """Blinds are added, so a relay can add too; without tags it had a holder's rows, with the head of a row alone.

    All members of the group receive the same shift, so no digest of D would differ and no round end otherwise.
    """
    made, shift = of(CGD(delta=(0.1, 0.3)), 4), 2.0**18
    clients, seen = participants(made), dict[int, Array]()

    def relayed(client: Client) -> Any:
        honest = client.answer

        def answer(message: Message) -> Message:
            if isinstance(message, Descend) and message.stamp == at(Stamp("run", 3, 0), "columns-2"):
                step = np.zeros(message.tensors[FIRST].shape)
                step[:2, :2] = -shift * np.eye(2)
                added = np.rint(np.ldexp(step, message.encoding[FIRST])).astype(np.int64).view(np.uint64)
                message = dataclasses.replace(
                    message, tensors={**message.tensors, FIRST: message.tensors[FIRST] + added}
                )
            return honest(message)

        return answer

    for name in clients[VICTIM]._position.groups["columns-2"].members:
        clients[name].answer = relayed(clients[name])  # type: ignore[method-assign]
    head, join = clients[HEAD], clients[HEAD]._join

    def watching(ask: Join) -> Any:
        words = np.array(ask.words, order="C")
        add_masks(words, head._group_keys.row_masks(ask.stamp, [VICTIM], words.shape, ask.fraction_bits))
        seen[ask.stamp.round] = Ring(64).decode(words, ask.fraction_bits)
        return join(ask)

    head._join = watching  # type: ignore[method-assign]
    engine = InProcess(made.clients, Codec(made.messages), strict=True)
    assert len(list(Driver(made.server, list(clients), "run", engine, made.least).rounds(1, 4))) == 4
    rows = clients[VICTIM]._rows
    x = np.asarray(rows.x[rows.batches.of_round(4)])  # type: ignore[index]
    found = (seen[4] - seen[3])[:, :2] * (6 + 4 + 7) / (head._params.rate(3, 4) * shift)
    assert np.linalg.norm(found) < 1e-3 * np.linalg.norm(x)  # D moved by the honest sums alone
    assert clients[VICTIM]._steps["columns-2"] == 4  # and the group goes on, without round 3
