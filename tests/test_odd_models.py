"""Odd models, arrays and modes of torch have two outcomes: the run trains, or one sentence says what to do.

Models that people bring keep tensors with a history, are pruned or weight-normed in the old way, have sparse gradients
or batch normalisation; they call under no_grad or autocast, and their arrays have any layout and byte order.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from moretta import BAFFLE, CGD, PBPFL, Engine, FedAvg, Federation, FedSGD, Result, SecureAggregation, Silo
from moretta.errors import MorettaError, ParameterError, RunFailed

SOFT: dict[str, Any] = {"loss": "cross-entropy", "learning_rate": 0.1}
KINDS = {"FedSGD": FedSGD(**SOFT), "FedAvg": FedAvg(**SOFT), "PBPFL": PBPFL(**SOFT), "CGD": CGD(**SOFT)} | {
    "BAFFLE": BAFFLE(loss="cross-entropy", k=2)
}


def rows(seed: int, count: int = 13) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.normal(size=(count, 4)).astype(np.float32), np.arange(count) % 2


def federation(model: nn.Module, protocol: Any, change: Any = lambda x: x, **options: Any) -> Federation:
    silos = [Silo(name, change(x), y) for name, (x, y) in (("a", rows(0)), ("b", rows(1, 17)))]
    return Federation(model, silos, protocol, test=(change(rows(2)[0]), rows(2)[1]), **{"batch_size": 4} | options)


def weights_of(result: Result, name: str) -> Tensor:
    assert result.model is not None
    found: Tensor = result.model.state_dict()[name]
    return found


class Remembers(nn.Linear):
    """Keeps what it computed last, with its history."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


class Rounded(nn.Module):
    """Numbers become places of a table with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(x.abs().clamp(max=4).long()).mean(1)


class Detaches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


class Half(nn.Module):
    """Computes in another dtype inside."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).to(x.dtype)


def pruned(layer: nn.Module) -> nn.Module:
    prune.l1_unstructured(layer, "weight", amount=0.3)
    return layer


def called(layer: nn.Module) -> nn.Module:
    layer(torch.ones(2, 4))
    return layer


LAYERS: dict[str, Any] = {
    "linear": lambda: nn.Linear(4, 4),
    "batch norm": lambda: nn.BatchNorm1d(4),
    "batch norm without statistics": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "layer norm": lambda: nn.LayerNorm(4),
    "dropout": lambda: nn.Dropout(0.3),
    "relu in place": lambda: nn.ReLU(inplace=True),
    "tanh": nn.Tanh,
    "old weight norm": lambda: weight_norm(nn.Linear(4, 4)),
    "old weight norm, called": lambda: called(weight_norm(nn.Linear(4, 4))),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "spectral norm": lambda: spectral_norm(nn.Linear(4, 4)),
    "pruned": lambda: pruned(nn.Linear(4, 4)),
    "pruned, called": lambda: called(pruned(nn.Linear(4, 4))),
    "remembers": lambda: Remembers(4, 4),
    "remembers, called": lambda: called(Remembers(4, 4)),
    "sparse table": Rounded,
    "frozen": lambda: nn.Linear(4, 4).requires_grad_(False),
    "double": lambda: nn.Linear(4, 4).double(),
    "half": lambda: nn.Linear(4, 4).half(),
    "bfloat inside": Half,
    "detaches": Detaches,
}
MODES: dict[str, Any] = {
    "plainly": nullcontext,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}
