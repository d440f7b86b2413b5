"""The baselines equal what they are baselines of: plain PyTorch training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import plain_sgd
import pytest
import torch
from networks import seeded
from torch import Tensor, nn

from moretta import Centralised, Engine, FedAvg, Federation, FedSGD, Local, SecureAggregation, Silo
from moretta.protocols.common import modules
from moretta.protocols.common.batches import Batches
from moretta.protocols.common.enrolment import targets
from moretta.protocols.common.losses import Loss
from moretta.protocols.common.modules import first_weights
from moretta.protocols.common.training import Training
from moretta.run.evaluation import largest_relative_difference
from moretta.run.result import Result

ROUNDS, SEED, BATCH = 30, 7, 8
CLEAR = SecureAggregation(scheme="none")
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def network(norm: bool = False) -> nn.Sequential:
    with seeded():
        middle = [nn.BatchNorm1d(6)] if norm else []
        return nn.Sequential(nn.Linear(4, 6), *middle, nn.Tanh(), nn.Linear(6, 3))


def silo(name: str, rows: int, seed: int) -> Silo:
    generator = np.random.default_rng(seed)
    x = generator.normal(0, 1, (rows, 4)).astype(np.float32)
    return Silo(name, x, (x @ generator.normal(0, 1, (4, 3))).argmax(1).astype(np.int64))


SILOS = [silo("north", 21, 1), silo("south", 40, 2), silo("east", 9, 3)]


def train(protocol: Training, silos: list[Silo] = SILOS, dtype: str = "float64", **settings: Any) -> Result:
    chosen: dict[str, Any] = {"batch_size": BATCH, "aggregation": CLEAR, "model": network()} | settings
    model = chosen.pop("model")
    return Federation(model, silos, protocol, dtype=dtype, **chosen).train(ROUNDS, SEED)


def weights(model: nn.Module | None) -> Mapping[str, np.ndarray]:
    assert model is not None
    return modules.arrays(model)


def batches(one: Silo, dtype: str, loss: str) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of each round, as plain training takes them."""
    y = targets(one.y, 3, loss, one.name, DTYPES[dtype])
    plan = Batches(len(one.x), BATCH, SEED, one.name)
    index = [torch.from_numpy(plan.of_round(number)) for number in range(1, ROUNDS + 1)]
    return [(torch.tensor(one.x, dtype=DTYPES[dtype])[rows], y[rows]) for rows in index]


def assert_same_bytes(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> None:
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        assert (ours[name].dtype, ours[name].tobytes()) == (value.dtype, value.tobytes()), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fedsgd_of_one_silo_is_plain_sgd_bit_for_bit(dtype: str, loss: str, momentum: float) -> None:
    settings: dict[str, Any] = {"loss": loss, "learning_rate": 0.05, "momentum": momentum}
    one = SILOS[1]
    result = train(FedSGD(**settings), [one], dtype)
    model = first_weights(network()).to(DTYPES[dtype])
    plain_sgd.train(model, batches(one, dtype, loss), loss, 0.05, momentum)
    assert_same_bytes(weights(result.model), weights(model))
    assert_same_bytes(weights(result.released), weights(model))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("protocol", [FedSGD, Local])
def test_adam_of_one_silo_is_torchs_bit_for_bit(dtype: str, protocol: type[Training]) -> None:
    one, settings = SILOS[1], {"lr": 0.02, "weight_decay": 0.01}
    result = train(protocol(optimizer="adam", learning_rate=0.02, weight_decay=0.01), [one], dtype)
    model = first_weights(network()).to(DTYPES[dtype])
    optimizer = torch.optim.Adam(model.parameters(), **settings)
    for inputs, wanted in batches(one, dtype, "mse"):
        optimizer.zero_grad()
        Loss("mse")(model(inputs), wanted).backward()
        optimizer.step()
    assert_same_bytes(weights(result.models["south"] if protocol is Local else result.model), weights(model))


def plain_epochs(one: Silo, dtype: str, params: FedAvg) -> nn.Module:
    """Local SGD with a new optimizer each round."""
    model = first_weights(network()).to(DTYPES[dtype])
    inputs, wanted = torch.tensor(one.x, dtype=DTYPES[dtype]), targets(one.y, 3, "mse", "", DTYPES[dtype])
    plan = Batches(len(one.x), BATCH, SEED, one.name)
    for number in range(ROUNDS):
        optimizer = torch.optim.SGD(model.parameters(), lr=params.learning_rate, momentum=params.momentum)
        for epoch in range(number * params.local_epochs, (number + 1) * params.local_epochs):
            for rows in plan.of_epoch(epoch):
                optimizer.zero_grad()
                Loss("mse")(model(inputs[rows]), wanted[rows]).backward()
                optimizer.step()
    return model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epochs", [1, 3])
def test_fedavg_of_one_silo_is_plain_local_sgd(dtype: str, epochs: int) -> None:
    one, params = SILOS[1], FedAvg(learning_rate=0.02, momentum=0.5, local_epochs=epochs)
    ours, theirs = weights(train(params, [one], dtype).model), weights(plain_epochs(one, dtype, params))
    # The silo sends W - W_k and the server takes W - (W - W_k). By Sterbenz's lemma that is W_k exactly where W_k lies
    # within [W / 2, 2 W]; elsewhere it is off by the rounding of two subtractions, 2^-24 of the larger of |W|, |W_k|
    # each. Such an error is carried on by at most (1 + rate * curvature) a step, near 1 here: inputs are of order 1.
    unit = float(np.finfo(dtype).eps)
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=0, atol=4 * ROUNDS * unit * max(1.0, np.abs(value).max()))


