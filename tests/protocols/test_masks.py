"""Masks as targets: a class and a weight at each position, under every protocol, against plain PyTorch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import seeded
from test_cli import call
from torch import Tensor, nn

from moretta import BAFFLE, CGD, PBPFL, FedAvg, Federation, FedSGD, Silo
from moretta.data.rows import as_positions, as_targets
from moretta.errors import ParameterError, RowsError
from moretta.protocols.common.losses import Loss
from moretta.protocols.common.targets import RowLosses, encode, figures_at_positions
from moretta.report.folder import read_run
from moretta.report.statements import verdicts
from moretta.secure_aggregation.settings import SecureAggregation

CLEAR = SecureAggregation(scheme="none")
SIZE, CLASSES, ROWS = 6, 3, 8
RATE = {"mse": 0.2 / 36, "cross-entropy": 0.2}


class Segmenter(nn.Module):
    """An image's classes at each pixel; last: on the last axis and not on the first."""

    def __init__(self, last: bool = False, residual: bool = False) -> None:
        super().__init__()
        with seeded():
            width = CLASSES if residual else 4
            self.body, self.head = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, CLASSES, 1)
        self.last, self.residual = last, residual

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.body(x))
        found: Tensor = self.head(h) + h if self.residual else self.head(h)
        return found.movedim(1, -1) if self.last else found