ARRAYS: dict[str, Any] = {
    "as they are": lambda x: x,
    "in columns": np.asfortranarray,
    "the other byte order": lambda x: x.astype(x.dtype.newbyteorder()),
    "backwards": lambda x: x[::-1, ::-1],
    "every other": lambda x: np.repeat(np.repeat(x, 2, 0), 2, 1)[::2, ::2],
    "read only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
    "half": lambda x: x.astype(np.float16),
    "long double": lambda x: x.astype(np.longdouble),
    "objects": lambda x: x.astype(object),
    "masked": lambda x: np.ma.masked_greater(x, 1.5),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@settings(deadline=None, max_examples=5 * settings().max_examples)
@given(
    layers=st.lists(st.sampled_from(sorted(LAYERS)), max_size=3),
    kind=st.sampled_from(sorted(KINDS)),
    mode=st.sampled_from(sorted(MODES)),
    arrays=st.sampled_from(sorted(ARRAYS)),
)
def test_an_odd_model_trains_or_is_refused_by_one_sentence(
    layers: list[str], kind: str, mode: str, arrays: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(LAYERS[name]() for name in layers), nn.Linear(4, 2))
    context: AbstractContextManager[Any] = MODES[mode]()
    try:
        with context:
            result = federation(model, KINDS[kind], ARRAYS[arrays]).train(2, seed=1, progress=False)
    except MorettaError as error:
        said = str(error)
        assert 0 < len(said) < 1200
        assert "\n" not in said
        return
    scores = result.test or next(iter(result.record["test"]["silos"].values()))
    assert np.isfinite(scores["accuracy"])


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("layer", ["old weight norm, called", "pruned, called", "weight norm"])
@pytest.mark.parametrize("kind", ["PBPFL", "BAFFLE"])
def test_what_computes_its_weight_from_others_trains_those(layer: str, kind: str) -> None:
    """By no faster way for plain layers, which would read a weight that is no parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(LAYERS[layer](), nn.ReLU(), nn.Linear(4, 2))
    result = federation(model, KINDS[kind]).train(3, seed=1, progress=False)
    assert not result.record["dropped"]
    assert np.isfinite(result.test["loss"])


TAKEN = sorted(set(LAYERS) - {"detaches", "spectral norm", "remembers, called"})


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("layer", TAKEN)
def test_fedsgd_takes_all_that_torch_can_train(layer: str) -> None:
    """And it trains the same as under no_grad, whose caller forgot it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), LAYERS[layer](), nn.Linear(4, 2))
    weights = []
    for mode in ("plainly", "inference", "autocast"):
        with MODES[mode]():
            trained = federation(model, KINDS["FedSGD"], insecure_secret_seed=3).train(2, seed=1, progress=False)
        weights.append(weights_of(trained, "2.weight"))
    assert not torch.equal(weights[0], model.state_dict()["2.weight"])
    assert all(torch.equal(one, weights[0]) for one in weights)


@pytest.mark.parametrize("name", sorted(set(ARRAYS) - {"half", "masked", "objects"}))
def test_rows_train_alike_however_their_array_is_laid_out(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2))

    def weights(change: Any) -> Tensor:
        made = federation(model, KINDS["FedSGD"], change, insecure_secret_seed=3).train(2, seed=1, progress=False)
        return weights_of(made, "0.weight")

    def backwards(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x[::-1, ::-1])

    same = backwards if name == "backwards" else ARRAYS["as they are"]
    assert torch.equal(weights(ARRAYS[name]), weights(same))


@pytest.mark.parametrize("dtype", ["int16", "uint16", "int32", "uint32", "uint64"])
@pytest.mark.parametrize("tensor", [False, True])
def test_token_ids_of_any_width_are_embedded(dtype: str, tensor: bool) -> None:
    ids = np.random.default_rng(0).integers(0, 9, (13, 4)).astype(dtype)
    model = nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(12, 2))
    silos = [Silo(name, torch.from_numpy(ids) if tensor else ids, np.arange(13) % 2) for name in "ab"]
    result = Federation(model, silos, KINDS["FedSGD"], test=(ids, np.arange(13) % 2)).train(1, progress=False)
    assert (result.predict(ids) == result.predict(ids.astype(np.int64))).all()


