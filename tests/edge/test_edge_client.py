"""Silos that only run inference: what they come to, what they refuse, and what their processes never import."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from networks import perceptron, seeded
from torch import nn

from moretta import BAFFLE, Engine, Federation, SecureAggregation, Silo
from moretta.contract.messages import Message, Stamp
from moretta.contract.roles import Aborted, Replies
from moretta.data.settings import Data
from moretta.data.tables.preparation import ColumnRules
from moretta.engines.child import ChildClient
from moretta.engines.confinement import landlock
from moretta.engines.settings import Run
from moretta.engines.usage import HEADROOM
from moretta.errors import ParameterError, PeerError
from moretta.protocols.baffle import edge_client, onnx_export
from moretta.protocols.baffle.silo.blocks import LayerBlock
from moretta.protocols.baffle.silo.messages import Commit, Committed, Revealed
from moretta.protocols.baffle.silo.seeds import Seed, agree
from moretta.protocols.baffle.torch_forward import layout_of
from moretta.protocols.common.setting import Setting
from moretta.protocols.common.specification import Specification
from moretta.secure_aggregation.identity import Identity, public_line

ROWS = {"north": 40, "south": 33, "east": 25}
NONE = SecureAggregation(scheme="none")
LONG = {"k": 32, "learning_rate": 0.3, "ema": 0.0}


def mlp() -> nn.Module:
    return perceptron(6, 12, 3, seed=1)


def silos() -> list[Silo]:
    random = np.random.default_rng(2)
    weights = random.normal(size=(6, 3))
    x = {name: 3.0 + random.normal(size=(count, 6)).astype("float32") for name, count in ROWS.items()}
    return [Silo(name, rows, ((rows - 3.0) @ weights).argmax(1)) for name, rows in x.items()]


def federation(edge: tuple[str, ...] = ("south",), engine: dict[str, Any] | None = None, **options: Any) -> Federation:
    test = silos()[0]
    settings: dict[str, Any] = {"loss": "cross-entropy", "k": 16, "optimizer": "sgd", "learning_rate": 0.5}
    values: dict[str, Any] = {"standardise": True, "batch_size": 16, "insecure_secret_seed": 5, **options}
    protocol = BAFFLE(**settings | values.pop("protocol", {}))
    engine = {"edge": edge, **(engine or {})}
    return Federation(mlp(), silos(), protocol, test=(test.x, test.y), engine=Engine(**engine), **values)


pytestmark = pytest.mark.usefixtures("started")


@functools.cache
def exported(
    shapes: tuple[str, ...],
    row_shape: tuple[int, ...],
    dtype: torch.dtype,
    precision: str,
    blocks: tuple[LayerBlock, ...],
) -> bytes:
    model = mlp().to(dtype)
    return EXPORT(model, layout_of(model), row_shape, dtype, precision, blocks)


ANSWER = ChildClient.answer
EXPORT: Callable[..., bytes] = onnx_export.graph_of


@pytest.fixture(autouse=True)
def one_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """Export the one model of these tests once for each precision: it takes a second."""

    def graph_of(
        model: nn.Module,
        layout: Any,
        row_shape: tuple[int, ...],
        dtype: torch.dtype,
        precision: str,
        blocks: tuple[LayerBlock, ...] = (),
    ) -> bytes:
        return exported(tuple(layout.shapes), row_shape, dtype, precision, blocks)

    monkeypatch.setattr(onnx_export, "graph_of", graph_of)


def weights_of(model: nn.Module) -> np.ndarray[Any, Any]:
    return np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])


def weights(result: Any) -> np.ndarray[Any, Any]:
    return weights_of(result.model)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"aggregation": SecureAggregation(scheme="additive-shares")},
        {"protocol": {"local_epochs": 1}},
        {"protocol": {"local_epochs": 1, "optimizer": "adam", "learning_rate": 0.02}},
        {"protocol": {"directions": "own"}},
        {"protocol": {"clip_entry": 0.01}},
        # Of all rows and without noise, as those are bound to what runs the model: an ONNX graph, or PyTorch's module.
        {"protocol": {"dp_noise": 0.0, "dp_clip": 1.0}, "batch_size": 0},
        {"protocol": {"dp_noise": 0.0, "dp_clip": 1.0, "local_epochs": 1}},
        {"protocol": {"form": "central", "class_weights": (1.0, 2.0, 0.5)}},
        {"protocol": {"perturb": "blocks"}},
        {"protocol": {"perturb": "blocks", "linear": "activations", "class_weights": (1.0, 2.0, 0.5)}},
        {"protocol": {"perturb": "blocks", "linear": "activations", "local_epochs": 1, "form": "central"}},
        {"protocol": {"perturb": "blocks", "linear": "activations", "clip_entry": 0.01}},
        {"protocol": {"perturb": "blocks", "directions": "own"}},
        {"protocol": {"perturb": "blocks", "dp_noise": 0.0, "dp_clip": 1.0}, "batch_size": 0},
    ],
)
def test_an_edge_silo_computes_what_the_others_do(options: Any) -> None:
    # One round: directions follow from the parameters' hash, so that a last digit makes the next round's other ones.
    plain, edge = (federation(names, dtype="float64", **options).train(1, seed=3) for names in ((), ("south",)))
    # ONNX Runtime's float64 products add in another order: 1e-15 of a loss is 1e-12 of a difference over sigma.
    np.testing.assert_allclose(weights(edge), weights(plain), rtol=0, atol=1e-9)
    assert edge.test["accuracy"] == plain.test["accuracy"]
    assert edge.record["dropped"] == []
    for one, other in zip(edge.history, plain.history, strict=True):
        assert one.get("loss", 0.0) == pytest.approx(other.get("loss", 0.0), rel=1e-9)
        assert one["bytes"]["up"] == other["bytes"]["up"]
        assert one["edge_peak_mib"] > 0
        assert ("local_forward" in one["seconds"]) == ("dp_clip" not in options.get("protocol", {}))
    assert edge.record["facts"]["edge_peak_mib"] == max(line["edge_peak_mib"] for line in edge.history)
    assert "edge_peak_mib" not in plain.record["facts"]


def test_an_edge_silo_varies_images_as_the_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_export, "graph_of", EXPORT)
    random = np.random.default_rng(2)
    parts = [Silo(name, random.normal(size=(20, 1, 6, 6)), random.integers(0, 3, 20)) for name in ("north", "south")]
    with seeded():
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))

    def trained(edge: tuple[str, ...], augment: str) -> Any:
        protocol = BAFFLE(loss="cross-entropy", k=16, optimizer="sgd", learning_rate=0.5)
        given: dict[str, Any] = {"batch_size": 8, "dtype": "float64", "insecure_secret_seed": 5, "augment": augment}
        return weights(Federation(model, parts, protocol, engine=Engine(edge=edge), **given).train(1, seed=3))

    varied = trained(("south",), "reflect-crop-flip")
    np.testing.assert_allclose(varied, trained((), "reflect-crop-flip"), rtol=0, atol=1e-9)
    assert np.abs(varied - trained((), "")).max() > 1e-3


class Recurrent(nn.Module):
    """A layer that runs row after row of its input, and one that reads the last state."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.states, self.head = kind(2, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        head: torch.Tensor = self.head(self.states(x)[0][:, -1])
        return head


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_model_trains_by_blocks(kind: type[nn.LSTM | nn.GRU], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_export, "graph_of", EXPORT)
    random = np.random.default_rng(2)
    x = {name: random.normal(size=(24, 6, 2)).astype("float32") for name in ("north", "south")}
    parts = [Silo(name, rows, (rows[:, -1, 0] > 0).astype("int64")) for name, rows in x.items()]
    with seeded():
        model = Recurrent(kind)

    def history(edge: tuple[str, ...], rounds: int) -> list[dict[str, Any]]:
        protocol = BAFFLE(loss="cross-entropy", perturb="blocks", learning_rate=0.05, ema=0.0)
        made = Federation(model, parts, protocol, engine=Engine(edge=edge), batch_size=24, insecure_secret_seed=5)
        return list(made.train(rounds, seed=3).history)

    (plain,), edge = history((), 1), history(("south",), 5)
    assert edge[0]["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert edge[-1]["loss"] < edge[0]["loss"]


def test_its_process_belongs_to_the_worker_that_plays_it() -> None:
    one, two = (federation(engine={"workers": workers}).train(2, seed=3) for workers in (1, 2))
    np.testing.assert_array_equal(weights(one), weights(two))
    assert one.record["dropped"] == two.record["dropped"] == []
    assert [line["bytes"] for line in one.history] == [line["bytes"] for line in two.history]
    assert min(line["edge_peak_mib"] for line in two.history) > 10


def test_a_process_that_dies_in_a_worker_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[list[int]] = []
    for workers in (1, 2):
        died: list[int] = []

        def answer(child: ChildClient, message: Message, died: list[int] = died) -> Message:
            if message.stamp.round == 2 and child._process is not None and not died:
                died.append(child._process._popen.pid)
                child._process.kill()
            return ANSWER(child, message)

        monkeypatch.setattr(ChildClient, "answer", answer)
        result = federation(engine={"workers": workers}, aggregation=SecureAggregation(threshold=2)).train(3, seed=3)
        assert [(gone["round"], gone["silo"]) for gone in result.record["dropped"]] == [(2, "south")]
        played.append([line["attempt"] for line in result.history])
        assert bool(died) == (workers == 1)  # else it was in another process
    assert played[0] == played[1]


def test_in_float32_losses_agree_to_rounding() -> None:
    all_edge, none = tuple(ROWS), ()
    plain, edge = (federation(names, engine={"strict": True}).train(1, seed=3) for names in (none, all_edge))
    assert edge.history[0]["loss"] == pytest.approx(plain.history[0]["loss"], rel=1e-6)
    # The step is 0.5 / 15 times 16 differences, each off by some 1e-7 / sigma.
    np.testing.assert_allclose(weights(edge), weights(plain), rtol=0, atol=1e-4)
    assert edge.test["accuracy"] == plain.test["accuracy"]
    moved = np.abs(weights(plain) - weights_of(mlp()))
    assert np.median(moved) > 1e-3


def test_it_learns_as_well() -> None:
    plain, edge = (federation(names, protocol=LONG).train(30, seed=3) for names in ((), ("south",)))
    assert edge.test["accuracy"] == pytest.approx(plain.test["accuracy"], abs=0.1)  # of 40 rows
    assert edge.history[-1]["loss"] < 0.7 * edge.history[0]["loss"]


@pytest.mark.parametrize("precision", ["float16", "int8-activations"])
def test_coarser_arithmetic_trains_too(precision: str) -> None:
    exact = federation(()).train(1, seed=3)
    coarse = federation(engine={"edge_precision": precision}, protocol=LONG).train(20, seed=3)
    assert coarse.record["dropped"] == []
    assert coarse.history[0]["loss"] == pytest.approx(exact.history[0]["loss"], rel=0.01)
    assert abs(coarse.history[0]["loss"] - exact.history[0]["loss"]) > 1e-6
    assert coarse.history[-1]["loss"] < 0.8 * coarse.history[0]["loss"]


ABSENT = ("torch", "sklearn", "scipy", "pandas", "matplotlib", "onnx", "onnxscript", "pydantic", "typer", "rich")
BLOCKER = """
import atexit, pathlib, sys
if "moretta.protocols.baffle.edge" in sys.orig_argv:
    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in {absent!r}:
                raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
    sys.meta_path.insert(0, Absent())
    found = pathlib.Path({found!r}).open("w")  # now, as the process can open it no more when it ends
    atexit.register(lambda: found.write(" ".join([*sys.modules, *sys.argv])))
"""


def test_its_process_needs_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with identities, which the process reads for itself."""
    (tmp_path / "site").mkdir()
    found = tmp_path / "modules"
    (tmp_path / "site" / "sitecustomize.py").write_text(BLOCKER.format(absent=ABSENT, found=str(found)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.chdir(tmp_path)
    entries = []
    for name in ROWS:
        identity = Identity.fresh()
        identity.save(tmp_path / name)
        entries.append(f'[[silo]]\nname = "{name}"\nkey = "{public_line(identity.public_key)}"\n')
    Path("roster.toml").write_text("".join(entries))
    signed = SecureAggregation(roster=Path("roster.toml"), identity="{silo}")
    result = federation(("south", "east"), aggregation=signed, insecure_secret_seed=None).train(2)
    assert result.record["dropped"] == []
    modules = found.read_text().split()
    assert "moretta.protocols.baffle.edge.host" in modules
    assert "onnxruntime" in modules
    assert not {*ABSENT, "moretta.run.federation", "moretta.config.run_files", "moretta.run.loop"}.intersection(modules)


@pytest.mark.skipif(sys.platform != "linux", reason="what a process sees is read from /proc")
def test_its_process_is_confined_before_it_loads_a_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[Any]
) -> None:
    """Not in the folder that its parent is in, which has the keys of a kit."""
    (tmp_path / "client.key").write_text("secret")
    monkeypatch.chdir(tmp_path)
    seen = []

    def look(line: object) -> None:
        seen.extend((process.pid, os.listdir(f"/proc/{process.pid}/cwd"), status(process.pid)) for process in started)

    def status(pid: int) -> str:
        return Path(f"/proc/{pid}/status").read_text().partition("NoNewPrivs:")[2].split()[0]

    federation().train(2, on_round=look)
    assert seen
    assert all(files == [] and (bound == "1" or not landlock()) for _, files, bound in seen), seen


def test_rehearsing_starts_nothing(started: list[Any]) -> None:
    federation().rehearse(3)
    assert started == []


def test_one_that_is_killed_misses_the_round_and_comes_back(started: list[Any]) -> None:
    def kill(number: int, rounds: int, line: Any) -> None:
        if number == 2:
            os.kill(started[0].pid, signal.SIGKILL)

    two = SecureAggregation(threshold=2)  # of three, which by default bear no loss
    result = federation(insecure_secret_seed=None, aggregation=two).train(4, progress=kill)
    (gone,) = result.record["dropped"]
    assert (gone["round"], gone["silo"]) == (3, "south")
    assert gone["reason"] == "disconnected: the process of silo `south` has ended (killed by signal 9)"
    # Batches of 16, 16, 8 rows of north, of 16, 15, 2 of south, and of 16, 9, 16 of east.
    assert [line["rows"] for line in result.history] == [48, 40, 24, 41]
    assert len(started) == 2


def test_below_the_minimum_its_end_costs_the_round(started: list[Any]) -> None:
    def kill(number: int, rounds: int, line: Any) -> None:
        with contextlib.suppress(ProcessLookupError):  # after round 1 it is gone
            os.kill(started[0].pid, signal.SIGKILL)

    least = SecureAggregation(min_survivors=3)
    (lost, *_) = federation(aggregation=least).train(3, progress=kill).record["lost"]
    assert lost["round"] == 2
    assert "at least 3 are needed" in str(lost)
    assert "the process of silo `south` has ended" in str(lost)


def test_too_little_memory_is_refused_with_what_is_needed(started: list[Any]) -> None:
    engine = {"memory_limit_mib": 60.0}
    with pytest.raises(ParameterError) as caught:
        federation(tuple(ROWS), engine, aggregation=NONE).train(2)
    said = str(caught.value)
    assert said.startswith("round 1: north: memory-limit-mib = 60: the client needs at least ")
    needed = float(said.split("set at least ")[1].split()[0])
    assert 50 < needed < 200
    assert len(started) == 3
    fits = federation(engine={"memory_limit_mib": needed + 10}, aggregation=NONE).train(2)
    assert fits.record["dropped"] == []
    assert fits.record["facts"]["edge_peak_mib"] <= needed + 10


def test_moments_of_a_model_of_any_size_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of Adam for each of 164,403 parameters: 1.3 MB, more than a message has room for in bytes."""
    monkeypatch.setattr(onnx_export, "graph_of", EXPORT)
    protocol = BAFFLE(loss="cross-entropy", k=2, local_epochs=1, learning_rate=0.01, ema=0.0)
    ends = []
    for edge in ((), ("south",)):
        model = perceptron(6, 400, 400, 3, seed=1)
        made = Federation(model, silos(), protocol, engine=Engine(edge=edge), aggregation=NONE, insecure_secret_seed=5)
        result = made.train(1, seed=3)
        assert result.record["dropped"] == []
        ends.append(weights(result))
    assert ends[0].size > 2**17
    np.testing.assert_allclose(*ends, rtol=0, atol=0.025)  # a sign of a float32 difference moves a weight by the rate


def many_rows(engine: dict[str, Any], **options: Any) -> Federation:
    random = np.random.default_rng(3)
    rows = [Silo(name, random.normal(size=(512, 6)), random.integers(0, 3, 512)) for name in ROWS]
    protocol = BAFFLE(loss="cross-entropy", **{"k": 3000, "optimizer": "sgd", "learning_rate": 0.1, **options})
    engine = {"edge": ("south",), **engine}
    return Federation(mlp(), rows, protocol, engine=Engine(**engine), batch_size=512, aggregation=NONE)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"form": "central"}, marks=pytest.mark.slow),
        pytest.param({"direction": "gaussian"}, marks=pytest.mark.slow),
        pytest.param({"dp_noise": 0.5, "dp_clip": 1.0}, marks=pytest.mark.slow),
        pytest.param({"directions": "own"}, marks=pytest.mark.slow),
    ],
)
def test_what_k_takes_is_kept_free(options: Any) -> None:
    said = many_rows({"memory_limit_mib": 60.0}, **options).train(1).record["dropped"][0]["reason"]
    k, rows = 3000, 512
    assert f" MiB for one row at a time, also for K = {k}; set at least " in said  # and nothing of how many rows
    needed = float(said.split("set at least ")[1].split()[0])
    # Beside them it has at least 40 MiB. Not counting them it would ask for its start's peak, some 66, which is less.
    assert needed > 40 + k * rows * 8 * 3 / 2**20
    fits = many_rows({"memory_limit_mib": needed}, **options).train(1)
    assert fits.record["dropped"] == []
    assert fits.record["facts"]["edge_peak_mib"] <= needed


