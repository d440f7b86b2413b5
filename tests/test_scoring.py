"""Scores on rows that silos hold back: what they come to, who is in them, and that no mask serves twice."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refused_rows import Row, refused
from test_contract import ADDITIVE, LOSSY, MORE, OPEN, ROWS, dropping, federation_of, silos, silos_of

from moretta import Engine, Federation, FedSGD, SecureAggregation, Silo
from moretta.config import run_files
from moretta.config.silo_file import load
from moretta.contract.messages import Stamp
from moretta.contract.roles import Aborted, Exchange, Outcome
from moretta.deployment import shared_settings as told
from moretta.engines.in_process import InProcess
from moretta.engines.journal import HelpedFile
from moretta.errors import ParameterError, PeerError
from moretta.protocols.cgd.client import Client as Participant
from moretta.protocols.common import modules
from moretta.protocols.common.enrolment import prepared
from moretta.protocols.common.scoring import HeldOut, Score, read
from moretta.protocols.fedsgd.server import Server
from moretta.protocols.registry import build
from moretta.report.folder import read_run
from moretta.report.page import write_report
from moretta.report.statements import privacy_statements
from moretta.run import federation as federations
from moretta.run.evaluation import evaluate
from moretta.run.loop import Session
from moretta.run.persistence import states_of
from moretta.run.result import Result
from moretta.secure_aggregation import pairwise
from moretta.secure_aggregation.masks import pair_key
from moretta.secure_aggregation.plain import PlainUpload
from moretta.secure_aggregation.schemes import contributor
from moretta.secure_aggregation.sums import Sum

NAMES = ["fedsgd", "fedavg", "local", "pbpfl", "cgd", *OPEN, "baffle", "baffle-epochs"]
ENDED: list[tuple[Session, Outcome]] = []
"""The sessions of a test and their outcomes: what a server got, and the models that no result has."""


@pytest.fixture(autouse=True)
def _ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    conclude = Session._conclude

    def kept(session: Session, outcome: Outcome, *rest: Any) -> Result:
        ENDED.append((session, outcome))
        return conclude(session, outcome, *rest)

    monkeypatch.setattr(Session, "_conclude", kept)
    yield
    ENDED.clear()


def holding_back(counts: Mapping[str, int] = MORE) -> list[Silo]:
    """The contract's silos, of which each has fewer rows to train on by another number."""
    return [
        replace(silo, x=silo.x[count:], y=silo.y[count:], held_out=(silo.x[:count], silo.y[:count]))
        for count, silo in enumerate(silos(counts), start=2)
    ]


def scoring(name: str, **settings: Any) -> Federation:
    given = {"silos": holding_back(), "score_at_silos": True, "engine": Engine(strict=True)}
    return federation_of(name, **given | settings)


def expected(federation: Federation, members: set[str]) -> dict[str, float]:
    """What the models score on the rows held back by some: the weighted mean over silos, in the clear."""
    ((session, _),) = ENDED
    agreed, models = session._players.preparation(), session._players.models()
    rows, sums, module = 0, Counter[str](), copy.deepcopy(federation.model)
    for silo in federation.silos:
        if silo.name in members and silo.held_out is not None:
            modules.load(module, models[""] if "" in models else models[silo.name])
            x = prepared(silo.held_out[0], agreed, torch.float32)
            found = evaluate(
                module, x, silo.held_out[1], federation.spec.protocol.loss, str(federation.spec.task), metrics=False
            )
            rows += found["rows"]
            for figure in found.keys() & {"loss", "mse", "accuracy"}:
                sums[figure] += found["rows"] * found[figure]
    return {"rows": rows, **{figure: value / rows for figure, value in sums.items()}}


def scores_of(result: Result) -> dict[str, Any]:
    return {key: value for key, value in result.test.items() if key != "per_silo"}


def like(found: Mapping[str, float]) -> dict[str, Any]:
    return {**{figure: pytest.approx(value, 1e-5) for figure, value in found.items()}, "by": "silos"}


@pytest.mark.parametrize("name", NAMES)
def test_a_score_is_the_mean_over_all_rows_that_silos_hold_back(name: str) -> None:
    federation = scoring(name)
    result = federation.train(2)
    assert result.test["rows"] == sum(range(2, 7))
    assert scores_of(result) == like(expected(federation, set(MORE)))
    assert not any("test rows" in said for said in result.record["warnings"])


