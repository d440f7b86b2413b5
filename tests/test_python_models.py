"""Models of runs from Python: they take raw rows, are saved, loaded and used by the shell; nothing is unpickled."""

from __future__ import annotations

import json
import weakref
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import perceptron
from safetensors import safe_open
from safetensors.torch import save
from test_cli import call
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import moretta
from moretta import BAFFLE, CGD, PBPFL, Centralised, FedAvg, Federation, FedSGD, Local, Schema, Silo, read_table
from moretta.errors import ParameterError
from moretta.models import graph
from moretta.run.trained_model import TrainedModel

Rows = tuple[np.ndarray, np.ndarray]
SETTINGS: dict[str, Any] = {"loss": "cross-entropy", "learning_rate": 0.3}


def rows(seed: int, count: int) -> Rows:
    """Rows of which no model learns anything unless their columns are standardised."""
    x = (np.random.default_rng(seed).normal(0, 1, (count, 3)) * [1, 100, 0.01] + [60, 4000, 3]).astype(np.float32)
    return x, (x[:, 0] - 60 + (x[:, 1] - 4000) / 100 > 0).astype(np.int64)


def test_the_words_for_no_value_stay_with_the_model(tmp_path: Path) -> None:
    kinds = {"a": {"kind": "number", "blanks": "mean"}, "y": {"kind": "target", "classes": ["no", "yes"]}}
    schema, silos = Schema.model_validate({"columns": kinds}), list[Silo]()
    for name in ("north", "south"):
        a = np.random.default_rng(len(silos)).normal(50, 10, 40).round()
        cells = ["-9" if number < 4 else str(one) for number, one in enumerate(a)]
        known = read_table({"a": cells, "y": np.where(a > 50, "yes", "no")}, schema, absent="-9")
        silos.append(Silo(name, known.x, known.y))
    made = Federation(
        {"source": "mlp", "hidden": [4]}, silos, FedSGD(**SETTINGS), standardise=True, table=schema, absent=["-9"],
        out=tmp_path / "run",
    )  # fmt: skip
    result = made.train(5, progress=False)
    result.save(tmp_path / "saved")
    (tmp_path / "new.csv").write_text("a\n-9\n-9.0\n60\n")
    new = read_table(tmp_path / "new.csv", schema, labelled=False, absent=["-9"])
    wanted = result.predict_proba(new.x)
    assert (wanted[0] == wanted[1]).all()
    for model in (result, moretta.load(tmp_path / "run"), moretta.load(tmp_path / "saved")):
        assert (model.predict_proba({"a": [-9.0, "-9", 60]}) == wanted).all()
    for folder in ("run", "saved"):
        done = call("predict", tmp_path / folder, "--data", tmp_path / "new.csv", "--out", tmp_path / "out.csv")
        assert done.code == 0, done.err
        lines = (tmp_path / "out.csv").read_text().splitlines()[1:]
        assert [float(line.split(",")[2]) for line in lines] == wanted[:, 1].tolist()


def network() -> nn.Module:
    return perceptron(3, 8, 2, between=nn.ReLU)


def federation(protocol: Any, **settings: Any) -> Federation:
    silos = [Silo("north", *rows(0, 60)), Silo("south", *rows(1, 50))]
    chosen: dict[str, Any] = {"model": network(), "standardise": True, "test": rows(2, 40)} | settings
    return Federation(silos=silos, protocol=protocol, **chosen)


PROTOCOLS = (PBPFL, FedSGD, FedAvg, BAFFLE, Centralised, Local, CGD)


@pytest.mark.parametrize("kind", PROTOCOLS, ids=lambda kind: kind.__name__)
def test_what_was_trained_predicts_raw_rows_wherever_it_is_loaded(kind: Any, tmp_path: Path) -> None:
    protocol = kind(loss="cross-entropy") if kind is BAFFLE else kind(**SETTINGS)
    made = federation(protocol, out=tmp_path / "run", model={"source": "mlp", "hidden": [8]})
    result = made.train(6 if kind in (BAFFLE, CGD) else 40, seed=7)
    x, y = rows(2, 40)
    whose: dict[str, Any] = {"silo": "north"} if result.models else {}
    assert bool(result.models) == (kind in (Local, CGD))
    ours = result.predict(x, **whose)
    scores = result.test["per_silo"]["north"] if whose else result.test
    assert (ours == y).mean() == pytest.approx(scores["accuracy"], abs=1e-15)
    if kind not in (BAFFLE, CGD):
        assert scores["accuracy"] > 0.8  # 0.5 where standardising stays outside
    for folder in (result.save(tmp_path / "saved"), tmp_path / "run"):
        loaded = moretta.load(folder, **whose)
        assert isinstance(loaded, nn.Module)
        assert (loaded.predict(x) == ours).all()
        assert (loaded.predict_proba(x) == result.predict_proba(x, **whose)).all()
        with torch.no_grad():
            assert (loaded(torch.tensor(x)).argmax(1).numpy() == ours).all()
    assert not list(tmp_path.rglob("saved/model.safetensors"))  # the server's true model stays in the run folder


