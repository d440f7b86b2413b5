"""Noise on scalars: what one row can add, how much noise there is, and that nothing else is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from baffle_runs import CLEAR, SEED, answering, client_of, learning, make, network, silos, table, weights
from cast import casting
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from moretta import SecureAggregation, Silo
from moretta.contract.messages import Stamp
from moretta.errors import ParameterError, PeerError, RangeError, UnreadableRow
from moretta.protocols.baffle.silo.client import noised_mean
from moretta.protocols.baffle.silo.messages import Estimate
from moretta.protocols.baffle.silo.recipe import LocalSteps
from moretta.protocols.common.accountant import epsilon
from moretta.protocols.common.lattice import Privacy
from moretta.protocols.common.noise import SiloNoise, Sums
from moretta.run.result import Result
from moretta.secure_aggregation.keystream import SecretRoot
from moretta.secure_aggregation.sums import Query

CLIP = 0.5
PURPOSE = ("run", 1, b"hash", b"seed")


def private(rows: int = 40, size: int = 10, noise: float = 0.0, root: int = 0, sharers: int = 1) -> SiloNoise:
    return SiloNoise(Privacy(noise, CLIP, 1e-5, sharers), rows, size, SecretRoot.insecure(root, "silo"), b"")


def scalars(k: int, rows: int, seed: int = 0, scale: float = 1.0) -> NDArray[np.float64]:
    return scale * np.random.default_rng(seed).normal(0, 1, (k, rows))


# -- one row -----------------------------------------------------------------------------------------------------------


@given(k=st.integers(1, 30), rows=st.integers(1, 12), seed=st.integers(0, 99), power=st.integers(-8, 8))
def test_a_sum_is_of_rows_clipped_to_the_norm_each(k: int, rows: int, seed: int, power: int) -> None:
    given_rows = scalars(k, rows, seed, 10.0**power)
    found = noised_mean(private(), given_rows, {}, *PURPOSE) * 10
    norms = np.sqrt(np.square(given_rows).sum(axis=0))
    wanted = sum(row * min(1.0, CLIP / norm) for row, norm in zip(given_rows.T, norms, strict=True))
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-13 * CLIP)


@pytest.mark.parametrize("row", [scalars(6, 1), scalars(6, 1, 1, 1e-3), scalars(6, 1, 2, 1e9), np.full((6, 1), 1e150)])
def test_one_row_more_changes_the_sum_by_its_clipped_scalars_and_no_more(row: NDArray[np.float64]) -> None:
    others = scalars(6, 9, 3)
    with_row, without = (noised_mean(private(), each, {}, *PURPOSE) for each in (np.hstack([others, row]), others))
    moved = with_row - without
    norm = np.linalg.norm(10 * moved)
    assert norm <= CLIP * (1 + 1e-9)
    assert norm == pytest.approx(min(CLIP, float(np.linalg.norm(row))), rel=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_counts_0(value: float) -> None:
    others = scalars(6, 9)
    broken = scalars(6, 1, 1)
    broken[3] = value
    assert np.array_equal(
        noised_mean(private(), np.hstack([others, broken]), {}, *PURPOSE), noised_mean(private(), others, {}, *PURPOSE)
    )


def test_a_row_whose_square_overflows_adds_no_more_than_another() -> None:
    with np.errstate(over="ignore"):
        moved = 10 * noised_mean(private(), np.full((6, 1), 1e300), {}, *PURPOSE)
    assert np.linalg.norm(moved) <= CLIP * (1 + 1e-9)


# -- noise -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharers", [1, 3])
def test_the_noise_has_the_deviation_that_is_told(sharers: int) -> None:
    k, rounds, noise = 500, 20, 1.5
    drawn = np.array(
        [
            10
            * noised_mean(private(noise=noise, sharers=sharers), np.zeros((k, 0)), {}, "run", number, b"hash", b"seed")
            for number in range(rounds)
        ]
    )
    deviation, entries = noise * CLIP / np.sqrt(sharers), k * rounds
    assert abs(drawn.mean()) < 5 * deviation / np.sqrt(entries)
    # A sum of squares over the variance is chi-squared, of variance 2 n.
    assert abs(np.square(drawn / deviation).sum() - entries) < 5 * np.sqrt(2 * entries)
    between = (drawn @ drawn.T / deviation**2 / np.sqrt(k))[np.triu_indices(rounds, 1)]
    assert np.abs(between).max() < 6


def test_the_same_round_has_the_same_lot_and_noise_and_any_other_has_others() -> None:
    rows, given_rows = 200, scalars(8, 5)
    one = private(rows, 100, 1.0)

    def drawn(of: SiloNoise, *purpose: int | str | bytes) -> tuple[bytes, bytes]:
        return of.rows_of_lot(*purpose).tobytes(), noised_mean(of, given_rows, {}, *purpose).tobytes()

    first = drawn(one, *PURPOSE)
    assert drawn(private(rows, 100, 1.0), *PURPOSE) == first
    restored = private(rows, 100, 1.0, root=4)
    restored.restore(one.state())
    assert drawn(restored, *PURPOSE) == first
    others = [("run", 2, b"hash", b"seed"), ("run", 1, b"HASH", b"seed"), ("run", 1, b"hash", b"SEED")]
    found = [first, *(drawn(one, *purpose) for purpose in others), drawn(private(rows, 100, 1.0, root=4), *PURPOSE)]
    assert len({lot for lot, _ in found}) == len({noise for _, noise in found}) == len(found)


def test_lots_have_each_row_with_its_chance() -> None:
    one, rounds = private(40, 10), 400
    lots = [one.rows_of_lot("run", number, b"hash", b"seed") for number in range(rounds)]
    counts = np.bincount(np.concatenate(lots), minlength=40)
    assert np.abs(counts - rounds / 4).max() < 5 * np.sqrt(rounds * 0.25 * 0.75)
    assert abs(counts.sum() - 10 * rounds) < 5 * np.sqrt(40 * rounds * 0.25 * 0.75)


# -- runs --------------------------------------------------------------------------------------------------------------


def train(rounds: int = 3, scheme: Any = "pairwise", **changes: Any) -> Result:
    rest = {key: changes.pop(key) for key in ("silos", "batch_size", "test", "insecure_secret_seed") if key in changes}
    protocol = learning(**{"dp_noise": 1.0, "dp_clip": 2.0, "k": 8} | changes)
    return make(protocol, aggregation=SecureAggregation(scheme=scheme), **rest).train(rounds, SEED)


@pytest.mark.parametrize("scheme", ["none", "pairwise"])
def test_a_run_states_the_accountants_epsilon_and_no_loss(scheme: str) -> None:
    result = train(3, scheme)
    facts = result.record["facts"]
    rate = 16 / 24  # of the silo with fewest rows
    assert facts["epsilon"] == epsilon(1.0, 1e-5, rate, 3)
    assert ("epsilon_to_silos" in facts) == (scheme == "pairwise")
    assert facts["sampling_rate"] == rate
    assert all("loss" not in line and line["rows"] == 48 for line in result.history)


def uploads(**changes: Any) -> list[NDArray[np.float64]]:
    """What silo-0 uploads in the clear in each round."""
    found: list[NDArray[np.float64]] = []

    def keep(honest: Any, ask: Estimate) -> Any:
        reply = honest(ask)
        assert set(reply.tensors) == {"scalars"}
        found.append(reply.tensors["scalars"])
        return reply

    with casting(answering("silo-0", Estimate, keep)):
        train(3, "none", **changes)
    return found


@pytest.mark.parametrize("form", ["mean", "twice-forward"])
def test_an_upload_is_the_scalars_and_nothing_else(form: str) -> None:
    found = uploads(form=form)
    assert {upload.shape for upload in found} == {(16 if form == "twice-forward" else 8,)}
    assert len({upload.tobytes() for upload in found}) == 3
    again, other = uploads(form=form), uploads(form=form, insecure_secret_seed=2)
    assert [upload.tobytes() for upload in again] == [upload.tobytes() for upload in found]
    assert not {upload.tobytes() for upload in other} & {upload.tobytes() for upload in found}


def test_the_noise_of_a_runs_uploads_is_as_told() -> None:
    quiet, loud = (uploads(k=200, dp_noise=noise, batch_size=0, silos=silos((24,) * 3))[0] for noise in (0.0, 5.0))
    deviation = 5.0 * 2.0 / 24  # z C / L; the first round's directions are those without noise, and all rows are in it
    assert abs(np.square((loud - quiet) / deviation).sum() - 200) < 5 * np.sqrt(2 * 200)


def test_a_silo_adds_no_noise_that_a_servers_encoding_would_round_away() -> None:
    refused: list[int] = []

    def tempt(honest: Any, ask: Estimate) -> Any:
        assert ask.encoding["scalars"] > 8
        with pytest.raises(ParameterError, match="which would round it away"):
            honest(replace(ask, encoding={**ask.encoding, "scalars": 1}))
        for bits in (-2000, 2000):
            with pytest.raises(PeerError, match="`scalars`: expected at most 964 fraction bits"):
                honest(replace(ask, encoding={**ask.encoding, "scalars": bits}))
        refused.append(ask.stamp.round)
        return honest(ask)

    with casting(answering("silo-0", Estimate, tempt)):
        train(2)
    assert refused == [1, 2]


def test_a_run_whose_ring_rounds_the_noise_away_is_refused() -> None:
    with pytest.raises(ParameterError, match="which would round it away"):
        make(
            learning(dp_noise=1.0, dp_clip=2.0, k=8), aggregation=SecureAggregation(limit=1e18), evaluate_every=1
        ).train(2)


def test_two_runs_of_one_id_with_other_noise_do_not_cancel_it() -> None:
    """Nine times the upload under dp-noise = 8, less eight times that under 9, was the sum of the clipped scalars."""
    parts = silos((24,) * 3)
    bare, eight, nine = (uploads(k=200, dp_noise=z, batch_size=0, silos=parts)[0] for z in (0.0, 8.0, 9.0))
    deviation = 72 * np.sqrt(2) * 2.0 / 24
    off = (9 * eight - 8 * nine - bare) / deviation
    assert abs(np.square(off).sum() - 200) < 5 * np.sqrt(2 * 200)  # as of independent noises; it was 0


def test_noise_is_bound_to_the_graph_that_a_server_sends() -> None:
    """Whose operations are the server's word: under two graphs the scalars differ, and the noise is to."""
    with casting() as players:
        train(1, "none", silos=silos((24, 24, 24)))
    client = client_of(players[0])
    assert client._private is not None
    ask = Estimate(
        stamp=Stamp("run", 1, 0),
        parameters=np.zeros(1, np.float32),
        parameter_hash=b"h" * 32,
        k=8,
        encoding={},
    )
    drawn = {
        client._private.purpose(ask.stamp, *client._follows_from(ask, b"seed"))
        for client._computes in (b"one graph", b"another")
    }
    assert len(drawn) == 2