# -- Batches of one row ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FedSGD, FedAvg, PBPFL], ids=lambda kind: kind.__name__)
def test_batch_normalisation_trains_where_a_last_batch_would_have_one_row(kind: Any, tmp_path: Path) -> None:
    """13 and 17 rows by 4: both leave one over."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    result = federation(model, kind(**SOFT), out=tmp_path).train(6, progress=False)
    assert not result.record["dropped"]


def test_what_failed_says_whose_fault_it_is() -> None:
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if self.training and len(x) > 2:
                raise RuntimeError("no batches of more than two rows")
            return super().forward(x)

    with pytest.raises(RunFailed) as caught:
        federation(Fails(4, 2), KINDS["FedSGD"]).train(1, progress=False)
    assert "each silo reports the same, so the cause is the model or a setting" in str(caught.value)
    assert "nothing of the run is kept, as it has no `out`" in str(caught.value)
    assert "checkpoint" not in str(caught.value)
    faults = {"drop": [{"round": 1, "silo": "a"}]}
    with pytest.raises(RunFailed, match="bring the others back; nothing of the run is kept"):
        federation(nn.Linear(4, 2), KINDS["FedSGD"], engine=Engine(faults=faults)).train(1, progress=False)


def test_a_model_of_a_run_goes_on_from_where_it_was() -> None:
    change = lambda x: x * np.float32(100) + np.float32(7)  # noqa: E731
    options: dict[str, Any] = {"change": change, "aggregation": SecureAggregation(scheme="none")}
    first = federation(nn.Sequential(nn.Linear(4, 2)), KINDS["FedSGD"], standardise=True, **options)
    done = first.train(40, progress=False)
    still = FedSGD(loss="cross-entropy", learning_rate=1e-9)
    assert done.model is not None
    again = federation(done.model, still, **options).train(1, progress=False)
    assert again.test["loss"] == pytest.approx(done.test["loss"], rel=1e-4)
    for model in (done.model, done.raw_model()):
        with pytest.raises(ParameterError, match="leave standardise out"):
            federation(model, still, standardise=True, **options)


# -- What runs and may not be meant ------------------------------------------------------------------------------------


def warnings_of(model: nn.Module, protocol: Any, change: Any = lambda x: x, **options: Any) -> str:
    return " ".join(federation(model, protocol, change, **options).train(1, progress=False).record["warnings"])


@pytest.mark.parametrize("last", [nn.Softmax(1), nn.Sigmoid()], ids=["softmax", "sigmoid"])
def test_outputs_that_are_probabilities_already_are_said_under_cross_entropy(last: nn.Module) -> None:
    said = "outputs of the model lie between 0 and 1"
    assert said in warnings_of(nn.Sequential(nn.Linear(4, 2), last), KINDS["FedSGD"])
    assert said not in warnings_of(nn.Sequential(nn.Linear(4, 2), last), FedSGD(loss="mse"))
    assert said not in warnings_of(nn.Sequential(nn.Linear(4, 2)), KINDS["FedSGD"])


class Squeezed(nn.Linear):
    """Takes the axis of outputs off, and that of rows where there is one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze()


class Dropped(nn.Module):
    """Drops inputs in evaluation too, as the default of the function has it."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5)


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
@pytest.mark.parametrize("layer", [Dropped, Centred, LAYERS["batch norm without statistics"]])
def test_outputs_that_change_with_the_rows_beside_them_are_said(layer: Any, loss: Any) -> None:
    model = nn.Sequential(layer(), nn.Linear(4, 2))
    assert "change with the rows beside it, or each time" in warnings_of(model, FedSGD(loss=loss))


class Words(nn.Module):
    """Attends among the words of a row, or by PyTorch's default among the rows of a batch."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 8), nn.Linear(8, 2)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)

    def forward(self, ids: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.attention(self.words(ids)).mean(1))
        return outputs


@pytest.mark.parametrize("several", [False, True])
def test_words_that_attend_to_other_rows_are_said(several: bool) -> None:
    change = lambda x: {"ids": np.abs(x).astype(np.int64)} if several else np.abs(x).astype(np.int64)  # noqa: E731
    for batch_first in (False, True):
        said = warnings_of(Words(batch_first), KINDS["FedSGD"], change)
        assert ("change with the rows beside it" in said) != batch_first


@pytest.mark.parametrize("layer", sorted({*LAYERS} - {"batch norm without statistics", "detaches"}))
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_other_models_give_a_row_the_same_outputs_beside_any(layer: str) -> None:
    assert "rows beside it" not in warnings_of(nn.Sequential(LAYERS[layer](), nn.Linear(4, 2)), KINDS["FedSGD"])


@pytest.mark.parametrize("outputs", [1, 3])
def test_a_model_that_squeezes_predicts_one_row(outputs: int) -> None:
    x = rows(2)[0]
    result = federation(Squeezed(4, outputs), FedSGD(loss="mse")).train(1, progress=False)
    model = result.raw_model()
    np.testing.assert_array_equal(model.predict(x[:1]), model.predict(x)[:1])
    with torch.no_grad():
        assert model(torch.tensor(x[:1])).shape == (1, outputs)