@pytest.mark.parametrize("kind", [Local, CGD], ids=lambda kind: kind.__name__)
def test_where_each_silo_has_its_own_model_one_is_named(kind: Any, tmp_path: Path) -> None:
    result = federation(kind(**SETTINGS), model={"source": "mlp"}).train(2)
    with pytest.raises(ParameterError, match=r'silo is missing: .*north, south.*name one, for example silo="north"'):
        result.predict(rows(2, 4)[0])
    with pytest.raises(ParameterError, match=r'silo = "nort": expected a silo .*north, south'):
        result.predict(rows(2, 4)[0], silo="nort")
    with pytest.raises(ParameterError, match="name one by silo="):
        moretta.load(result.save(tmp_path / "saved"))


def test_the_true_model_is_had_by_its_key(tmp_path: Path) -> None:
    result = federation(PBPFL(**SETTINGS), out=tmp_path / "run", model={"source": "mlp"}).train(5)
    x = rows(2, 40)[0]
    ours, loaded = result.raw_model(true_model=True), moretta.load(tmp_path / "run", true_model=True)
    with torch.no_grad():
        assert torch.equal(ours(torch.tensor(x)), loaded(torch.tensor(x)))


def test_the_shell_predicts_and_reports_a_run_from_python(tmp_path: Path) -> None:
    x = rows(2, 40)[0]
    np.savez(tmp_path / "rows.npz", x=x)
    result = federation(FedSGD(**SETTINGS), out=tmp_path / "run", feature_names=["a", "b", "c"]).train(5)
    words = ("predict", tmp_path / "run", "--data", tmp_path / "rows.npz", "--out", tmp_path / "out.npy")
    assert "Result.save()" in call(*words).sentence  # before its graph is there
    result.save()
    done = call(*words)
    assert done.code == 0, done.err
    assert (np.load(tmp_path / "out.npy").argmax(1) == result.predict(x)).all()
    assert call("report", tmp_path / "run", "--out", tmp_path / "page.html").code == 0


