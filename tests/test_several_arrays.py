"""A sample of several arrays, from silos and files through every protocol to predictions and ONNX."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import seeded
from refused_rows import Row, refused
from torch import Tensor, nn

from moretta import (
    BAFFLE,
    CGD,
    PBPFL,
    Centralised,
    Engine,
    FedAvg,
    Federation,
    FedSGD,
    Local,
    SecureAggregation,
    Silo,
)
from moretta.config import run_files
from moretta.data.layout import pack
from moretta.engines.run_folder import read_json, read_model
from moretta.errors import ParameterError
from moretta.models.hooks import Unpack, takes_arrays, takes_packed, with_one_argument
from moretta.protocols.common import modules
from moretta.protocols.common.batches import Batches
from moretta.protocols.common.enrolment import SiloRows
from moretta.protocols.common.lattice import Privacy
from moretta.protocols.common.losses import Loss
from moretta.protocols.common.modules import first_weights
from moretta.protocols.common.noise import SiloNoise
from moretta.protocols.common.silo_rows import TrainingRows
from moretta.protocols.common.training import Training
from moretta.protocols.fedsgd.private import PrivateGradient
from moretta.run.assembly import federation_of
from moretta.run.export import export
from moretta.run.prediction import predict
from moretta.run.trained_model import ModelChoice
from moretta.secure_aggregation.keystream import SecretRoot

LENGTH, WORDS, CLASSES = 6, 20, 2
CLEAR = SecureAggregation(scheme="none")
Arrays = dict[str, Any]

NETS = """
import torch
from torch import nn

