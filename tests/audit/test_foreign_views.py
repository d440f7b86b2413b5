"""A federation that Flower played, recorded at its clients, is audited as one that Moretta played."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from recorded import attacked
from torch import nn

pytest.importorskip("flwr", reason="pip install 'moretta[flower]'")

from flower_nodes import Nodes, folders, reply
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from moretta import FedAvg, Federation, SecureAggregation, Silo, flower
from moretta.audit.attacks.common import gradient_inversion, membership_inference
from moretta.audit.evidence.attack import Attack
from moretta.audit.evidence.truth import Truth
from moretta.engines import views
from moretta.errors import ParameterError
from moretta.run import auditing
from moretta.run.auditing import run_folder_of

NAMES, RATE, ROUNDS = ("north", "south", "west"), 0.5, 3


def silos() -> list[Silo]:
    """Return three silos of eight rows, with classes that rows show."""
    generator = np.random.default_rng(5)
    y = [generator.integers(0, 3, 8) for _ in NAMES]
    rows = [np.eye(3, 6)[one] * 2 + generator.normal(size=(8, 6)) for one in y]
    return [Silo(name, x.astype("f4"), one) for name, x, one in zip(NAMES, rows, y, strict=True)]


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def test_rows() -> tuple[Any, Any]:
    generator = np.random.default_rng(9)
    y = np.arange(60) % 3
    return (np.eye(3, 6)[y] * 2 + generator.normal(size=(60, 6))).astype("f4"), y


test_rows.__test__ = False  # type: ignore[attr-defined]


def federation(**more: Any) -> Federation:
    protocol = FedAvg(loss="cross-entropy", learning_rate=RATE, local_epochs=1)
    return Federation(model(), silos(), protocol, test=test_rows(), batch_size=0, **more)


def stepped(k: int, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Take one step on all rows of the k-th silo."""
    own, net = silos()[k], model()
    net.load_state_dict({name: torch.tensor(one) for name, one in arrays.items()})
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    nn.functional.cross_entropy(net(torch.tensor(own.x)), torch.tensor(own.y)).backward()
    optimizer.step()
    return {name: one.detach().numpy() for name, one in net.state_dict().items()}


def step(message: Message, context: Context) -> Message:
    """Train or evaluate as the app of a node."""
    if message.metadata.message_type == "evaluate":
        return reply(message, None, score=0.5, num_examples=8)
    arrays = {name: one.numpy() for name, one in message.content.array_records["arrays"].items()}
    return reply(message, stepped(int(context.node_config["k"]), arrays), loss=0.5, num_examples=8)


def recorded(folder: Path, *, secure: bool, evaluate: float = 0.0, named: bool = True) -> Path:
    """Play the federation by Flower, and return the folder with its clients' views."""
    mods = [flower.record_views(folder / "recorded"), *([flower.secure_sum()] if secure else [])]

    def made() -> ClientApp:
        app = ClientApp(mods=mods)
        app.train()(step)
        app.evaluate()(step)
        return app

    places = folders(folder / "sites", *NAMES).values()
    roster = SecureAggregation(roster=folder / "sites/roster.toml")
    strategy = flower.SecureFedAvg(fraction_evaluate=evaluate, secure=roster, most_examples=64) if secure else None
    strategy = strategy or FlowerFedAvg(fraction_evaluate=evaluate)
    start = ArrayRecord({name: Array(one.numpy()) for name, one in model().state_dict().items()})
    found = strategy.start(Nodes(places, made), start, num_rounds=ROUNDS, timeout=60)  # type: ignore[arg-type]
    np.savez(folder / "final.npz", **{name: one.numpy() for name, one in found.arrays.items()})
    return folder / "recorded"


def truth_of(folder: Path) -> Truth:
    made, rounds = run_folder_of(folder, federation())
    return Truth(folder, made, rounds, 0)


def natively(folder: Path, scheme: str) -> Truth:
    made = federation(out=folder, record_views=True, aggregation=SecureAggregation(scheme=scheme))  # type: ignore[arg-type]
    made.train(ROUNDS, 0, progress=False)
    return Truth(folder, made, ROUNDS, 0)


def assert_alike(theirs: Truth, ours: Truth, *attacks: Attack) -> None:
    for attack in attacks:
        if why := attack.fits(ours.run):
            assert attack.fits(theirs.run) == why
            continue
        found, expected = (attacked(attack, truth) for truth in (theirs, ours))
        assert found.succeeded == expected.succeeded
        assert abs(found.score - expected.score) < 0.05, (found, expected)