def test_a_graph_becomes_an_onnx_graph(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    x = rows(2, 40)[0]
    result = federation(FedSGD(**SETTINGS)).train(2)
    saved = result.save(tmp_path / "saved")
    assert call("export", saved, "--out", tmp_path / "model.onnx").code == 0
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    with torch.no_grad():
        outputs = result.raw_model()(torch.tensor(x)).numpy()
    assert np.abs(session.run(None, {"x": x})[0] - outputs).max() < 1e-5


NETS = """
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

def build(hidden=8):
    return nn.Sequential(nn.Linear(3, hidden), nn.ReLU(), nn.Linear(hidden, 2))
"""


def test_a_model_that_can_be_imported_needs_no_graph_but_consent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nets_of_mine.py").write_text(NETS)
    made = federation(FedSGD(**SETTINGS), model={"source": "nets_of_mine:build", "hidden": 5}, out="run")
    result = made.train(3)
    saved = result.save("saved")
    assert not (saved / graph_name()).exists()
    for folder in ("saved", "run"):
        with pytest.raises(ParameterError, match=r"names code that would be run as you: build of nets_of_mine .*allow"):
            moretta.load(folder)
        loaded = moretta.load(folder, allow_code=True)
        assert (loaded.predict(rows(2, 9)[0]) == result.predict(rows(2, 9)[0])).all()
    done = call("export", "run", "--out", "weights.safetensors")
    assert done.code == 0, done.err


def test_a_built_in_model_needs_neither(tmp_path: Path) -> None:
    made = federation(FedSGD(**SETTINGS), model={"source": "mlp", "hidden": [4]}, out=tmp_path / "run")
    result = made.train(3)
    loaded = moretta.load(tmp_path / "run")
    assert (loaded.predict(rows(2, 9)[0]) == result.predict(rows(2, 9)[0])).all()
    assert federation(FedSGD(), model="mlp").outputs == 1  # two classes under the squared error


FEDERATION = """
import numpy as np
from test_python_models import FedSGD, SETTINGS, federation

def made():
    return federation(FedSGD(**SETTINGS), out="run", record_views=True, insecure_secret_seed=3)

def other():
    return federation(FedSGD(loss="cross-entropy"), out="run")

def nothing():
    return None
"""


def test_the_shell_audits_a_run_from_python_with_what_returns_its_federation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("made_here.py").write_text(FEDERATION)
    federation(FedSGD(**SETTINGS), out="run", record_views=True, insecure_secret_seed=3).train(2, seed=5)
    assert "--federation module:function" in call("audit", "run").sentence
    assert (
        "settings or the seed in run.toml have changed"
        in call("audit", "run", "--federation", "made_here:other").sentence
    )
    assert "must return the moretta.Federation" in call("audit", "run", "--federation", "made_here:nothing").sentence
    assert not Path("run/audit.json").exists()


def test_such_an_audit_runs_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("made_here.py").write_text(FEDERATION)
    federation(FedSGD(**SETTINGS), out="run", record_views=True, insecure_secret_seed=3).train(2, seed=5)
    done = call("audit", "run", "--federation", "made_here:made", "--json")
    assert done.code == 0, done.err
    assert json.loads(Path("run/audit.json").read_text())["attacks"]


# -- Tables and several arrays -----------------------------------------------------------------------------------------

SCHEMA = """
[columns.age]
kind = "number"
blanks = "mean"
[columns.ward]
kind = "category"
categories = ["A", "B", "C"]
blanks = "category"
[columns.outcome]
kind = "target"
classes = ["no", "yes"]
"""


def words(seed: int, count: int) -> dict[str, list[Any]]:
    random = np.random.default_rng(seed)
    ages = [float(one) for one in random.normal(60, 12, count).round()]
    wards = ["ABC"[one] for one in random.integers(0, 3, count)]
    outcome = ["yes" if age > 60 else "no" for age in ages]
    ages[3] = float("nan")
    wards[4] = ""
    return {"age": ages, "ward": wards, "outcome": outcome}


@pytest.mark.parametrize("source", ["mlp", "embeddings"])
def test_a_table_is_predicted_by_its_words(source: str, tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(SCHEMA)
    schema = Schema.load(tmp_path / "schema.toml")
    parts = [read_table(words(seed, 50), schema) for seed in (0, 1)]
    silos = [Silo(name, part.x, part.y) for name, part in zip(("north", "south"), parts, strict=True)]
    linear = {"source": source, "hidden": []}
    made = Federation(linear, silos, FedSGD(**SETTINGS), standardise=True, table=schema, out=tmp_path / "run")
    result = made.train(60, seed=1)
    fresh = words(2, 30)
    targets = np.array(fresh.pop("outcome"))
    found = result.predict(dict(reversed(fresh.items())))  # whatever the order of its columns
    assert (found == targets).mean() > 0.85
    loaded = moretta.load(tmp_path / "run")
    assert loaded.classes == ("no", "yes")
    coded, given = read_table(fresh, schema, labelled=False), loaded.predict_proba(fresh)
    for one in (fresh, coded.x, coded.coded, coded.coded.tolist()):
        assert (loaded.predict(one) == found).all()
    with torch.no_grad():
        for tensor in (coded.x, coded.coded):
            assert (np.array(loaded.classes)[loaded(torch.tensor(tensor)).argmax(1).numpy()] == found).all()
    for cast, near in ((loaded.double, 1e-6), (loaded.float, 1e-6), (loaded.half, 1e-2)):
        cast()  # what prepares rows keeps its digits
        with torch.no_grad():
            softmax = torch.softmax(loaded(torch.tensor(coded.coded)).double(), 1).numpy()
        np.testing.assert_allclose(softmax, given, atol=near)
        np.testing.assert_allclose(loaded.predict_proba(fresh), given, atol=near)
    by_name, by_number = (loaded.evaluate(fresh, y) for y in (targets, (targets == "yes").astype(int)))
    assert by_name == by_number
    fresh["ward"] = ["Z"] * 30
    with pytest.raises(ParameterError, match="x: column 'ward' has a word that the schema does not have in 30 of 30"):
        loaded.predict(fresh)


class Joined(nn.Module):
    """Token ids and two numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(9, 4), nn.Linear(6, 2)

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(torch.cat([self.tokens(ids).mean(1), numbers], 1))
        return outputs


def arrays(seed: int, count: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    random = np.random.default_rng(seed)
    numbers = (random.normal(0, 1, (count, 2)) * 100 + 4000).astype(np.float32)
    return {"ids": random.integers(0, 9, (count, 5)), "numbers": numbers}, (numbers[:, 0] > 4000).astype(np.int64)


def test_samples_of_several_arrays(tmp_path: Path) -> None:
    silos = [Silo("north", *arrays(0, 60)), Silo("south", *arrays(1, 60))]
    made = Federation(Joined(), silos, FedSGD(**SETTINGS), test=arrays(2, 40), standardise=True, out=tmp_path / "run")
    result = made.train(60)
    x, y = arrays(2, 40)
    assert (result.predict(x) == y).mean() == result.test["accuracy"] > 0.8
    loaded = moretta.load(result.save(tmp_path / "saved"))
    assert (loaded.predict(x) == result.predict(x)).all()
    with torch.no_grad():
        outputs = loaded(**{name: torch.tensor(one) for name, one in x.items()})
    assert (outputs.argmax(1).numpy() == result.predict(x)).all()


# -- Graphs ------------------------------------------------------------------------------------------------------------


def graph_name() -> str:
    from moretta.run.trained_model import GRAPH

    return GRAPH


NETWORKS: Mapping[str, tuple[nn.Module, tuple[int, ...], torch.dtype]] = {
    "convolutions": (
        nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU(), nn.MaxPool2d(2), nn.GroupNorm(2, 4),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(4, 3),
        ),
        (3, 8, 8),
        torch.float32,
    ),
    "a transformer": (
        nn.Sequential(nn.Embedding(11, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Flatten(),
                      nn.Linear(40, 2)),
        (5,),
        torch.int64,
    ),
}  # fmt: skip


def drawn(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype, path: Path) -> nn.Module:
    path.write_bytes(graph.written(model, shape, dtype))
    return graph.Graph.read(path.read_bytes(), {name: one.detach().numpy() for name, one in model.state_dict().items()})


@pytest.mark.parametrize("name", NETWORKS)
def test_a_graph_computes_what_the_model_does(name: str, tmp_path: Path) -> None:
    model, shape, dtype = NETWORKS[name]
    found = drawn(model, shape, dtype, tmp_path / "graph.safetensors")
    model.eval()
    assert list(found.state_dict()) == list(model.state_dict())
    for count in (1, 2, 7):
        x = torch.rand(count, *shape) if dtype.is_floating_point else torch.randint(0, 11, (count, *shape))
        with torch.no_grad():
            assert torch.allclose(found(x), model(x), atol=1e-6)


class Alive(TorchDispatchMode):
    """Counts how many results of operations are there at once."""

    def __init__(self) -> None:
        super().__init__()
        self.refs, self.most = list[weakref.ref[Any]](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.refs.append(weakref.ref(out))
        self.most = max(self.most, sum(ref() is not None for ref in self.refs))
        return out


def test_a_graph_keeps_no_result_that_nothing_reads_any_more(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(8)], nn.Linear(4, 2))
    found = drawn(model, (4,), torch.float32, tmp_path / "graph.safetensors")
    with Alive() as alive, torch.no_grad():
        found(torch.zeros(3, 4))
    assert len(alive.refs) > 16
    assert alive.most <= 4


@pytest.mark.parametrize("name", ["_steps", "constant_0", "_done"])
def test_a_tensor_whose_name_a_graph_has_for_itself_is_refused(name: str) -> None:
    model = nn.Linear(3, 2)
    model.register_buffer(name, torch.ones(2))
    with pytest.raises(ParameterError, match=f"graphs reserve the name `{name}`"):
        graph.written(model, (3,), torch.float32)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(x) if x.sum() > 0 else self.head(-x)
        return outputs


def test_a_model_that_cannot_be_followed_says_what_to_do_and_leaves_nothing(tmp_path: Path) -> None:
    result = federation(FedSGD(**SETTINGS), model=Branching()).train(2)
    with pytest.raises(ParameterError, match=r'cannot be exported as a graph .*model="module:function"') as caught:
        result.save(tmp_path / "saved")
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "saved").exists()


def told_of(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    with safe_open(path, "pt") as file:
        names = file.keys()
        return json.loads((file.metadata() or {})["graph"]), {name: file.get_tensor(name) for name in names}


BAD: Mapping[str, Any] = {
    "a function of torch": "torch.load",
    "a file": "aten.from_file.default",
    "in place": "aten.add_.Tensor",
    "an attribute": "aten.__class__.default",
    "an operator": "sizes.attrgetter",
    "a module's function": "os.system",
    "no operation": "aten.nothing.default",
    "memory as it was": "aten.empty.memory_format",
    "offsets before the first row": "aten._embedding_bag.default",
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graph") / "graph.safetensors"
    drawn(network(), (3,), torch.float32, path)
    return path


def test_a_norm_whose_tensors_are_too_short_reads_nothing_beyond_them(tmp_path: Path) -> None:
    model, shape, dtype = NETWORKS["convolutions"]
    path = tmp_path / "graph.safetensors"
    path.write_bytes(graph.written(model, shape, dtype))
    told, constants = told_of(path)
    tensors = {name: one.detach().numpy() for name, one in model.state_dict().items()}
    for name in ("1.weight", "1.bias", "1.running_mean", "1.running_var"):
        told["tensors"][name]["shape"], tensors[name] = [1], tensors[name][:1]
    path.write_bytes(save(constants, {"graph": json.dumps(told)}))
    with pytest.raises(ParameterError, match=r"`_native_batch_norm_legit.*` has shapes that it cannot take"):
        graph.Graph.read(path.read_bytes(), tensors)(torch.zeros(2, *shape))


def test_a_norm_without_statistics_takes_the_batch_s(plain: Path, tmp_path: Path) -> None:
    path, model = tmp_path / "graph.safetensors", network()
    told, constants = told_of(plain)
    reads = [{"input": True}, None, None, False, 0.1, 1e-5]
    told["nodes"] = [{"does": "aten._native_batch_norm_legit.no_stats", "reads": reads, "by_name": {}}]
    path.write_bytes(save(constants, {"graph": json.dumps(told)}))
    read = graph.Graph.read(path.read_bytes(), {name: one.detach().numpy() for name, one in model.state_dict().items()})
    with pytest.raises(ParameterError, match=r"`_native_batch_norm_legit.*` has shapes that it cannot take"):
        read(torch.zeros(2, 3))
    instances = nn.Sequential(nn.InstanceNorm1d(2, affine=True), nn.Flatten(), nn.Linear(8, 2))
    found, x = drawn(instances, (2, 4), torch.float32, tmp_path / "instances.safetensors"), torch.rand(3, 2, 4)
    assert torch.allclose(found(x), instances.eval()(x), atol=1e-6)


@pytest.mark.parametrize("reads", [["a", 1 << 40], [[0], 1 << 40], [1 << 64, 1 << 64]])
def test_arithmetic_is_on_sizes_alone(reads: list[Any], plain: Path, tmp_path: Path) -> None:
    path, model = tmp_path / "graph.safetensors", network()
    told, constants = told_of(plain)
    told["nodes"] = [{"does": "sizes.mul", "reads": reads, "by_name": {}}]
    told["output"] = {"node": 0}
    path.write_bytes(save(constants, {"graph": json.dumps(told)}))
    read = graph.Graph.read(path.read_bytes(), {name: one.detach().numpy() for name, one in model.state_dict().items()})
    with pytest.raises(ParameterError, match="a value that is not a size"):
        read(torch.zeros(2, 3))


@pytest.mark.parametrize("does", BAD.values(), ids=BAD.keys())
def test_a_graph_of_somebody_else_runs_core_operations_alone(does: str, plain: Path, tmp_path: Path) -> None:
    path, model = tmp_path / "graph.safetensors", network()
    told, constants = told_of(plain)
    told["nodes"][0]["does"] = does
    path.write_bytes(save(constants, {"graph": json.dumps(told)}))
    with pytest.raises(ParameterError, match="is not a core operation of PyTorch"):
        graph.Graph.read(path.read_bytes(), {name: one.detach().numpy() for name, one in model.state_dict().items()})


def test_an_archive_of_torch_export_is_never_opened(tmp_path: Path) -> None:
    """`torch.export.load` unpickles; so neither a file of its kind nor one under our name is given to it."""
    result = federation(FedSGD(**SETTINGS)).train(2)
    saved = result.save(tmp_path / "saved")
    with zipfile.ZipFile(saved / graph_name(), "w") as archive:
        archive.writestr("archive/data/weights/model.pt", b"cos\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(ParameterError, match="expected the graph of a model"):
        moretta.load(saved)


def test_a_raw_model_says_what_it_is() -> None:
    result = federation(FedSGD(**SETTINGS), feature_names=["a", "b", "c"]).train(2)
    model = result.raw_model()
    assert isinstance(model, TrainedModel)
    assert repr(model) == "TrainedModel(classification, rows [3])"
    assert (model.task, model.columns, model.training) == ("classification", ("a", "b", "c"), False)
    absent = torch.tensor([[60.0, float("nan"), 3.0], [60.0, 4000.0, 3.0]])
    with torch.no_grad():
        assert torch.isnan(model(absent)).any(1).tolist() == [True, False]
