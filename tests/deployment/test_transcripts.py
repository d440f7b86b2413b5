"""The same run says the same, byte for byte, on one machine and on many; and goes on the same after any restart."""

from __future__ import annotations

import logging
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from message_kinds import messages_in, tag_of
from safetensors.numpy import load
from stopped import Killed, killed_after

from moretta.contract.roles import Missing, Reason
from moretta.engines import views
from moretta.engines.checkpoint import last_checkpoint
from moretta.engines.flare.envelope import (
    Awake,
    Busy,
    Poll,
    Reply,
    Signed,
    SiteReady,
    Stranger,
    Submit,
    WorkDone,
    reply_of,
    request_of,
)
from moretta.errors import ParameterError
from moretta.run.record import UNMASKING_TAGS

if TYPE_CHECKING:
    from loopback import Machines

DEAD = Missing(Reason.DISCONNECTED, "cannot be reached")
GRID = 'partition = "grid"\ngrid = [2, 2]\nbatch-size = 8'
BAFFLE = 'name = "baffle"\nlearning-rate = 0.01\nk = 16'
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "fedsgd": (('name = "fedsgd"\nlearning-rate = 0.1\nmomentum = 0.5',), {}),
    "fedsgd, additive": (
        ('name = "fedsgd"\nlearning-rate = 0.1', '[secure-aggregation]\nscheme = "additive-shares"'),
        {},
    ),
    "fedsgd, nothing masked": (
        ('name = "fedsgd"\nlearning-rate = 0.1', '[secure-aggregation]\nscheme = "none"'),
        {},
    ),
    "fedsgd, dp-noise": (
        ('name = "fedsgd"\nlearning-rate = 0.1\ndp-noise = 1.0\ndp-clip = 1.0',),
        {"sites": "least-rows = 20"},
    ),
    "fedsgd, participation": (
        ('name = "fedsgd"\nlearning-rate = 0.1',),
        {"run": "checkpoint-every = 1\nparticipation = 0.7"},
    ),
    "fedavg": (('name = "fedavg"\nlearning-rate = 0.05\nlocal-epochs = 2',), {}),
    "pbpfl, mse": (('name = "pbpfl"\nlearning-rate = 0.05\nloss = "mse"',), {}),
    "pbpfl, cross-entropy": (('name = "pbpfl"\nlearning-rate = 0.05\nloss = "cross-entropy"',), {}),
    "cgd": (('name = "cgd"\nlearning-rate = 0.3\ndelta = 0.1',), {}),
    "cgd, nothing masked": (
        ('name = "cgd"\nlearning-rate = 0.3\ndelta = 0.1', '[secure-aggregation]\nscheme = "none"'),
        {},
    ),
    "cgd, joint grid": (('name = "cgd"\nlearning-rate = 0.3\ndelta = 0.1',), {"data": GRID}),
    "cgd, independent grid": (
        ('name = "cgd"\nlearning-rate = 0.3\ndelta = 0.1\nvertical = "independent"',),
        {"data": GRID},
    ),
    "baffle": ((BAFFLE,), {}),
    "baffle, dp-noise": ((f"{BAFFLE}\ndp-noise = 1.0\ndp-clip = 1.0",), {"sites": "least-rows = 20"}),
    "baffle, local epochs": (
        (f'{BAFFLE}\nlocal-epochs = 1\noptimizer = "sgd"\nform = "central"\nema = 0\nseed-pool = 64',),
        {},
    ),
}


TWO_OF_THREE = "[secure-aggregation]\nthreshold = 2"  # by default three silos cannot lose one


def seen(folder: Path) -> dict[str, dict[str, list[views.Seen]]]:
    """What a role saw, by file and peer, in order."""
    found: dict[str, dict[str, list[views.Seen]]] = {}
    for path in sorted(folder.glob("*.bin")):
        by_peer = found.setdefault(path.name, defaultdict(list))
        for one in views.read(path):
            by_peer[one.peer].append(one)
    return found


def asked(data: bytes) -> tuple[str, int] | None:
    """The tag and the round of the message in a submission; None for other requests."""
    request, envelope = request_of(data)
    if not isinstance(request, Submit) or request.work != "answer":
        return None
    return next(messages_in(bytes(envelope.body)))


def models_in(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*.safetensors") if not {"checkpoint", "truth"} & set(path.parts)
    }  # fmt: skip


