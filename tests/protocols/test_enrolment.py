"""The set-up: statistics of all rows without pooling them, agreement on the model, and targets as a loss wants them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from refused_rows import Row, refused
from torch import nn

from moretta.contract.codec import Codec
from moretta.contract.messages import Message, Stamp
from moretta.contract.roles import Aborted, Ask, Reason, no_phase
from moretta.data.settings import Data
from moretta.data.tables.preparation import ColumnRules, Preparation
from moretta.engines.in_process import InProcess
from moretta.engines.settings import Run
from moretta.errors import ParameterError, PeerError
from moretta.protocols.common import modules, silo_rows
from moretta.protocols.common.batches import Batches
from moretta.protocols.common.enrolment import Enrolment, SiloRows, fitted_alone, prepared, targets
from moretta.protocols.common.losses import Loss
from moretta.protocols.common.setting import Setting
from moretta.protocols.common.silo_rows import TrainingRows
from moretta.protocols.common.specification import Specification
from moretta.protocols.common.statistics import Statistics
from moretta.protocols.fedsgd.params import FedSGD
from moretta.secure_aggregation.keyed_sums import Contributor
from moretta.secure_aggregation.schemes import MESSAGES, aggregator, contributor
from moretta.secure_aggregation.statistics import AskHistogram

SCHEMES = [("none", 64), ("pairwise", 64), ("pairwise", 32)]


class Silo:
    """A silo that knows nothing but the set-up."""

    def __init__(
        self,
        name: str,
        x: np.ndarray,
        y: np.ndarray,
        scheme: str,
        bits: int,
        model: nn.Module,
        statistics: Statistics,
    ) -> None:  # fmt: skip
        self.phase = no_phase
        batches, schema = Batches(len(x), 4, 0, name), modules.schema(model)
        self.rows = SiloRows(TrainingRows(x, y, batches, schema, statistics=statistics), torch.float64)
        self.contributor: Contributor = contributor(scheme, name, bits)
        self.model = model
        self.sent: list[Message] = []

    def answer(self, message: Message) -> Message:
        reply = self.rows.answer(message, self.contributor, self.model)
        assert reply is not None
        self.sent.append(reply)
        return reply

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: object) -> None:
        pass


class House:
    """Silos and the server's half, ready to be set up."""

    def __init__(
        self, xs: Sequence[np.ndarray], scheme: str = "none", bits: int = 64, *, columns: int | ColumnRules = 0,
        batch_size: int = 4, scales: bool = False, ys: Sequence[np.ndarray] | None = None,
        model: nn.Module | None = None, targets: int = 0,
    ) -> None:  # fmt: skip
        self.model = model or nn.Linear(3, 1)
        rules = ColumnRules.alike(columns, scaled=True) if isinstance(columns, int) else columns
        ys = ys or [np.zeros((len(x), 1)) for x in xs]
        data = Data(source="python", batch_size=batch_size, standardise_targets=targets > 0)
        setting = Setting(Specification(Run(rounds=1), data, FedSGD()), self.model, targets or 1, (), rules)
        listed = setting.statistics(rules, batch_size, scales=scales)
        self.enrolment = Enrolment(setting, aggregator(scheme, bits), rules, batch_size, listed)
        self.silos = {
            f"silo-{number}": Silo(f"silo-{number}", x, y, scheme, bits, self.model, self.enrolment.statistics)
            for number, (x, y) in enumerate(zip(xs, ys, strict=True))
        }
        self.asked: list[Ask] = []
        self.engine = InProcess(self.silos, Codec((*MESSAGES, *silo_rows.MESSAGES)), strict=True)

    def setup(self, attempt: int = 0, cohort: Sequence[str] | None = None) -> Aborted | None:
        exchange, replies = self.enrolment.setup(Stamp("run", 1, attempt), cohort or list(self.silos)), None
        while True:
            try:
                ask = exchange.send(replies)  # type: ignore[arg-type]
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            self.asked.append(ask)
            replies = self.engine.deliver(ask)

    def tags(self) -> list[str]:
        return [message.TAG for ask in self.asked for message in dict.fromkeys(ask.messages.values())]


