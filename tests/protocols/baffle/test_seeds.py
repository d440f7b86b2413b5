"""Nobody chooses the seed: a role reveals its part once all are committed, and once only, for one set of silos."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cast import casting
from hypothesis import given
from hypothesis import strategies as st

from moretta import BAFFLE, Engine, Federation, SecureAggregation, Silo
from moretta.contract.messages import Message, Stamp
from moretta.errors import PeerError
from moretta.protocols.baffle.silo.forward import Layout
from moretta.protocols.baffle.silo.messages import Agree, Commit, Committed, Estimate, Reveal, Revealed
from moretta.protocols.baffle.silo.seeds import SERVER, Seed, commitment, parameter_hash
from moretta.protocols.common.roles import Roles
from moretta.secure_aggregation.keystream import SecretRoot

RUN, NAMES = "run", ("anna", "bea", "carla")
NOW = Stamp(RUN, 1, 0)


def roles(names: tuple[str, ...] = NAMES, root: int = 0) -> dict[str, Seed]:
    return {name: Seed(name, SecretRoot.insecure(root, name)) for name in (SERVER, *names)}


def committed(seeds: Mapping[str, Seed], cohort: tuple[str, ...] = NAMES, run: str = RUN) -> dict[str, bytes]:
    return {name: seeds[name].begin(run, cohort) for name in (SERVER, *cohort)}


def revealed(seeds: Mapping[str, Seed], cohort: tuple[str, ...] = NAMES, run: str = RUN) -> dict[str, bytes]:
    commitments = committed(seeds, cohort, run)
    return {name: seeds[name].reveal(commitments) for name in commitments}


def agreed(seeds: Mapping[str, Seed], cohort: tuple[str, ...] = NAMES, run: str = RUN) -> bytes:
    contributions = revealed(seeds, cohort, run)
    digests = {seeds[name].agree(contributions) for name in contributions}
    assert len(digests) == 1
    (seed,) = {seeds[name].seed for name in contributions}
    return seed


# -- an honest agreement -----------------------------------------------------------------------------------------------


def test_all_roles_have_the_same_seed_which_everybody_is_part_of() -> None:
    seed = agreed(roles())
    assert len(seed) == 32
    assert agreed(roles()) == seed  # from the same roots
    for name in (SERVER, *NAMES):
        others = roles() | {name: Seed(name, SecretRoot.insecure(1, name))}
        assert agreed(others) != seed


def test_the_same_silos_have_the_same_seed_again_and_others_another() -> None:
    seeds, restored = roles(), roles(root=5)
    first, fewer = agreed(seeds), agreed(seeds, ("anna", "carla"))
    assert len({first, fewer, agreed(roles(), run="other run")}) == 3
    assert agreed(seeds) == first
    assert agreed(seeds, ("carla", "anna")) == fewer  # in whichever order they are called
    for name, one in restored.items():
        one.restore(seeds[name].state())
        assert not one.seed  # until it is agreed on
    assert agreed(restored) == first


def test_a_contribution_is_of_one_run_and_one_set_of_silos() -> None:
    cohorts = [NAMES, ("anna", "bea"), ("anna", "carla"), ("anna",)]
    found = [revealed(roles(), cohort, run)["anna"] for cohort in cohorts for run in ("run", "other")]
    assert len(set(found)) == len(found)


def test_a_commitment_says_whose_it_is_and_hides_nothing_else() -> None:
    value = bytes(range(32))
    assert commitment("anna", value) != commitment("bea", value)
    assert commitment("anna", value) != commitment("anna", bytes(32))
    assert len(commitment("anna", value)) == 32


# -- a server that deviates --------------------------------------------------------------------------------------------


def at_reveal() -> tuple[Seed, dict[str, bytes]]:
    seeds = roles()
    return seeds["anna"], committed(seeds)


@pytest.mark.parametrize(
    "change",
    [
        lambda of: of | {"anna": bytes(32)},
        lambda of: of | {"anna": of["bea"]},
        lambda of: {name: value for name, value in of.items() if name != "anna"},
        lambda of: {name: value for name, value in of.items() if name != SERVER},
        lambda of: {},
    ],
    ids=["another of its own", "another's for its own", "without its own", "without the server's", "none"],
)
def test_a_silo_reveals_nothing_where_its_commitment_or_the_servers_is_not_there(
    change: Callable[[dict[str, bytes]], dict[str, bytes]],
) -> None:
    anna, commitments = at_reveal()
    with pytest.raises(PeerError, match="expected the commitments of the server and of the cohort"):
        anna.reveal(change(commitments))


@pytest.mark.parametrize(
    "change",
    [
        lambda of: of | {"dora": bytes(32)},
        lambda of: {name: value for name, value in of.items() if name != "bea"},
        lambda of: {"anna": of["anna"], SERVER: of[SERVER]},
    ],
    ids=["one more", "one less", "alone"],
)
def test_a_silo_reveals_nothing_to_another_cohort_than_it_was_told(
    change: Callable[[dict[str, bytes]], dict[str, bytes]],
) -> None:
    anna, commitments = at_reveal()
    with pytest.raises(PeerError):
        anna.reveal(change(commitments))


def test_a_contribution_is_revealed_for_one_set_of_commitments() -> None:
    anna, commitments = at_reveal()
    first = anna.reveal(commitments)
    assert anna.reveal(dict(commitments)) == first
    for name in (SERVER, "bea"):
        with pytest.raises(PeerError, match="expected the same, as this contribution was revealed for those"):
            anna.reveal(commitments | {name: bytes(32)})


@pytest.mark.parametrize("restarts", [False, True])
def test_a_server_that_has_seen_all_contributions_cannot_begin_anew_with_another_of_its_own(restarts: bool) -> None:
    seeds = roles()
    contributions = revealed(seeds)  # and no Agree: nobody has a seed yet, and the server has seen everything
    anna = seeds["anna"]
    if restarts:
        anna = Seed("anna", SecretRoot.insecure(9, "anna"))
        anna.restore(seeds["anna"].state())
    chosen = bytes(range(32))  # of as many as the server cared to try
    with pytest.raises(PeerError):  # noqa: PT012  # wherever it is noticed
        again = {name: commitment(name, value) for name, value in (contributions | {SERVER: chosen}).items()}
        anna.begin(RUN, NAMES)
        anna.reveal(again)
        anna.agree(contributions | {SERVER: chosen})


@pytest.mark.parametrize("name", [SERVER, "anna", "bea"])
def test_a_changed_contribution_is_refused_by_name(name: str) -> None:
    seeds = roles()
    contributions = revealed(seeds)
    with pytest.raises(PeerError, match=f"the contribution of `{name}` is not the one it was committed to"):
        seeds["anna"].agree(contributions | {name: bytes(32)})
    assert not seeds["anna"].seed


@pytest.mark.parametrize("name", [SERVER, "anna", "bea"])
def test_no_contribution_is_left_out_and_none_is_added(name: str) -> None:
    seeds = roles()
    contributions = revealed(seeds)
    for wrong in (
        {one: value for one, value in contributions.items() if one != name},
        contributions | {"x": bytes(32)},
    ):
        with pytest.raises(PeerError, match="expected a contribution for each commitment"):
            seeds["anna"].agree(wrong)


def test_nothing_is_agreed_on_before_commitments_were_shown() -> None:
    seeds = roles()
    contributions = revealed(seeds)
    seeds["anna"].begin(RUN, NAMES)
    with pytest.raises(PeerError, match="expected a contribution for each commitment"):
        seeds["anna"].agree(contributions)


@pytest.mark.parametrize("restarts", [False, True])
def test_the_same_silos_do_not_take_a_second_seed(restarts: bool) -> None:
    seeds = roles()
    agreed(seeds)
    if restarts:
        states = {name: one.state() for name, one in seeds.items()}
        seeds = roles(root=3)
        for name, one in seeds.items():
            one.restore(states[name])
    seeds |= {"bea": Seed("bea", SecretRoot.insecure(1, "bea"))}  # or whom the server gives out for her
    commitments = committed(seeds)
    with pytest.raises(PeerError, match="these silos had shown other commitments before"):
        seeds["anna"].reveal(commitments)
    assert not seeds["anna"].seed


# -- the model that a round is about -----------------------------------------------------------------------------------


def layout(**changes: Any) -> Layout:
    trained = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float32)} | changes.pop("trained", {})
    return Layout.of(trained, {"c": np.arange(3.0)} | changes.pop("fixed", {}))


def test_the_parameter_hash_is_of_layout_fixed_tensors_and_parameters() -> None:
    at = np.arange(10, dtype=np.float32)
    other = at.copy()
    other[3] = np.nextafter(other[3], 9)
    layouts = [
        layout(),
        layout(trained={"a": np.zeros((3, 2), np.float32)}),
        layout(trained={"a": np.zeros((2, 3), np.float32), "b": np.zeros((2, 2), np.float32)}),
        layout(fixed={"c": np.array([0.0, 1.0, 2.5])}),
        layout(fixed={"c": np.arange(3)}),
        layout(fixed={"c": np.arange(3.0)[None]}),
        layout(fixed={"d": np.arange(3.0)}),
        Layout({"b": (4,), "a": (2, 3)}, "float32", layout().fixed),
        Layout({"a": (2, 3), "e": (4,)}, "float32", layout().fixed),
        replace(layout(), dtype="float64"),
    ]
    hashes = [parameter_hash(one, at) for one in layouts]
    hashes += [parameter_hash(layout(), other), parameter_hash(layout(), at.astype(np.float64))]
    assert len(set(hashes)) == len(hashes)
    assert parameter_hash(layout(), at) == hashes[0]
    assert parameter_hash(layout(), np.repeat(at, 2)[::2]) == hashes[0]  # wherever it lies in memory
    assert len({one.digest for one in layouts}) == len(layouts)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=5))
def test_a_layout_splits_what_it_has_joined(shapes: list[tuple[int, int]]) -> None:
    tensors = {f"t{i}": np.random.default_rng(i).normal(size=shape).astype("f4") for i, shape in enumerate(shapes)}
    made = Layout.of(tensors, {})
    flat = made.flat(tensors)
    assert (flat.shape, flat.dtype) == ((made.size,), np.dtype(np.float32))
    for name, value in made.split(flat).items():
        assert np.array_equal(value, tensors[name])


# -- in a run ----------------------------------------------------------------------------------------------------------


def run(protocol: BAFFLE | None = None, wrap: Callable[[Roles], None] | None = None, **settings: Any) -> list[Any]:
    """Train on three silos for two rounds; return each message with the silo it went to and its answer, in order."""
    from torch import nn

    seen: list[Any] = []
    generator = np.random.default_rng(0)
    silos = [Silo(name, generator.normal(0, 1, (6, 3)), generator.integers(0, 2, 6)) for name in NAMES]

    def watching(made: Roles) -> None:
        if wrap is not None:
            wrap(made)
        for name, client in made.clients.items():
            client.answer = watched(name, client.answer)  # type: ignore[method-assign]

    def watched(name: str, answer: Callable[[Message], Message]) -> Callable[[Message], Message]:
        def noted(message: Message) -> Message:
            reply = answer(message)
            seen.append((name, message, reply))
            return reply

        return noted

    with casting(watching):
        settings = {"engine": Engine(strict=True), "insecure_secret_seed": 1, "batch_size": 0} | settings
        Federation(nn.Linear(3, 2), silos, protocol or BAFFLE(k=8), **settings).train(2)
    return seen


def test_the_servers_part_is_fixed_before_any_silo_reveals() -> None:
    seen = run()
    kinds = [type(message) for _, message, _ in seen]
    assert kinds.count(Commit) == kinds.count(Reveal) == kinds.count(Agree) == 3
    assert max(i for i, kind in enumerate(kinds) if kind is Commit) < kinds.index(Reveal)
    assert max(i for i, kind in enumerate(kinds) if kind is Reveal) < kinds.index(Agree)
    reveals = {name: message.commitments for name, message, _ in seen if isinstance(message, Reveal)}
    parts = {name: reply.contribution for name, _, reply in seen if isinstance(reply, Revealed)}
    said = {name: reply.commitment for name, _, reply in seen if isinstance(reply, Committed)}
    agrees = [message.contributions for _, message, _ in seen if isinstance(message, Agree)]
    for shown in reveals.values():
        assert {name: value for name, value in shown.items() if name != SERVER} == said
        assert shown[SERVER] == commitment(SERVER, agrees[0][SERVER])
    for contributions in agrees:
        assert {name: value for name, value in contributions.items() if name != SERVER} == parts
        assert contributions[SERVER] not in parts.values()
    assert len({message.parameter_hash for _, message, _ in seen if isinstance(message, Estimate)}) == 2


def test_a_round_that_is_set_up_again_for_fewer_silos_has_other_parts_of_everybody() -> None:
    faults = {"drop": [{"round": 1, "silo": "bea", "phase": "upload"}]}
    engine = Engine.model_validate({"strict": True, "faults": faults})
    # Additive shares bear no loss, so that the round is played again; of half the rows, as all are summed once alone.
    secure = SecureAggregation(scheme="additive-shares", min_survivors=2)
    seen = run(engine=engine, aggregation=secure, batch_size=3)
    parts = [(name, reply.contribution) for name, _, reply in seen if isinstance(reply, Revealed)]
    # All three; the round is repeated by two; bea is back in the second.
    assert [name for name, _ in parts] == [*NAMES, "anna", "carla", *NAMES]
    assert parts[:3] == parts[5:]
    assert len({value for _, value in parts}) == 5


def dishonest(silo: str, kind: type[Message], change: Callable[[Any], Message]) -> Callable[[Roles], None]:
    """Have what a silo answers to one kind of message, in the first attempt, be something else."""

    def wrap(players: Roles) -> None:
        answer = players.clients[silo].answer

        def changed(message: Message) -> Message:
            reply = answer(message)
            return change(reply) if isinstance(message, kind) and message.stamp.attempt == 0 else reply

        players.clients[silo].answer = changed  # type: ignore[method-assign]

    return wrap


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (Commit, lambda reply: replace(reply, commitment=bytes(32))),
        (Reveal, lambda reply: replace(reply, contribution=bytes(32))),
        (Agree, lambda reply: replace(reply, digest=bytes(32))),
    ],
    ids=["commitment", "contribution", "digest"],
)
def test_a_silo_that_does_not_stand_by_its_part_is_left_out(
    kind: type[Message], change: Callable[[Any], Message]
) -> None:
    seen = run(wrap=dishonest("bea", kind, change), aggregation=SecureAggregation(threshold=2, min_survivors=2))
    asked = [(name, message.stamp) for name, message, _ in seen if isinstance(message, Estimate)]
    assert sorted(name for name, stamp in asked if stamp.round == 1 and stamp.attempt == 1) == ["anna", "carla"]
    assert not [name for name, stamp in asked if stamp.round == 1 and stamp.attempt == 0]


def test_without_a_test_seed_every_run_has_another() -> None:
    parts = [
        reply.contribution
        for _ in range(2)
        for _, _, reply in run(insecure_secret_seed=None)
        if isinstance(reply, Revealed)
    ]
    assert len(set(parts)) == len(parts) == 6
