"""A participant comes back with its own start and needs D only; an aggregator has nothing that a fresh one lacks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grids import (
    FIRST,
    SEED,
    Fault,
    Seen,
    bytes_of,
    casting,
    copied,
    failing,
    furthest,
    grid,
    make,
    oracle,
    participants,
    run,
    same_bytes,
    watched,
)
from message_kinds import tag_of

from moretta import CGD, Engine, Faults, Silo
from moretta.contract.codec import Codec
from moretta.contract.roles import Server
from moretta.engines import views
from moretta.engines.driver import Driver
from moretta.engines.in_process import InProcess
from moretta.protocols.cgd.group_keys import group_of
from moretta.protocols.cgd.messages import CatchUp, Displacement, ShowDisplacement
from moretta.protocols.common.roles import Roles
from moretta.protocols.registry import build

JOINT = grid([6, 4, 7, 5], [3, 2], holders=[0, 1, 0, 0])
ROWS = grid([6, 4, 7, 5], [5])
AWAY = (2, 3, 4)


def away(silo: str) -> Engine:
    drop = [{"round": number, "silo": silo, "phase": "set-up"} for number in AWAY]
    return Engine(strict=True, faults=Faults.model_validate({"drop": drop}))


@pytest.mark.parametrize(
    ("silos", "blind"), [(JOINT, True), (JOINT, False), (ROWS, True)], ids=["joint", "joint, not blind", "rows"]
)
def test_who_returns_needs_only_d(silos: list[Silo], blind: bool) -> None:
    name, seen = silos[0].name, Seen()
    owner = silos[0].row or name
    starts: list[dict[str, bytes]] = []

    def wrap(players: Roles) -> None:
        starts.append({tensor: value.tobytes() for tensor, value in participants(players)[name]._start.items()})
        watched(seen)(players)

    found = run(silos, 6, CGD(delta=(0.1, 0.3), blind=blind), away(name), wrap=wrap)
    assert found.dropped == [(number, name) for number in AWAY]
    models, displacement = oracle(found.starts, silos, [0.5] * 6, absent=[(number, owner, "") for number in AWAY])
    assert furthest(found.displacement, displacement) < 1e-9
    assert all(furthest(found.models[who], models[who]) < 1e-9 for who in models)
    # Its start is the one it had, and nothing but D came to it, as a member of each of its groups sealed it, with the
    # norms of the sums that it missed, by which the next ones are clipped.
    after = participants(found.players)[name]
    assert {tensor: value.tobytes() for tensor, value in after._start.items()} == starts[0]
    caught = [(silo, message) for silo, message in seen.asked(CatchUp) if message.stamp.round == 5]
    assert {group_of(message.stamp) for silo, message in caught if silo == name} == set(after._position.groups)
    for _, message in caught:
        shapes = after._position.groups[group_of(message.stamp)].shapes
        assert message.steps == 4
        numbers = sum(int(np.prod(shape)) for shape in shapes.values()) + message.steps  # D, and a norm a round
        assert message.sealed.size == 8 * numbers + 28
    assert not [message for _, message in seen.asked(CatchUp) if message.stamp.round == 6]


def test_a_relay_does_not_read_the_d_that_it_relays(tmp_path: Path) -> None:
    seen = Seen()
    known: list[np.ndarray[Any, Any]] = []

    def wrap(players: Roles) -> None:
        watched(seen)(players)
        showing = participants(players)["silo-1-0"]
        show = showing._show

        def noted(ask: Any, group: str) -> Any:
            known.extend(value.copy() for value in showing.displacement.values())
            return show(ask, group)

        showing._show = noted  # type: ignore[method-assign]

    found = run(JOINT, 6, CGD(delta=0.2), away("silo-0-0"), wrap=wrap, out=tmp_path / "run", record_views=True)
    assert known
    data = b"".join(
        message.data
        for path in (tmp_path / "run" / "views" / "server").iterdir()
        for message in views.read(path)
    )  # fmt: skip
    assert sum(tag_of(one.data) == "cgd/catch-up" for p in (tmp_path / "run" / "views" / "server").iterdir()
               for one in views.read(p)) >= 2  # fmt: skip
    for value in known:
        for dtype in (np.float64, np.float32):
            for number in value.astype(dtype).ravel():
                assert number.tobytes() not in data
    # Sealed for one time only: no two have a block of 16 bytes in common.
    sealed = [answer.sealed.tobytes() for _, answer in seen.answered(Displacement)]
    assert len(sealed) >= 2
    blocks = [one[at : at + 16] for one in sealed for at in range(0, len(one) - 15, 16)]
    assert len(set(blocks)) == len(blocks)
    assert found.dropped == [(number, "silo-0-0") for number in AWAY]


@pytest.mark.parametrize("vertical", ["joint", "independent"])
def test_all_columns_of_a_row_leave_and_return(vertical: str) -> None:
    silos = grid([6, 4, 7, 5], [3, 2], joint=vertical == "joint")
    protocol = CGD.model_validate({"delta": 0.2, "vertical": vertical})
    drop = [{"round": n, "silo": f"silo-2-{j}", "phase": "set-up"} for n in AWAY for j in (0, 1)]
    found = run(silos, 6, protocol, Engine(strict=True, faults=Faults.model_validate({"drop": drop})))
    owners = ["row-2"] if vertical == "joint" else ["silo-2-0", "silo-2-1"]
    absent = [(number, owner, "") for number in AWAY for owner in owners]
    models, _ = oracle(found.starts, silos, [0.5] * 6, absent=absent)
    assert all(furthest(found.models[who], models[who]) < 1e-9 for who in models)


def test_away_from_the_start() -> None:
    drop = [{"round": n, "silo": "silo-0-1", "phase": "set-up"} for n in (1, 2)]
    engine = Engine(strict=True, faults=Faults.model_validate({"drop": drop}))
    found = run(JOINT, 4, CGD(delta=0.2), engine, batch_size=2)  # of all rows it could not join
    models, _ = oracle(found.starts, JOINT, [0.5] * 4, absent=[(1, "row-0", ""), (2, "row-0", "")], batch_size=2)
    assert all(furthest(found.models[who], models[who]) < 1e-9 for who in models)


def test_a_returned_participant_that_was_restored_from_an_old_checkpoint_catches_up() -> None:
    """A site that lost its disk's last rounds, and has its root and an old D."""
    silos, protocol = ROWS, CGD(delta=0.2)
    with casting() as (players, _):
        made = make(silos, protocol)
        made.train(2, SEED)
    old = players[0].clients["silo-1"].state()
    assert int(old["steps/all"]) == 2
    with casting() as (players, _):
        engine, server = engine_of(made, players_now := roles_of(made)), None
        server = players_now.server
        play(server, engine, players_now, 1, 5)
        players_now.clients["silo-1"].restore(old)
        play(server, engine, players_now, 6, 7)
    found = copied(players_now.models())
    undisturbed = run(silos, 7, protocol)
    assert all(furthest(found[name], undisturbed.models[name]) == 0 for name in found)