def check_confined(many: Machines, theirs: Mapping[str, bytes]) -> None:
    """Each site's own model is the one that the run on one machine has for it, or of a row's model its columns."""
    for silo in many.on_one_machine(None).silos:
        ours = load((many.kept(silo.name) / "confined.safetensors").read_bytes())
        owner = silo.name if f"participants/{silo.name}/confined.safetensors" in theirs else silo.row
        whole = load(theirs[f"participants/{owner}/confined.safetensors"])
        assert ours
        for name, array in ours.items():
            expected = whole[name] if whole[name].shape == array.shape else whole[name][:, list(silo.columns)]
            assert array.tobytes() == np.ascontiguousarray(expected).tobytes(), f"{silo.name}: {name}"


@pytest.mark.parametrize("case", CASES)
def test_many_machines_say_what_one_says(case: str, machines: Callable[..., Machines], tmp_path: Path) -> None:
    given, settings = CASES[case]
    many = machines(*given, **settings)
    one, out = tmp_path / "one", tmp_path / "many"
    whole = many.on_one_machine(one).train(many.rounds, 7)
    many.start()
    result = many.serve(out)

    assert seen(out / "views" / "server") == seen(one / "views" / "server") != {}
    for name in many.names:
        assert seen(many.kept(name) / "views" / name) == seen(one / "views" / name) != {}

    ours, theirs = models_in(out), models_in(one)
    assert ours or "cgd" in case
    assert ours == {name: data for name, data in theirs.items() if name in ours}
    if "cgd" in case:
        check_confined(many, theirs)
    if "released.safetensors" in theirs:
        for name in many.names:
            assert (many.kept(name) / "released.safetensors").read_bytes() == theirs["released.safetensors"]
    assert [line["bytes"] for line in result.history] == [line["bytes"] for line in whole.history]
    assert result.record["run"] == whole.record["run"]
    assert result.record["dropped"] == []


# -- stopped, and gone on with -----------------------------------------------------------------------------------------


RESUMED = [
    "fedsgd", "fedsgd, dp-noise", "fedavg", "pbpfl, mse", "pbpfl, cross-entropy", "cgd", "cgd, joint grid", "baffle",
    "baffle, local epochs",
]  # fmt: skip


@pytest.mark.parametrize("case", RESUMED)
def test_all_stopped_and_resumed_end_with_the_same_bytes(
    case: str, machines: Callable[..., Machines], tmp_path: Path
) -> None:
    given, settings = CASES[case]  # a checkpoint every other round, and stopped one round after it
    many = machines(*given, **{"rounds": 4, **settings, "run": "checkpoint-every = 2"})
    one, out = tmp_path / "one", tmp_path / "many"
    federation = many.on_one_machine(one)
    with pytest.raises(Killed):
        federation.train(many.rounds, 7, progress=killed_after(3))
    many.on_one_machine(one).train(many.rounds, 7, resume=True)

    many.start()
    with pytest.raises(Killed):
        many.serve(out, progress=killed_after(3))
    many.stop()  # all, and without a word
    many.start()
    result = many.serve(out, resume=True)
    assert result.record["sessions"] == 2
    assert result.record["dropped"] == []
    ours, theirs = models_in(out), models_in(one)
    assert ours == {name: data for name, data in theirs.items() if name in ours}
    if "cgd" in case:
        check_confined(many, theirs)
    assert seen(out / "views" / "server") == seen(one / "views" / "server")


@pytest.mark.parametrize("case", ["fedsgd", "fedavg", "pbpfl, cross-entropy", "cgd", "cgd, joint grid", "baffle"])
def test_a_site_that_restarts_between_rounds_comes_back_with_its_state(
    case: str, machines: Callable[..., Machines], tmp_path: Path
) -> None:
    given, settings = CASES[case]
    many = machines(*given, **settings)
    out, name = tmp_path / "many", many.names[1]
    many.start()

    def progress(number: int, of: int, line: object) -> None:
        if number == 1:
            many.stop(name)
            many.start(name)
            many.workers[name].answer(b"")  # whatever comes first

    result = many.serve(out, progress=progress)
    assert result.record["rounds"] == many.rounds
    dropped = {(gone["silo"], gone["round"]) for gone in result.record["dropped"]}
    assert dropped <= {(name, 2)}  # at most the round in which it came back
    if "cgd" in case:
        shapes: dict[object, set[object]] = defaultdict(set)  # the same for all who hold the same
        for silo in many.on_one_machine(None).silos:
            ours = load((many.kept(silo.name) / "confined.safetensors").read_bytes())
            assert all(np.isfinite(value).all() for value in ours.values())
            shapes[silo.columns, bool(len(silo.y))].add(frozenset((key, one.shape) for key, one in ours.items()))
        assert all(len(found) == 1 for found in shapes.values())
    assert last_checkpoint(many.kept(name) / "checkpoint")[0].round == many.rounds