def test_a_bound_that_promises_nothing_and_sums_in_the_clear_are_said() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    loose = FedSGD(**SOFT, dp_noise=0.01, dp_clip=1.0, dp_delta=0.5)
    said = warnings_of(model, loose, aggregation=SecureAggregation(ring_bits=64))
    assert "delta = 0.5: with that chance the bound does not hold" in said
    assert "bounds nothing that matters" in said
    assert "sums are in the clear" not in said
    assert "sums are in the clear" in warnings_of(model, KINDS["FedSGD"], aggregation=SecureAggregation(scheme="none"))


@pytest.mark.parametrize(("known", "said"), [(17, True), (9, True), (8, False), (0, False)])
def test_test_rows_that_were_trained_on_are_said(known: int, said: bool) -> None:
    (x, y), (own, labels) = rows(5, 17), rows(1, 17)
    test = np.concatenate([own[:known], x[known:]]).astype(np.float64), np.concatenate([labels[:known], y[known:]])
    silos = [Silo("a", *rows(0)), Silo("b", own[::-1].copy(), labels[::-1].copy())]
    result = Federation(nn.Linear(4, 2), silos, KINDS["FedSGD"], test=test).train(1, progress=False)
    sentence = f"{known} of 17 test rows are among the training rows of the silos"
    assert (sentence in " ".join(result.record["warnings"])) == said


def test_test_rows_that_were_trained_on_are_said_however_their_array_is_laid_out() -> None:
    x, y = np.random.default_rng(0).normal(size=(20, 30)).astype(np.float32), np.arange(20) % 2
    silos = [Silo(name, np.asfortranarray(x[part]), y[part]) for name, part in (("a", slice(10)), ("b", slice(10, 20)))]
    result = Federation(nn.Linear(30, 2), silos, KINDS["FedSGD"], test=(x, y)).train(1, progress=False)
    assert "20 of 20 test rows are among the training rows" in " ".join(result.record["warnings"])


@pytest.mark.parametrize("tags", [3, 5])
def test_outputs_of_as_many_classes_as_positions_are_said(tags: int) -> None:
    words = np.random.default_rng(0).integers(0, 9, (12, 5))
    silos = [Silo(name, words, words % tags) for name in "ab"]
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, tags))
    result = Federation(model, silos, KINDS["FedSGD"]).train(1, progress=False)
    said = "the model's outputs are [rows, 5, 5] for masks of 5 positions, so classes are taken to be on the first"
    assert (said in " ".join(result.record["warnings"])) == (tags == 5)


def test_rows_that_nothing_scores_are_said() -> None:
    held = [Silo(name, *rows(0), held_out=rows(1)) for name in "abc"]
    said = "silo `a`: nothing scores its rows of held_out, and nothing trains on them"
    for scored in (False, True):
        result = Federation(nn.Linear(4, 2), held, KINDS["FedSGD"], score_at_silos=scored).train(1, progress=False)
        assert (said in " ".join(result.record["warnings"])) != scored


def test_images_that_are_nearly_black_are_said() -> None:
    """As 32-bit DICOM files are without a window: all that they can hold is 1."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    images = lambda scale: lambda x: np.abs(x).reshape(-1, 1, 2, 2) * np.float32(scale)  # noqa: E731
    assert "silo `a`: its images are nearly black" in warnings_of(model, KINDS["FedSGD"], images(1e-4))
    assert "nearly black" not in warnings_of(model, KINDS["FedSGD"], images(0.3))


def test_rows_that_all_have_one_target_are_said() -> None:
    said = "all rows have the same target, so that there is nothing to learn"
    held = [Silo(name, rows(number)[0], np.ones_like(rows(number)[1])) for number, name in enumerate("ab")]
    result = Federation(nn.Linear(4, 2), held, KINDS["FedSGD"]).train(1, progress=False)
    assert said in " ".join(result.record["warnings"])
    assert said not in warnings_of(nn.Linear(4, 2), KINDS["FedSGD"])