def greedy(graph: bytes, *, at_load: bool) -> bytes:
    """Return a graph of the same outputs that makes an array of 800 MB on the way, in a run or already when loaded."""
    proto = onnx.load_from_string(graph)
    nodes = proto.graph.node
    output, nodes[-1].output[0] = nodes[-1].output[0], "before"
    for name, value in (("many", [200_000_000]), ("axis", [0])):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(value), name))
    make = onnx.helper.make_node
    if not at_load:
        nodes.extend([make("Shape", ["x"], ["rows"], start=0, end=1), make("Div", ["rows", "rows"], ["one"])])
        nodes.append(make("Mul", ["one", "many"], ["length"]))
    nodes.append(make("ConstantOfShape", ["many" if at_load else "length"], ["zeros"]))
    nodes.append(make("ReduceMax", ["zeros", "axis"], ["nought"], keepdims=1))
    nodes.append(make("Add", ["before", "nought"], [output]))
    return proto.SerializeToString()


def exporting(graph: bytes) -> Callable[..., Callable[[str], bytes]]:
    """Return what gives this graph in the place of the exported one."""
    return lambda *of: lambda runs: b"" if runs == "torch" else graph


@pytest.mark.parametrize("at_load", [False, True])
@pytest.mark.parametrize("micro_batch", [None, 4])
def test_a_graph_that_takes_all_memory_is_stopped(
    monkeypatch: pytest.MonkeyPatch, at_load: bool, micro_batch: int | None
) -> None:
    graph = greedy(exported(tuple(layout_of(mlp()).shapes), (6,), torch.float32, "float32", ()), at_load=at_load)
    monkeypatch.setattr(edge_client, "exporter", exporting(graph))
    engine = {"memory_limit_mib": 100.0, "micro_batch": micro_batch}
    result = federation(engine=engine, aggregation=NONE).train(2)
    for gone in result.record["dropped"]:
        assert gone["silo"] == "south"
        assert gone["reason"].startswith("bad input: ONNX Runtime cannot run this model: it asks for more memory than")
    assert len(result.record["dropped"]) >= 2
    assert 50 < result.record["facts"]["edge_peak_mib"] < 100 + HEADROOM