@pytest.mark.parametrize("aggregation", [ADDITIVE, SecureAggregation(scheme="none"), SecureAggregation(ring_bits=32)])
@pytest.mark.parametrize("name", ["fedsgd", "cgd"])
def test_every_scheme_comes_to_the_same(name: str, aggregation: SecureAggregation) -> None:
    federation = scoring(name, aggregation=aggregation)
    assert scores_of(federation.train(1)) == like(expected(federation, set(MORE)))


def test_numbers_of_any_size_are_scored() -> None:
    made = []
    for silo in holding_back():
        assert silo.held_out is not None
        far, farther = (np.float32(1e9) * one[:, :1] for one in (silo.x, silo.held_out[0]))
        made.append(replace(silo, y=far, held_out=(silo.held_out[0], farther)))
    model, limit = torch.nn.Linear(4, 1), SecureAggregation(limit=1e20)
    squared = FedSGD(loss="mse", learning_rate=1e-3)
    federation = Federation(model, made, squared, aggregation=limit, score_at_silos=True)
    result = federation.train(1)
    assert result.test["loss"] > 1e15
    assert scores_of(result) == like(expected(federation, set(MORE)))


def test_a_servers_own_test_rows_stay_beside_the_silos() -> None:
    one = silos()[0]
    both, alone = (
        federation_of("fedsgd", silos=holding_back(), test=(one.x, one.y), score_at_silos=asked).train(2).test
        for asked in (True, False)
    )
    assert set(both) - set(alone) == {"silos"}
    assert both == {**alone, "silos": both["silos"]}
    assert (both["silos"]["by"], both["silos"]["rows"]) == ("silos", sum(range(2, 7)))


@pytest.mark.parametrize("name", ["fedsgd", "pbpfl", "cgd", "baffle"])
def test_asking_changes_nothing_else(name: str) -> None:
    asked, plain = scoring(name).train(2), scoring(name, score_at_silos=False).train(2)
    bare = [replace(silo, held_out=None) for silo in holding_back()]
    without = scoring(name, silos=bare, score_at_silos=False).train(2)
    for other in (plain, without):
        assert set(other.test) <= {"per_silo"}
        assert [line["bytes"] for line in asked.history] == [line["bytes"] for line in other.history]
        assert [line.get("loss") for line in asked.history] == [line.get("loss") for line in other.history]
    states = [states_of(session._players) for session, _ in ENDED]
    for role, state in states[0].items():
        for other in states[1:]:
            assert {key: np.asarray(value).tobytes() for key, value in state.items()} == {
                key: np.asarray(value).tobytes() for key, value in other[role].items()
            }


def test_a_blind_score_is_the_participants_own() -> None:
    result = scoring("cgd").train(1)
    ((session, outcome),) = ENDED
    assert outcome.scores == {}  # of the aggregator
    taken = [client.scores for client in session._players.clients.values()]
    assert taken == [{key: value for key, value in result.test.items() if key != "by"}] * len(MORE)


def test_an_aggregator_without_participants_here_says_who_knows_the_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(federations, "build", lambda *of: replace(build(*of), scores=dict))
    result = scoring("cgd").train(1)
    assert scores_of(result) == {}
    assert any("participants alone know what their models score" in said for said in result.record["warnings"])


@pytest.mark.parametrize("name", ["fedsgd", "cgd"])
def test_a_report_says_whose_rows_and_who_knows(name: str, tmp_path: Path) -> None:
    scoring(name, out=tmp_path / "run").train(1)
    record = read_run(tmp_path / "run")
    page = write_report([tmp_path / "run"], tmp_path / "report.html").read_text()
    assert re.search(r"On \d+ rows that silos hold back the model reaches an accuracy of", page)
    assert "On the test rows" not in page
    said = [one.text for one in privacy_statements(record) if one.role == "Server"][-1]
    assert said.startswith("Relays the scores" if name == "cgd" else "Learns, at the end, the number of rows held back")


# -- masks -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair_keys(monkeypatch: pytest.MonkeyPatch) -> Counter[bytes]:
    """How often each key of a mask was made."""
    keys = Counter[bytes]()

    def noted(*of: Any) -> bytes:
        keys[pair_key(*of)] += 1
        return pair_key(*of)

    monkeypatch.setattr(pairwise, "pair_key", noted)
    return keys


