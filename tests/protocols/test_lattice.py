"""Noise in whole steps: the lattice, what one row moves, sums that are exact, and the noise that a sum is left with."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from moretta.errors import ParameterError, PeerError
from moretta.protocols.common.lattice import COARSEST, Lattice, Privacy
from moretta.protocols.common.noise import SiloNoise
from moretta.secure_aggregation.discrete_gaussian import discrete_gaussian
from moretta.secure_aggregation.encoding import MOST_WEIGHT, Ring, plan
from moretta.secure_aggregation.keystream import Keystream, SecretRoot
from moretta.secure_aggregation.removable_noise import Noise

PRIVACY = Privacy(noise=1.5, clip=0.7, delta=1e-5, sharers=4)
SILOS, LOT, ENTRIES = 4, 7, 4000  # a lot by which no power of two can be divided


@given(
    entries=st.integers(1, 10**8), noise=st.floats(1e-3, 1e3), clip=st.floats(1e-6, 1e6), sharers=st.integers(1, 100)
)
def test_a_lattice_is_as_fine_as_it_is_said_to_be(entries: int, noise: float, clip: float, sharers: int) -> None:
    found = Lattice.of(Privacy(noise, clip, 1e-5, sharers), entries)
    assert math.frexp(found.step)[0] == 0.5  # a power of two, so that products with it are exact
    assert found.step * math.sqrt(entries) <= COARSEST * clip
    assert clip < found.sensitivity <= 1.01 * clip
    assert found.deviation * found.step >= noise * found.sensitivity / math.sqrt(sharers)
    # What (C) of `discrete_gaussian` takes off is no more than was added: sigma sqrt(k / S) is the multiplier of k.
    for k in (1, sharers):
        multiplier = math.sqrt(k * found.deviation**2 - 8) * found.step / found.sensitivity
        assert multiplier >= noise * math.sqrt(k / sharers) * (1 - 1e-12)


@given(st.integers(0, 10**6), st.integers(1, 400))
def test_one_row_more_moves_a_rounded_sum_by_no_more_than_the_sensitivity(seed: int, entries: int) -> None:
    found, drawn = Lattice.of(PRIVACY, entries), np.random.default_rng(seed)
    total, row = drawn.normal(size=(2, entries))
    # As bad as can be: each number of the row's just passes the middle between two steps.
    total = (np.rint(total / found.step) + 0.5 - 1e-9) * found.step
    for moved in (row, np.full(entries, 1e-8 * found.step), found.step * drawn.integers(-1, 2, entries)):
        moved = moved / max(1.0, float(np.linalg.norm(moved)) / PRIVACY.clip)
        before, after = (np.rint(each / found.step) * found.step for each in (total, total + moved))
        assert np.linalg.norm(after - before) <= found.sensitivity * (1 + 1e-9)


# -- in the ring -------------------------------------------------------------------------------------------------------


def silo(number: int = 0, privacy: Privacy = PRIVACY) -> SiloNoise:
    return SiloNoise(privacy, 4 * LOT, LOT, SecretRoot.insecure(number, "north"), b"")


@pytest.mark.parametrize(("bits", "limit"), [(64, 2.0**16), (64, 8.0), (32, 16.0)])
def test_a_ring_adds_whole_steps_exactly(bits: int, limit: float) -> None:
    ring, found = Ring(bits), Lattice.of(PRIVACY, ENTRIES)
    limit = found.range(limit, SILOS * LOT) if bits == 64 else limit
    encoding = plan(ring, SILOS, {"x": (ENTRIES,)}, {"x": limit}, SILOS * LOT).fraction_bits
    total = {"x": np.random.default_rng(0).normal(0, 3, ENTRIES)}
    uploads = [silo(number).noised(total, encoding, "run", 1)["x"] for number in range(SILOS)]
    words = [ring.encode("x", upload, LOT, encoding["x"], SILOS * LOT, SILOS) for upload in uploads]
    finer = math.ldexp(found.step, encoding["x"])  # the ring's steps in one of the lattice
    for word, upload in zip(words, uploads, strict=True):
        signed = word.view(f"int{bits}").astype(object)
        assert all(number % int(finer) == 0 for number in signed)
        steps = np.rint(upload * LOT / found.step)  # whole, whatever a division by 7 has rounded
        assert np.abs(steps - upload * LOT / found.step).max() < 1e-6
        assert [number // int(finer) for number in signed] == steps.astype(np.int64).tolist()


def test_a_ring_too_coarse_or_too_fine_for_whole_steps_is_refused() -> None:
    weight, found = {MOST_WEIGHT: 1 << 40}, Lattice.of(PRIVACY, 100)
    assert found.step == 2.0**-11
    found.check({"w": 11, "b": 30} | weight, LOT)
    with pytest.raises(ParameterError, match=r"has steps of 0\.000488, but sums are rounded to 0\.000977, which would"):
        found.check({"w": 20, "b": 10} | weight, LOT)
    with pytest.raises(ParameterError, match=r"need more of such steps than are added exactly; set a higher"):
        found.check({"w": 48} | weight, LOT)
    with pytest.raises(ParameterError, match=r"and 9000 rows with noise need more"):
        found.check({"w": 40} | weight, 9000)
    found.check({}, LOT)  # in the clear
    Lattice.of(replace(PRIVACY, noise=0.0), 100).check({"w": -60}, LOT)  # no noise, and epsilon is unbounded
    for bits in (-2000, 2000):
        with pytest.raises(PeerError, match=f"`w`: expected at most 964 fraction bits, got {bits}"):
            found.check({"w": bits} | weight, LOT)


def test_what_is_too_large_for_exact_sums_is_brought_in_before_the_noise() -> None:
    found = Lattice.of(PRIVACY, 3)
    stream = SecretRoot.insecure(0, "x").stream("noise")
    drawn = discrete_gaussian(found.deviation).draw(stream, 3)
    noised = found.noised(np.array([1e30, -1e30, 0.0]), 1000.0, drawn) / found.step
    assert np.abs(noised - [1000, -1000, 0]).max() < 6 * found.deviation


# -- the noise of a sum ------------------------------------------------------------------------------------------------


def chance_of(noises: list[NDArray[np.float64]], privacy: Privacy = PRIVACY) -> float:
    """The two-sided chance of noise in the sum that is as far from the accountant's variance, by chi-square."""
    found = Lattice.of(privacy, ENTRIES)
    variance = (privacy.noise * found.sensitivity) ** 2 + 8 * SILOS * found.step**2
    squares = float(np.square(np.sum(noises, axis=0)).sum()) / variance
    return 2 * min(stats.chi2.cdf(squares, ENTRIES), stats.chi2.sf(squares, ENTRIES))


