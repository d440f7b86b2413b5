"""Graphs of somebody else's folder: hostile arguments end in a sentence, and what runs them reaches nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save
from test_cli import call
from test_python_models import SETTINGS, FedSGD, federation, rows

import moretta
from moretta.engines import process
from moretta.engines.confinement import landlock
from moretta.engines.process import ConfinedProcess
from moretta.errors import ParameterError
from moretta.models import operations
from moretta.models.graph import Graph, written
from moretta.run.foreign import ForeignGraph


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder of a run from Python, with its graph."""
    return Path(federation(FedSGD(**SETTINGS)).train(2).save(tmp_path_factory.mktemp("saved") / "model"))


def changed(saved: Path, folder: Path, nodes: list[dict[str, Any]]) -> Path:
    """Return a copy of the folder, whose graph has other nodes."""
    folder.mkdir()
    for path in saved.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    with safe_open(saved / "graph.safetensors", "pt") as file:
        told = json.loads(file.metadata()["graph"])
    told["nodes"], told["output"] = nodes, {"node": len(nodes) - 1}
    (folder / "graph.safetensors").write_bytes(save({}, {"graph": json.dumps(told)}))
    return folder


X = {"input": True}
HOSTILE: Mapping[str, tuple[list[Any], dict[str, Any]]] = {
    "_fft_r2c": ([X, [1 << 40, 0], 0, True], {}),
    "clone": ([X], {"memory_format": 4}),
    "_to_copy": ([X], {"memory_format": 4}),
    "full_like": ([X, 1.0], {"memory_format": 4}),
    "repeat": ([X, [1 << 20, 1 << 20]], {}),
}


@pytest.mark.parametrize(("name", "command"), [*((name, "predict") for name in HOSTILE), ("clone", "export")])
def test_arguments_that_end_a_process_are_a_sentence(name: str, command: str, saved: Path, tmp_path: Path) -> None:
    """The attack: a folder that needs no consent ends whoever predicts with it, by a signal."""
    if command == "export":
        pytest.importorskip("onnxscript")
    reads, by_name = HOSTILE[name]
    folder = changed(saved, tmp_path / "evil", [{"does": f"aten.{name}.default", "reads": reads, "by_name": by_name}])
    np.savez(tmp_path / "rows.npz", x=rows(2, 40)[0])
    out = tmp_path / ("out.npy" if command == "predict" else "model.onnx")
    words = ["--data", tmp_path / "rows.npz"] if command == "predict" else []
    done = call(command, folder, *words, "--out", out)
    assert done.code == 2
    assert f"`{name}`" in done.sentence or "memory" in done.sentence
    assert not out.exists()


FUZZ = """
import random, sys, warnings
import torch
from moretta.errors import ParameterError
from moretta.models import operations
from moretta.models.graph import Graph, written
warnings.simplefilter("ignore")
torch.set_num_threads(1)
NUMBERS = [-(1 << 63), -(1 << 31), -7, -3, -2, -1, 0, 1, 1, 2, 2, 3, 4, 5, 77, 1 << 31, 1 << 40, (1 << 63) - 1]
WORDS = [*operations.DTYPES, *operations.FORMATS, torch.strided, torch.sparse_coo, 4, 9, 77]

def value(r, kind, rank):
    if kind.startswith("Optional["):
        return None if r.random() < 0.3 else value(r, kind[9:-1], rank)
    if kind.startswith("List["):
        return [value(r, kind[5:-1], rank) for _ in range(r.choice([0, 1, 2, 2, 3, 4]))]
    if kind == "Tensor":
        shape = [r.choice([0, 1, 2, 3, 4, 6]) for _ in range(rank if r.random() < 0.7 else r.randrange(6))]
        found = torch.randn(shape).mul(3).to(r.choice([*[torch.float32] * 4, torch.int64, *operations.DTYPES]))
        return found.transpose(0, -1) if shape and r.random() < 0.2 else found
    if kind in ("int", "number"):
        return r.choice(NUMBERS)
    if kind in ("bool", "float", "str"):
        return {"bool": r.random() < 0.5, "float": r.choice([0.0, 2.0, -1.0, float("nan")]), "str": "sum"}[kind]
    return torch.device("cpu") if kind == "Device" else r.choice(WORDS)

for name in sorted(operations.ATEN):
    checked = operations.operation("aten." + (name if "." in name else name + ".default"))
    for number in range(int(sys.argv[1])):
        r = random.Random(f"{name} {number}")
        torch.manual_seed(number)
        print(name, number, flush=True)  # the last line says which one it was
        rank, given, by_name = r.randrange(6), [], {}
        for one in checked._does._schema.arguments:
            if one.kwarg_only:
                by_name[one.name] = value(r, str(one.real_type), rank)
            else:
                given.append(value(r, str(one.real_type), rank))
        try:
            checked(*given, **by_name)
        except (ParameterError, RuntimeError, ValueError, IndexError, TypeError, ZeroDivisionError, MemoryError):
            pass
print("done")
"""