def columns_of(seed: int = 0) -> list[np.ndarray]:
    """Three silos whose columns differ in scale and offset, and whose last column never varies."""
    generator = np.random.default_rng(seed)
    scale, offset = np.array([1e-6, 1.0, 1e6, 0.0]), np.array([1e-5, -3.0, 2e6, 4.0])
    return [
        generator.normal(number, 1.0 + number, (rows, 4)) * scale + offset for number, rows in enumerate((7, 30, 1))
    ]


@pytest.mark.parametrize(("scheme", "bits"), SCHEMES)
def test_standardised_columns_are_numpys_of_the_pooled_rows(scheme: str, bits: int) -> None:
    xs = columns_of()
    house = House(xs, scheme, bits, columns=4)
    assert house.setup() is None
    pooled = np.concatenate(xs)
    mean, deviation = pooled.mean(axis=0), pooled.std(axis=0)
    # Rounding is that of numpy's own sums: 38 rows, |mean| below 10 deviations, 2^-53 each.
    np.testing.assert_allclose(house.enrolment.preparation.mean, mean, rtol=1e-14)
    np.testing.assert_allclose(house.enrolment.preparation.deviation[:3], deviation[:3], rtol=1e-13)
    assert house.enrolment.preparation.deviation[3] == 1.0  # a column that never varies stays as it is, minus its mean
    for x, silo in zip(xs, house.silos.values(), strict=True):
        expected = (x[:, :3] - mean[:3]) / deviation[:3]
        np.testing.assert_allclose(silo.rows.x[:, :3].numpy(), expected, rtol=0, atol=1e-12)
        assert (silo.rows.x[:, 3] == 0).all()


def with_absent(seed: int = 3) -> list[np.ndarray]:
    """Three silos whose rows lack values; one silo lacks a whole column."""
    generator = np.random.default_rng(seed)
    xs = [generator.uniform(0, 120, (rows, 4)) for rows in (40, 25, 9)]
    for x in xs:
        x[generator.random(x.shape) < 0.2] = np.nan
    xs[2][:, 1] = np.nan
    xs[0][0] = 7.0
    return xs


def rules_of(fill: str) -> ColumnRules:
    """Columns 0 and 1 are scaled; in 0 the median is filled in, in 1 and 2 the mean, and 3 has every value."""
    fills = np.array([2 if fill == "median" else 1, 1, 1, 0], np.int8)
    low, high = np.array([0.0, 0, 0, 0]), np.array([120.0, 0, 0, 0])
    return ColumnRules(np.array([True, True, False, False]), fills, low, high)


@pytest.mark.parametrize("fill", ["mean", "median"])
@pytest.mark.parametrize(("scheme", "bits"), SCHEMES)
def test_absent_values_are_filled_in_by_the_figures_of_all_silos(scheme: str, bits: int, fill: str) -> None:
    xs = with_absent()
    for x in xs:
        x[np.isnan(x[:, 3]), 3] = 5.0
    house = House(xs, scheme, bits, columns=rules_of(fill), scales=True)
    assert house.setup() is None
    pooled, found = np.concatenate(xs), house.enrolment.preparation
    mean = np.nanmean(pooled, axis=0)
    np.testing.assert_allclose(found.mean, [*mean[:2], 0, 0], rtol=1e-13)
    np.testing.assert_allclose(found.deviation, [*np.nanstd(pooled, axis=0)[:2], 1, 1], rtol=1e-13)
    np.testing.assert_allclose(found.fill[1:], [*mean[1:3], 0], rtol=1e-13)
    if fill == "median":  # it lies in the part of the range, a 64th, in which the true median is
        assert abs(found.fill[0] - np.nanmedian(pooled[:, 0])) < 120 / 64
    seen = np.concatenate([silo.rows.x.numpy() for silo in house.silos.values()])
    whole = (np.where(np.isnan(pooled), found.fill, pooled) - found.mean) / found.deviation
    np.testing.assert_allclose(seen, whole, rtol=0, atol=1e-12)
    # PBPFL's scale of all inputs is that of what is trained on, without another sum.
    assert house.enrolment.input_scale == pytest.approx((whole.mean(), whole.std()), rel=1e-9)