@pytest.mark.parametrize("name", ["fedsgd", "cgd", "pbpfl"])
def test_no_mask_serves_twice(name: str, pair_keys: Counter[bytes]) -> None:
    # The end is of all silos and so has a set-up, which counts their rows under the stamp of their scores.
    scoring(name, batch_size=0, participation=1.0 if name == "cgd" else 0.8).train(2)
    assert set(pair_keys.values()) == {2}  # a mask is of two silos, who each make it once


def test_a_sum_that_a_protocol_had_under_the_same_stamp_would_have_other_masks(
    pair_keys: Counter[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = Server.finish

    def summing_first(server: Server, now: Stamp) -> Exchange[Outcome | Aborted]:
        yield from server.round(now)
        return (yield from finish(server, now))

    monkeypatch.setattr(Server, "finish", summing_first)
    assert scoring("fedsgd").train(1).test["rows"] == sum(range(2, 7))
    assert set(pair_keys.values()) == {2}


@pytest.mark.parametrize("aggregation", [SecureAggregation(), ADDITIVE])
def test_a_silo_scores_once_under_a_stamp(
    aggregation: SecureAggregation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    finish = Server.finish

    def twice(server: Server, now: Stamp) -> Exchange[Outcome | Aborted]:
        yield from finish(server, now)
        return (yield from finish(server, now))

    monkeypatch.setattr(Server, "finish", twice)
    assert "rows" not in scoring("fedsgd", aggregation=aggregation).train(1).test
    assert re.search(r"the score on rows that silos hold back is left out: .*score/.* was uploaded before", caplog.text)


# -- dropouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "phase"),
    [(name, phase) for name in NAMES for phase in ("upload", "unmasking") if (name, phase) != ("local", "unmasking")],
)
def test_a_score_goes_on_without_those_who_vanish(name: str, phase: str) -> None:
    federation = scoring(name, aggregation=LOSSY, engine=Engine(faults=dropping([(3, "south", phase)])))
    result = federation.train(2)
    assert [(one["round"], one["silo"]) for one in result.record["dropped"]] == [(3, "south")]
    gone = {"south"} if phase == "upload" else set[str]()
    assert scores_of(result) == like(expected(federation, set(MORE) - gone))


def test_additive_shares_are_summed_again_without_those_who_vanish() -> None:
    federation = scoring("fedsgd", aggregation=ADDITIVE, engine=Engine(faults=dropping([(3, "south", "upload")])))
    result = federation.train(2)
    assert scores_of(result) == like(expected(federation, set(MORE) - {"south"}))


# -- a silo's half -----------------------------------------------------------------------------------------------------

ASK = Score(stamp=Stamp("run", 4, 0), parameters={}, encoding={})


def told_of(held_out: HeldOut, outputs: Any) -> dict[str, float]:
    upload = held_out.upload(ASK, contributor("none", "north"), np.array(outputs, np.float32))
    assert isinstance(upload, PlainUpload)
    total = Sum({name: np.asarray(one) for name, one in upload.tensors.items()}, 1, {}, ["north"])
    return read(total, held_out.figures)


def test_classes_are_read_off_whatever_the_targets() -> None:
    x, outputs = np.zeros((4, 1), np.float32), [[0.9, 0.1], [0.2, 0.3], [0.6, 0.5], [0.0, 1.0]]
    classes, only = np.array([0, 1, 1, 0]), ("accuracy",)
    for y, given in [
        (classes, outputs),
        (np.eye(2)[classes], outputs),
        (classes[:, None], [[row[1]] for row in outputs]),
    ]:
        found = told_of(HeldOut(x, y, "mse", only, 3), given)
        assert found == {"rows": 4, "accuracy": 0.25 if y.shape == (4, 1) else 0.5}


@refused("scoring.txt")
def test_what_cannot_be_is_refused(row: Row, request: pytest.FixtureRequest) -> None:
    row.play(globals(), request)


def test_a_sum_that_cannot_be_one_of_scores_is_refused() -> None:
    limbs = np.zeros(12)
    for means in ({"score/rows": limbs}, {"score/rows": limbs[:3], "score/loss": limbs[:3]}):
        with pytest.raises(PeerError, match="expected a sum of rows, loss"):
            read(Sum(means, 1, {}, ["north"]), ("loss",))
    with pytest.raises(PeerError, match="at least one row a silo"):
        read(Sum({"score/rows": limbs, "score/loss": limbs}, 1, {}, ["north"]), ("loss",))


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("fedsgd", {"silos": silos()}, "silo `north` has no held-out rows .* score-at-silos.*; set test-fraction"),
        ("centralised", {}, "score_at_silos sums what silos score, and nobody sums under"),
        ("cgd", {"engine": Engine(name="fused")}, "score_at_silos sums what silos score, and nobody sums under"),
        ("cgd-joint", {"silos": silos_of("cgd-joint")}, "score-at-silos needs silos that hold whole samples"),
        ("baffle-private", {}, r"a score would be a release without noise; remove it, or BAFFLE\(dp_noise=..\)"),
        (
            "fedsgd",
            {"aggregation": SecureAggregation(min_survivors=6)},
            "but silos is 5; set at most as many",
        ),
    ],
)
def test_what_is_refused(name: str, changed: Mapping[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said) as refused:
        scoring(name, **changed).train(1)
    assert len(str(refused.value).splitlines()) == 1


# -- sites -------------------------------------------------------------------------------------------------------------

RUN = """
[run]
rounds = 1
[data]
source = "sites"
inputs = [4]
classes = 3
score-at-silos = true
[model]
source = "mlp"
[protocol]
name = "{name}"
loss = "cross-entropy"
[engine]
name = "flare"
sites = ["north", "south", "east"]
"""
SITE = '[silo]\nname = "{silo}"\n[data]\nsource = "{silo}.npz"\n'


def sites(folder: Path, more: str, name: str = "fedsgd") -> dict[str, Federation]:
    """Each site's own side of a run, from what it is told and its silo.toml."""
    (folder / "run.toml").write_text(RUN.format(name=name))
    text, found = told.shared_text(run_files.load(folder / "run.toml")), dict[str, Federation]()
    for silo in silos():
        np.savez(folder / f"{silo.name}.npz", x=silo.x, y=silo.y)
        (folder / "silo.toml").write_text(SITE.format(silo=silo.name) + more)
        found[silo.name] = told.site_side(run_files.loads(text, folder / "told.toml"), load(folder / "silo.toml"))
    return found


@pytest.mark.parametrize("name", ["fedsgd", "pbpfl", "cgd"])
def test_a_server_without_any_rows_has_a_score(name: str, tmp_path: Path) -> None:
    clients = {
        silo: made.client(silo, 1, 0, federations.NOWHERE, HelpedFile(str(tmp_path / f"{silo}.jsonl")))[0]
        for silo, made in sites(tmp_path, "test-fraction = 0.25", name).items()
    }
    server = told.server_side(run_files.load(tmp_path / "run.toml"), tmp_path / "run")
    result = server.train(1, transport=lambda codec, place, recorder: InProcess(clients, codec, strict=True))
    if name != "cgd":
        assert set(result.test) == {"rows", "loss", "accuracy", "by"}
        assert (result.test["rows"], result.test["by"]) == (5 + 8 + 2, "silos")
        return
    assert result.test == {}
    assert any("the participants alone know" in said for said in result.record["warnings"])
    scores = [client.scores for client in clients.values() if isinstance(client, Participant)]
    assert scores == [scores[0]] * 3
    assert scores[0]["rows"] == 5 + 8 + 2


def test_a_site_holds_the_same_rows_back_in_every_run(tmp_path: Path) -> None:
    (north, *others), (whole, *_) = sites(tmp_path, "test-fraction = 0.25")["north"].silos, silos()
    assert [silo.held_out for silo in others] == [None, None]
    assert north.held_out is not None
    x, y = north.held_out
    assert (len(x), len(north.x)) == (5, 15)
    rows = {row.tobytes(): label for row, label in zip(whole.x, whole.y, strict=True)}
    for held, label in [*zip(x, y, strict=True), *zip(north.x, north.y, strict=True)]:
        assert rows.pop(held.tobytes()) == label  # each row once, with its own label
    again = sites(tmp_path, "test-fraction = 0.25")["north"].silos[0].held_out
    assert again is not None
    np.testing.assert_array_equal(again[0], x)


# -- edge clients ------------------------------------------------------------------------------------------------------


def test_an_edge_client_scores_too() -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    federation = scoring("baffle", silos=holding_back(ROWS), engine=Engine(edge=("south",)))
    assert scores_of(federation.train(1)) == like(expected(federation, set(ROWS)))
