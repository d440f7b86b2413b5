"""The built-in models: one exact step of each, running statistics through the protocol, and long runs."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from networks import perceptron, seeded
from torch import nn
from torchvision_stub import OUTPUTS

from moretta import PBPFL, Federation, FedSGD, SecureAggregation, Silo
from moretta.errors import UnsupportedModel
from moretta.models import catalogue
from moretta.protocols.common import modules
from moretta.protocols.common.enrolment import SiloRows
from moretta.protocols.common.modules import first_weights
from moretta.protocols.fedsgd import server as fedsgd_server
from moretta.protocols.pbpfl.exactness import BARS, Input, check
from moretta.run.evaluation import largest_relative_difference
from moretta.run.result import Result

IMAGE = (3, 16, 16)
MLPS: dict[str, dict[str, Any]] = {f"mlp-{layers}": {"layers": layers, "width": 32} for layers in (3, 5, 7)}
MLPS["mlp-authors"] = {"layers": 4, "width": 50, "bias": False}
RESNETS: dict[str, dict[str, Any]] = {
    f"resnet-{depth}-{shortcut}-{norm}": {"depth": depth, "shortcut": shortcut, "norm": norm}
    for depth in (20, 32, 56)
    for shortcut in ("A", "B", "concat")
    for norm in ("batch", "group", "none")
    if depth == 20 or (shortcut != "concat" and norm != "none")
} | {"resnet-20-authors": {"depth": 20, "shortcut": "B", "norm": "none", "bias": False, "start": "he-normal"}}
DENSENETS: dict[str, dict[str, Any]] = {
    f"densenet-{depth}-{norm}": {"depth": depth, "norm": norm} for depth in (22, 40) for norm in ("batch", "group")
}
# Deep networks with BatchNorm on 8 rows, of which some keys flip a ReLU in float32 (docs/models-measured.md); no
# other model may come to need powers of two unseen.
FALLING_BACK = {
    "resnet-20-A-batch", "resnet-20-B-batch", "resnet-20-concat-batch", "resnet-32-A-batch", "resnet-32-B-batch",
    "resnet-56-A-batch", "resnet-56-B-batch", "densenet-22-batch", "densenet-40-batch",
}  # fmt: skip


def build(name: str) -> tuple[nn.Module, Input]:
    source = name.split("-")[0]
    shape = (12,) if source == "mlp" else IMAGE
    arguments = (MLPS | RESNETS | DENSENETS)[name]
    return catalogue.build(source, inputs=shape, outputs=OUTPUTS, seed=1, **arguments), Input(shape)


def check_one(name: str, protocol: PBPFL) -> dict[str, Any]:
    model, given = build(name)
    return check(model, [given], OUTPUTS, protocol, fall_back=name in FALLING_BACK)


def assert_passes(found: Mapping[str, Any], scales: str = "continuous") -> None:
    assert found["scales"] == scales
    assert {name: found[name] for name in BARS if found[name] > BARS[name]} == {}
    assert found["passes"]
    assert found["free_scales"] > 0


LOSSES: list[dict[str, Any]] = [
    {"loss": "mse"}, {"loss": "cross-entropy"}, {"loss": "cross-entropy", "variant": "paper"}
]  # fmt: skip
LOSS_NAMES = ["mse", "probabilities", "paper"]


@pytest.mark.parametrize("partitions", [1, 3, OUTPUTS])
@pytest.mark.parametrize("settings", LOSSES, ids=LOSS_NAMES)
@pytest.mark.parametrize("name", MLPS)
def test_multilayer_perceptrons(name: str, settings: dict[str, Any], partitions: int) -> None:
    assert_passes(check_one(name, PBPFL(partitions=partitions, **settings)))


@pytest.mark.parametrize(
    ("name", "settings", "partitions"),
    [
        ("resnet-20-A-batch", {"loss": "mse"}, 1),
        ("resnet-20-B-group", {"loss": "cross-entropy"}, 3),
        ("resnet-20-concat-none", {"loss": "mse"}, OUTPUTS),
        ("resnet-20-concat-batch", {"loss": "cross-entropy", "variant": "paper"}, 1),
        ("resnet-20-authors", {"loss": "mse"}, OUTPUTS),
        ("densenet-22-batch", {"loss": "cross-entropy"}, 1),
        ("densenet-22-group", {"loss": "mse"}, 3),
    ],
)
def test_convolutional_networks(name: str, settings: dict[str, Any], partitions: int) -> None:
    assert_passes(check_one(name, PBPFL(partitions=partitions, **settings)))


def latin_square() -> list[Any]:
    """Each convolutional network with each loss and each partitioning, once: a third of all triples, and every pair."""
    partitionings = (1, 3, OUTPUTS)
    return [
        pytest.param(name, settings, partitionings[(row + column) % 3], id=f"{name}-{label}")
        for row, name in enumerate([*RESNETS, *DENSENETS])
        for column, (settings, label) in enumerate(zip(LOSSES, LOSS_NAMES, strict=True))
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings", "partitions"), latin_square())
def test_every_network_with_every_loss_and_every_partitioning(
    name: str, settings: dict[str, Any], partitions: int
) -> None:
    found = check_one(name, PBPFL(partitions=partitions, **settings))
    assert_passes(found, found["scales"] if name in FALLING_BACK else "continuous")


def test_powers_of_two_keep_a_deep_batchnorm_network_exact_in_float32() -> None:
    """Its own float32 gradient is 2e-3 from that in float64, and no continuous key does better."""
    found = check_one("resnet-56-A-batch", PBPFL(scales="powers-of-two"))
    assert found["relative_error_float32"] <= 1e-5  # of which all is the offset's
    assert_passes(found, "powers-of-two")
    assert check_one("resnet-56-A-batch", PBPFL(scales="powers-of-two", rho=0.01))["relative_error_float32"] <= 1e-6


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_runs_under_powers_of_two_are_fedsgds_with_channels_in_their_places(dtype: str) -> None:
    model = perceptron(8, 16, 4, between=nn.ReLU)
    made = silos((20, 30), (8,))
    ours = run(model, PBPFL(scales="powers-of-two"), made, 10, dtype=dtype)
    found = arrays(ours.model)
    assert largest_relative_difference(found, arrays(run(model, FedSGD(), made, 10, dtype=dtype).model)) <= (
        1e-5 if dtype == "float32" else 1e-12
    )
    scales = np.log2(arrays(ours.released)["0.weight"] / found["0.weight"])
    assert set(scales.ravel()) == {-1.0, 0.0, 1.0}


# -- whole runs --------------------------------------------------------------------------------------------------------


def silos(rows: tuple[int, ...], shape: tuple[int, ...] = IMAGE, outputs: int = 4) -> list[Silo]:
    """Images of one pattern a class under noise, unlike classes and brightness a silo."""
    patterns = np.random.default_rng(0).normal(0, 1, (outputs, *shape))
    made = []
    for number, count in enumerate(rows):
        random = np.random.default_rng(100 + number)
        y = random.choice(outputs, count, p=random.dirichlet(np.full(outputs, 2.0)))
        x = patterns[y] + random.normal(0.3 * number, 1.5, (count, *shape))
        made.append(Silo(f"silo-{number}", x.astype(np.float32), y))
    return made


def run(model: nn.Module, protocol: FedSGD | PBPFL, silos: list[Silo], rounds: int, **chosen: Any) -> Result:
    settings: dict[str, Any] = {"batch_size": 8, "dtype": "float64", "insecure_secret_seed": 3} | chosen
    secure = SecureAggregation(scheme=settings.pop("scheme", "none"))
    return Federation(model, silos, protocol, aggregation=secure, **settings).train(rounds, 7)


def arrays(model: nn.Module | None) -> dict[str, np.ndarray]:
    assert model is not None
    return modules.arrays(model)


def outputs_of(model: nn.Module | None, x: np.ndarray) -> torch.Tensor:
    assert model is not None
    model.eval()
    with torch.no_grad():
        return model(torch.from_numpy(x).to(next(model.parameters())))


def buffers(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value for name, value in tensors.items() if "running" in name}


BARS_OF_A_RUN = {"float64": 1e-9, "float32": 1e-6}


@pytest.mark.parametrize(
    ("scheme", "dtype", "loss"),
    [("pairwise", "float64", "mse"), ("none", "float64", "cross-entropy"), ("pairwise", "float32", "cross-entropy")],
)
def test_running_statistics_are_fedsgds(scheme: str, dtype: str, loss: Any) -> None:
    made = silos((19, 40, 9), (2, 6, 6))
    with seeded():
        model = nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.BatchNorm2d(12, momentum=0.3), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4),
        )  # fmt: skip
    settings: dict[str, Any] = {"loss": loss, "learning_rate": 0.02}
    ours = run(model, PBPFL(**settings, partitions=2), made, 10, scheme=scheme, dtype=dtype)
    theirs = run(model, FedSGD(**settings), made, 10, scheme="none", dtype=dtype)
    found, wanted = arrays(ours.model), arrays(theirs.model)
    assert largest_relative_difference(buffers(found), buffers(wanted)) <= BARS_OF_A_RUN[dtype]
    assert found["1.num_batches_tracked"] == found["4.num_batches_tracked"] == 10
    assert arrays(ours.released)["1.num_batches_tracked"] == 10
    x = np.concatenate([silo.x for silo in made])
    released, true = outputs_of(ours.released, x), outputs_of(ours.model, x)
    assert float((released - true).abs().max() / true.abs().max()) <= 1e-6
    # .. and the released model is another: its filters are scaled, its statistics stand in another order.
    assert not np.allclose(arrays(ours.released)["0.weight"], found["0.weight"], rtol=1e-2)


def test_a_batchnorm_after_the_first_round_is_that_of_one_round() -> None:
    """Every silo starts from the server's statistics and makes one update; the server takes the mean by rows."""
    made = silos((6, 12, 3), (2, 6, 6))
    with seeded():
        model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4)).double()
    ours = arrays(run(model, PBPFL(), made, 1, batch_size=0).model)
    model, each = first_weights(model), []
    for silo in made:
        layer = nn.BatchNorm2d(4).double()
        with torch.no_grad():
            layer(model[0](torch.from_numpy(silo.x).double()))
        each.append(arrays(layer))
    for name in ("running_mean", "running_var"):
        wanted = np.average([one[name] for one in each], axis=0, weights=[6, 12, 3])
        np.testing.assert_allclose(ours[f"1.{name}"], wanted, rtol=1e-12, atol=1e-12)