def weighted(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images, and masks [rows, size, size, 2] of which some positions do not count."""
    random = np.random.default_rng(seed)
    classes = random.integers(-1, CLASSES, (ROWS, SIZE, SIZE))
    y = np.stack([classes, random.uniform(0, 2, classes.shape)], axis=-1)
    return random.normal(size=(ROWS, 1, SIZE, SIZE)).astype("float32"), y.astype("float32")


def silos() -> list[Silo]:
    return [Silo(name, *weighted(seed)) for seed, name in enumerate("ab")]


def plain_loss(outputs: Tensor, y: np.ndarray, loss: str) -> Tensor:
    """Return the mean over rows of the sum over pixels, or of cross-entropy of their mean; y: as of `weighted`."""
    classes, weights = torch.tensor(y[..., 0]).long(), torch.tensor(y[..., 1]).to(outputs.dtype)
    weights = weights * (classes >= 0)
    if loss == "cross-entropy":
        each = nn.functional.cross_entropy(outputs, classes.clamp_min(0), reduction="none")
    else:
        hot = nn.functional.one_hot(classes.clamp_min(0), CLASSES).movedim(-1, 1)
        each = (outputs - hot).square().sum(1) / 2 * SIZE * SIZE
    return (weights * each).mean()


def plain_run(loss: str, rounds: int, rate: float, residual: bool) -> dict[str, Tensor]:
    model = Segmenter(residual=residual).double()
    for _ in range(rounds):
        model.zero_grad()
        for seed in (0, 1):
            x, y = weighted(seed)
            (plain_loss(model(torch.tensor(x).double()), y, loss) / 2).backward()
        with torch.no_grad():
            for one in model.parameters():
                assert one.grad is not None
                one.sub_(rate * one.grad)
    return dict(model.named_parameters())


@pytest.mark.parametrize(
    ("protocol", "loss"),
    [(FedSGD, "mse"), (FedSGD, "cross-entropy"), (FedAvg, "mse"), (FedAvg, "cross-entropy"), (PBPFL, "mse")],
)
@pytest.mark.parametrize(("last", "residual"), [(False, False), (True, False), (False, True)])
def test_gradients_are_those_of_pytorch(protocol: Callable[..., Any], loss: str, last: bool, residual: bool) -> None:
    own = {"local_epochs": 1} if protocol is FedAvg else {}
    made = Federation(
        Segmenter(last, residual), silos(), protocol(loss=loss, learning_rate=RATE[loss], **own), dtype="float64",
        batch_size=0, aggregation=CLEAR, test=weighted(7),
    )  # fmt: skip
    result = made.train(2, progress=False)
    ours = dict(result.raw_model(true_model=True).network.named_parameters())
    for name, wanted in plain_run(loss, 2, RATE[loss], residual).items():
        torch.testing.assert_close(ours[name], wanted, rtol=0, atol=5e-7)  # of fixed point in the sum
    x, y = weighted(7)
    with torch.no_grad():
        outputs = Segmenter(residual=residual).double()
        outputs.load_state_dict(ours)
        wanted_loss = plain_loss(outputs(torch.tensor(x).double()), y, loss)
    assert result.test["loss"] == pytest.approx(float(wanted_loss))
    assert {"dice_0", "dice_1", "dice_2", "iou_2", "position_accuracy"} <= set(result.test["metrics"])


@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
@pytest.mark.parametrize(
    "protocol",
    [
        lambda loss: BAFFLE(loss=loss, k=8, learning_rate=RATE[loss] / 4),
        lambda loss: BAFFLE(loss=loss, perturb="blocks", k={"*": 4}, learning_rate=RATE[loss] / 4),
        lambda loss: CGD(loss=loss, learning_rate=RATE[loss] / 4),
    ],
)
def test_other_protocols_train_on_masks(protocol: Callable[[str], Any], loss: str) -> None:
    made = Federation(Segmenter(), silos(), protocol(loss), aggregation=CLEAR, insecure_secret_seed=1)
    history = made.train(8, progress=False).history
    assert history[-1]["loss"] < history[0]["loss"]
    with torch.no_grad():
        wanted = np.mean([float(plain_loss(Segmenter()(torch.tensor(x)), y, loss)) for x, y in map(weighted, (0, 1))])
    assert history[0]["loss"] == pytest.approx(wanted, rel=0.05)  # baffle's is at moved parameters


@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_both_forms_of_a_loss_agree(loss: str) -> None:
    _, y = weighted(3)
    targets = encode(as_positions(y, "a"), SIZE * SIZE * CLASSES, loss, "a", "float64")
    extra: dict[str, Any] = {"smoothing": 0.1, "class_weights": (1.0, 2.0, 0.5)} if loss == "cross-entropy" else {}
    outputs = np.random.default_rng(5).normal(size=(2, ROWS, SIZE * SIZE * CLASSES))
    rows = RowLosses(loss, **extra)(outputs, targets)
    here = Loss(loss, **extra)
    for number in range(2):
        found = here(torch.tensor(outputs[number]), torch.tensor(targets))
        assert float(found) == pytest.approx(rows[number].mean())
    stacked = here.of_each(torch.tensor(outputs), torch.tensor(np.stack([targets, targets])))
    np.testing.assert_allclose(stacked, rows.mean(axis=1))


def test_figures_are_dice_and_iou_by_class() -> None:
    targets = np.zeros((1, 5, 3))
    targets[0, [0, 1, 2, 3], [0, 1, 1, 0]] = 1  # the fifth position does not count, and no pixel is of class 2
    outputs = np.eye(3)[[0, 1, 0, 0, 2]].reshape(1, -1)
    assert figures_at_positions(outputs, targets) == {
        "position_accuracy": 3 / 4,
        "dice_0": pytest.approx(4 / 5),
        "iou_0": pytest.approx(2 / 3),
        "dice_1": pytest.approx(2 / 3),
        "iou_1": pytest.approx(1 / 2),
    }


def test_whole_numbers_at_positions_are_masks() -> None:
    y = np.random.default_rng(0).integers(-1, 3, (4, 1, 5, 5))
    found, task, classes = as_targets(y, "file")
    assert (found.shape, found.dtype, task, classes) == ((4, 25, 2), np.float32, "regression", None)
    assert (found[..., 1] == (y.reshape(4, 25) >= 0)).all()
    assert Silo("a", np.zeros((4, 1, 5, 5)), y).y.shape == (4, 25, 2)
    words = np.array([[0, 2, 1], [1, 1, 0]])
    assert as_targets(words, "file")[0].shape == (2, 3, 2)
    assert as_targets(words, "file", "regression")[0].shape == (2, 3)  # numbers, as ever


@pytest.mark.parametrize(
    ("y", "said"),
    [
        (np.full((4, 5, 5), 0.5), r"targets are float64\[4, 5, 5\]; expected masks as whole numbers"),
        (np.full((4, 5, 2), 0.5), "expected whole numbers as the classes of masks and weights of 0 or more"),
        (np.full((4, 5, 2), -1.0), "weights of 0 or more; got fractions, negative weights"),
        (np.full((4, 5, 2), np.nan), "or numbers that are not finite"),
    ],
)
def test_targets_that_are_no_masks_are_refused(y: np.ndarray, said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        Silo("a", np.zeros((4, 1, 5, 5)), y)


def mask(size: int = SIZE, most: int = CLASSES) -> np.ndarray:
    return np.arange(ROWS * size * size).reshape(ROWS, size, size) % most


def refused(y: Any, protocol: Any = None, other: Any = None, model: nn.Module | None = None, **settings: Any) -> Any:
    x = weighted(0)[0]
    made = Federation(
        model or Segmenter(), [Silo("a", x, y), Silo("b", x, y if other is None else other)], protocol or FedSGD(),
        aggregation=CLEAR, **settings,
    )  # fmt: skip
    made.rehearse(1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"y": mask(5)}, "targets have 25 entries a row, and outputs are"),
        ({"y": mask(), "other": mask(5)}, "masks have 25 and 36 positions at different silos"),
        ({"y": mask(), "other": np.zeros(ROWS)}, "masks have 0 and 36 positions"),
        ({"y": mask(most=4)}, "masks have class 3; expected 0 to 2, .*; set -1 where a position does not count"),
        ({"y": mask(), "model": nn.Sequential(nn.Flatten(), nn.Linear(36, 108))}, r"outputs are \[2, 108\]"),
        ({"y": mask(), "augment": True}, "augment = \"crop-flip\": masks would not change with it"),
        ({"y": mask(), "standardise_targets": True}, "standardise-targets = true: masks would not change"),
        ({"y": mask(), "protocol": PBPFL(loss="cross-entropy")}, "the server would see the softmax at each: of an"),
        ({"y": mask(), "protocol": FedSGD(loss="cross-entropy", class_weights=(1.0, 2.0))}, "expected 3, one an outp"),
    ],
)  # fmt: skip
def test_masks_that_do_not_fit_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises((ParameterError, RowsError), match=said):
        refused(**given)


def test_a_head_that_gives_patches_takes_no_masks_under_pbpfl() -> None:
    whole = nn.Sequential(nn.Flatten(), nn.Linear(36, 108), nn.Unflatten(1, (6, 6, 3)))
    with pytest.raises(
        ParameterError, match="masks have 36 positions, but the model's last linear layer has 108 outputs"
    ):
        refused(mask(), PBPFL(), model=whole)


@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_masks_are_trained_on_from_a_run_file(loss: str, tmp_path: Path) -> None:
    x, y = weighted(0)
    np.savez(tmp_path / "rows.npz", x=x, y=y[..., 0].astype(int))
    (tmp_path / "run.toml").write_text(
        '[run]\nrounds = 1\n[data]\nsource = "rows.npz"\nsilos = 2\nstandardise = false\n'
        '[model]\nsource = "test_masks:Segmenter"\n'
        f'[protocol]\nname = "fedsgd"\nloss = "{loss}"\n[secure-aggregation]\nscheme = "none"\n'
    )
    (tmp_path / "test_masks.py").write_text(Path(__file__).read_text())
    done = call("train", tmp_path / "run.toml", "--out", tmp_path / "out")
    assert done.code == 0, done.err
    verdict = {"mse": "reaches a mean squared error of", "cross-entropy": "reaches an accuracy at positions of"}
    assert verdict[loss] in verdicts([read_run(tmp_path / "out")])[0].sentences[0]
    assert "iou_1" in json.loads((tmp_path / "out" / "result.json").read_text())["test"]["metrics"]


# -- the next word at each position ------------------------------------------------------------------------------------

WORDS, LENGTH = 7, 6


class NextWord(nn.Module):
    """The next word from the mean of those so far, through a frozen base and an adapter, as a causal language model."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.words, self.base, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Linear(8, WORDS)
            self.a, self.b = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        for part in (self.words, self.base):
            part.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x).cumsum(1) / torch.arange(1, LENGTH + 1)[:, None]
        found: Tensor = self.head(torch.relu(self.base(h) + self.b(self.a(h))))
        return found