def test_one_row_more_changes_a_runs_upload_by_its_share_at_most() -> None:
    """All of 24 rows against 23: a row outside has nothing to say about the lot's others."""
    parts, changed = silos((24, 24, 24)), silos((24, 24, 24))
    x = changed[0].x.copy()
    x[7] = 50.0
    changed[0] = Silo("silo-0", x, changed[0].y)
    one, other = (uploads(silos=of, dp_noise=0.0, dp_clip=0.1, batch_size=0)[0] for of in (parts, changed))
    moved = 24 * np.linalg.norm(one - other)
    assert 0.01 < moved <= 2 * 0.1 * (1 + 1e-9)  # one row out and another in


@pytest.mark.parametrize("orthogonal", [False, True])
def test_an_empty_lot_uploads_noise(orthogonal: bool) -> None:
    x, y = table(60)
    small = [Silo(f"silo-{part}", x[20 * part : 20 * part + 20], y[20 * part : 20 * part + 20]) for part in range(3)]
    lots = list[int]()

    def wrap(players: Any) -> None:
        for name in players.clients:
            client = client_of(players, name)
            client._private.lot_of = noting(client._private.lot_of)  # type: ignore[union-attr, method-assign]

    def noting(draw: Any) -> Any:
        def drawn(*purpose: int | str | bytes) -> Any:
            lots.append(len((lot := draw(*purpose))[0]))
            return lot

        return drawn

    with casting(wrap):
        result = make(
            learning(dp_noise=1.0, dp_clip=1.0, k=8, orthogonal=orthogonal),
            silos=small,
            batch_size=1,
            aggregation=CLEAR,
        ).train(8, SEED)
    assert 0 in lots  # with the chance (19/20)^20 = 0.36 for each of 24
    assert not result.record["dropped"]