def test_a_limit_that_suffices_stops_nothing() -> None:
    """ONNX Runtime reserves more than it uses; what it may reserve has room for that."""
    program = """
import sys, numpy, onnx
from onnx import helper, TensorProto
from moretta.protocols.baffle.edge import metadata
from moretta.engines.usage import cap, peak_mib
from moretta.protocols.baffle.edge.host import fit
from moretta.protocols.baffle.edge.onnx_forward import OnnxForward
from moretta.protocols.baffle.silo.forward import Layout
layout = Layout({"w": (1, 1)}, "float32", bytes(32))
put = lambda name, shape: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
nodes = [helper.make_node("Conv", ["x", "k"], ["a"], pads=[1] * 4), helper.make_node("Relu", ["a"], ["b"]),
         helper.make_node("Sin", ["b"], ["c"]), helper.make_node("Add", ["a", "c"], ["d"]),
         helper.make_node("GlobalAveragePool", ["d"], ["e"]), helper.make_node("Flatten", ["e"], ["f"]),
         helper.make_node("Mul", ["f", "w"], ["outputs"])]
kernel = onnx.numpy_helper.from_array(numpy.ones((16, 3, 3, 3), "float32"), "k")
graph = helper.make_graph(nodes, "g", [put("x", ["rows", 3, 96, 96]), put("w", [1, 1])],
                          [put("outputs", ["rows", 16])], [kernel])
proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
helper.set_model_props(proto, metadata.written(layout, "float32"))
limit = peak_mib() + {room}
cap(limit)
forward, x = OnnxForward(proto.SerializeToString()), numpy.ones(({rows}, 3, 96, 96), "float32")
at = numpy.ones(1, "float32")
rows = fit(forward, x, limit, at)
for _ in range(5):
    forward.outputs(at[None], x)
assert peak_mib() <= limit
print(rows)
"""
    found = []
    for room in (40, 90, 300):
        words = [sys.executable, "-c", program.replace("{room}", str(room)).replace("{rows}", "64")]
        found.append(int(subprocess.run(words, capture_output=True, text=True, check=True).stdout))
    assert 1 <= found[0] < found[1] < found[2] == 64