class Summed(nn.Module):
    """Adds up parameters, of which autograd gives one and the same gradient, or parts of one."""

    def __init__(self) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 4, generator=drawn))
        self.first, self.second = (nn.Parameter(torch.randn(3, generator=drawn)) for _ in range(2))
        self.left, self.right = (nn.Parameter(torch.randn(2, 3, generator=drawn)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.left, self.right]).sum(0)
        return torch.addmm(self.first + self.second, x, self.weight.T) + joined


@pytest.mark.parametrize("strict", [False, True])
def test_gradients_that_share_memory_are_clipped_once_as_torch_does(strict: bool) -> None:
    params = FedAvg(learning_rate=0.5, momentum=0.5, clip_norm=0.25, local_epochs=2)
    alike = [silo(f"silo-{number}", 2 * BATCH, number) for number in range(6)]  # six with equal batches are stacked
    settings = {"dtype": "float64", "batch_size": BATCH, "aggregation": CLEAR, "engine": Engine(strict=strict)}
    result = Federation(Summed(), alike, params, **settings).train(1, SEED)
    ends, clipped = [], 0
    for one in alike:
        model = first_weights(Summed())
        inputs, wanted = torch.tensor(one.x, dtype=torch.float64), targets(one.y, 3, "mse", "", torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
        plan = Batches(len(one.x), BATCH, SEED, one.name)
        for index in (rows for epoch in range(2) for rows in plan.of_epoch(epoch)):
            optimizer.zero_grad()
            Loss("mse")(model(inputs[index]), wanted[index]).backward()
            clipped += float(nn.utils.clip_grad_norm_(model.parameters(), 0.25)) > 0.25
            optimizer.step()
        ends.append(weights(model))
    assert clipped == 6 * 4
    for name, value in weights(result.model).items():
        np.testing.assert_allclose(value, sum(end[name] for end in ends) / 6, rtol=0, atol=1e-12)


def test_fedavg_of_several_silos_is_the_mean_by_rows() -> None:
    params = FedAvg(learning_rate=0.05, local_epochs=2)
    result = Federation(network(), SILOS, params, dtype="float64", batch_size=BATCH, aggregation=CLEAR).train(1, SEED)
    start, ends, rows = weights(first_weights(network())), [], [len(one.x) for one in SILOS]
    for one in SILOS:
        model = first_weights(network())
        inputs, wanted = torch.tensor(one.x, dtype=torch.float64), targets(one.y, 3, "mse", "", torch.float64)
        plan, optimizer = Batches(len(one.x), BATCH, SEED, one.name), torch.optim.SGD(model.parameters(), lr=0.05)
        for epoch in (0, 1):
            for index in plan.of_epoch(epoch):
                optimizer.zero_grad()
                Loss("mse")(model(inputs[index]), wanted[index]).backward()
                optimizer.step()
        ends.append(weights(model))
    for name in start:
        expected = sum(n * end[name] for n, end in zip(rows, ends, strict=True)) / sum(rows)
        np.testing.assert_allclose(weights(result.model)[name], expected, rtol=0, atol=1e-14)
    assert result.history[0]["rows"] == sum(rows)


@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-13), ("float32", 2e-5)])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_centralised_is_fedsgd_to_rounding(dtype: str, bound: float, optimizer: str) -> None:
    settings: dict[str, Any] = {"learning_rate": 0.05, "optimizer": optimizer}
    ours = weights(train(FedSGD(**settings), dtype=dtype).model)
    theirs = weights(train(Centralised(**settings), dtype=dtype).model)
    # The same sums of at most 24 rows in another order: about 5 ulps a gradient, ROUNDS steps of at most 0.05 times
    # it; Adam divides by the gradient's own size, so a component near 0 may lose more, hence the wide factor.
    assert largest_relative_difference(ours, theirs) < bound


def test_local_is_a_run_of_each_silo_on_its_own() -> None:
    together = train(Local(momentum=0.5, learning_rate=0.05))
    assert together.model is None
    assert list(together.models) == [one.name for one in SILOS]
    for one in SILOS:
        alone = train(FedSGD(momentum=0.5, learning_rate=0.05), [one])
        assert_same_bytes(weights(together.models[one.name]), weights(alone.model))