def texts(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return padded texts, and at each position the word that comes next, or -1 where none does."""
    random = np.random.default_rng(seed)
    there = np.arange(LENGTH) < random.integers(2, LENGTH + 1, (ROWS, 1))
    x = np.where(there, random.integers(1, WORDS, (ROWS, LENGTH)), 0)
    y = np.where(there[:, 1:], x[:, 1:], -1)
    return x, np.concatenate([y, np.full((ROWS, 1), -1)], axis=1)


def next_word_loss(model: nn.Module, seed: int) -> Tensor:
    x, y = (torch.tensor(one) for one in texts(seed))
    each = nn.functional.cross_entropy(model(x).movedim(-1, 1), y, ignore_index=-1, reduction="sum")
    return each / y.numel()


@pytest.mark.parametrize("protocol", [FedSGD, FedAvg])
def test_a_causal_language_models_adapter_trains_as_in_pytorch(protocol: Callable[..., Any]) -> None:
    silos = [Silo(name, *texts(seed)) for seed, name in enumerate("ab")]
    own = {"local_epochs": 1} if protocol is FedAvg else {}
    made = Federation(
        NextWord(), silos, protocol(loss="cross-entropy", learning_rate=0.5, **own), dtype="float64", batch_size=0,
        aggregation=CLEAR,
    )  # fmt: skip
    ours = made.train(3, progress=False).raw_model(true_model=True).network
    plain = NextWord().double()
    trained = [one for one in plain.parameters() if one.requires_grad]
    for _ in range(3):
        found = torch.autograd.grad((next_word_loss(plain, 0) + next_word_loss(plain, 1)) / 2, trained)
        with torch.no_grad():
            for one, gradient in zip(trained, found, strict=True):
                one.sub_(0.5 * gradient)
    for name, one in plain.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name), one, rtol=0, atol=5e-7)  # of fixed point in the sum


def test_a_causal_language_models_adapter_trains_by_forward_passes() -> None:
    silos = [Silo(name, *texts(seed)) for seed, name in enumerate("ab")]
    made = Federation(
        NextWord(), silos, BAFFLE(loss="cross-entropy", k=16, learning_rate=0.1), aggregation=CLEAR,
        insecure_secret_seed=1,
    )  # fmt: skip
    result = made.train(10, progress=False)
    with torch.no_grad():
        wanted = float(next_word_loss(NextWord(), 0) + next_word_loss(NextWord(), 1)) / 2
    assert result.history[0]["loss"] == pytest.approx(wanted, rel=0.05)  # at moved parameters
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    assert result.predict(texts(2)[0]).shape == (ROWS, LENGTH)