def test_a_fresh_aggregator_asks_again_where_somebody_is_that_did_not_catch_up() -> None:
    """It has seen no sum itself, so it goes by what the others said."""
    protocol, fault = CGD(delta=0.2), Fault("silo-1", 6, CatchUp)
    made = make(ROWS, protocol)
    players = roles_of(made)
    engine = engine_of(made, players)
    play(players.server, engine, players, 1, 2)
    old = players.clients["silo-1"].state()
    play(players.server, engine, players, 3, 5)
    players.clients["silo-1"].restore(old)
    failing(fault)(players)
    driver = Driver(roles_of(made).server, list(players.clients), "a-run", engine, players.least)
    assert [[gone.silo for gone in end.dropped] for end in driver.rounds(6, 7)] == [["silo-1"], []]
    assert fault.happened
    found, undisturbed = copied(players.models()), run(ROWS, 7, protocol)
    assert all(furthest(found[name], undisturbed.models[name]) == 0 for name in found)


# -- the aggregator ----------------------------------------------------------------------------------------------------


def roles_of(made: Any, rounds: int = 7) -> Roles:
    return build(made._setting(SEED, rounds))


def engine_of(made: Any, players: Roles) -> InProcess:
    return InProcess(players.clients, Codec(players.messages), strict=True)


def play(server: Server, engine: InProcess, players: Roles, first: int, last: int, run_id: str = "a-run") -> None:
    driver = Driver(server, list(players.clients), run_id, engine, players.least)
    ends = list(driver.rounds(first, last))
    assert not [gone for end in ends for gone in end.dropped]