def test_a_model_of_tokens_is_trained_as_fedsgd_trains_it() -> None:
    with seeded():
        model = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(40, 8), nn.ReLU(), nn.Linear(8, 3))
    random = np.random.default_rng(0)
    made = [Silo(name, random.integers(0, 20, (30, 5)), random.integers(0, 3, 30)) for name in ("north", "south")]
    for loss in ("mse", "cross-entropy"):
        ours = run(model, PBPFL(loss=loss), made, 5)
        theirs = run(model, FedSGD(loss=loss), made, 5)
        assert largest_relative_difference(arrays(ours.model), arrays(theirs.model)) <= 1e-9


class Centred(nn.Module):
    """Takes each row's mean off, as a normalisation without weights does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(dim=1, keepdim=True)


def behind(norm: nn.Module, *, bias: bool) -> nn.Module:
    with seeded():
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), norm, nn.Linear(16, 4, bias=bias))


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(16, elementwise_affine=False), nn.GroupNorm(1, 16, affine=False), Centred()]
)
@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_a_head_whose_inputs_add_up_to_0_is_refused_before_a_round(norm: nn.Module, loss: Any) -> None:
    """Alpha is 1e-16 then, and the offset 1e16 times the outputs: 0.40 accuracy where FedSGD has 0.91."""
    with pytest.raises(UnsupportedModel, match=r"add up to 0 in every row, .* add a bias to that layer"):
        run(behind(norm, bias=False), PBPFL(loss=loss), silos((20, 30), (8,)), 1)
    ours, theirs = (
        run(behind(norm, bias=True), protocol, silos((20, 30), (8,)), 5)
        for protocol in (PBPFL(loss=loss), FedSGD(loss=loss))
    )
    assert largest_relative_difference(arrays(ours.model), arrays(theirs.model)) <= 1e-9


@pytest.mark.parametrize(("dtype", "bar"), [("float32", 1e-4), ("float64", 1e-9)])
@pytest.mark.parametrize("scales", ["continuous", "powers-of-two"])
@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_weights_of_a_normalisation_that_are_1_yet_let_the_offset_be_large_and_no_larger(
    loss: Any, scales: Any, dtype: str, bar: float
) -> None:
    model, made = behind(nn.LayerNorm(16), bias=False), silos((20, 30), (8,))
    ours = run(model, PBPFL(loss=loss, scales=scales), made, 20, dtype=dtype)
    theirs = run(model, FedSGD(loss=loss), made, 20, dtype=dtype)
    assert largest_relative_difference(arrays(ours.model), arrays(theirs.model)) <= bar


@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_dropout_is_fedsgds_and_leaves_torchs_generator(loss: Any) -> None:
    with seeded():
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))
    made = silos((20, 30), (8,))
    theirs = run(model, FedSGD(loss=loss), made, 5)
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        found.append(run(model, PBPFL(loss=loss), made, 5))
        assert (torch.get_rng_state() == before).all()
        assert largest_relative_difference(arrays(found[-1].model), arrays(theirs.model)) <= 1e-9
    first, second = (arrays(one.model) for one in found)
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)  # the secret seed is the same


def long_run(protocol: FedSGD | PBPFL, dtype: str, made: list[Silo], rounds: int = 300) -> dict[str, np.ndarray]:
    """Five silos; 300 rounds of FedSGD or PBPFL take about a minute on one core."""
    model = catalogue.build("resnet", inputs=(3, 8, 8), outputs=4, seed=1, depth=20, width=8)
    result = run(model, protocol, made, rounds, dtype=dtype)
    x = np.concatenate([silo.x for silo in silos((200,), (3, 8, 8))])
    return arrays(result.model) | {"predicted": outputs_of(result.model, x).argmax(1).numpy()}


def distance(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> float:
    """|a - b| / |b| of all floating tensors together."""
    names = [name for name, value in theirs.items() if value.dtype.kind == "f"]
    a, b = (np.concatenate([one[name].ravel().astype(np.float64) for name in names]) for one in (ours, theirs))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def of_41_bits(module: nn.Module) -> dict[str, np.ndarray]:
    """The arrays of a model as PBPFL rounds what it sends in float64."""

    def rounded(value: np.ndarray) -> np.ndarray:
        mantissa, exponent = np.frexp(value)
        return np.ldexp(np.round(np.ldexp(mantissa, 41)), exponent - 41)

    return {
        name: rounded(value) if value.dtype.kind == "f" else value for name, value in modules.arrays(module).items()
    }


@pytest.mark.slow
def test_300_rounds_of_resnet_20_are_fedsgds() -> None:
    made = silos((40, 25, 33, 18, 50), (3, 8, 8))
    double, perturbed = (long_run(kind(loss="mse", learning_rate=0.05), "float64", made) for kind in (FedSGD, PBPFL))
    assert distance(perturbed, double) <= 1e-6
    np.testing.assert_array_equal(perturbed["predicted"], double["predicted"])


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_100_rounds_in_float64_are_no_further_off_than_weights_of_41_bits(
    loss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training amplifies what is rounded away of weights; FedSGD that sends as many bits says by how much.

    After 300 rounds with cross-entropy both are some percent off, where this says nothing.
    """
    made = silos((40, 25, 33, 18, 50), (3, 8, 8))
    settings: dict[str, Any] = {"loss": loss, "learning_rate": 0.05}
    double, perturbed = (long_run(kind(**settings), "float64", made, 100) for kind in (FedSGD, PBPFL))
    monkeypatch.setattr(fedsgd_server, "modules", SimpleNamespace(**{**vars(modules), "arrays": of_41_bits}))
    rounded = long_run(FedSGD(**settings), "float64", made, 100)
    assert 0 < distance(perturbed, double) <= 3 * distance(rounded, double)
    np.testing.assert_array_equal(perturbed["predicted"], double["predicted"])


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_300_rounds_in_float32_are_no_further_off_than_another_order_of_summation(
    loss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding grows with training whatever rounds; FedSGD with the rows of each batch reversed says by how much.

    The order of the silos would say nothing: their float32 gradients are added in float64, by name.
    """
    made = silos((40, 25, 33, 18, 50), (3, 8, 8))
    settings: dict[str, Any] = {"loss": loss, "learning_rate": 0.05}
    plain, perturbed = (long_run(kind(**settings), "float32", made) for kind in (FedSGD, PBPFL))
    rows = SiloRows.rows
    monkeypatch.setattr(SiloRows, "rows", lambda self, index: rows(self, index[::-1].copy()))
    reordered = long_run(FedSGD(**settings), "float32", made)
    assert 0 < distance(perturbed, plain) <= 3 * distance(reordered, plain)


# -- float32 -----------------------------------------------------------------------------------------------------------


def balanced(depth: int) -> nn.Module:
    """A model whose head's inputs sum to 0 in every row, so that alpha is 1 by the bias alone and the offset large."""
    with seeded():
        body = [layer for _ in range(depth) for layer in (nn.Linear(32, 32), nn.LayerNorm(32), nn.Tanh())]
        return nn.Sequential(*body, nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, OUTPUTS))


@pytest.mark.parametrize("depth", [2, 20])
@pytest.mark.parametrize("shrink", [1.0, 0.1, 0.0])
def test_float32_stays_within_its_bar_where_the_offset_would_be_far_larger_than_the_head(depth, shrink) -> None:
    model = balanced(depth)
    with torch.no_grad():
        model[-1].weight *= shrink
    for settings in LOSSES:
        assert_passes(check(model, [Input((32,))], OUTPUTS, PBPFL(**settings)))


def test_rho_is_lowered_in_float32_alone_and_said() -> None:
    random = np.random.default_rng(0)
    made = [Silo(name, random.normal(size=(16, 32)), random.integers(0, OUTPUTS, 16)) for name in ("north", "south")]
    rho = {
        dtype: [line["rho"] for line in run(balanced(20), PBPFL(rho=20.0), made, 3, dtype=dtype).history]
        for dtype in ("float64", "float32")
    }
    assert rho["float64"] == [20.0] * 3
    assert all(0.1 < value < 12.0 for value in rho["float32"]), rho