def test_a_silo_counts_only_columns_whose_median_is_filled_in_within_their_range() -> None:
    xs = with_absent()
    for x in xs:
        x[np.isnan(x[:, 3]), 3] = 5.0
    house = House(xs, columns=rules_of("median"))
    assert house.setup() is None
    silo = house.silos["silo-0"]
    asked = {"what": "input columns", "columns": np.array([0]), "low": np.array([0.0]), "high": np.array([120.0])}
    for change in (
        {"what": "targets"},
        {"columns": np.array([1])},
        {"low": np.array([10.0])},
        {"high": np.array([20.0])},
    ):
        message = AskHistogram(stamp=Stamp("run", 1, 0), encoding={}, **(asked | change))  # type: ignore[arg-type]
        with pytest.raises(PeerError, match="a statistic of the run's settings"):
            silo.rows.answer(message, silo.contributor, silo.model)


def test_a_column_without_any_value_at_any_silo_is_refused_by_its_number() -> None:
    xs = with_absent()
    for x in xs:
        x[:, 2] = np.nan
        x[np.isnan(x[:, 3]), 3] = 5.0
    with pytest.raises(ParameterError, match=r"column 2 \(counted from 0\) has no value at any silo"):
        House(xs, columns=rules_of("mean")).setup()


def test_a_silo_with_another_schema_of_its_table_refuses() -> None:
    house = House(columns_of(), columns=4)
    house.enrolment._table = "another"
    aborted = house.setup()
    assert aborted is not None
    assert "the schemas of the server and of this silo differ" in aborted.missing["silo-1"].detail


def test_what_the_server_receives_is_masked() -> None:
    house = House(columns_of(), "pairwise", columns=4, scales=True)
    house.setup()
    sent = {message.TAG for silo in house.silos.values() for message in silo.sent}
    assert sent == {
        "secure-aggregation/key-advert", "secure-aggregation/keys-accepted", "secure-aggregation/masked",
        "secure-aggregation/self-mask-shares", "enrolment/ready",
    }  # fmt: skip


@pytest.mark.parametrize(("scheme", "bits"), SCHEMES)
def test_scales_of_inputs_and_targets_are_those_of_all_rows(scheme: str, bits: int) -> None:
    generator = np.random.default_rng(1)
    xs = [generator.normal(3, 2, (rows, 2, 3, 3)) for rows in (4, 9)]
    ys = [generator.normal(-1, 5, (rows, 2)) for rows in (4, 9)]
    house = House(xs, scheme, bits, scales=True, ys=ys)
    house.setup()
    x, y = np.concatenate(xs), np.concatenate(ys)
    assert house.enrolment.input_scale == pytest.approx((x.mean(), x.std()), rel=1e-13)
    assert house.enrolment.target_scale == pytest.approx(np.sqrt((y**2).mean()), rel=1e-13)
    standard = House([x[:, 0, 0] for x in xs], scheme, bits, scales=True, columns=3, ys=ys)
    standard.setup()
    assert standard.enrolment.input_scale == (0.0, 1.0)  # columns of mean 0 and deviation 1 each


