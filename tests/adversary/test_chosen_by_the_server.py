"""What a server may not choose: another run's name, a narrower range, another total weight, a far center.

Each was a way to a silo's own numbers: the first by two sums of one round that each counted as a run's only one, the
others by what a silo refused, in as many asks as it takes, of which nothing was kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from silos import SCHEMES, World, play_roles

from moretta.contract.messages import Message, Stamp
from moretta.contract.roles import Aborted, Exchange, Replies, answered
from moretta.errors import PeerError
from moretta.protocols.common import modules
from moretta.protocols.common.roles import Roles
from moretta.protocols.fedsgd.messages import TrainOn
from moretta.secure_aggregation.agreement import AdvertiseKey
from moretta.secure_aggregation.encoding import MOST_WEIGHT
from moretta.secure_aggregation.statistics import HALF, LIMBS, AskMoments

NONE = np.empty(0, np.int64)


def play(roles: Roles, exchange: Exchange[Aborted | None]) -> None:
    """Play an exchange in which every silo does as it is asked."""
    replies: Replies | None = None
    while True:
        try:
            ask = exchange.send(replies)  # type: ignore[arg-type]  # None starts a generator
        except StopIteration:
            return
        replies = Replies({silo: answered(roles.clients[silo], message) for silo, message in ask.messages.items()})


@pytest.fixture(params=SCHEMES)
def world(request: pytest.FixtureRequest) -> World:
    return World("fedsgd", request.param, roster=True)


@pytest.fixture
def roles(world: World, tmp_path: Path) -> Roles:
    """Roles behind their set-up for round 1."""
    found = play_roles(world, tmp_path, world.run(1), 0)
    play(found, found.server.setup(Stamp(world.run(1), 1, 0), list(world.names)))
    return found


def asks(roles: Roles, world: World) -> tuple[TrainOn, Mapping[str, int]]:
    """The ask of round 1 as the server would make it, and its encoding."""
    exchange = roles.server.round(Stamp(world.run(1), 1, 0))
    ask = next(exchange).messages["a"]
    assert isinstance(ask, TrainOn)
    return ask, ask.encoding


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("protocol", ["fedsgd", "fedavg", "pbpfl", "pbpfl-ce", "baffle", "cgd", "cgd-open"])
def test_a_silo_has_one_run(protocol: str, scheme: str, tmp_path: Path) -> None:
    """Asked for sums of one round under two names, over sets that differ by a silo, its own gradient was left."""
    world = World(protocol, scheme, roster=True)
    run = world.run(1)
    group = "everybody/" if protocol.startswith("cgd") else ""
    client = play_roles(world, tmp_path, run, 0).clients["a"]
    answered(client, AdvertiseKey(stamp=Stamp(f"{group}{run}", 1, 0)))
    for other in (f"x{run}", f"q/{run}", f"{run}/{run}", world.run(2)):
        with pytest.raises(PeerError, match=r"expected messages of the run|in no group"):
            answered(client, AdvertiseKey(stamp=Stamp(other, 1, 0)))


def test_a_question_of_another_run_is_not_answered(roles: Roles, world: World) -> None:
    ask, _ = asks(roles, world)
    for other in (world.run(2), f"q/{world.run(1)}"):
        with pytest.raises(PeerError, match="expected messages of the run"):
            answered(roles.clients["a"], replace(ask, stamp=replace(ask.stamp, run=other)))


def test_a_narrower_range_is_refused_whatever_the_values_are(roles: Roles, world: World) -> None:
    ask, encoding = asks(roles, world)
    for name in encoding.keys() - {MOST_WEIGHT}:
        for bits in (encoding[name] + 1, 200, 2000):
            with pytest.raises(PeerError) as refused:
                answered(roles.clients["a"], replace(ask, encoding={**encoding, name: bits}))
            assert re.search(
                r"expected (an encoding of values up to 65536|at most 964 fraction bits)", str(refused.value)
            )
    answered(roles.clients["a"], ask)


def test_a_range_that_a_value_is_out_of_is_named_and_the_value_is_not(roles: Roles, world: World) -> None:
    ask, _ = asks(roles, world)
    far = {name: 1e4 * value + 1e4 for name, value in modules.arrays(roles.server._model).items()}  # type: ignore[attr-defined]
    with pytest.raises(Exception, match=r"`\S+`: a value is outside the range of the secure sum, \+-[\d.]+;") as no:
        answered(roles.clients["a"], replace(ask, parameters=far))
    assert len(re.findall(r"\d[\d.e+]*", str(no.value).partition("secure sum")[2])) == 1  # the range's


def test_one_total_weight_a_session(roles: Roles, world: World) -> None:
    """A silo with all its rows in a round refused totals below its number of rows, and so told that number."""
    ask, encoding = asks(roles, world)
    answered(roles.clients["a"], ask)
    for weight in (encoding[MOST_WEIGHT] - 1, 2, encoding[MOST_WEIGHT] + 1):
        wide = {name: bits - 1 for name, bits in encoding.items()} | {MOST_WEIGHT: weight}
        other = replace(ask, stamp=Stamp(world.run(1), 1, 0, 1), encoding=wide)
        with pytest.raises(PeerError, match=f"expected the total weight of the sums before, {encoding[MOST_WEIGHT]}"):
            answered(roles.clients["a"], other)


def moments(roles: Roles, world: World, order: int, center: float, bits: int = 0, attempt: int = 0) -> Message:
    wanted = roles.server._enrolment.aggregation.want(  # type: ignore[attr-defined]
        {f"moments/{order}/input columns": (LIMBS, 4)}, {f"moments/{order}/input columns": float(HALF)}, 5
    )
    ask = AskMoments(
        stamp=Stamp(world.run(1), 1, attempt),
        what="input columns",
        order=order,
        center=np.array([center, 0.0, 0.0]),
        columns=NONE,
        encoding={name: value + (bits if name != MOST_WEIGHT else 0) for name, value in wanted.fraction_bits.items()},
    )
    return answered(roles.clients["a"], ask)


@pytest.mark.parametrize(("order", "center"), [(0, 1.0), (1, -1e-300), (2, 9e12), (2, -1e30)])
def test_a_center_that_only_a_number_of_rows_would_refuse(
    roles: Roles, world: World, order: int, center: float
) -> None:
    with pytest.raises(PeerError, match=r"expected a center within 8\.8e"):
        moments(roles, world, order, center)


def test_statistics_have_their_own_range(roles: Roles, world: World) -> None:
    with pytest.raises(PeerError, match="expected an encoding of values up to 524288, got one of fewer"):
        moments(roles, world, 1, 0.0, bits=1)
    moments(roles, world, 1, 0.0, attempt=1)
    with pytest.raises(PeerError, match="around the center that was answered before in this run, got another center"):
        moments(roles, world, 2, 8e12, attempt=1)


@pytest.mark.parametrize("what", ["rows", "input columns"])
def test_a_center_of_the_wrong_length_tells_no_number_of_rows(roles: Roles, world: World, what: str) -> None:
    ask = AskMoments(
        stamp=Stamp(world.run(1), 1, 0), what=what, order=1, center=np.zeros(9), columns=NONE, encoding={MOST_WEIGHT: 5}
    )
    with pytest.raises(PeerError, match=f"expected a statistic of the run's settings, was asked for {what}"):
        answered(roles.clients["a"], ask)
