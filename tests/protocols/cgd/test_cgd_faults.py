"""A participant that fails costs the round itself at most, and has the same D as the others afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grids import (
    FIRST,
    Fault,
    Run,
    Seen,
    both,
    failing,
    furthest,
    grid,
    make,
    oracle,
    participants,
    run,
    same_bytes,
    train,
    watched,
)

from moretta import CGD, Engine, Faults, SecureAggregation
from moretta.contract.messages import Message, Stamp
from moretta.contract.roles import Aborted
from moretta.data.silo import Silo
from moretta.engines.checkpoint import last_checkpoint
from moretta.errors import RunFailed
from moretta.protocols.cgd.messages import (
    Backward,
    CatchUp,
    Contribute,
    Deltas,
    Descend,
    DescribeRows,
    DrawKey,
    Forward,
    Here,
    Join,
    Partial,
    ShowDisplacement,
    StepAlone,
    TakeKey,
    Where,
)
from moretta.protocols.cgd.server import Server
from moretta.protocols.common.roles import Roles
from moretta.protocols.common.silo_rows import Begin
from moretta.secure_aggregation.additive import AddShares
from moretta.secure_aggregation.agreement import AdvertiseKey, PeerKeys
from moretta.secure_aggregation.unmasking import Survivors, Unmask

pytestmark = pytest.mark.usefixtures("quiet")

JOINT = grid([6, 4, 7, 5], [3, 2], holders=[0, 1, 0, 0])
INDEPENDENT = grid([6, 4, 7, 5], [3, 2], joint=False)
ROWS = grid([6, 4, 7, 5], [5])
ROUNDS = 4

Absent = Collection[tuple[int, str, str]]


def played(
    silos: list[Silo],
    faults: Collection[Fault],
    absent: Absent,
    protocol: CGD | None = None,
    batch_size: int = 0,
    **settings: Any,
) -> Run:
    """Train with faults; the models are the oracle's, in which a part took no part, and everybody has the same D."""
    protocol = protocol or CGD(delta=(0.1, 0.3))
    found = run(silos, ROUNDS, protocol, wrap=failing(*faults), batch_size=batch_size, **settings)
    assert all(fault.happened == fault.times for fault in faults)
    expect(found, silos, absent, batch_size=batch_size)
    return found


def expect(found: Run, silos: list[Silo], absent: Absent, rounds: int = ROUNDS, batch_size: int = 0) -> None:
    models, displacement = oracle(found.starts, silos, [0.5] * rounds, absent=absent, batch_size=batch_size)
    assert furthest(found.displacement, displacement) < 1e-9
    for owner, tensors in models.items():
        assert furthest(found.models[owner], tensors) < 1e-9
    clients = participants(found.players)
    for group, members in shared(clients).items():
        for name in clients[members[0]]._position.groups[group].shapes:
            assert len({clients[member].displacement[name].tobytes() for member in members}) == 1
        assert {clients[member]._steps[group] for member in members} == {rounds}