INVERSION = (gradient_inversion.ATTACK, gradient_inversion.OF_SUM)


@pytest.mark.parametrize("secure", [False, True], ids=["in the clear", "summed"])
def test_flowers_views_score_as_our_own_and_a_sum_left_out_is_found(tmp_path: Path, secure: bool) -> None:
    theirs = truth_of(recorded(tmp_path / "flower", secure=secure, evaluate=float(secure)))
    ours = natively(tmp_path / "ours", "pairwise" if secure else "none")
    assert theirs.run.scheme == ours.run.scheme == ("pairwise" if secure else "none")
    with np.load(tmp_path / "flower/final.npz") as final:
        for name, one in theirs.final("released.safetensors").items():
            np.testing.assert_allclose(one, final[name], rtol=0, atol=1e-6)
            np.testing.assert_allclose(one, ours.final("released.safetensors")[name], rtol=0, atol=1e-5)
    assert_alike(theirs, ours, *INVERSION, membership_inference.ATTACK)
    assert attacked(INVERSION[0], theirs).succeeded != secure  # the leak is found, and the control has none


def flares(folder: Path, *, secure: bool) -> Path:
    """Play the federation by the filters of FLARE's sites, and return the folder with their views."""
    pytest.importorskip("nvflare")
    from nvflare.apis.dxo import DXO, DataKind
    from nvflare.apis.event_type import EventType
    from nvflare.apis.fl_constant import FLContextKey
    from nvflare.app_common.app_constant import AppConstants
    from test_keep_result import SECURE, TASK, TEXT, WEIGHT, context, delivers, result

    from moretta.deployment.recipe.site import SILOS, KeepResult, RecordViews
    from moretta.secure_aggregation.secure_sum import secure_sum

    made = {name: KeepResult(TEXT, str(folder), 64) if secure else RecordViews(str(folder)) for name in NAMES}
    weights = {name: one.numpy() for name, one in model().state_dict().items()}
    for number in range(ROUNDS):
        own = [stepped(k, weights) for k in range(len(NAMES))]
        for (name, one), came_to in zip(made.items(), own, strict=True):
            task = DXO(DataKind.WEIGHTS, data=weights).to_shareable()
            task.set_header(AppConstants.CURRENT_ROUND, number)
            told = {FLContextKey.TASK_NAME: TASK, FLContextKey.TASK_DATA: task}
            one.handle_event(EventType.BEFORE_TASK_EXECUTION, context(name, **told))
            one.process(result(came_to, steps=8), context(name))
        if secure:
            deliver = {name: delivers(one, name, **{SILOS: list(NAMES)}) for name, one in made.items()}  # type: ignore[arg-type]
            shapes = {WEIGHT + name: one.shape for name, one in weights.items()}
            means = secure_sum(deliver, shapes, SECURE, most_weight=63).means
            weights = {name: means[WEIGHT + name].astype("f4") for name in weights}
        else:
            weights = {name: np.mean([one[name] for one in own], axis=0) for name in weights}
    return folder


@pytest.mark.parametrize("secure", [False, True], ids=["in the clear", "summed"])
def test_flares_views_score_as_our_own(tmp_path: Path, secure: bool) -> None:
    theirs = truth_of(flares(tmp_path / "flare", secure=secure))
    ours = natively(tmp_path / "ours", "pairwise" if secure else "none")
    for name, one in ours.final("released.safetensors").items():
        np.testing.assert_allclose(theirs.final("released.safetensors")[name], one, rtol=0, atol=1e-5)
    assert_alike(theirs, ours, *INVERSION)


def test_counters_that_flare_sends_as_floats_are_recorded(tmp_path: Path) -> None:
    """Those of batch normalisation: a script sends whole numbers back, and FLARE's own FedAvg their mean."""
    pytest.importorskip("nvflare")
    from nvflare.apis.dxo import DXO, DataKind
    from nvflare.apis.event_type import EventType
    from nvflare.apis.fl_constant import FLContextKey
    from nvflare.app_common.app_constant import AppConstants
    from test_keep_result import TASK, context, result

    from moretta.deployment.recipe.site import RecordViews

    recorder = RecordViews(str(tmp_path))
    for number, sent in enumerate((np.asarray(0), np.asarray(2.0))):
        task = DXO(DataKind.WEIGHTS, data={"w": np.ones(2, "f4"), "seen": sent}).to_shareable()
        task.set_header(AppConstants.CURRENT_ROUND, number)
        told = {FLContextKey.TASK_NAME: TASK, FLContextKey.TASK_DATA: task}
        recorder.handle_event(EventType.BEFORE_TASK_EXECUTION, context("north", **told))
        recorder.process(result({"w": np.zeros(2, "f4"), "seen": np.asarray(2 * number + 2)}), context("north"))
    assert [number for number, _ in views.noted(tmp_path / "views", "north")] == [1, 2]