def test_a_restart_noticed_as_it_is_to_keep_its_state_ends_no_run(
    machines: Callable[..., Machines], tmp_path: Path
) -> None:
    given, settings = CASES["cgd, joint grid"]  # whose run stands still where any is missing
    many = machines(*given, **settings)
    many.start()
    restarted = list[str]()

    def wrap(name: str, data: bytes) -> bytes | Missing:
        request, _ = request_of(data)
        if isinstance(request, Submit) and request.work == "keep" and request.round == 1 and not restarted:
            restarted.append(name)
            many.stop(name)
            many.start(name)
        return many.workers[name].answer(data)

    many.wrap = wrap
    assert many.serve(tmp_path / "out").record["rounds"] == many.rounds
    assert restarted


@pytest.mark.parametrize("case", ["fedsgd", "fedavg", "pbpfl, mse", "baffle"])
def test_a_site_that_misses_rounds_is_named_and_comes_back(
    case: str, machines: Callable[..., Machines], tmp_path: Path
) -> None:
    given, settings = CASES[case]
    many = machines(*given, TWO_OF_THREE, **settings)
    many.start()

    def wrap(name: str, data: bytes) -> bytes | Missing:
        found = asked(data)
        away = found is not None and found[1] == 2 and name == "silo-2"
        return DEAD if away else many.workers[name].answer(data)

    many.wrap = wrap
    result = many.serve(tmp_path / "out")
    assert [(gone["round"], gone["silo"]) for gone in result.record["dropped"]] == [(2, "silo-2")]
    assert [line["attempt"] > 0 or bool(line["dropped"]) for line in result.history] == [False, True, False]


@pytest.mark.parametrize("case", ["fedsgd", "pbpfl, mse", "cgd", "baffle"])
def test_a_site_that_vanishes_after_its_upload_counts_or_the_round_is_played_again(
    case: str, machines: Callable[..., Machines], tmp_path: Path
) -> None:
    given, settings = CASES[case]
    many = machines(*given, TWO_OF_THREE, **settings)
    many.start()
    gone = list[str]()

    def wrap(name: str, data: bytes) -> bytes | Missing:
        found = asked(data)
        if name == "silo-2" and found is not None and found[1] == 2 and found[0] in UNMASKING_TAGS:
            gone.append(found[0])
        return DEAD if gone and name == "silo-2" else many.workers[name].answer(data)

    many.wrap = wrap
    result = many.serve(tmp_path / "out")
    assert gone  # it was asked to unmask, after it had uploaded
    assert {entry["silo"] for entry in result.record["dropped"]} == {"silo-2"}
    assert result.record["rounds"] == many.rounds