@pytest.mark.parametrize(("scheme", "bits"), SCHEMES)
def test_scaled_targets_are_numpys_of_the_pooled_rows_and_are_asked_for_once(scheme: str, bits: int) -> None:
    generator = np.random.default_rng(1)
    xs = [generator.normal(3, 2, (rows, 3)) for rows in (4, 9, 5)]
    ys = [generator.normal([5e4, -1e-3], [9e3, 1e-5], (rows, 2)) for rows in (4, 9, 5)]
    house = House(xs, scheme, bits, scales=True, columns=3, ys=ys, targets=2)
    assert house.setup() is None
    assert house.setup(1, ["silo-0", "silo-2"]) is None
    assert house.tags().count("secure-aggregation/ask-moments") == 4  # of columns, and of targets
    assert house.enrolment.target_scale == 1.0
    pooled = np.concatenate(ys)
    preparation = house.enrolment.preparation
    np.testing.assert_allclose(preparation.target_mean, pooled.mean(axis=0), rtol=1e-14)
    np.testing.assert_allclose(preparation.target_deviation, pooled.std(axis=0), rtol=1e-12)
    for y, silo in zip(ys, house.silos.values(), strict=True):
        expected = (y - pooled.mean(axis=0)) / pooled.std(axis=0)
        np.testing.assert_allclose(silo.rows.y.numpy(), expected, rtol=0, atol=1e-10)
        np.testing.assert_array_equal(silo.rows.of.take(np.arange(len(y)), np.float64)[1], silo.rows.y.numpy())
    again = House(xs, scheme, bits, scales=True, columns=3, ys=ys, targets=2)
    again.enrolment.restore(house.enrolment.state())
    assert again.setup() is None
    assert "secure-aggregation/ask-moments" not in again.tags()
    np.testing.assert_array_equal(again.silos["silo-0"].rows.y.numpy(), house.silos["silo-0"].rows.y.numpy())


@pytest.mark.parametrize(("agreed", "sent"), [(0, 1), (1, 0), (1, 2), (2, 1)])
def test_a_silo_scales_targets_only_as_its_settings_say(agreed: int, sent: int) -> None:
    """A server that scales them as it likes makes of gradients what it likes, also where sums are blind."""
    house = House([np.ones((3, 3))], targets=agreed, ys=[np.arange(6.0).reshape(3, 2)[:, : agreed or 1]])
    prepared = Preparation.nothing()
    prepared = prepared.scaling(np.zeros(sent), np.full(sent, 1e-9)) if sent else prepared
    silo = house.silos["silo-0"]
    before = silo.rows.y.clone()
    with pytest.raises(PeerError, match=f"expected the scale of {agreed} targets, as the run's settings have it"):
        silo.answer(silo_rows.Begin.of(Stamp("run", 1, 0), modules.schema(house.model), "", prepared))
    assert torch.equal(silo.rows.y, before)


@pytest.mark.parametrize(
    ("mean", "deviation"), [([0.0], [0.0]), ([0.0], [-1.0]), ([], []), ([0.0], [1.0, 1.0]), ([[0.0]], [[1.0]])]
)
def test_a_scale_that_is_none_is_refused(mean: Any, deviation: Any) -> None:
    plain = Preparation.nothing().figures
    with pytest.raises(PeerError, match=r"enrolment/begin-scaled, .*: expected"):
        silo_rows.BeginScaled(
            stamp=Stamp("run", 1, 0), schema="", table="", **plain,
            target_mean=np.array(mean), target_deviation=np.array(deviation),
        )  # fmt: skip


def test_targets_that_are_all_zero_have_the_scale_1() -> None:
    house = House([np.ones((3, 3))], scales=True)
    house.setup()
    assert house.enrolment.target_scale == 1.0


def test_tokens_have_no_scale_and_stay_whole_numbers() -> None:
    x = np.arange(12, dtype=np.int64).reshape(4, 3)
    house = House([x], scales=True)
    house.setup()
    assert house.silos["silo-0"].rows.x.dtype == torch.int64
    assert (house.silos["silo-0"].rows.x.numpy() == x).all()
    assert house.enrolment.input_scale == (0.0, 0.0)