def test_views_are_the_messages_that_travelled(tmp_path: Path) -> None:
    folder = recorded(tmp_path, secure=True)
    truth = truth_of(folder)
    assert truth.recorded == (1, 2, 3)
    tags = [one.message.TAG for one in truth.heard("north", 2)]
    assert tags == [one.message.TAG for one in truth.heard("server", 2) if one.peer == "north"]
    assert not any("flower/" in tag or tag == "secure-aggregation/plain" for tag in tags)
    kept = b"".join(path.read_bytes() for path in (folder / "views").rglob("*.bin"))
    weights = np.load(tmp_path / "final.npz")["0.weight"]
    assert weights.tobytes() not in kept  # the last mean, that nobody was sent
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder / "views").rglob("*.bin"))


def command(folder: Path, monkeypatch: pytest.MonkeyPatch, made: Callable[[], Any] = federation) -> Any:
    module = ModuleType("theirs")
    module.federation = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "theirs", module)
    monkeypatch.setattr("moretta.run.auditing.resolve", lambda *_: made)
    return auditing.audit_folder(folder, federation="theirs:federation", views=True)


@pytest.mark.slow
def test_the_command_writes_an_audit_twice_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = recorded(tmp_path, secure=False)
    first, second = (command(folder, monkeypatch).record for _ in range(2))
    scores = [{one["attack"]: one["score"] for one in of["attacks"]} for of in (first, second)]
    in_time = scores[0].keys() & scores[1].keys()  # an attack that has no time left on a busy machine has no score
    assert {"gradient-inversion", "membership-inference"} & in_time
    assert all(scores[0][name] == scores[1][name] for name in in_time)
    assert json.loads((folder / "audit.json").read_text())["protocol"] == "fedavg"


def other(name: str) -> Callable[[Path], Federation]:
    """Return what spoils a recording, and returns the federation that is to fit it."""

    def spoil(folder: Path) -> Federation:
        made = federation()
        if name == "a silo without a view":
            for path in (folder / "views/west").iterdir():
                path.unlink()
            (folder / "views/west").rmdir()
        elif name == "a damaged view":
            path = folder / "views/west/round-000001.0.bin"
            path.write_bytes(path.read_bytes()[:-1])
        elif name == "another model":
            return Federation(nn.Sequential(nn.Linear(6, 3)), silos(), FedAvg(loss="cross-entropy"))
        elif name == "two runs":
            recorded(folder.parent / "again", secure=True)
            for path in (folder.parent / "again/recorded/views").rglob("*.bin"):
                seen = list(views.read(path))
                views.note(folder / "views", path.parent.name, int(path.name[6:12]), seen)
        elif name == "different models":
            generator = np.random.default_rng(1)
            path = folder / "views/west/round-000001.0.bin"
            data, at = path.read_bytes(), path.read_bytes().index(model().state_dict()["0.weight"].numpy().tobytes())
            path.write_bytes(data[:at] + generator.normal(size=2).astype("f4").tobytes() + data[at + 8 :])
        return made

    return spoil


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("a silo without a view", r"has the views of \['north', 'south'\]; expected those of the silos"),
        ("a damaged view", "ends in the middle of a message"),
        ("another model", "expected the tensors of the federation's model"),
        ("two runs", "is of several runs; record each into a folder of its own"),
        ("different models", "sent silos different models"),
    ],
)
def test_views_that_do_not_fit_are_refused_in_a_sentence(tmp_path: Path, name: str, sentence: str) -> None:
    folder = recorded(tmp_path, secure=True)
    made = other(name)(folder)
    with pytest.raises(ParameterError, match=sentence):
        run_folder_of(folder, made)
    assert not (folder / "result.json").exists()


def test_what_the_option_needs(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="--views needs --federation module:function"):
        auditing.audit_folder(tmp_path, views=True)
    with pytest.raises(ParameterError, match="expected the folder that was passed to a mod or filter"):
        auditing.audit_folder(tmp_path, federation="theirs:federation", views=True)
