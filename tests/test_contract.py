"""What every protocol must do to be admitted: one list, one set of tests.

The list is the registry's. What the suite has to know of a protocol besides is in ``cases_of_<folder>`` (contract/).
``-k NAME`` runs it for one protocol.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cast import cast_only
from networks import perceptron
from protocol_case import Case
from stopped import interrupted
from torch import nn

from moretta import Engine, Faults, Federation, SecureAggregation, Silo
from moretta.contract.messages import Message, Stamp, Tensors
from moretta.contract.roles import Client, State
from moretta.engines import silos_here
from moretta.engines.checkpoint import last_checkpoint
from moretta.errors import ParameterError, PeerError, RunFailed
from moretta.protocols.common.entry import Entry
from moretta.protocols.common.roles import Roles
from moretta.protocols.common.setting import Setting
from moretta.protocols.common.silo_rows import Ready
from moretta.protocols.registry import ENTRIES, REFERENCE, build, entry_of
from moretta.run import federation
from moretta.run.loop import Session
from moretta.run.raw_rows import Prepared
from moretta.run.result import Result

FOLDERS = dict.fromkeys(entry.settings.split(".")[-2] for entry in ENTRIES.values())
EACH: Mapping[str, Case] = {case.id: case for folder in FOLDERS for case in import_module(f"cases_of_{folder}").CASES}
ENTRY: Mapping[str, Entry] = {name: entry_of(case.protocol) for name, case in EACH.items()}
CASES = [name for name, case in EACH.items() if not case.name]  # a protocol each
OPEN = [name for name, case in EACH.items() if case.only_with_sums]
ALSO = [name for name in EACH if name not in (*CASES, *OPEN)]
FEDERATED = [name for name in CASES if not ENTRY[name].pooled]  # a pool is one party, so nobody can be missing
SUMMED = [name for name in FEDERATED if ENTRY[name].summed]  # whose rounds are secure sums
ROWS = {"north": 20, "south": 33, "east": 9}
# Two of three must be left, so that a round may lose one; by default it takes all three.
PAIRWISE, ADDITIVE = SecureAggregation(threshold=2), SecureAggregation(scheme="additive-shares")
MORE = ROWS | {"west": 15, "centre": 27}  # enough silos for a sum to go on without some


def silos(counts: Mapping[str, int] = ROWS) -> list[Silo]:
    made = []
    for number, (name, rows) in enumerate(counts.items()):
        x = np.random.default_rng(number).normal(number, 2, (rows, 4)).astype(np.float32)
        made.append(Silo(name, x, (np.abs(x[:, 0]) > 2).astype(np.int64) + (x[:, 1] > 1)))
    return made


def silos_of(name: str) -> list[Silo]:
    """The silos of a case."""
    return EACH[name].silos(silos())


def network() -> nn.Module:
    return perceptron(4, 6, 3, between=nn.ReLU)


def federation_of(name: str, out: Path | None = None, **settings: Any) -> Federation:
    chosen: dict[str, Any] = {
        "protocol": EACH[name].protocol, "silos": silos_of(name), "insecure_secret_seed": 5, "batch_size": 8,
        "standardise": True, "checkpoint_every": 2,
    } | settings  # fmt: skip
    return Federation(network(), out=out, **chosen)


CONFINED: dict[int, tuple[Result, Mapping[str, Tensors]]] = {}
"""Models that no result holds, as they belong to their participants: by the identity of its record."""


@pytest.fixture(autouse=True)
def _confined(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    play = Session.play

    def kept(session: Session) -> Result:
        result = play(session)
        if not entry_of(session._of.spec.protocol).common_model:
            CONFINED[id(result.record)] = result, dict(session._players.models())
        return result

    monkeypatch.setattr(Session, "play", kept)
    yield
    CONFINED.clear()


def weights(result: Result) -> dict[str, bytes]:
    """Everything that a run leaves, as bytes."""
    _, confined = CONFINED.get(id(result.record), (result, {}))
    if confined:
        return {
            f"{which}/{name}": tensor.tobytes() for which, model in confined.items() for name, tensor in model.items()
        }
    given = {"true": result.model, "released": result.released, **result.models}
    models = {which: one.model if isinstance(one, Prepared) else one for which, one in given.items()}
    return {
        f"{which}/{name}": tensor.numpy().tobytes()
        for which, model in models.items() if model is not None
        for name, tensor in model.state_dict().items()
    }  # fmt: skip


def figures(result: Result, name: str) -> list[float | None]:
    """One figure of each round; None where sums are blind and the server does not know it."""
    return [line.get(name) for line in result.history]


def in_thousands(name: str, scale: Callable[[np.ndarray], np.ndarray] = lambda y: y) -> list[Silo]:
    """Silos of a case, with two targets of one deviation: costs of about 50,000, and what they leave of 200,000."""
    made = []
    for one in silos():
        costs = 50_000 + 9_000 * one.x[:, :1]
        made.append(Silo(one.name, one.x, scale(np.concatenate([costs, 200_000 - costs], axis=1, dtype=np.float32))))
    return EACH[name].silos(made)


@pytest.mark.parametrize("name", [*CASES, "cgd-joint", "cgd-independent"])
def test_targets_that_the_run_scales_train_as_those_scaled_by_hand(name: str) -> None:
    pooled = np.concatenate([one.y for one in in_thousands(CASES[0])]).astype(np.float64)
    mean, deviation = pooled.mean(axis=0), pooled.std(axis=0)

    def by_hand(y: np.ndarray) -> np.ndarray:
        return np.asarray((y.astype(np.float64) - mean) / deviation).astype(np.float32)

    x, protocol = silos()[0].x, EACH[name].protocol.model_copy(update={"loss": "mse"})
    y = in_thousands(CASES[0])[0].y
    given: dict[str, Any] = {"protocol": protocol, "batch_size": 8, "standardise": True, "insecure_secret_seed": 5}
    model = perceptron(4, 6, 2, between=nn.ReLU)
    scaled = Federation(model, in_thousands(name), test=(x, y), standardise_targets=True, **given).train(3, 2)
    plain = Federation(model, in_thousands(name, by_hand), test=(x, by_hand(y)), **given).train(3, 2)
    near: dict[str, Any] = {"rtol": 0, "atol": 2e-5}
    for (one, first), other in zip(weights(scaled).items(), weights(plain).values(), strict=True):
        np.testing.assert_allclose(*(np.frombuffer(w, np.float32) for w in (first, other)), **near, err_msg=one)
    assert scaled.test["mse"] == pytest.approx(
        plain.test["mse"] * deviation[0] ** 2, rel=1e-4
    )  # of confined models too
    assert set(figures(scaled, "loss")) == {None}
    for ours, theirs in zip(figures(scaled, "scaled_loss"), figures(plain, "loss"), strict=True):
        assert ours == (None if theirs is None else pytest.approx(theirs, rel=1e-4))


# -- silos that misbehave ----------------------------------------------------------------------------------------------

Fault = Callable[[Client, Message], object]


def is_setup(message: Message) -> bool:
    return message.TAG.startswith(("secure-aggregation/", "enrolment/"))


class Faulty:
    """A silo that misbehaves where `when` says so, and is itself otherwise."""

    def __init__(self, client: Client, fault: Fault, when: Callable[[Message], bool]) -> None:
        self._client, self._fault, self._when = client, fault, when

    @property
    def phase(self) -> Callable[[str], AbstractContextManager[None]]:
        return self._client.phase

    @phase.setter
    def phase(self, phase: Callable[[str], AbstractContextManager[None]]) -> None:
        self._client.phase = phase

    def answer(self, message: Message) -> Message:
        if self._when(message):
            return self._fault(self._client, message)  # type: ignore[return-value]  # junk is the point
        return self._client.answer(message)

    def state(self) -> State:
        return self._client.state()

    def restore(self, state: State) -> None:
        self._client.restore(state)


Misbehave = Callable[..., None]


@pytest.fixture
def misbehave(monkeypatch: pytest.MonkeyPatch) -> Misbehave:
    """misbehave("south", fault, when): from now on, and in the silos of all runs that begin."""

    def install(silo: str, fault: Fault, when: Callable[[Message], bool]) -> None:
        inner = federation.build

        def casting(setting: Setting) -> Roles:
            made = inner(setting)
            clients = {
                name: Faulty(client, fault, when) if name == silo else client for name, client in made.clients.items()
            }
            return dataclasses.replace(made, clients=clients)

        monkeypatch.setattr(federation, "build", casting)

    return install


class Wall:
    """A clock on the wall that a slow silo moves."""

    ahead = 0.0

    def perf_counter(self) -> float:
        return time.perf_counter() + self.ahead


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Wall]]:
    monkeypatch.setattr(silos_here, "time", Wall())
    yield Wall
    Wall.ahead = 0.0


def raises(client: Client, message: Message) -> object:
    raise ZeroDivisionError("division by zero")


def refuses(client: Client, message: Message) -> object:
    raise PeerError("not today")


def says_nothing(client: Client, message: Message) -> object:
    return None


def says_something_else(client: Client, message: Message) -> object:
    client.answer(message)
    return Ready(stamp=message.stamp)


def says_it_for_another_round(client: Client, message: Message) -> object:
    answer = client.answer(message)
    return dataclasses.replace(answer, stamp=Stamp(message.stamp.run, message.stamp.round, 77))


def uploads_other_tensors(client: Client, message: Message) -> object:
    answer = client.answer(message)
    if not hasattr(answer, "tensors"):  # a lone silo's answer has no tensors
        return Ready(stamp=message.stamp)
    return dataclasses.replace(answer, tensors={name: np.ravel(array)[None] for name, array in answer.tensors.items()})


def is_late(client: Client, message: Message) -> object:
    Wall.ahead += 1000.0
    return client.answer(message)


FAULTS: Mapping[Fault, str] = {
    raises: "failed: ZeroDivisionError: division by zero",
    refuses: "refused: not today",
    says_nothing: "malformed: expected a message, got NoneType",
    says_something_else: "malformed: expected `",
    says_it_for_another_round: "malformed: expected an answer for round 3, attempt 0, got one for round 3, attempt 77",
    uploads_other_tensors: "malformed: ",
    is_late: "late: expected an answer in 500 s, it took 1",
}


def in_round(number: int) -> Callable[[Message], bool]:
    return lambda message: message.stamp.round == number and not is_setup(message)


# -- the suite ---------------------------------------------------------------------------------------------------------


def test_every_protocol_is_in_the_suite() -> None:
    assert set(CASES) == set(ENTRIES)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", [*CASES, *ALSO])
def test_a_strict_engine_changes_no_bit(name: str, dtype: str) -> None:
    one = federation_of(name, dtype=dtype).train(6)
    two = federation_of(name, dtype=dtype, engine=Engine(strict=True)).train(6)
    assert weights(one) == weights(two)
    assert figures(one, "loss") == figures(two, "loss")
    assert [line["bytes"] for line in one.history] == [line["bytes"] for line in two.history]


@pytest.mark.parametrize("name", [*CASES, *ALSO])
def test_one_insecure_seed_gives_one_transcript(name: str, tmp_path: Path) -> None:
    def run(folder: str, seed: int) -> tuple[dict[str, bytes], dict[str, bytes]]:
        views = tmp_path / folder / "views"
        result = federation_of(name, tmp_path / folder, record_views=True, insecure_secret_seed=seed).train(3)
        files = {str(path.relative_to(views)): path.read_bytes() for path in views.rglob("*.bin")}
        return files, weights(result)

    (one, first), (two, second), (other, third) = run("one", 5), run("two", 5), run("other", 6)
    assert len(one) >= (3 if ENTRY[name].pooled else 9)
    assert one == two
    assert first == second
    assert one != other
    if EACH[name].secrets_move != "in rounding":
        assert (first != third) == (EACH[name].secrets_move == "yes")


@pytest.mark.parametrize(
    "name", [name for name in (*CASES, *ALSO) if EACH[name].tells_loss and EACH[name].protocol.privacy is None]
)
def test_a_model_learns(name: str) -> None:  # with noise, the server knows no loss
    protocol = EACH[name].protocol
    if EACH[name].blind:
        protocol = protocol.model_copy(update={"blind": False})  # so that the server knows the loss
    history = federation_of(name, protocol=protocol).train(40).history
    assert history[-1]["loss"] < 0.8 * history[0]["loss"]


# A fault is the driver's to notice, whatever the protocol: all of them with one, one for each scheme with the others.
NOTICED = [
    *((REFERENCE, scheme, fault) for scheme in (PAIRWISE, ADDITIVE) for fault in FAULTS),
    *((name, PAIRWISE, uploads_other_tensors) for name in FEDERATED if name != REFERENCE),
    *((name, ADDITIVE, raises) for name in FEDERATED if name != REFERENCE),
]


def called(given: Any) -> str:
    """What a name, a scheme or a fault is called in the name of a test."""
    return str(getattr(given, "scheme", getattr(given, "__name__", given)))


@pytest.mark.parametrize(("name", "aggregation", "fault"), NOTICED, ids=called)
def test_a_fault_is_named_costs_one_round_and_the_silo_comes_back(
    name: str, aggregation: SecureAggregation, fault: Fault, misbehave: Misbehave, wall: type[Wall]
) -> None:
    whole = federation_of(name, aggregation=aggregation).train(4)
    misbehave("south", fault, in_round(3))
    result = federation_of(name, aggregation=aggregation, engine=Engine(deadline=500.0)).train(4)
    again = not ENTRY[name].summed or aggregation is ADDITIVE  # which have no dropout recovery
    assert [line["attempt"] for line in result.history] == [0, 0, int(again), 0]
    assert [len(line["dropped"]) for line in result.history] == [0, 0, 1, 0]
    (dropped,) = result.record["dropped"]
    assert (dropped["round"], dropped["silo"]) == (3, "south")
    assert dropped["reason"].startswith(FAULTS[fault])
    # The sum of the others is used: the rows are theirs, and before that round nothing was different.
    rows = figures(whole, "rows")
    if EACH[name].blind:
        assert figures(result, "participants") == [3, 3, 2 if again else 3, 3]  # who began it
    else:
        assert figures(result, "rows") == [rows[0], rows[1], rows[2] - rows_of_south(name, 3), rows[3]]
    assert figures(result, "loss")[:2] == figures(whole, "loss")[:2]


def test_a_threshold_does_not_shrink_with_the_cohort(misbehave: Misbehave) -> None:
    misbehave("south", raises, in_round(3))
    with pytest.raises(RunFailed, match="round 3 cannot be completed by 2 of 3 silos, at least 3 are needed"):
        federation_of("fedsgd").train(4)


@pytest.mark.parametrize("name", FEDERATED)
def test_additive_shares_come_to_the_bits_of_masks(name: str) -> None:
    masks = federation_of(name).train(4)
    shares = federation_of(name, aggregation=ADDITIVE, engine=Engine(strict=True)).train(4)
    assert weights(shares) == weights(masks)
    assert figures(shares, "loss") == figures(masks, "loss")
    assert shares.record["secure_aggregation"] == {"scheme": "additive-shares", "ring_bits": 64}


# Three of five must be left, so that in round 4 the sum may lose one more while it is completed.
LOSSY = SecureAggregation(threshold=3)
DROPS = [(2, "south", "upload"), (3, "west", "unmasking"), (4, "centre", "upload"), (4, "east", "unmasking")]
COUNTED = [set(MORE), set(MORE) - {"south"}, set(MORE), set(MORE) - {"centre", "east"}, set(MORE)]


def dropping(rows: list[tuple[int, str, str]]) -> Faults:
    return Faults.model_validate({"drop": [dict(zip(("round", "silo", "phase"), row, strict=True)) for row in rows]})


@pytest.mark.parametrize("name", [*SUMMED, *OPEN])
def test_a_round_goes_on_without_those_who_vanish(name: str) -> None:
    lossy = Engine(faults=dropping(DROPS), strict=True)
    given: dict[str, Any] = {"silos": silos(MORE), "batch_size": 0, "dtype": "float64"}
    result = federation_of(name, aggregation=LOSSY, engine=lossy, **given).train(5)
    assert [line["attempt"] for line in result.history] == [0] * 5
    if not EACH[name].sets_up_again:
        assert [line["bytes"]["set_up"] > 0 for line in result.history] == [True] + [False] * 4
    if not EACH[name].blind:
        assert figures(result, "rows") == [sum(map(MORE.__getitem__, names)) for names in COUNTED]
    dropped = [(one["round"], one["silo"]) for one in result.record["dropped"]]
    assert dropped == [(number, silo) for number, silo, _ in DROPS]
    # In the clear, whoever uploads counts: there those who are not in the sum vanish before.
    absent = [(number, silo, "upload") for number, names in enumerate(COUNTED, 1) for silo in set(MORE) - names]
    if EACH[name].last_bits_matter:  # so that only the same sum will do
        same = federation_of(name, aggregation=LOSSY, engine=Engine(faults=dropping(absent)), **given).train(5)
        assert weights(result) == weights(same)
        return
    clear = federation_of(
        name, aggregation=SecureAggregation(scheme="none"), engine=Engine(faults=dropping(absent)), **given
    ).train(5)
    found, expected = weights(result), weights(clear)
    assert set(found) == set(expected)
    assert found
    for tensor, value in found.items():
        np.testing.assert_allclose(np.frombuffer(value), np.frombuffer(expected[tensor]), rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "aggregation"),
    [*((name, LOSSY) for name in SUMMED), (REFERENCE, SecureAggregation(scheme="none"))],
    ids=called,
)
def test_a_run_in_two_parts_with_dropouts_ends_with_the_bytes_of_a_run_in_one(
    name: str, aggregation: SecureAggregation, tmp_path: Path
) -> None:
    def make(folder: str) -> Federation:
        lossy = Engine(faults=Faults(drop_probability=0.2, seed=3))
        return federation_of(name, tmp_path / folder, silos=silos(MORE), aggregation=aggregation, engine=lossy)

    whole = make("whole").train(8)
    make("parts").train(4)
    parts = make("parts").train(8, resume=True)
    assert weights(parts) == weights(whole)
    assert [line["dropped"] for line in parts.history] == [line["dropped"] for line in whole.history]
    for some in (whole.history[:4], whole.history[4:]):
        assert any(line["dropped"] for line in some)


def rows_of_south(name: str, number: int) -> int:
    return ROWS["south"] if EACH[name].all_rows else 8  # 33 rows in batches of 8, the third of five


@pytest.mark.parametrize("name", FEDERATED)
def test_whatever_the_fault_the_others_end_with_the_same_weights(
    name: str, misbehave: Misbehave, wall: type[Wall]
) -> None:
    ends = []
    for fault in (raises, is_late, uploads_other_tensors):
        misbehave("south", fault, in_round(3))
        result = federation_of(name, aggregation=PAIRWISE, engine=Engine(deadline=500.0)).train(3)
        ends.append({key: value for key, value in weights(result).items() if not key.startswith("south/")})
    if ENTRY[name].summed:
        assert ends[0] == ends[1] == ends[2]
    else:  # what a lone silo did before its answer was lost stays its own affair
        assert ends[0] == ends[1]


@pytest.mark.parametrize("fault", [raises, is_late])
def test_a_lone_silo_is_not_touched_by_anothers_fault(fault: Fault, misbehave: Misbehave, wall: type[Wall]) -> None:
    whole = weights(federation_of("local", aggregation=PAIRWISE).train(4))
    misbehave("south", fault, in_round(3))
    result = weights(federation_of("local", aggregation=PAIRWISE, engine=Engine(deadline=500.0)).train(4))
    assert {key for key in whole if whole[key] != result[key]} <= {key for key in whole if key.startswith("south/")}


SET_UP = ["advertise-key", "peer-keys", "ask-moments", "enrolment/begin"]


@pytest.mark.parametrize("name", [*FEDERATED, *OPEN])
@pytest.mark.parametrize("tag", SET_UP)
def test_a_silo_that_misses_the_first_setup_comes_back(name: str, tag: str, misbehave: Misbehave) -> None:
    misbehave("south", refuses, lambda message: message.stamp == first(message) and message.TAG.endswith(tag))
    history = federation_of(name, aggregation=PAIRWISE).train(3).history
    # Where silos use all their rows, these are counted once a run: who missed that stays out.
    out = EACH[name].all_rows and not tag.startswith("enrolment/")
    assert [[gone["silo"] for gone in line["dropped"]] for line in history] == [["south"], *([["south"] * out] * 2)]
    rows = [29, *[29 if out else 62] * 2] if EACH[name].all_rows else [15, 18, 19]  # 20, 33 and 9 in batches of 8
    assert [line.get("rows") for line in history] == ([None] * 3 if EACH[name].blind else rows)


@pytest.mark.parametrize("name", [name for name in (*SUMMED, *OPEN) if not EACH[name].blind])
@pytest.mark.parametrize("tag", SET_UP[:3])
def test_a_silo_whose_rows_were_not_counted_stays_out_of_sums_of_all_rows(
    name: str, tag: str, misbehave: Misbehave
) -> None:
    misbehave("south", refuses, lambda message: message.stamp == first(message) and message.TAG.endswith(tag))
    history = federation_of(name, aggregation=PAIRWISE, batch_size=0).train(3).history
    assert [[gone["silo"] for gone in line["dropped"]] for line in history] == [["south"]] * 3
    assert "refused: it was not there when rows were counted" in history[1]["dropped"][0]["reason"]
    assert [line["rows"] for line in history] == [29, 29, 29]


@pytest.mark.parametrize(("name", "tag"), [(name, tag) for name in FEDERATED for tag in EACH[name].set_up])
def test_a_silo_that_misses_the_first_setup_of_the_protocol_comes_back(
    name: str, tag: str, misbehave: Misbehave
) -> None:
    misbehave("south", refuses, lambda message: message.stamp == first(message) and tag == message.TAG)
    history = federation_of(name, aggregation=PAIRWISE).train(3).history
    assert [[gone["silo"] for gone in line["dropped"]] for line in history] == [["south"], [], []]
    assert [line["rows"] for line in history] == [15, 18, 19]


def first(message: Message) -> Stamp:
    return Stamp(message.stamp.run, 1, 0)


@pytest.mark.parametrize("name", CASES)
def test_too_few_silos_fail_the_run_and_are_named_and_mended_silos_go_on(
    name: str, tmp_path: Path, misbehave: Misbehave, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = weights(federation_of(name).train(5))
    gone = ["everybody"] if ENTRY[name].pooled else ["north", "east"]
    with monkeypatch.context():
        for silo in gone:
            misbehave(silo, raises, lambda message: message.stamp.round == 4)
        with pytest.raises(RunFailed) as failed:
            federation_of(name, tmp_path / "run").train(5)
    assert all(f"{silo}: ZeroDivisionError: division by zero" in str(failed.value) for silo in gone)
    assert "round 4" in str(failed.value)
    assert len(str(failed.value).splitlines()) == 1
    monkeypatch.setattr(federation, "build", build)  # mended
    resumed = federation_of(name, tmp_path / "run").train(5, resume=True)
    assert weights(resumed) == whole
    assert [line["round"] for line in resumed.history] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", CASES)
def test_input_that_nobody_can_use_is_the_users_to_mend(name: str, misbehave: Misbehave) -> None:
    def cannot(client: Client, message: Message) -> object:
        raise ParameterError("these rows are of no use")

    for silo in ROWS if not ENTRY[name].pooled else ["everybody"]:
        misbehave(silo, cannot, lambda message: message.stamp.round == 1)
    with pytest.raises(ParameterError, match=r"round 1: .*these rows are of no use"):
        federation_of(name).train(2)


@pytest.mark.parametrize("name", [*CASES, *ALSO])
def test_a_run_in_two_parts_ends_with_the_bytes_of_a_run_in_one(name: str, tmp_path: Path) -> None:
    whole = federation_of(name, tmp_path / "whole").train(7)
    federation_of(name, tmp_path / "parts").train(3)
    federation_of(name, tmp_path / "parts").train(4, resume=True)
    parts = federation_of(name, tmp_path / "parts").train(7, resume=True)
    assert weights(parts) == weights(whole)
    assert figures(parts, "loss") == figures(whole, "loss")
    assert parts.record["sessions"] == 3
    assert weights(federation_of(name, tmp_path / "parts").train(7, resume=True)) == weights(whole)  # it had finished
    for path in sorted((tmp_path / "whole").rglob("*.safetensors")):
        if "checkpoint" not in path.parts:
            assert path.read_bytes() == (tmp_path / "parts" / path.relative_to(tmp_path / "whole")).read_bytes()


@pytest.mark.parametrize("every", [1, 3, 100])
@pytest.mark.parametrize("name", CASES)
def test_wherever_a_run_was_interrupted_it_ends_the_same(name: str, every: int, tmp_path: Path) -> None:
    whole = weights(federation_of(name, tmp_path / "whole", checkpoint_every=every).train(8))
    for first, second in ((1, 2), (2, 4), (4, 4), (7, 8), (8, 8)):
        out = tmp_path / f"{first}-{second}"
        interrupted(federation_of(name, out, checkpoint_every=every), first, 8)
        found = last_checkpoint(out / "checkpoint")
        assert found is not None
        if second > found[0].round:
            interrupted(federation_of(name, out, checkpoint_every=every), second, 8, resume=True)
        result = federation_of(name, out, checkpoint_every=every).train(8, resume=True)
        assert weights(result) == whole
        assert [line["round"] for line in result.history] == list(range(1, 9))


@pytest.mark.parametrize("name", [*CASES, *ALSO])
def test_what_a_role_states_is_what_it_takes_up(name: str) -> None:
    made = federation_of(name)
    players, others = cast_only(made), cast_only(federation_of(name, insecure_secret_seed=6))
    for one, two in [
        (players.server, others.server),
        *zip(players.clients.values(), others.clients.values(), strict=True),
    ]:
        two.restore(one.state())
        mine, taken = one.state(), two.state()
        assert set(mine) == set(taken)
        for key, value in mine.items():
            assert isinstance(value, np.ndarray | bytes | str | int | float)
            assert np.asarray(value).tobytes() == np.asarray(taken[key]).tobytes()


def arrays_in(message: Message) -> Iterator[np.ndarray]:
    for field in message.KINDS:
        value = getattr(message, field)
        entries = value.values() if isinstance(value, Mapping) else [value]
        yield from (entry for entry in entries if isinstance(entry, np.ndarray))


@pytest.mark.parametrize("name", [*CASES, *ALSO])
def test_what_was_received_is_never_written_to(name: str, misbehave: Misbehave) -> None:
    kept: list[tuple[np.ndarray, bytes]] = []

    def noted(message: Message) -> Message:
        for array in arrays_in(message):
            kept.append((array, array.tobytes()))
        return message

    for silo in ["everybody"] if ENTRY[name].pooled else [silo.name for silo in silos_of(name)]:
        misbehave(silo, lambda client, message: noted(client.answer(noted(message))), lambda message: True)
    federation_of(name).train(4)
    assert kept
    assert all(array.tobytes() == before for array, before in kept)  # by nobody, to the end of the run


@pytest.mark.parametrize("name", CASES)
def test_no_secret_is_written_shown_or_sent(
    name: str, tmp_path: Path, misbehave: Misbehave, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    casts: list[Roles] = []
    monkeypatch.setattr(federation, "build", lambda setting: casts.append(build(setting)) or casts[-1])
    misbehave("south", raises, in_round(2))  # so that the log has something to say
    secure = PAIRWISE if not ENTRY[name].pooled else SecureAggregation()
    run = federation_of(name, tmp_path / "run", record_views=True, insecure_secret_seed=None, aggregation=secure)
    run.train(4)
    (players,) = casts
    state = players.server.state()
    assert any("secret_root" in key for key in state) == bool(EACH[name].root)
    roots = [state[EACH[name].root]] if EACH[name].root else []
    seeds: list[bytes] = []
    own: dict[str, bytes] = {}  # what a silo keeps in its own checkpoint
    for silo, client in players.clients.items():
        if isinstance(client, Faulty):
            client = client._client
        held = getattr(client, "_contributors", None) or {"": getattr(client, "_contributor", None)}
        for contributor in held.values():
            if hasattr(contributor, "_keys"):
                seeds += contributor._keys.agreed[0].seeds.values()
        if keyring := getattr(client, "_group_keys", None):
            seeds += [*keyring._set_up.agreed[0].seeds.values(), *keyring._keys.values()]
        if EACH[name].own_root:
            own[silo] = client.state()[EACH[name].own_root]
    assert bool(seeds) != ENTRY[name].pooled
    output = "".join(capfd.readouterr())
    shown = [output, *(repr(role) for role in (players, players.server, *players.clients.values(), run))]
    shown += [repr(value) for role in (players.server, *players.clients.values()) for value in vars(role).values()]
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            kept = {"checkpoint", "truth"} & set(path.parts) and path.name == "server.safetensors"
            assert not kept or path.stat().st_mode & 0o077 == 0
            others = [secret for silo, secret in own.items() if path.name != f"silo-{silo}.safetensors"]
            for secret in [*seeds, *others, *([] if kept else roots)]:
                assert secret not in data
                assert secret.hex().encode() not in data
            if kept and roots:
                assert roots[0].hex().encode() in data  # for resuming, and for an audit's scorer; of mode 0600
    for secret in [*seeds, *roots, *own.values()]:
        assert all(secret.hex() not in text and repr(secret) not in text for text in shown)


@pytest.mark.parametrize("name", CASES)
def test_the_record_says_what_was_exchanged(name: str) -> None:
    result = federation_of(name, test=(silos()[0].x, silos()[0].y)).train(3)
    up, down = result.bytes["up_per_silo_per_round"], result.bytes["down_per_silo_per_round"]
    parameters = 4 * (4 * 6 + 6 + 6 * 3 + 3)
    if not ENTRY[name].summed and not ENTRY[name].pooled:
        assert 0 < up < 400
        assert 0 < down < 400
    else:
        least = EACH[name].least_up
        assert up > (parameters if least is None else least)
        assert parameters < down < parameters + 4000
    assert (result.bytes["secure_aggregation"] > 0) == (not ENTRY[name].pooled)
    assert result.bytes["set_up"] > 0
    assert result.record["protocol"] == name
    assert result.record["silo_names"] == list(ROWS)
    assert set(result.test) >= {"loss", "accuracy", "metrics"}
    of_silos = [one for one in (result.test.get("per_silo"), result.training) if one]
    assert [set(one) for one in of_silos] == [set(ROWS)]
    assert result.record["test"]["per_silo"] in of_silos
    assert result.record["secure_aggregation"] == (
        {"scheme": "none", "ring_bits": None} if ENTRY[name].pooled else {"scheme": "pairwise", "ring_bits": 64}
    )


@pytest.mark.parametrize("name", [*FEDERATED, *ALSO])
def test_the_order_of_the_silos_does_not_matter(name: str) -> None:
    one = federation_of(name).train(3)
    turned = federation_of(name, silos=silos_of(name)[::-1]).train(3)
    assert weights(one) == weights(turned)


def test_a_blind_run_comes_to_the_bits_of_an_open_one() -> None:
    for aggregation in (PAIRWISE, ADDITIVE):
        blind, unhidden = (federation_of(name, aggregation=aggregation).train(4) for name in ("cgd", "cgd-open"))
        assert weights(blind) == weights(unhidden)
        assert figures(blind, "loss") == [None] * 4
        for hidden, shown in ((a["bytes"], b["bytes"]) for a, b in zip(blind.history, unhidden.history, strict=True)):
            assert {**hidden, "up": 0, "down": 0} == {**shown, "up": 0, "down": 0}
            assert 0 < hidden["up"] - shown["up"] < 400  # the tag
            assert 0 < hidden["down"] - shown["down"] < 400


def test_fedavg_runs_with_the_clear_sum() -> None:
    result = federation_of("fedavg", aggregation=SecureAggregation(scheme="none")).train(2)
    assert result.record["facts"] == {}