def test_no_operation_ends_the_process_whatever_it_is_given() -> None:
    """A few calls of each: unless arguments are checked, `_fft_r2c`, `clone`, `_to_copy` and `full_like` do."""
    done = subprocess.run([sys.executable, "-c", FUZZ, "25"], capture_output=True, text=True, check=False, timeout=900)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "done"), done.stderr[-500:]


def test_a_graphs_process_is_the_one_that_runs_it(saved: Path) -> None:
    model, x = moretta.load(saved), rows(2, 9)[0]
    graph = model.model.model
    assert isinstance(graph, ForeignGraph)
    first = model.predict_proba(x)
    process = graph._process._process
    assert process is not None
    with torch.no_grad():
        assert torch.softmax(model(torch.tensor(x)).double(), 1).numpy() == pytest.approx(first, abs=1e-6)
    assert graph._process._process is process  # one for all that is asked
    if sys.platform == "linux":
        place = Path(f"/proc/{process._popen.pid}/cwd")
        assert place.resolve() != Path.cwd()
        assert list(place.iterdir()) == []
    folder = Path(os.readlink(f"/proc/{process._popen.pid}/cwd")) if sys.platform == "linux" else None
    graph._process.close()
    assert folder is None or not folder.exists()
    assert (model.predict_proba(x) == first).all()  # another one, with the same weights
    model.double()
    assert model.predict_proba(x) == pytest.approx(first, abs=1e-6)


def test_a_folder_that_is_trusted_runs_here_with_gradients(saved: Path) -> None:
    model, x = moretta.load(saved, allow_code=True), torch.tensor(rows(2, 9)[0], requires_grad=True)
    assert not isinstance(model.model.model, ForeignGraph)
    model(x).sum().backward()
    assert x.grad is not None
    assert (moretta.load(saved).predict(x.detach().numpy()) == model.predict(x.detach().numpy())).all()


# -- What a confined process may do ------------------------------------------------------------------------------------

PROGRAM = """
import os, pathlib, resource, signal, socket, sys, time
import numpy as np
from moretta.engines import process

def answer(request):
    what = request["what"].tobytes().decode()
    if what == "reads":
        return {"got": np.fromfile(request["path"].tobytes().decode(), np.uint8)}
    if what == "writes":
        pathlib.Path("here").write_text("a file")
    if what == "writes there":
        pathlib.Path(request["path"].tobytes().decode()).with_name("there").write_text("a file")
    if what == "connects":
        socket.create_connection(("127.0.0.1", 9), 1)
    if what == "limits":
        return {"got": np.array(resource.getrlimit(resource.RLIMIT_CORE))}
    if what == "fills":
        return {"got": np.ones(1 << 42, np.uint8)}
    if what == "hangs":
        time.sleep(60)
    if what == "dies":
        signal.raise_signal(signal.SIGSEGV)
    if what == "prints":
        os.write(confined_output, b"x" * 99)
    return {"got": request["what"]}

confined_output = os.dup(1)
process.serve(answer)
"""


def said(what: str, path: Path = Path("none"), seconds: float = 120.0) -> dict[str, np.ndarray[Any, Any]]:
    process = ConfinedProcess("none")
    try:
        arrays = {"what": what, "path": str(path)}
        return process.ask({name: np.frombuffer(text.encode(), np.uint8) for name, text in arrays.items()}, seconds)
    finally:
        process.close()


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "command", lambda *words: [sys.executable, "-P", "-c", PROGRAM])


@pytest.mark.usefixtures("program")
def test_a_confined_process_reaches_nothing(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"key")
    assert said("limits")["got"].tolist() == [0, 0]
    with pytest.raises(ParameterError, match="MemoryError"):
        said("fills")
    if landlock():
        for what, error in (("reads", "Permission"), ("writes", "Permission"), ("writes there", "Permission")):
            with pytest.raises(ParameterError, match=error):
                said(what, tmp_path / "secret")
        assert not (tmp_path / "there").exists()
    if landlock() >= 4:
        with pytest.raises(ParameterError, match="Permission"):
            said("connects")


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize(
    ("what", "sentence"),
    [("dies", "has ended .*signal 11"), ("prints", "sent a malformed answer")],
)
def test_how_a_confined_process_ends_is_one_sentence(what: str, sentence: str) -> None:
    with pytest.raises(ParameterError, match=sentence) as caught:
        said(what)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.usefixtures("program")
def test_a_confined_process_has_so_much_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "START", 0.0)
    with pytest.raises(ParameterError, match="did not answer within 5 s"):
        said("hangs", seconds=5.0)