def test_noise_in_proportion_leaves_a_model_that_learns() -> None:
    x, y = table(1500, 2)
    parts = [Silo(f"silo-{part}", x[part:1200:3], y[part:1200:3]) for part in range(3)]
    result = train(
        30, silos=parts, batch_size=100, test=(x[1200:], y[1200:]), k=24, dp_noise=0.7, dp_clip=4.0, learning_rate=0.05
    )
    assert result.test["accuracy"] > 0.25 + 5 * np.sqrt(0.25 * 0.75 / 300) + 0.1
    assert set(weights(result)) == set(network().state_dict())


@pytest.mark.parametrize("settings", [{}, {"local_epochs": 1}])
def test_a_silo_that_cannot_read_its_rows_is_named(settings: dict[str, Any]) -> None:
    """What is wrong at a silo and is no value of its rows is not hidden by a noised upload."""

    def broken(*_: Any) -> Any:
        raise UnreadableRow("an image has changed")

    def wrap(players: Any) -> None:
        client_of(players, "silo-1")._work = broken  # type: ignore[assignment]

    with casting(wrap):
        result = train(1, "none", **settings)
    assert [(drop["silo"], "an image has changed" in drop["reason"]) for drop in result.record["dropped"]]


def test_moments_that_overflow_are_those_of_the_rounds_start() -> None:
    steps, at = LocalSteps(adam=True), np.zeros(2, np.float32)
    steps.begin(1)
    steps.step(at, np.array([1.0, 2.0]), 0.1)
    steps.begin(2)
    before = steps.state()
    with np.errstate(over="ignore"):
        steps.step(at, np.array([1e25, 0.0]), 0.1)
    assert not steps.finite
    steps.begin(2)
    assert steps.finite
    assert steps.state() == before


def test_an_update_that_is_refused_for_its_range_is_counted() -> None:
    """The refusal is seen, and tells something of the noised values."""

    class Refuses:
        members = ("north", "south")

        def upload(self, *_: Any, **__: Any) -> Any:
            raise RangeError("a value is out of range")

    noise = SiloNoise(Privacy(0.0, CLIP, 1e-5, 1, "silo"), 40, 10, SecretRoot.insecure(0, "silo"), b"")
    asked = Query(b"digest", own=b"cohort")
    with pytest.raises(RangeError):
        noise.upload_update(Stamp("run", 1, 0), {"difference": np.ones(3)}, {}, Sums(Refuses(), asked), b"rows")  # type: ignore[arg-type]
    assert noise.releases.count == 1


@pytest.mark.parametrize("settings", [{}, {"local_epochs": 2}])
def test_rows_that_overflow_are_not_told_of(settings: dict[str, Any]) -> None:
    parts = silos()
    x = parts[1].x.copy()
    x[:4] = 1e38
    parts[1] = Silo("silo-1", x, parts[1].y)
    result = train(2, silos=parts, loss="mse", **settings)
    assert not result.record["dropped"]
    assert all(np.isfinite(value).all() for value in weights(result).values())