def test_without_columns_inputs_stay_bit_for_bit() -> None:
    xs = [x.astype(np.float32) for x in columns_of()]
    house = House(xs)
    house.setup()
    for x, silo in zip(xs, house.silos.values(), strict=True):
        assert silo.rows.x.dtype == torch.float64
        assert (silo.rows.x.numpy() == x).all()
    x32 = prepared(xs[0], Preparation.nothing(), torch.float32)
    assert x32.numpy().tobytes() == xs[0].tobytes()


def test_statistics_are_gathered_once_a_run_and_keys_at_every_setup() -> None:
    house = House(columns_of(), "pairwise", columns=4)
    house.setup()
    preparation = house.enrolment.preparation
    first, house.asked = house.tags(), []
    assert first.count("secure-aggregation/ask-moments") == 2  # mean and deviation of the columns
    assert house.setup(1, ["silo-0", "silo-2"]) is None
    assert house.tags() == ["secure-aggregation/advertise-key", "secure-aggregation/peer-keys", "enrolment/begin"]
    assert house.enrolment.cohort == ("silo-0", "silo-2")
    assert house.enrolment.preparation is preparation


def test_a_restored_server_asks_for_no_statistics_and_says_the_same() -> None:
    house, other = House(columns_of(), columns=4, scales=True), House(columns_of(), columns=4, scales=True)
    house.setup()
    other.enrolment.restore(house.enrolment.state())
    assert other.setup() is None
    assert other.tags() == ["enrolment/begin"]
    for one, two in zip(house.silos.values(), other.silos.values(), strict=True):
        assert one.rows.x.numpy().tobytes() == two.rows.x.numpy().tobytes()
    restored = other.enrolment.state()
    for name, value in house.enrolment.state().items():
        assert (np.asarray(restored[name]) == np.asarray(value)).all()
    assert other.enrolment.most_weight == house.enrolment.most_weight


@pytest.mark.parametrize(
    ("batch_size", "cohort", "most"),
    [(0, 3, 38), (0, 2, 38), (4, 3, 12), (100, 3, 300), (4, 2, 8)],  # rows are counted once a run, of all silos
)
def test_most_weight_bounds_the_rows_of_a_round(batch_size: int, cohort: int, most: int) -> None:
    house = House(columns_of(), batch_size=batch_size)
    house.setup()
    house.setup(1, list(house.silos)[:cohort])
    assert house.enrolment.most_weight == most


def test_a_silo_with_another_model_refuses_and_says_why() -> None:
    house = House(columns_of())
    house.silos["silo-1"].rows.of.schema = modules.schema(nn.Linear(3, 2))
    aborted = house.setup()
    assert aborted is not None
    assert list(aborted.missing) == ["silo-1"]
    assert aborted.missing["silo-1"].reason is Reason.REFUSED
    assert "the server's model has other tensors than the silo's" in aborted.missing["silo-1"].detail
    assert house.enrolment.cohort == ()


@pytest.mark.parametrize("scheme", ["none", "pairwise"])
def test_a_silo_with_other_columns_refuses_and_says_how_many(scheme: str) -> None:
    xs = columns_of()
    house = House([xs[0], xs[1][:, :3], xs[2]], scheme, columns=4)
    aborted = house.setup()
    assert aborted is not None
    assert list(aborted.missing) == ["silo-1"]
    assert aborted.missing["silo-1"].reason is Reason.BAD_INPUT
    assert "4 columns" in aborted.missing["silo-1"].detail
    house.setup(1, ["silo-0", "silo-2"])  # the rest go on; it is told again when it comes back
    aborted = house.setup(2)
    assert aborted is not None
    assert "expected 4 input columns, as the server has; got 3" in aborted.missing["silo-1"].detail


def test_rows_are_seen_in_batches() -> None:
    x, y = np.arange(30.0).reshape(10, 3), np.arange(10.0)[:, None]
    house = House([x], ys=[y])
    rows = house.silos["silo-0"].rows
    for number in (1, 3, 4):
        inputs, wanted = rows.batch(number)
        index = Batches(10, 4, 0, "silo-0").of_round(number)
        assert (inputs.numpy() == x[index]).all()
        assert (wanted.numpy() == y[index]).all()