CASES: dict[str, tuple[Sequence[Silo], dict[str, Any], dict[str, Any]]] = {
    "joint": (JOINT, {}, {}),
    "joint, standardised": (JOINT, {}, {"standardise": True}),
    "joint, not blind": (JOINT, {"blind": False}, {}),
    "independent": (grid([6, 4, 7], [3, 2], joint=False), {"vertical": "independent"}, {}),
    "rows": (ROWS, {}, {"standardise": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_fresh_aggregator_goes_on_with_the_same_bytes(case: str) -> None:
    silos, protocol, rest = CASES[case]
    made = make(list(silos), CGD.model_validate({"delta": (0.1, 0.3), **protocol}), **rest)
    undisturbed, disturbed = roles_of(made), roles_of(made)
    play(undisturbed.server, engine_of(made, undisturbed), undisturbed, 1, 7)
    engine = engine_of(made, disturbed)
    play(disturbed.server, engine, disturbed, 1, 3)
    play(roles_of(made).server, engine, disturbed, 4, 5)  # one that knows nothing but who shares what with whom
    heir = roles_of(made).server
    heir.restore(disturbed.server.state())
    play(heir, engine, disturbed, 6, 7)
    ends = {name: value.tobytes() for name, value in undisturbed.displacement().items()}  # type: ignore[misc]
    assert {name: value.tobytes() for name, value in disturbed.displacement().items()} == ends  # type: ignore[misc]
    for owner, tensors in undisturbed.models().items():
        for name, value in tensors.items():
            assert disturbed.models()[owner][name].tobytes() == value.tobytes()


@pytest.mark.parametrize("case", CASES)
def test_an_aggregators_state_has_no_weights(case: str) -> None:
    silos, protocol, rest = CASES[case]
    found = run(list(silos), 3, CGD.model_validate({"delta": 0.2, **protocol}), **rest)
    state = dict(found.players.server.state())
    for name in [name for name in state if name.startswith("summed/")]:
        assert state.pop(name) in range(4)  # the round of a group's last sum
    groups = found.players.server._groups  # type: ignore[attr-defined]
    for name in [name for name in state if name.endswith("/counted")]:  # whose rows were counted, and how many are all
        assert set(state.pop(name).split("\n")) == set(groups[name.rpartition("/")[0]].members)
    assert {name.rpartition("/")[2] for name in state} <= {
        "rows", "input_fill", "input_mean", "input_deviation", "has_statistics", "scales"
    }  # fmt: skip
    largest = max(np.asarray(value).size for value in state.values()) if state else 0
    assert largest <= max(silo.x.shape[1] for silo in silos) + 2
    numbers = {number.tobytes() for value in state.values() for number in np.asarray(value).ravel()}
    for value in found.displacement.values():
        assert not numbers & {number.tobytes() for number in value.ravel() if number}
    assert found.result.model is None
    assert found.players.server is not None


@pytest.mark.parametrize("case", ["joint", "rows"])
def test_whoever_aggregates_needs_nobodys_data(case: str) -> None:
    """Any participant can: what it takes follows from the grid, the model's shapes and the settings."""
    silos, protocol, _ = CASES[case]
    made = make(list(silos), CGD.model_validate({"delta": 0.2, **protocol}))
    blank = [dataclasses.replace(silo, x=np.zeros_like(silo.x), y=np.zeros_like(silo.y)) for silo in silos]
    other = make(blank, CGD.model_validate({"delta": 0.2, **protocol}), insecure_secret_seed=77)
    one, two = roles_of(made), roles_of(made)
    play(one.server, engine_of(made, one), one, 1, 4)
    play(roles_of(other).server, engine_of(made, two), two, 1, 4)
    for owner, tensors in one.models().items():
        assert {name: value.tobytes() for name, value in tensors.items()} == {
            name: value.tobytes() for name, value in two.models()[owner].items()
        }


def test_where_a_participant_is_is_all_that_an_aggregator_asks() -> None:
    seen = Seen()
    found = run(JOINT, 3, CGD(delta=0.2), wrap=watched(seen))
    assert not list(seen.asked(ShowDisplacement))  # nobody was away
    assert same_bytes(found, run(JOINT, 3, CGD(delta=0.2)))
    assert bytes_of(found)["row-0", FIRST] != bytes_of(found)["row-1", FIRST]
