from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sum_driver import NOW, play

from moretta.contract.messages import Message
from moretta.contract.roles import Aborted
from moretta.errors import ParameterError, PeerError, RangeError
from moretta.secure_aggregation.schemes import aggregator, contributor
from moretta.secure_aggregation.statistics import (
    ALL,
    AskMoments,
    Moments,
    answer_moments,
    from_limbs,
    moments,
    to_limbs,
)

WAYS = [("none", 64), ("pairwise", 64), ("pairwise", 32)]


def gather(scheme: str, bits: int, data: list[np.ndarray], asked: tuple[str, ...] = ("inputs",)) -> list:
    """Set up, then ask for moments; the whats of `asked` all under one stamp."""
    server, silos = aggregator(scheme, bits), {}
    for number, matrix in enumerate(data):
        room = contributor(scheme, f"s{number}", bits)
        columns = {"inputs": matrix, "all": matrix.reshape(-1, 1), "rows": np.zeros((len(matrix), 0))}

        def answer(message: Message, room=room, columns=columns) -> Message | None:
            if isinstance(message, AskMoments):
                return answer_moments(room, message, columns[message.what])
            return room.answer(message)

        silos[f"s{number}"] = answer
    assert play(server.setup(NOW, list(silos)), silos) is None
    widths = {"inputs": data[0].shape[1], "all": 1, "rows": 0}
    return [play(moments(server, NOW, widths[what], what=what), silos) for what in asked]


@pytest.mark.parametrize(("scheme", "bits"), WAYS)
def test_equal_to_numpy_on_pooled_data(scheme: str, bits: int) -> None:
    rng = np.random.default_rng(5)
    scales = 10.0 ** np.arange(-6, 10)
    data = [rng.normal(0.5, 1.0, size=(rows, 16)) * scales for rows in (1, 7, 300, 40_000)]
    pooled = np.concatenate(data)
    (result,) = gather(scheme, bits, data)
    assert isinstance(result, Moments)
    assert result.rows == len(pooled)
    assert np.allclose(result.mean, pooled.mean(axis=0), rtol=1e-12, atol=0)
    assert np.allclose(result.deviation, pooled.std(axis=0), rtol=1e-12, atol=0)


def test_far_from_zero_and_far_apart() -> None:
    # Columns with a mean a million times their spread: two passes keep what sums of squares would lose.
    rng = np.random.default_rng(6)
    data = [1e6 + rng.normal(size=(50, 1)), 1e6 + rng.normal(size=(9, 1))]
    (result,) = gather("pairwise", 64, data)
    assert np.allclose(result.deviation, np.concatenate(data).std(axis=0), rtol=1e-9)


def test_a_mean_beyond_every_center() -> None:
    micros = 1.7e15 + 8.64e10 * np.arange(60.0)[:, None]  # of two months
    (result,) = gather("pairwise", 64, [np.hstack([part, np.full_like(part, -1e17)]) for part in np.split(micros, 3)])
    np.testing.assert_allclose(result.mean, [micros.mean(), -1e17], rtol=1e-15)
    assert result.deviation[0] == pytest.approx(micros.std(), rel=1e-6)
    assert result.deviation[1] == 0.0


@pytest.mark.parametrize("constant", [0.0, 0.1, -1e9 / 3, 1e-6])
def test_a_column_that_never_varies_has_deviation_zero(constant: float) -> None:
    (result,) = gather("pairwise", 64, [np.full((rows, 1), constant) for rows in (1_000, 30_001, 3)])
    assert result.deviation.tolist() == [0.0]
    assert np.allclose(result.mean, constant, rtol=1e-15)


def test_several_whats_under_one_stamp() -> None:
    data = [np.arange(6.0).reshape(3, 2), np.ones((2, 2))]
    rows, inputs, everything = gather("pairwise", 64, data, ("rows", "inputs", "all"))
    assert (rows.rows, inputs.rows, everything.rows) == (5, 5, 10)
    assert rows.mean.shape == (0,)
    assert np.allclose(inputs.mean, np.concatenate(data).mean(axis=0))
    assert np.allclose(everything.deviation, np.concatenate(data).std())


@pytest.mark.parametrize(
    ("matrix", "sentence"),
    [
        (np.array([[1.0, np.nan]]), "`inputs`: column 1 .* missing or infinite"),
        (np.array([[np.inf, 1.0]]), "`inputs`: column 0 .* missing or infinite"),
        (np.array([[1.0, 1e36]]), "`inputs`: column 1 .* too large"),
        (np.array([[1.0, 1e308], [1.0, 1e308]]), "`inputs`: column 1 .* too large"),
        (np.ones((2, 3)), "knows 2 columns"),
        (np.ones((0, 2)), "at least one row"),
    ],
)
def test_data_that_cannot_be_summed_names_its_column(matrix: np.ndarray, sentence: str) -> None:
    (aborted,) = gather("pairwise", 64, [np.ones((2, 2)), matrix])
    assert isinstance(aborted, Aborted)
    assert set(aborted.missing) == {"s1"}
    room = contributor("none", "s1")
    ask = AskMoments(stamp=NOW, what="inputs", order=1, center=np.zeros(2), columns=ALL, encoding={})
    with pytest.raises(ParameterError, match=sentence):
        answer_moments(room, ask, matrix)


def test_the_first_error_is_of_its_kind() -> None:
    room = contributor("none", "s1")
    ask = AskMoments(stamp=NOW, what="inputs", order=2, center=np.zeros(1), columns=ALL, encoding={})
    with pytest.raises(RangeError):
        answer_moments(room, ask, np.array([[1e200]]))


@pytest.mark.parametrize(("entry", "value"), [((11, 0), 2.0**18), ((11, 1), 2.0**18), ((5, 0), 2.0**18)])
def test_a_silo_that_sends_impossible_sums_fails_the_exchange_and_not_the_server(
    entry: tuple[int, int], value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(values: Sequence[float]) -> np.ndarray:
        limbs = to_limbs(values)
        if values[0] == 5.0:  # the rows of one silo
            limbs[entry] += value
        return limbs

    monkeypatch.setattr("moretta.secure_aggregation.statistics.to_limbs", wrong)
    with pytest.raises(PeerError):
        gather("none", 64, [np.ones((2, 1)), np.ones((5, 1))])


@pytest.mark.parametrize(("order", "center"), [(-1, np.zeros(1)), (3, np.zeros(1)), (1, np.zeros((1, 1))),
                                               (1, np.zeros(1, dtype=np.float32))])  # fmt: skip
def test_bad_asks(order: int, center: np.ndarray) -> None:
    with pytest.raises(PeerError):
        AskMoments(stamp=NOW, what="inputs", order=order, center=center, columns=ALL, encoding={})


@given(st.lists(st.floats(-(2.0**118), 2.0**118, allow_subnormal=True), max_size=4))
def test_limbs_hold_a_number_to_half_a_grid_step(values: list[float]) -> None:
    limbs = to_limbs(values)
    assert limbs.shape == (12, len(values))
    assert (limbs >= -(2**19)).all()
    assert (limbs < 2**19).all()
    for value, back in zip(values, from_limbs(limbs), strict=True):
        numerator, denominator = value.as_integer_ratio()
        assert 2 * abs(back * denominator - (numerator << 120)) <= denominator


def test_a_plain_sum_of_limbs_is_exact_too() -> None:
    values = [2.0**117, -(2.0**117) / 3, 2.0**-118]
    silos = 100
    total = sum(to_limbs(values) / silos for _ in range(silos)) * silos
    assert from_limbs(np.rint(total)) == [silos * number for number in from_limbs(to_limbs(values))]