WRITES = """
import os, sys
from pathlib import Path
from moretta.engines.confinement import confine, readable
confine(readable(), [Path(sys.argv[1])])
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_APPEND)
os.ftruncate(descriptor, 6)  # of half a line, as after a power cut
os.write(descriptor, b"second\\n")
try:
    Path(sys.argv[1]).with_name("another").write_text("")
except OSError:
    print("refused")
"""


def test_a_record_is_cut_and_added_to_by_a_process_that_can_make_no_file(tmp_path: Path) -> None:
    """As an edge client's record of the sums that it has helped to open."""
    record = tmp_path / "helped.jsonl"
    record.write_bytes(b"first\nhal")
    words = [sys.executable, "-c", WRITES, str(record)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert record.read_bytes() == b"first\nsecond\n"
    assert done.stdout == ("refused\n" if landlock() else "")


def test_words_alone_name_formats_and_dtypes() -> None:
    assert set(map(type, operations.WORDS.values())) == {torch.dtype, torch.memory_format, torch.layout}
    with pytest.raises(ParameterError, match="is not a core operation of PyTorch"):
        operations.operation("aten._embedding_bag.default")


def test_a_graph_larger_than_the_free_memory_is_refused_by_name(saved: Path, tmp_path: Path) -> None:
    """A file without content on the disk may be of any size."""
    folder = changed(saved, tmp_path / "evil", [])
    os.truncate(folder / "graph.safetensors", 1 << 42)
    with pytest.raises(ParameterError, match=r"graph\.safetensors takes .* of memory"):
        moretta.load(folder)


class WithNumbers(torch.nn.Module):
    """A model that computes with numbers, and with the number of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.bias - x) * 2 + 1 + x / 3 - 0.5 + x.sum(0) / x.shape[0]


def test_a_model_that_computes_with_numbers_is_read_again() -> None:
    """PyTorch exports `x * 2` as a product of tensors, one of which is a number."""
    found = Graph.read(written(WithNumbers(), (3,), torch.float32), {"bias": np.ones(3, np.float32)})
    for count in (2, 5):
        x = torch.randn(count, 3)
        torch.testing.assert_close(found(x), WithNumbers()(x))


class Counting(torch.nn.Linear):
    """A model that counts its calls in a buffer of the outputs' shape."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("calls", torch.zeros(1, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def test_a_model_that_changes_a_buffer_is_read_again_with_its_outputs() -> None:
    """PyTorch exports the changed buffer as a result before the outputs."""
    model = Counting()
    tensors = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    found, x = Graph.read(written(model, (3,), torch.float32), tensors), torch.randn(1, 3)
    torch.testing.assert_close(found(x), model(x))


@pytest.mark.parametrize("name", ["outputs", "request", "read"])
def test_a_layer_may_have_the_name_of_a_method_of_graphs(name: str) -> None:
    class Named(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(name, torch.nn.Linear(3, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = self.get_submodule(name)(x)
            return outputs

    model, x = Named(), torch.randn(4, 3)
    tensors = {key: tensor.numpy().copy() for key, tensor in model.state_dict().items()}
    file = written(model, (3,), torch.float32)
    for kind in (Graph, ForeignGraph):
        found = kind.read(file, tensors)
        assert set(found.state_dict()) == set(tensors)
        with torch.no_grad():
            torch.testing.assert_close(found(x), model(x))


def fresh(saved: Path) -> tuple[Any, list[np.ndarray], list[np.ndarray]]:
    """Return a model of the folder, two inputs of equal length, and what is predicted of each."""
    model = moretta.load(saved)
    first = rows(2, 40)[0]
    inputs = [first, first[::-1].copy()]
    outputs = [model.predict_proba(x) for x in inputs]
    assert not np.allclose(outputs[0], outputs[1])
    return model, inputs, outputs


def test_an_interrupted_request_does_not_answer_the_next(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (first, second), (_, wanted) = fresh(saved)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(process, "receive_arrays", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.predict_proba(first)
    np.testing.assert_array_equal(model.predict_proba(second), wanted)


def test_threads_get_the_answers_to_their_own_requests(saved: Path) -> None:
    model, inputs, outputs = fresh(saved)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda turn: model.predict_proba(inputs[turn % 2]), range(16)))
    for turn, one in enumerate(found):
        np.testing.assert_array_equal(one, outputs[turn % 2])


def test_a_fork_has_a_process_of_its_own_and_leaves_the_first_one() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, check=False, timeout=120, stdin=subprocess.DEVNULL
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "other\nsame\n", "")


FORK = """
import os, sys
from moretta.engines.process import ConfinedProcess
process = ConfinedProcess("moretta.run.foreign")
def pid():
    try:
        process.ask({})
    except Exception:
        pass
    return process._process._popen.pid
first = pid()
if os.fork() == 0:
    print("other" if pid() != first else "the parent's", flush=True)
    sys.exit(0)
os.wait()
print("same" if pid() == first else "ended")
"""