@pytest.mark.parametrize(
    ("engine", "options", "said"),
    [
        (
            {"edge_precision": "int8-activations"},
            {"dtype": "float64"},
            "needs a float32 model, and this one is float64",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(engine: Any, options: Any, said: str) -> None:
    setting, layout = setting_of(nn.Sequential(nn.Linear(6, 3)), engine, options.get("dtype", "float32"))
    with pytest.raises(ParameterError, match=said):
        edge_client.check_graph(setting, layout, real_exporter(setting, layout))


class Branching(nn.Module):
    """Goes by the values, as no graph can."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x) if x.sum() > 0 else self.last(-x)


@pytest.mark.parametrize(
    ("model", "dtype", "precision", "said"),
    [
        (Branching(), "float32", "float32", "cannot be expressed in ONNX"),
        (nn.Sequential(nn.Linear(6, 3), nn.Hardswish()), "float64", "float16", "ONNX Runtime cannot run this model"),
    ],
)
def test_models_that_cannot_work_are_refused_quietly(
    model: nn.Module, dtype: str, precision: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    setting, layout = setting_of(model, {"edge_precision": precision}, dtype)
    with pytest.raises(ParameterError, match=f'^edge clients with edge-precision = "{precision}": .*{said}') as caught:
        edge_client.check_graph(setting, layout, real_exporter(setting, layout))
    assert len(str(caught.value).splitlines()) == 1
    assert "\x1b" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_what_works_is_exported_once() -> None:
    asked: list[str] = []

    def graph_of(precision: str) -> bytes:
        asked.append(precision)
        return exported(tuple(layout.shapes), (6,), torch.float32, precision, ())

    setting, layout = setting_of(mlp(), {}, "float32")
    edge_client.check_graph(replace(setting, spec=replace(setting.spec, engine=Engine())), layout, graph_of)
    assert asked == []
    edge_client._CHECKED.clear()
    for _ in range(3):
        again = replace(setting, built=copy.deepcopy(setting.built))
        edge_client.check_graph(again, layout, graph_of)
    assert asked == ["float32"]
    other = replace(setting, spec=replace(setting.spec, engine=Engine(edge=("south",), edge_precision="float16")))
    edge_client.check_graph(other, layout, graph_of)
    assert asked == ["float32", "float16"]


def setting_of(model: nn.Module, engine: dict[str, Any], dtype: str) -> tuple[Setting, Any]:
    kind = getattr(torch, dtype)
    model = model.to(kind)
    engine = {"edge": ("south",), **engine}
    run = Run(rounds=1, dtype=dtype)
    spec = Specification(run, Data(source="python", batch_size=16), BAFFLE(), NONE, Engine(**engine))
    setting = Setting(spec, model, 3, silos(), ColumnRules.alike(0))
    return setting, layout_of(model)


def real_exporter(setting: Setting, layout: Any) -> Callable[[str], bytes]:
    def graph_of(precision: str) -> bytes:
        return EXPORT(setting.model, layout, (6,), setting.dtype, precision)

    return graph_of


def test_one_that_dies_at_the_end_does_not_cost_the_result(started: list[Any]) -> None:
    def kill(number: int, rounds: int, line: Any) -> None:
        if number == rounds:
            os.kill(started[0].pid, signal.SIGKILL)
            started[0].wait()

    held_out = silos()[1]
    best = {"validation": (held_out.x, held_out.y), "early_stopping": 5}  # at the end the best round's states return
    result = federation(insecure_secret_seed=None, **best).train(2, progress=kill)
    assert len(result.history) == 2


def test_a_graph_of_another_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other = nn.Sequential(nn.Linear(6, 11), nn.Hardswish(), nn.Linear(11, 3))
    graph = EXPORT(other, layout_of(other), (6,), torch.float32, "float32")
    monkeypatch.setattr(edge_client, "exporter", exporting(graph))
    result = federation(aggregation=NONE).train(1)
    (first, *_) = result.record["dropped"]
    assert (first["silo"], first["round"]) == ("south", 1)
    assert first["reason"].startswith("bad input: the ONNX graph has other tensors")
    monkeypatch.setattr(edge_client, "exporter", exporting(b"no"))
    result = federation(aggregation=NONE).train(1)
    assert "bad input: these bytes are not an ONNX file" in result.record["dropped"][0]["reason"]


@pytest.mark.parametrize("steps", [{}, {"local_epochs": 1, "optimizer": "adam", "learning_rate": 0.02}])
def test_a_resumed_run_comes_to_the_same_bytes(tmp_path: Path, steps: dict[str, Any]) -> None:
    protocol = {"dp_noise": 0.5, "dp_clip": 1.0, **steps}  # so that its secrets matter too
    whole = federation(out=tmp_path / "whole", protocol=protocol).train(3)
    federation(out=tmp_path / "cut", protocol=protocol).train(1)
    again = federation(out=tmp_path / "cut", protocol=protocol).train(3, resume=True)
    assert again.record["sessions"] == 2
    assert again.record["facts"]["unit"] == ("silo" if steps else "row")
    assert again.record["facts"]["releases"] == 3.0
    bytes_of = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert bytes_of[0] == bytes_of[1]
    assert np.array_equal(weights(again), weights(whole))
    more = federation(out=tmp_path / "cut", protocol=protocol, engine={"micro_batch": 3, "memory_limit_mib": 500.0})
    assert more.train(4, resume=True).record["dropped"] == []
    for other in ((), ("east",)):
        with pytest.raises(ParameterError, match="begun with another run file or other settings"):
            federation(other, out=tmp_path / "cut", protocol=protocol).train(6, resume=True)
    with pytest.raises(ParameterError, match="begun with another run file or other settings"):
        federation(out=tmp_path / "cut", protocol=protocol, engine={"edge_precision": "float16"}).train(5, resume=True)


def test_adams_moments_outlive_its_process(tmp_path: Path, started: list[Any]) -> None:
    protocol = {"local_epochs": 1, "optimizer": "adam", "learning_rate": 0.02, "directions": "own"}
    whole = federation(protocol=protocol).train(3)
    federation(out=tmp_path, protocol=protocol).train(2)
    again = federation(out=tmp_path, protocol=protocol, engine={"memory_limit_mib": 200.0}).train(3, resume=True)
    assert np.array_equal(weights(again), weights(whole))
    assert len(started) == 3


def test_a_silos_secrets_outlive_its_process(tmp_path: Path, started: list[Any]) -> None:
    """With secrets of its own, of which lots and directions follow, a resumed run goes on from the checkpoint's."""
    options: dict[str, Any] = {"insecure_secret_seed": None, "protocol": {"dp_noise": 0.5, "dp_clip": 1.0}}
    one = federation(out=tmp_path / "one", **options)
    one.train(2)
    two = federation(out=tmp_path / "one", **options).train(3, resume=True)
    assert two.record["dropped"] == []
    assert len(started) == 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"edge": ("soth",)}, r"\[engine\] edge: no silo is called `soth`; did you mean `south`\?"),
        ({"edge": ("zzz",)}, r"\[engine\] edge: no silo is called `zzz`; the silos are north, south, east"),
    ],
)
def test_edge_silos_are_silos(options: Any, sentence: str) -> None:
    with pytest.raises(ParameterError, match=sentence):
        federation(**options)