def test_a_server_that_replays_itself_is_answered_under_other_keys(
    machines: Callable[..., Machines], tmp_path: Path
) -> None:
    """A site that is led back to a state it kept does not mask two messages alike: its keys are drawn anew.

    By the server itself, which signs all of it again; what anybody else hands on is for a process that is gone.
    """
    many = machines('name = "fedsgd"\nlearning-rate = 0.1', rounds=1)
    many.draw_secrets()
    many.start()
    said: list[tuple[bytes, bytes]] = []

    def wrap(name: str, data: bytes) -> bytes | Missing:
        reply = many.workers[name].answer(data)
        if name == "silo-1":
            said.append((data, reply))
        return reply

    many.wrap = wrap
    first = many.workers["silo-1"].process_id
    many.serve(tmp_path / "out")
    session = many.made[-1]._live._session

    def ask(request: Signed, body: bytes = b"") -> tuple[Reply, bytes]:
        data, serial = session.pack(request, {"silo-1": worker.process_id}, body)
        return session.open(worker.answer(data), worker.process_id, serial, None)

    for replayed in (session.hello, session.hello.model_copy(update={"round": 1})):
        many.stop()
        many.start("silo-1")
        worker = many.workers["silo-1"]
        assert all(
            reply_of(worker.answer(data))[0] in (Stranger(), Awake(process_id=worker.process_id)) for data, _ in said
        )
        while isinstance(here := ask(replayed)[0], Busy):
            pass
        assert isinstance(here, SiteReady)
        answers = list[bytes]()
        for data, sealed in said:
            request, envelope = request_of(data)
            if not isinstance(request, Submit) or request.work != "answer":
                continue
            before = session.open(sealed, first, request.serial, None)[1]
            reply, answer = ask(request, envelope.body)
            while isinstance(reply, Busy):
                reply, answer = ask(Poll(number=request.number, wait=1.0))
            if tag_of(before).endswith(("/masked", "/key-advert")):
                answers.append(answer)
                assert answers[-1] != before
        assert answers[0]  # no keys, no upload: at most that the take is spent
        assert all(not answer or tag_of(answer) == "spent" for answer in answers[1:])
        assert len(answers) > 2


def test_a_site_that_never_came_is_named(machines: Callable[..., Machines], tmp_path: Path) -> None:
    many = machines('name = "fedsgd"\nlearning-rate = 0.1', TWO_OF_THREE)
    many.start("silo-1", "silo-2")
    with pytest.raises(
        ParameterError, match=r"2 of 3 sites take part after waiting up to 0\.3 s, at least 3 are needed \(silo-3: "
    ):
        many.serve(tmp_path / "out", least=3, wait=0.3)
    assert not (tmp_path / "out" / "result.json").exists()
    for name in ("silo-1", "silo-2"):  # by its insecure seed the next run has the same id, and is none to them
        shutil.rmtree(many.kept(name))
    many.stop()
    many.start("silo-1", "silo-2")
    result = many.serve(tmp_path / "again", least=2, wait=0.3)
    assert {gone["silo"] for gone in result.record["dropped"]} == {"silo-3"}


def test_a_site_without_its_state_says_so_and_goes_on(
    machines: Callable[..., Machines], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    many = machines()
    many.start()
    with pytest.raises(Killed):
        many.serve(tmp_path / "out", progress=killed_after(2))
    many.stop()
    shutil.rmtree(many.kept("silo-1"))
    many.start()
    with caplog.at_level(logging.WARNING, "moretta"):
        assert many.serve(tmp_path / "out", resume=True).record["rounds"] == many.rounds
    assert "has no state of round 2 or before; it begins again as a new silo" in caplog.text


def test_sites_that_the_engine_knows_by_other_names_take_part(
    machines: Callable[..., Machines], tmp_path: Path
) -> None:
    """`engine-name` in the roster: FLARE's certificates are of site-1 and of another silo's name, the run of silos."""
    many = machines(engine_names={"silo-1": "site-1", "silo-2": "silo-9", "silo-3": "silo-2"})
    many.on_one_machine(tmp_path / "one").train(many.rounds, 7)
    many.start()
    result = many.serve(tmp_path / "many")
    assert result.record["dropped"] == []
    assert models_in(tmp_path / "many") == models_in(tmp_path / "one")


@pytest.mark.parametrize("case", ["fedsgd", "fedsgd, dp-noise"])
def test_seconds_of_silos_are_left_out_where_noise_hides_their_lots(
    case: str, machines: Callable[..., Machines], tmp_path: Path
) -> None:
    """How long a silo computes follows the size of its secret lot; without noise the server is told, with it not."""
    given, settings = CASES[case]
    many = machines(*given, **settings, rounds=1)
    told: list[Mapping[str, float]] = []
    ask = many.wrap

    def listening(name: str, data: bytes) -> bytes | Missing:
        answer = ask(name, data)
        if isinstance(answer, bytes) and isinstance(done := reply_of(answer)[0], WorkDone):
            told.append(done.seconds)
        return answer

    many.wrap = listening
    many.start()
    result = many.serve(tmp_path / "many")
    private = "dp" in case
    assert told
    assert any(told) != private
    assert all(bool(line["seconds"]) != private for line in result.history)
    assert (set(result.seconds) == {"total"}) == private