class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.table, self.head = nn.Embedding(20, 4), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, ids, mask, table):
        pooled = (self.words(ids) * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        return self.head(torch.relu(pooled + self.table(table)))

class ByHand(Masked):
    def forward(self, x):
        return super().forward(x[:, :6].long(), x[:, 6:12], x[:, 12:])
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The models, as a user's module beside a run file."""
    (tmp_path / "nets_of_arrays.py").write_text(NETS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("nets_of_arrays")
    sys.modules.pop("nets_of_arrays", None)


def built(kind: Any) -> nn.Module:
    with seeded():
        model: nn.Module = kind()
        return model


def rows(count: int, seed: int = 0, *, scale: float = 1.0) -> tuple[Arrays, np.ndarray]:
    """Padded token ids with their mask, and a table; the class follows from the first word."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, LENGTH + 1, count)
    mask = (np.arange(LENGTH) < lengths[:, None]).astype(np.float32)
    ids = generator.integers(0, WORDS, (count, LENGTH)) * mask.astype(np.int64)
    table = (3.0 + generator.normal(0, scale, (count, 3))).astype(np.float32)
    return {"ids": ids, "mask": mask, "table": table}, (ids[:, 0] >= WORDS // 2).astype(np.int64)


def silos(*, by_hand: bool = False, sizes: tuple[int, ...] = (20, 16, 24), scale: float = 1.0) -> list[Silo]:
    found = []
    for number, size in enumerate(sizes):
        x, y = rows(size, number, scale=scale)
        found.append(Silo(f"silo-{number}", pack(x, "")[0] if by_hand else x, y))
    return found


def tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(one) for name, one in arrays.items()}


def made(model: nn.Module, given: list[Silo], protocol: Training, **settings: Any) -> Federation:
    chosen: dict[str, Any] = {"batch_size": 8, "insecure_secret_seed": 5, "evaluate_every": 1000, **settings}
    return Federation(model, given, protocol, **chosen)


# -- the module that takes packed rows ---------------------------------------------------------------------------------


def test_a_model_keeps_its_class_and_its_names(nets: Any) -> None:
    x, _ = rows(5)
    packed, layout = pack(x, "rows")
    model = built(nets.Masked)
    names = list(model.state_dict())
    wanted = model(**tensors(x))
    taking = takes_packed(model, layout)
    assert taking is model
    assert list(model.state_dict()) == names
    assert torch.equal(takes_packed(model, layout)(torch.from_numpy(packed)), wanted)  # twice is once
    assert torch.equal(model(**tensors(x)), wanted)
    assert torch.equal(takes_arrays(model)(**tensors(x)), wanted)
    with pytest.raises(TypeError):
        model(torch.from_numpy(packed))


def test_integers_are_whole_in_the_model_and_numbers_of_the_rows_dtype(nets: Any) -> None:
    packed, layout = pack(rows(5)[0], "rows")
    found = Unpack(layout).arrays(torch.from_numpy(packed).double())
    assert {name: one.dtype for name, one in found.items()} == {
        "ids": torch.int64,
        "mask": torch.float64,
        "table": torch.float64,
    }


def test_torch_export_sees_one_argument(nets: Any) -> None:
    packed, layout = pack(rows(5)[0], "rows")
    model = takes_packed(built(nets.Masked), layout)
    wanted, given = model(torch.from_numpy(packed)), (torch.from_numpy(packed),)
    dimensions = ({0: torch.export.Dim("rows")},)
    program = torch.export.export(with_one_argument(model), given, dynamic_shapes=dimensions, strict=False)
    assert torch.equal(program.module()(*given), wanted)
    assert set(program.state_dict) == set(model.state_dict())


# -- every protocol ----------------------------------------------------------------------------------------------------

PROTOCOLS: dict[str, tuple[Training, dict[str, Any]]] = {
    "fedsgd": (FedSGD(loss="cross-entropy", learning_rate=0.1), {}),
    "fedsgd, mse": (FedSGD(loss="mse", learning_rate=0.1), {}),
    "cgd": (CGD(loss="cross-entropy", learning_rate=0.1), {}),
    "baffle, edge": (BAFFLE(loss="cross-entropy", k=8), {"engine": Engine(edge=("silo-1",))}),
    "baffle": (BAFFLE(loss="cross-entropy", k=8), {}),
    "fedavg": (FedAvg(loss="cross-entropy", learning_rate=0.1), {}),
    "local": (Local(loss="cross-entropy", learning_rate=0.1), {}),
    "centralised": (Centralised(loss="cross-entropy", learning_rate=0.1), {}),
}


def weights(federation: Federation, out: Path) -> dict[str, bytes]:
    federation.train(rounds=2, seed=1)
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*.safetensors")}


@pytest.mark.parametrize("case", PROTOCOLS)
def test_it_trains_as_on_rows_packed_by_hand_to_the_last_bit(nets: Any, case: str, tmp_path: Path) -> None:
    protocol, settings = PROTOCOLS[case]
    found = []
    for kind, given in ((nets.Masked, silos()), (nets.ByHand, silos(by_hand=True))):
        out = tmp_path / kind.__name__
        found.append(weights(made(built(kind), given, protocol, out=out, **settings), out))
    names = [name for name in found[0] if "checkpoint" not in name]
    assert names
    assert {name: found[0][name] for name in names} == {name: found[1][name] for name in names}


def test_each_row_is_clipped_as_on_rows_packed_by_hand(nets: Any) -> None:
    x, y = rows(20)
    packed, layout = pack(x, "rows")
    own = SiloRows(TrainingRows(packed, y, Batches(20, 8, 0, "north")), torch.float32)
    loss, root = Loss("cross-entropy"), SecretRoot.insecure(0, "north")
    private = PrivateGradient(SiloNoise(Privacy(1.0, 0.1, 1e-5), 20, 8, root, b""), own, loss)
    models = takes_packed(built(nets.Masked), layout), built(nets.ByHand)
    ours, theirs = (private.clipped_sum(model, np.array([0, 3, 17])) for model in models)
    assert {name: value.tobytes() for name, value in ours.items()} == {
        name: value.tobytes() for name, value in theirs.items()
    }


@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_pbpfl_trains_it_exactly(nets: Any, loss: Any) -> None:
    """Its keys are drawn by what it sees of inputs, so it is compared with plain training, in float64."""
    settings = {"dtype": "float64", "standardise": True}
    ours = made(built(nets.Masked), silos(), PBPFL(loss=loss, learning_rate=0.1), **settings).train(4, 1)
    plain = made(built(nets.Masked), silos(), FedSGD(loss=loss, learning_rate=0.1), **settings).train(4, 1)
    assert ours.model is not None
    assert plain.model is not None
    theirs = plain.model.state_dict()
    for name, value in ours.model.state_dict().items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-7)


def test_a_resumed_run_ends_with_the_same_bytes(nets: Any, tmp_path: Path) -> None:
    protocol = PBPFL(loss="cross-entropy", learning_rate=0.1)
    whole = made(built(nets.Masked), silos(), protocol, out=tmp_path / "whole", standardise=True)
    whole.train(3, 1)
    parts = made(built(nets.Masked), silos(), protocol, out=tmp_path / "parts", standardise=True)
    parts.train(2, 1)
    parts.train(3, 1, resume=True)
    released = [(tmp_path / name / "released.safetensors").read_bytes() for name in ("whole", "parts")]
    assert released[0] == released[1]


def test_strict_messages_carry_it(nets: Any) -> None:
    for engine in (Engine(), Engine(strict=True)):
        result = made(built(nets.Masked), silos(), FedSGD(loss="cross-entropy"), engine=engine).train(1, 1)
        assert result.record["dropped"] == []


# -- standardisation by array ------------------------------------------------------------------------------------------


def test_only_the_table_is_standardised_and_asked_about(nets: Any, tmp_path: Path) -> None:
    given = silos(scale=5.0)
    run = made(built(nets.Masked), given, FedSGD(loss="cross-entropy"), standardise=True, out=tmp_path / "out")
    result = run.train(1, 1)
    inputs = read_json(tmp_path / "out" / "inputs.json")
    assert list(inputs["arrays"]) == ["ids", "mask", "table"]
    assert [name for name, one in inputs["arrays"].items() if one["standardised"]] == ["table"]
    pooled = np.concatenate([silo.x[:, -3:] for silo in given]).astype(np.float64)
    np.testing.assert_allclose(inputs["mean"], [0.0] * 12 + pooled.mean(0).tolist(), rtol=1e-12)
    np.testing.assert_allclose(inputs["deviation"], [1.0] * 12 + pooled.std(0).tolist(), rtol=1e-12)
    # The result takes arrays as the silos have them; its tensors have the names that they had.
    assert result.model is not None
    assert list(result.model.state_dict()) == list(built(nets.Masked).state_dict())
    x, _ = rows(7, 99, scale=5.0)
    plain = built(nets.Masked)
    modules.load(plain, read_model(tmp_path / "out", "model.safetensors"))
    scaled = (x["table"].astype(np.float64) - pooled.mean(0)) / pooled.std(0)
    expected = plain.eval()(**tensors({**x, "table": scaled.astype(np.float32)}))
    torch.testing.assert_close(result.model(**tensors(x)), expected, rtol=0, atol=1e-6)
    ids, mask, table = tensors(x).values()
    torch.testing.assert_close(result.model(ids, mask, table), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(result.model(ids, mask, table=table), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("named", [["table"], []])
def test_arrays_are_standardised_by_name(nets: Any, named: list[str]) -> None:
    run = made(built(nets.Masked), silos(), FedSGD(loss="cross-entropy"), standardise=named)
    assert run.layout is not None
    assert [one.name for one in run.layout.arrays if one.standardised] == named


# -- padding -----------------------------------------------------------------------------------------------------------


def alone(x: Arrays, row: int) -> dict[str, Tensor]:
    """One row by itself, without its padding."""
    length = int(x["mask"][row].sum())
    end = {"ids": length, "mask": length, "table": 3}
    return tensors({name: one[row : row + 1, : end[name]] for name, one in x.items()})


def test_padded_rows_are_evaluated_as_each_by_itself(nets: Any) -> None:
    x, _ = rows(40)
    packed, layout = pack(x, "rows")
    model = built(nets.Masked).eval()
    each = torch.cat([model(**alone(x, row)) for row in range(40)])
    together = modules.outputs_of(takes_packed(model, layout), torch.from_numpy(packed))
    torch.testing.assert_close(together, each, rtol=0, atol=1e-6)


def test_a_round_over_padded_rows_steps_by_the_mean_over_rows_by_themselves(nets: Any) -> None:
    given = silos()
    protocol = FedSGD(loss="cross-entropy", learning_rate=1.0, optimizer="sgd")
    result = made(built(nets.Masked), given, protocol, batch_size=0, aggregation=CLEAR).train(1, 1)
    assert result.model is not None
    start = first_weights(built(nets.Masked)).float()
    for number, silo in enumerate(given):
        x, y = rows(len(silo.x), number)
        for row in range(len(y)):
            loss = nn.functional.cross_entropy(start(**alone(x, row)), torch.from_numpy(y[row : row + 1]))
            (loss / sum(len(one.x) for one in given)).backward()
    for name, parameter in start.named_parameters():
        assert parameter.grad is not None
        step = parameter.detach() - result.model.state_dict()[name]
        torch.testing.assert_close(step, parameter.grad, rtol=0, atol=1e-6)


# -- run files ---------------------------------------------------------------------------------------------------------

RUN = """
[run]
rounds = 2
insecure-secret-seed = 3
[data]
source = "{source}"
standardise = ["table"]
[model]
source = "nets_of_arrays:Masked"
[protocol]
name = "fedsgd"
loss = "cross-entropy"
"""


def saved(path: Path, x: Arrays, part: str = "x", **others: Any) -> None:
    np.savez(path, **{f"{part}.{name}": one for name, one in x.items()}, **others)


def trained(folder: Path, source: str, name: str) -> Path:
    (folder / "run.toml").write_text(RUN.format(source=source))
    run_file = run_files.load(folder / "run.toml")
    federation_of(run_file, folder / name).train(run_file.run.rounds, run_file.run.seed)
    return folder / name


def test_a_file_and_a_function_train_to_the_same_bytes(nets: Any, tmp_path: Path) -> None:
    x, y = rows(60)
    parts = {"x_train": {k: v[:48] for k, v in x.items()}, "x_test": {k: v[48:] for k, v in x.items()}}
    named = {f"{part}.{k}": v for part, one in parts.items() for k, v in one.items()}
    np.savez(tmp_path / "all.npz", y_train=y[:48], y_test=y[48:], **named)
    (tmp_path / "arrays_to_load.py").write_text(
        "import numpy as np\nfrom pathlib import Path\nfrom moretta.data.layout import gather\n"
        "def load():\n    held = np.load(Path(__file__).parent / 'all.npz')\n"
        "    return gather(held, 'x_train'), held['y_train'], gather(held, 'x_test'), held['y_test']\n"
    )
    out = [trained(tmp_path, source, f"run-{n}") for n, source in enumerate(("all.npz", "arrays_to_load:load"))]
    released = [(folder / "released.safetensors").read_bytes() for folder in out]
    assert released[0] == released[1]
    assert read_json(out[0] / "inputs.json") == read_json(out[1] / "inputs.json")


def test_new_rows_are_predicted_alike_by_the_shell_python_and_onnx(nets: Any, tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    x, y = rows(60)
    saved(tmp_path / "all.npz", x, y=y)
    out = trained(tmp_path, "all.npz", "out")
    x, _ = rows(9, 42)
    saved(tmp_path / "new.npz", x)
    assert predict(out, tmp_path / "new.npz", tmp_path / "new.npy", ModelChoice(allow_code=True))[:2] == (9, CLASSES)
    found = np.load(tmp_path / "new.npy")
    one = {name: array[4:5] for name, array in x.items()}
    saved(tmp_path / "one.npz", one)
    predict(out, tmp_path / "one.npz", tmp_path / "one.npy", ModelChoice(allow_code=True))
    np.testing.assert_allclose(np.load(tmp_path / "one.npy"), found[4:5], rtol=0, atol=1e-6)
    export(out, tmp_path / "model.onnx", ModelChoice(allow_code=True))
    session = ort.InferenceSession(tmp_path / "model.onnx")
    assert {put.name: (put.type, put.shape[1:]) for put in session.get_inputs()} == {
        "ids": ("tensor(int64)", [LENGTH]),
        "mask": ("tensor(float)", [LENGTH]),
        "table": ("tensor(float)", [3]),
    }
    np.testing.assert_allclose(session.run(["outputs"], x)[0], found, rtol=0, atol=1e-6)


class Aged(nn.Module):
    """Takes one number a row beside a table."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, age: Tensor, table: Tensor) -> Tensor:
        outputs: Tensor = self.head(torch.cat([age[:, None], table], 1))
        return outputs


def test_one_number_a_row_is_an_array_of_the_module_too() -> None:
    random = np.random.default_rng(0)
    x = {"age": random.normal(size=20).astype(np.float32), "table": random.normal(size=(20, 2)).astype(np.float32)}
    given = [Silo(name, x, np.arange(20) % 2) for name in "ab"]
    result = made(Aged(), given, FedSGD(loss="cross-entropy")).train(1, progress=False)
    with torch.no_grad():
        outputs = result.raw_model()(**tensors(x))
    np.testing.assert_allclose(torch.softmax(outputs, 1), result.predict_proba(x), atol=1e-6)


BAD_FILES: list[tuple[Arrays, str]] = [
    ({"mask": None}, "x: array `mask` is missing; expected ids, mask, table"),
    ({"ids": np.zeros((4, LENGTH))}, "x: array `ids` holds numbers, expected integers"),
    ({"table": np.full((4, 3), np.nan)}, "x: array `table` column 0 is NaN or infinite in 4 rows"),
    ({"note": np.zeros(4)}, "x: array `note` is unexpected"),
]


@pytest.mark.parametrize(("changed", "said"), BAD_FILES)
def test_rows_that_cannot_be_predicted_name_the_array(nets: Any, changed: Arrays, said: str, tmp_path: Path) -> None:
    x, y = rows(60)
    saved(tmp_path / "all.npz", x, y=y)
    out = trained(tmp_path, "all.npz", "out")
    new = {name: one for name, one in (rows(4, 1)[0] | changed).items() if one is not None}
    saved(tmp_path / "new.npz", new)
    with pytest.raises(ParameterError, match=said):
        predict(out, tmp_path / "new.npz", tmp_path / "new.npy", ModelChoice(allow_code=True))
    assert not (tmp_path / "new.npy").exists()


# -- what cannot be ----------------------------------------------------------------------------------------------------


@refused("several_arrays.txt")
def test_what_cannot_be_is_refused(row: Row, request: pytest.FixtureRequest) -> None:
    row.play(globals(), request)


def test_test_rows_have_the_silos_arrays(nets: Any) -> None:
    x, y = rows(8)
    x.pop("mask")
    with pytest.raises(ParameterError, match="test: array `mask` is missing; expected ids, mask, table"):
        made(built(nets.Masked), silos(), FedSGD(loss="cross-entropy"), test=(x, y))
    with pytest.raises(ParameterError, match="validation: array `mask` is missing"):
        made(built(nets.Masked), silos(), FedSGD(loss="cross-entropy"), validation=(x, y))
    with pytest.raises(ParameterError, match="test: expected one array of inputs, as the silos have; got arrays by n"):
        made(nn.Linear(15, 2), silos(by_hand=True), FedSGD(loss="cross-entropy"), test=(x, y))


def test_a_built_in_model_takes_one_array(nets: Any, tmp_path: Path) -> None:
    x, y = rows(60)
    saved(tmp_path / "all.npz", x, y=y)
    text = RUN.format(source="all.npz").replace("nets_of_arrays:Masked", "mlp")
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ParameterError, match=r'model "mlp" takes one array, but a sample has the arrays ids \[6\]'):
        federation_of(run_files.load(tmp_path / "run.toml"), None)


SITES = """
[run]
rounds = 2
[data]
source = "sites"
classes = 2
{data}
[model]
source = "nets_of_arrays:Masked"
[protocol]
name = "fedsgd"
[engine]
name = "flare"
sites = ["a", "b", "c"]
"""
INPUTS = "inputs = {ids = [6], mask = [6], table = [3]}\n"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            INPUTS + 'tokens = true\nstandardise = ["table"]',
            r'tokens: expected names of the arrays .* for example \["ids"\]',
        ),
        (
            INPUTS + 'tokens = ["words"]\nstandardise = []',
            "tokens: there is no array `words`; inputs has ids, mask or t",
        ),
        (INPUTS + 'tokens = ["ids"]', "standardise: expected a list of arrays, of mask, table"),
        (INPUTS + 'tokens = ["ids"]\nstandardise = true', "standardise: expected a list of arrays, of mask, table"),
        (INPUTS + 'tokens = ["ids"]\nstandardise = ["ids"]', "standardise: array `ids` holds integers"),
        ('inputs = [6]\ntokens = ["ids"]', "tokens lists arrays, and inputs is the shape of one; set true or false"),
        ("inputs = {class = [6]}\nstandardise = []", "an array of a sample is called 'class'"),
        (INPUTS + 'tokens = ["ids"]\nstandardise = []\npartition = "grid"\ngrid = [1, 3]', "splits the columns of one"),
    ],
)
def test_a_run_file_of_sites_says_what_is_wrong(data: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(SITES.format(data=data))
    with pytest.raises(ParameterError, match=said):
        run_files.load(tmp_path / "run.toml")


def test_a_run_file_of_sites_survives_being_sent(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(SITES.format(data=INPUTS + 'tokens = ["ids"]\nstandardise = ["table"]'))
    run_file = run_files.load(tmp_path / "run.toml")
    sent = run_files.loads(run_files.dumps(run_file), tmp_path / "sent.toml")
    assert sent.data.layout == run_file.data.layout is not None
    assert run_files.digest(sent) == run_files.digest(run_file)


def test_noise_is_bound_to_which_entries_are_which_array(nets: Any) -> None:
    given = silos()
    protocol = FedSGD(loss="cross-entropy", dp_noise=1.0, dp_clip=1.0)
    run = made(built(nets.Masked), given, protocol)
    setting = run._setting(1, 1)
    layout = setting.layout
    assert layout is not None
    other = replace(layout, arrays=tuple(replace(one, shape=(*one.shape, 1)) for one in layout.arrays))
    digests = {replace(setting, layout=one).bound("schema") for one in (None, layout, other)}
    assert len(digests) == 3