def test_without_onnxruntime_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    for package, extra in (("onnxruntime", "edge"), ("onnxscript", "onnx")):
        absent = lambda name, package=package: None if name == package else real(name)  # noqa: E731
        monkeypatch.setattr(importlib.util, "find_spec", absent)
        with pytest.raises(
            ParameterError,
            match=rf"need {package}, .* run: pip install 'moretta\[{extra}\]'",
        ):
            federation().rehearse(1)


def test_what_a_silo_says_it_runs_does_not_stop_the_server() -> None:
    now, layout = Stamp("run", 1, 0), layout_of(mlp())
    with pytest.raises(PeerError, match=r"expected a silo that runs torch, float32, .* got 'float8'"):
        Committed(stamp=now, commitment=b"c" * 32, runs="float8")

    def graph_of(kind: str) -> bytes:
        if kind == "torch":
            return b""
        raise ParameterError("int8-activations needs a float32 model")

    roles = {name: Seed(name, casting_root(name)) for name in ROWS}
    runs = {"north": "torch", "south": "int8-activations", "east": "torch"}
    exchange = agree(now, list(ROWS), Seed("server", casting_root("server")), layout, graph_of)
    ask = next(exchange)
    assert isinstance(ask.messages["north"], Commit)
    committed = {
        name: Committed(stamp=now, commitment=role.begin("run", list(ROWS)), runs=runs[name])
        for name, role in roles.items()
    }
    ask = exchange.send(Replies(committed))
    shown: Any = ask.messages["north"]
    revealed = {name: Revealed(stamp=now, contribution=role.reveal(shown.commitments)) for name, role in roles.items()}
    with pytest.raises(StopIteration) as end:
        exchange.send(Replies(revealed))
    assert isinstance(end.value.value, Aborted)
    (gone,) = end.value.value.missing.items()
    assert gone[0] == "south"
    assert gone[1].detail == "int8-activations needs a float32 model"


def casting_root(name: str) -> Any:
    from moretta.secure_aggregation.keystream import SecretRoot

    return SecretRoot.insecure(1, name)