def test_a_rounds_randomness_is_a_function_of_seed_silo_and_round_and_is_put_back() -> None:
    def draw(seed: int, silo: str, number: int) -> float:
        rows = SiloRows(TrainingRows(np.zeros((1, 1)), np.zeros(1), Batches(1, 1, seed, silo)), torch.float64)
        before = torch.get_rng_state()
        with rows.randomness(number):
            drawn = float(torch.rand(1))
        assert (torch.get_rng_state() == before).all()
        return drawn

    places = [(seed, silo, number) for seed in (0, 1) for silo in ("a", "b") for number in (1, 2)]
    drawn = [draw(*place) for place in places]
    assert drawn == [draw(*place) for place in reversed(places)][::-1]
    assert len(set(drawn)) == len(drawn)


INTS, FLOATS = np.array([0, 2, 1]), np.array([0.5, -1.0, 2.0])
PROBABILITIES = np.array([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [0.0, 0.75, 0.25]])
ONE_HOT = np.eye(3)[INTS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("y", "outputs", "loss", "expected"),
    [
        (INTS, 3, "mse", ONE_HOT),
        (INTS.astype(np.uint8), 3, "mse", ONE_HOT),
        (INTS, 5, "mse", np.eye(5)[INTS]),
        (np.array([0, 1, 1]), 1, "mse", [[0], [1], [1]]),
        (np.array([False, True, True]), 1, "mse", [[0], [1], [1]]),
        (np.array([False, True, True]), 2, "mse", [[1, 0], [0, 1], [0, 1]]),
        (INTS, 3, "cross-entropy", INTS),
        (INTS.astype(np.int8), 4, "cross-entropy", INTS),
        (FLOATS, 1, "mse", FLOATS[:, None]),
        (FLOATS[:, None], 1, "mse", FLOATS[:, None]),
        (FLOATS.astype(np.float32), 1, "mse", FLOATS[:, None]),
        (np.stack([FLOATS, FLOATS], 1), 2, "mse", np.stack([FLOATS, FLOATS], 1)),
        (ONE_HOT, 3, "mse", ONE_HOT),
        (ONE_HOT, 3, "cross-entropy", ONE_HOT),
        (PROBABILITIES, 3, "cross-entropy", PROBABILITIES),
        (PROBABILITIES.astype(np.float32), 3, "cross-entropy", PROBABILITIES),
    ],
)
def test_targets_as_the_loss_wants_them(
    y: np.ndarray, outputs: int, loss: str, expected: Any, dtype: torch.dtype
) -> None:
    made = targets(y, outputs, loss, "north", dtype)
    wanted = np.asarray(expected)
    classes = y.dtype.kind in "iub" and loss == "cross-entropy"
    assert made.dtype == (torch.int64 if classes else dtype)
    assert tuple(made.shape) == wanted.shape
    np.testing.assert_allclose(made.numpy(), wanted, rtol=6e-8 if dtype == torch.float32 else 1e-7)
    Loss(loss)(torch.zeros(len(y), outputs, dtype=dtype), made)  # and the loss takes them


@refused("enrolment.txt")
def test_what_cannot_be_is_refused(row: Row) -> None:
    row.play(globals())


def test_a_column_that_never_varies_is_not_divided_by_its_rounding() -> None:
    x = np.stack([np.full(1000, 0.1), np.arange(1000.0)], axis=1)
    assert x.std(axis=0)[0] > 0  # float64 cannot say 0.1
    found = fitted_alone(x, ColumnRules.alike(2, scaled=True))
    assert found.deviation[0] == 1.0
    assert found.deviation[1] == pytest.approx(x[:, 1].std())
    assert found.mean == pytest.approx([0.1, 499.5])