def noises_of(*roots: int) -> list[NDArray[np.float64]]:
    """What silos add to nothing, as sums."""
    return [silo(root).noised({"x": np.zeros(ENTRIES)}, {}, "run", 1)["x"] * LOT for root in roots]


def correlations(noises: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Between every two."""
    table = np.asarray(np.corrcoef(noises))
    return table[np.triu_indices(len(noises), 1)]


def test_the_noise_of_a_sum_has_the_accountants_variance() -> None:
    assert chance_of(noises_of(0, 1, 2, 3)) > 1e-3


def test_half_the_deviation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Noise.levels
    monkeypatch.setattr(Noise, "levels", lambda own, *of: whole(replace(own, variance=own.variance / 4), *of))
    assert chance_of(noises_of(0, 1, 2, 3)) < 1e-6


@pytest.mark.parametrize("roots", [(0, 0, 0, 0), (0, 1, 2, 2)])
def test_one_seed_for_several_silos_is_found(roots: tuple[int, ...]) -> None:
    noises = noises_of(*roots)
    assert chance_of(noises) < 1e-6
    each = correlations(noises)
    assert each.max() > 6 / math.sqrt(ENTRIES)  # five deviations of what independent noises have, and one


def test_a_silo_without_noise_is_found() -> None:
    assert chance_of(noises_of(0, 1)) < 1e-6


def test_noises_of_silos_rounds_and_tensors_are_independent() -> None:
    noises = [*noises_of(0, 1, 2, 3), silo().noised({"x": np.zeros(ENTRIES)}, {}, "run", 2)["x"]]
    both = silo().noised({"x": np.zeros(ENTRIES), "y": np.zeros(ENTRIES)}, {}, "run", 3)
    assert np.abs(correlations([*noises, both["x"], both["y"]])).max() < 5 / math.sqrt(ENTRIES)


def test_a_stream_that_is_new_to_this_mechanism() -> None:
    """A silo that goes on after an update draws other noise for a take than the one before it did."""
    old = SecretRoot.insecure(0, "north").stream("dp noise", "run", 1)
    drawn = discrete_gaussian(Lattice.of(PRIVACY, ENTRIES).deviation).draw(old, ENTRIES)
    assert isinstance(old, Keystream)
    assert abs(np.corrcoef(drawn, noises_of(0)[0])[0, 1]) < 5 / math.sqrt(ENTRIES)