def shared(clients: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    return {name: group.members for client in clients.values() for name, group in client._position.groups.items()}


def attempts(found: Run) -> list[int]:
    return [line["attempt"] for line in found.result.history]


ROW_0 = [(2, "row-0", "")]
BESIDE: dict[str, tuple[list[Fault], Absent, set[tuple[int, str]]]] = {
    "forward": ([Fault("silo-0-1", 2, Forward)], ROW_0, {(2, "silo-0-1")}),
    "forward, answer lost": ([Fault("silo-0-1", 2, Forward, "after")], ROW_0, {(2, "silo-0-1")}),
    "join": ([Fault("silo-0-0", 2, Join)], ROW_0, {(2, "silo-0-0")}),
    "join, answer lost": ([Fault("silo-0-0", 2, Join, "after")], ROW_0, {(2, "silo-0-0")}),
    "backward": ([Fault("silo-0-1", 2, Backward)], ROW_0, {(2, "silo-0-1")}),
    "backward, answer lost": ([Fault("silo-0-1", 2, Backward, "after")], ROW_0, {(2, "silo-0-1")}),
    "upload of columns": (
        [Fault("silo-0-1", 2, Contribute)], [(2, "row-0", "silo-0-1")], {(2, "silo-0-1")}
    ),
    "a head's upload of the rest": (
        [Fault("silo-0-0", 2, Contribute, group="heads")], [(2, "row-0", "heads")], {(2, "silo-0-0")}
    ),
    "a head's upload of columns, answer lost": (
        [Fault("silo-0-0", 2, Contribute, "after", "columns-1")], [(2, "row-0", "silo-0-0")], {(2, "silo-0-0")}
    ),
    "unmasking": ([Fault("silo-0-1", 2, Unmask)], [], {(2, "silo-0-1")}),
    "descend": ([Fault("silo-0-1", 2, Descend)], [], {(2, "silo-0-1")}),
    "descend, answer lost": ([Fault("silo-0-1", 2, Descend, "after")], [], {(2, "silo-0-1")}),
    "a head's descend of the rest": ([Fault("silo-0-0", 2, Descend, group="heads")], [], {(2, "silo-0-0")}),
    "descend at the end": ([Fault("silo-0-1", ROUNDS, Descend)], [], {(ROUNDS, "silo-0-1")}),
    "descend, twice": (
        [Fault("silo-0-1", 2, Descend), Fault("silo-0-0", 3, Descend, "after", "columns-1")], [],
        {(2, "silo-0-1"), (3, "silo-0-0")},
    ),
    "descend and catching up": (
        [Fault("silo-0-1", 2, Descend), Fault("silo-0-1", 3, CatchUp)], [(3, "row-0", "")],
        {(2, "silo-0-1"), (3, "silo-0-1")},
    ),
    "descend and catching up, answer lost": (
        [Fault("silo-0-1", 2, Descend), Fault("silo-0-1", 3, CatchUp, "after")], [(3, "row-0", "")],
        {(2, "silo-0-1"), (3, "silo-0-1")},
    ),
    "descend, and the first who is to show D cannot": (
        [Fault("silo-0-1", 2, Descend), Fault("silo-1-1", 3, ShowDisplacement)], [],
        {(2, "silo-0-1"), (3, "silo-1-1")},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "blind"), [*((case, True) for case in BESIDE), ("descend", False), ("upload of columns", False)]
)
def test_the_round_goes_on_without_it(case: str, blind: bool) -> None:
    faults, absent, dropped = BESIDE[case]
    faults = [dataclasses.replace(fault) for fault in faults]
    found = played(JOINT, faults, absent, CGD(delta=(0.1, 0.3), blind=blind))
    assert attempts(found) == [0] * ROUNDS
    assert set(found.dropped) == dropped


@pytest.mark.parametrize(
    "kind", [AdvertiseKey, PeerKeys, DrawKey, TakeKey, DescribeRows, Where, Begin], ids=lambda kind: str(kind.TAG)
)
@pytest.mark.parametrize("silo", ["silo-0-0", "silo-0-1"])
def test_a_round_that_could_not_be_set_up_is_repeated_without_it(kind: type[Message], silo: str) -> None:
    if (kind is DrawKey and silo != "silo-0-0") or (kind is TakeKey and silo == "silo-0-0"):
        pytest.skip("is not asked that")
    # In batches: where rounds use all rows, who is not there when they are counted cannot join the run.
    found = played(JOINT, [Fault(silo, 1, kind)], [(1, f"row-{silo[5]}", "")], batch_size=2)
    assert attempts(found) == [1, 0, 0, 0]
    assert found.dropped == [(1, silo)]


@pytest.mark.parametrize("phase", ["set-up", "upload", "unmasking"])
@pytest.mark.parametrize("number", [1, ROUNDS])
def test_injected_faults_of_a_joint_grid(phase: str, number: int) -> None:
    faults = Faults.model_validate({"drop": [{"round": number, "silo": "silo-0-1", "phase": phase}]})
    engine = Engine(strict=True, faults=faults)
    found = run(JOINT, ROUNDS, CGD(delta=(0.1, 0.3)), engine=engine, batch_size=2)  # of all rows it could not join
    assert found.dropped == [(number, "silo-0-1")]
    # Who is lost in unmasking has uploaded, and counts; the sum it misses it takes from the others later.
    expect(found, JOINT, [] if phase == "unmasking" else [(number, "row-0", "")], batch_size=2)
    assert attempts(found)[number - 1] == int(phase == "set-up" and number == 1)


@pytest.mark.parametrize("phase", ["set-up", "upload", "unmasking"])
@pytest.mark.parametrize("vertical", ["joint", "independent"])
def test_injected_faults_of_a_split_by_rows(vertical: str, phase: str) -> None:
    faults = Faults.model_validate({"drop": [{"round": 2, "silo": "silo-0", "phase": phase}]})
    protocol = CGD.model_validate({"delta": 0.2, "vertical": vertical})
    found = run(ROWS, ROUNDS, protocol, engine=Engine(strict=True, faults=faults))
    assert found.dropped == [(2, "silo-0")]
    expect(found, ROWS, [] if phase == "unmasking" else [(2, "silo-0", "")])


@pytest.mark.parametrize("kind", [Contribute, Descend, Unmask], ids=lambda kind: str(kind.TAG))
@pytest.mark.parametrize("group", ["all", "columns-2"])
def test_an_independent_grid(kind: type[Message], group: str) -> None:
    part = "heads" if group == "all" else "silo-0-1"
    absent = [(2, "silo-0-1", part)] if kind is Contribute else []
    found = played(
        INDEPENDENT, [Fault("silo-0-1", 2, kind, group=group)], absent, CGD(delta=0.2, vertical="independent")
    )
    assert found.dropped == [(2, "silo-0-1")]
    assert attempts(found) == [0] * ROUNDS


def nobodys(part: int, rows: int = 4) -> list[tuple[int, str, str]]:
    """Return the absences of round 2 where a column group's sum fails: nobody's part of it counts."""
    return [(2, f"row-{row}", f"silo-{row}-{part}") for row in range(rows)]


def left_out(found: Run) -> list[float]:
    return [line["groups_left_out"] for line in found.result.history]


def test_two_lost_in_one_sum_are_too_many_and_the_group_does_not_step() -> None:
    faults = [Fault("silo-1-1", 2, Contribute, group="columns-2"), Fault("silo-0-1", 2, Survivors)]
    found = played(JOINT, faults, nobodys(1))
    assert attempts(found) == [0] * ROUNDS
    assert left_out(found) == [0, 1, 0, 0]
    assert set(found.dropped) == {(2, "silo-1-1"), (2, "silo-0-1")}


@pytest.mark.parametrize("blind", [True, False])
@pytest.mark.parametrize("scheme", ["pairwise", "additive-shares"])
def test_no_group_is_summed_twice_in_a_round(monkeypatch: pytest.MonkeyPatch, scheme: str, blind: bool) -> None:
    """Two sums of the same gradients, over one participant more and less, would differ by that one's own."""
    opened = list[tuple[str, int]]()
    inner = Server._sum

    def watched_sum(self: Server, now: Stamp, group: str, *rest: Any) -> Any:
        found = yield from inner(self, now, group, *rest)
        if not isinstance(found, Aborted):
            opened.append((group, now.round))
        return found

    monkeypatch.setattr(Server, "_sum", watched_sum)
    faults = [Fault("silo-0-1", 2, Contribute, group="columns-2"), Fault("silo-1-1", 2, Contribute, group="columns-2")]
    found = run(JOINT, ROUNDS, CGD(delta=0.2, blind=blind), wrap=failing(*faults), scheme=scheme)
    assert left_out(found) == [0, 1, 0, 0]
    assert len(opened) == len(set(opened)) == 3 * ROUNDS - 1


def test_a_threshold_that_bears_two_and_one_that_bears_none() -> None:
    silos = grid([6, 4, 7, 5, 3], [3, 2], holders=1)
    faults = [Fault("silo-0-0", 2, Contribute), Fault("silo-2-0", 2, Contribute)]
    found = played(silos, faults, [(2, "row-0", "silo-0-0"), (2, "row-2", "silo-2-0")],
                   aggregation=SecureAggregation(threshold=3))  # fmt: skip
    assert attempts(found) == [0] * ROUNDS
    again = [dataclasses.replace(fault, happened=0) for fault in faults]
    found = played(silos, again, nobodys(0, rows=5))  # by default it takes four of five
    assert left_out(found) == [0, 1, 0, 0]
    found = played(JOINT, [Fault("silo-0-1", 2, Contribute)], nobodys(1), aggregation=SecureAggregation(threshold=4))
    assert left_out(found) == [0, 1, 0, 0]


@pytest.mark.parametrize("kind", [Contribute, AddShares], ids=lambda kind: str(kind.TAG))
def test_additive_shares_bear_no_loss(kind: type[Message]) -> None:
    found = played(JOINT, [Fault("silo-0-1", 2, kind)], nobodys(1), scheme="additive-shares")
    assert attempts(found) == [0] * ROUNDS
    assert left_out(found) == [0, 1, 0, 0]
    assert found.dropped[0] == (2, "silo-0-1")


def test_in_the_clear() -> None:
    found = played(JOINT, [Fault("silo-0-1", 2, Contribute)], [(2, "row-0", "silo-0-1")], scheme="none")
    assert found.dropped == [(2, "silo-0-1")]


def test_one_row_that_sits_out_stands_still() -> None:
    silos = grid([9], [3, 2], holders=1)
    for fault in (Fault("silo-0-0", 2, Forward), Fault("silo-0-1", 2, Join), Fault("silo-0-0", 2, Backward)):
        found = run(silos, ROUNDS, CGD(delta=0.2), wrap=failing(fault))
        _, displacement = oracle(found.starts, silos, [0.5, 0.5, 0.5])
        assert fault.happened
        assert furthest(found.displacement, displacement) < 1e-9
        assert found.dropped == [(2, fault.silo)]


def test_a_step_alone_that_failed_is_named() -> None:
    fault = Fault("silo-0-0", 2, StepAlone)
    found = run(grid([9], [3, 2], holders=1), ROUNDS, CGD(delta=0.2), wrap=failing(fault))
    assert found.dropped == [(2, "silo-0-0")]


# -- garbage -----------------------------------------------------------------------------------------------------------


def _flipped(sealed: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.concatenate([sealed[:5], sealed[5:6] ^ 1, sealed[6:]])


def _later(reply: Message) -> Message:
    return dataclasses.replace(reply, stamp=dataclasses.replace(reply.stamp, attempt=7))


GARBAGE: dict[str, tuple[Fault, Absent]] = {
    "too few words": (
        Fault("silo-0-1", 2, Forward, lambda one: Partial(stamp=one.stamp, words=one.words[1:])), ROW_0
    ),
    "too many words": (
        Fault("silo-0-1", 2, Forward, lambda one: Partial(stamp=one.stamp, words=np.tile(one.words, 2))), ROW_0
    ),
    "words of another stamp": (Fault("silo-0-1", 2, Forward, _later), ROW_0),
    "words that are another message": (
        Fault("silo-0-1", 2, Forward, lambda one: Here(stamp=one.stamp, steps={})), ROW_0
    ),
    "Delta with a bit turned": (
        Fault("silo-0-0", 2, Join, lambda one: Deltas(stamp=one.stamp, sealed=_flipped(one.sealed))), ROW_0
    ),
    "no Delta": (Fault("silo-0-0", 2, Join, lambda one: Deltas(stamp=one.stamp, sealed=one.sealed[:0])), ROW_0),
    "Delta of another stamp": (Fault("silo-0-0", 2, Join, _later), ROW_0),
    "an upload of other tensors": (
        Fault("silo-0-1", 2, Contribute, lambda one: dataclasses.replace(one, tensors={"x": one.weight})),
        [(2, "row-0", "silo-0-1")],
    ),
    "an upload of another shape": (
        Fault("silo-0-1", 2, Contribute, lambda one: dataclasses.replace(one, tensors={FIRST: one.weight})),
        [(2, "row-0", "silo-0-1")],
    ),
    "no step": (Fault("silo-0-1", 2, Descend, _later), []),
}  # fmt: skip


@pytest.mark.parametrize("case", GARBAGE)
def test_garbage_costs_the_round_only(case: str) -> None:
    fault, absent = GARBAGE[case]
    found = played(JOINT, [dataclasses.replace(fault)], absent)
    assert attempts(found) == [0] * ROUNDS
    assert [silo[:6] for _, silo in found.dropped] == ["silo-0"]  # of the row; who of both is at fault is not known


def test_garbage_of_one_of_three_holders() -> None:
    silos = grid([6, 4, 7, 5], [2, 1, 2], holders=1)
    fault = Fault("silo-0-2", 2, Forward, lambda one: Partial(stamp=one.stamp, words=one.words[1:]))
    found = played(silos, [fault], ROW_0)
    assert attempts(found) == [0] * ROUNDS


@pytest.mark.parametrize("what", ["short", "infinite"])
def test_a_delta_that_was_sealed_wrongly_costs_the_round_only(what: str) -> None:
    def wrap(players: Roles) -> None:
        keyring = participants(players)["silo-0-0"]._group_keys
        seal = keyring.seal

        def sealing(stamp: Any, name: str, maker: str, content: bytes) -> Any:
            if stamp.round == 2 and name == "delta":
                content = content[8:] if what == "short" else np.full(len(content) // 8, np.inf).tobytes()
            return seal(stamp, name, maker, content)

        keyring.seal = sealing  # type: ignore[method-assign]

    found = run(JOINT, ROUNDS, CGD(delta=0.2), wrap=wrap)
    expect(found, JOINT, ROW_0)
    assert found.dropped == [(2, "silo-0-1")]


def test_a_wrong_displacement_is_not_taken() -> None:
    lost = Fault("silo-0-1", 2, Descend)
    garbled = Fault("silo-1-1", 3, ShowDisplacement, lambda one: dataclasses.replace(one, sealed=_flipped(one.sealed)))
    found = played(JOINT, [lost, garbled], [])  # the next member of the group seals another
    assert attempts(found) == [0] * ROUNDS


def _unsealed(one: Any) -> Message:
    return dataclasses.replace(one, sealed={name: bytes(len(sealed)) for name, sealed in one.sealed.items()})


SET_UP_GARBAGE = {
    "a place without groups": (Fault("silo-0-1", 1, Where, lambda one: Here(stamp=one.stamp, steps={})), "silo-0-1"),
    "a place in the future": (
        Fault("silo-0-1", 1, Where, lambda one: Here(stamp=one.stamp, steps={"columns-2": 9})), "silo-0-1"
    ),
    "keys for nobody": (
        Fault("silo-0-0", 1, DrawKey, lambda one: dataclasses.replace(one, sealed={}), "heads"), "silo-0-0"
    ),
    "keys that nobody can open": (Fault("silo-0-0", 1, DrawKey, _unsealed, "heads"), "silo-0-0"),
    "a row's key that nobody can open": (Fault("silo-0-0", 1, DrawKey, _unsealed, "row=row-0"), "silo-0-0"),
}  # fmt: skip


@pytest.mark.parametrize("case", SET_UP_GARBAGE)
def test_garbage_in_the_set_up_costs_the_round_only(case: str) -> None:
    fault, silo = SET_UP_GARBAGE[case]
    found = played(JOINT, [dataclasses.replace(fault)], [(1, "row-0", "")], batch_size=2)
    assert attempts(found) == [1, 0, 0, 0]
    assert [(number, name[:6]) for number, name in found.dropped] == [(1, silo[:6])]


# -- too few -----------------------------------------------------------------------------------------------------------


def test_too_few_of_a_group_fail_the_run_by_name(tmp_path: Path) -> None:
    silos = grid([6, 4], [3, 2])
    made = make(silos, CGD(delta=0.2), out=tmp_path / "run")
    with pytest.raises(RunFailed, match=r"round 3: .* group `(heads|columns-[12])` .*too few to sum.*resume=True"):
        train(made, ROUNDS, wrap=failing(Fault("silo-0-1", 3, Forward, times=9)))
    found = last_checkpoint(tmp_path / "run" / "checkpoint")
    assert found is not None
    assert found[0].round == 2
    resumed = train(make(silos, CGD(delta=0.2), out=tmp_path / "run"), ROUNDS, resume=True)
    assert same_bytes(resumed, run(silos, ROUNDS, CGD(delta=0.2)))


def test_too_few_silos_fail_the_run() -> None:
    faults = [Fault(f"silo-{row}-1", 3, Contribute) for row in range(3)]
    assert left_out(run(JOINT, ROUNDS, CGD(delta=0.2), wrap=failing(*faults))) == [0, 0, 1, 0]  # one group of three
    heads = [Fault(name, 3, Contribute, times=9) for name in ("silo-0-0", "silo-1-1", "silo-2-0")]
    with pytest.raises(RunFailed, match=r"round 3 cannot be completed by 5 of 8 silos, at least 6 are needed"):
        run(JOINT, ROUNDS, CGD(delta=0.2), wrap=failing(*heads))
    rows = [Fault(f"silo-{row}", 3, Contribute, times=9) for row in range(3)]
    with pytest.raises(RunFailed, match="round 3 cannot be completed by 1 of 4 silos"):
        run(ROWS, ROUNDS, CGD(delta=0.2), wrap=failing(*rows))


def test_nobody_is_asked_for_a_gradient_twice_under_one_stamp() -> None:
    seen = Seen()
    fault = [Fault("silo-1-1", 2, Contribute, group="columns-2"), Fault("silo-0-1", 2, Survivors)]
    run(JOINT, ROUNDS, CGD(delta=0.2), wrap=both(failing(*fault), watched(seen)))
    for kind in (Forward, Join, Backward, Contribute, Descend):
        asked = [(silo, ask.stamp) for silo, ask in seen.asked(kind)]
        assert len(asked) == len(set(asked)) > 0


def test_chance() -> None:
    faults = Faults(drop_probability=0.06, seed=2)
    silos = grid([6, 4, 7, 5, 6, 3, 8], [3, 2], holders=1)
    aggregation = SecureAggregation(threshold=4)
    found = run(silos, 8, CGD(delta=0.2), engine=Engine(strict=True, faults=faults), aggregation=aggregation)
    assert len(found.dropped) > 3
    clients = participants(found.players)
    for group, members in shared(clients).items():
        name = next(iter(clients[members[0]]._position.groups[group].shapes))
        furthest_on = max(clients[member]._steps[group] for member in members)
        there = [clients[member] for member in members if clients[member]._steps[group] == furthest_on]
        assert len({client.displacement[name].tobytes() for client in there}) == 1