@pytest.mark.parametrize(
    "protocol", [FedSGD(learning_rate=0.05, momentum=0.5), FedAvg(learning_rate=0.02, local_epochs=2)]
)
@pytest.mark.parametrize(("ring_bits", "limit"), [(64, None), (64, 2.0**40), (32, None)])
def test_masked_equals_unmasked_within_the_stated_bound(
    protocol: Training, ring_bits: Any, limit: float | None
) -> None:
    secure = SecureAggregation(ring_bits=ring_bits, limit=limit)
    masked, clear = train(protocol, aggregation=secure), train(protocol)
    ours, theirs = weights(masked.model), weights(clear.model)
    stated = masked.record["facts"]["ring_weight_error"]
    assert 0 < stated < {64: 1e-2, 32: 1.0}[ring_bits]
    assert "ring_weight_error" not in clear.record["facts"]
    largest = max(float(np.abs(ours[name] - theirs[name]).max()) for name in theirs)
    assert 0 < largest <= stated + 1e-13  # and float64's own rounding
    # every round says the error of its means, K / (2 * 2^f N): losses are such means
    step = masked.history[0]["ring_step"]
    assert 0 < step < 1e-2
    assert masked.history[0]["loss"] == pytest.approx(clear.history[0]["loss"], abs=step + 1e-14)


def test_the_mean_is_weighted_by_the_rows_of_each_batch() -> None:
    result = Federation(
        network(), SILOS, FedSGD(learning_rate=0.1), dtype="float64", batch_size=30, aggregation=CLEAR
    ).train(1, SEED)
    model = first_weights(network())  # 21, 30 and 9 rows: as one batch
    rows = [torch.from_numpy(Batches(len(one.x), 30, SEED, one.name).of_round(1)) for one in SILOS]
    inputs = torch.cat(
        [torch.tensor(one.x, dtype=torch.float64)[index] for one, index in zip(SILOS, rows, strict=True)]
    )
    wanted = torch.cat([torch.tensor(one.y)[index] for one, index in zip(SILOS, rows, strict=True)])
    plain_sgd.train(model, [(inputs, nn.functional.one_hot(wanted, 3).double())], "mse", 0.1)
    ours, theirs = weights(result.model), weights(model)
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-15)
    assert result.history[0]["rows"] == 60


@pytest.mark.parametrize("scheme", ["none", "pairwise"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights_are_torchs_on_the_union_of_the_batches(scheme: Any, smoothing: float) -> None:
    settings: dict[str, Any] = {
        "loss": "cross-entropy", "class_weights": (1.0, 3.0, 0.5), "label_smoothing": smoothing, "learning_rate": 0.1,
    }  # fmt: skip
    secure = SecureAggregation(scheme=scheme)
    ours = weights(train(FedSGD(**settings), aggregation=secure).model)
    theirs = weights(train(Centralised(**settings)).model)
    model = first_weights(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parts in zip(*(batches(one, "float64", "cross-entropy") for one in SILOS), strict=True):
        inputs, wanted = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
        optimizer.zero_grad()
        weight = torch.tensor(settings["class_weights"], dtype=torch.float64)
        nn.functional.cross_entropy(model(inputs), wanted, weight=weight, label_smoothing=smoothing).backward()
        optimizer.step()
    # The ring's step is about limit / 2^62 (`encoding`): 2^16 / 2^62 = 6e-14 a round, before the rate.
    assert largest_relative_difference(ours, weights(model)) < (1e-13 if scheme == "none" else 1e-11)
    assert largest_relative_difference(theirs, weights(model)) < 1e-13


def test_running_statistics_are_the_silos_mean_by_rows() -> None:
    result = Federation(network(norm=True), SILOS, FedSGD(), dtype="float64", batch_size=0, aggregation=CLEAR).train(
        1, SEED
    )
    found, means, variances = weights(result.model), [], []
    for one in SILOS:
        model = first_weights(network(norm=True))
        model(torch.tensor(one.x, dtype=torch.float64))
        means.append(weights(model)["1.running_mean"])
        variances.append(weights(model)["1.running_var"])
    rows = [len(one.x) for one in SILOS]
    np.testing.assert_allclose(found["1.running_mean"], np.average(means, 0, rows), rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(found["1.running_var"], np.average(variances, 0, rows), rtol=1e-13)
    assert found["1.num_batches_tracked"] == 1


@pytest.mark.parametrize("protocol", [FedSGD(), Centralised(), FedAvg(local_epochs=2), Local()])
def test_dropout_is_the_same_in_the_same_run_and_leaves_torchs_generator(protocol: Training) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3))
    torch.manual_seed(1)
    first = train(protocol, model=model)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = train(protocol, model=model)
    assert (torch.get_rng_state() == before).all()
    for one, two in zip(first.models.values(), second.models.values(), strict=True):
        assert_same_bytes(weights(one), weights(two))
    if first.model is not None:
        assert_same_bytes(weights(first.model), weights(second.model))


def test_a_frozen_parameter_stays_and_the_model_given_is_not_touched() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    before = {name: value.copy() for name, value in weights(model).items()}
    ours = weights(train(FedSGD(), model=model, dtype="float32").model)
    begun = weights(first_weights(model).float())
    assert ours["0.weight"].tobytes() == begun["0.weight"].tobytes()
    assert ours["2.weight"].tobytes() != begun["2.weight"].tobytes()
    assert_same_bytes(weights(model), before)
    assert next(model.parameters()).dtype == torch.float32
