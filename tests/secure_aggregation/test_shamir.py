from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refused_rows import Row, refused

from moretta.errors import ParameterError, PeerError
from moretta.secure_aggregation import shamir
from moretta.secure_aggregation.shamir import PRIME, SHARE_BYTES, random_secret, reconstruct, share

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "shamir.json").read_text(encoding="utf-8"))

secrets = st.integers(0, PRIME - 1).map(lambda value: value.to_bytes(SHARE_BYTES, "little"))


def shares_of(case: dict) -> dict[int, bytes]:
    return {int(x): bytes.fromhex(content) for x, content in case["shares"].items()}


@pytest.mark.parametrize("case", VECTORS["good"])
def test_vectors(case: dict) -> None:
    secret, shares = bytes.fromhex(case["secret"]), shares_of(case)
    random = io.BytesIO(bytes.fromhex(case["randomness"])).read
    assert share(secret, case["threshold"], list(shares), random) == shares
    assert reconstruct(shares, case["threshold"]) == secret


def test_published_vector() -> None:
    case = VECTORS["published"]
    shares = shares_of(case)
    for first in range(1, 5):
        some = {x: shares[x] for x in range(first, first + case["threshold"])}
        assert reconstruct(some, case["threshold"]).hex() == case["secret"]


@pytest.mark.parametrize("case", VECTORS["tampered"], ids=lambda case: case["why"])
def test_tampered_vectors(case: dict) -> None:
    with pytest.raises(PeerError, match=case["error"]) as caught:
        reconstruct(shares_of(case), case["threshold"])
    assert not any(len(content) > 8 and content in str(caught.value) for content in case["shares"].values())


@given(secrets, st.data())
def test_any_threshold_of_the_shares_give_the_secret(secret: bytes, data: st.DataObject) -> None:
    points = data.draw(st.lists(st.integers(1, PRIME - 1) | st.integers(1, 40), min_size=2, max_size=12, unique=True))
    threshold = data.draw(st.integers(2, len(points)))
    shares = share(secret, threshold, points)
    assert list(shares) == points
    assert all(len(content) == SHARE_BYTES for content in shares.values())
    some = data.draw(st.permutations(points))[: data.draw(st.integers(threshold, len(points)))]
    assert reconstruct({x: shares[x] for x in some}, threshold) == secret


@given(secrets, secrets, st.integers(2, 8))
def test_one_share_too_few_goes_with_every_secret(secret: bytes, other: bytes, threshold: int) -> None:
    known = {x: content for x, content in share(secret, threshold, range(1, threshold + 1)).items() if x < threshold}
    # The polynomial of degree threshold - 1 through these shares and `other` at 0, seen at one point more.
    points = [0, *known]
    values = [int.from_bytes(content, "little") for content in (other, *known.values())]
    last = 0
    for x, y in zip(points, values, strict=True):
        for z in points:
            if z != x:
                y = y * (threshold - z) * pow(x - z, -1, PRIME) % PRIME
        last += y
    forged = {**known, threshold: (last % PRIME).to_bytes(SHARE_BYTES, "little")}
    assert reconstruct(forged, threshold) == other


@pytest.mark.parametrize("secret", [0, PRIME - 1])
def test_a_share_alone_is_uniform_whatever_the_secret(secret: int) -> None:
    rng = np.random.default_rng(11)
    draws = 6400
    content = secret.to_bytes(SHARE_BYTES, "little")
    shares = [share(content, 2, [1, 2], rng.bytes)[2] for _ in range(draws)]
    # Chi-square over 64 equal classes of the low and of the high bits: mean 63, deviation sqrt(126) = 11.2; six above.
    for classes in ([low[0] & 63 for low in shares], [high[31] >> 1 for high in shares]):
        counts = np.bincount(classes, minlength=64)
        assert ((counts - draws / 64) ** 2).sum() / (draws / 64) < 63 + 6 * 126**0.5


def test_random_secrets_are_field_elements_and_fresh() -> None:
    drawn = {random_secret() for _ in range(50)}
    assert len(drawn) == 50
    for secret in drawn:
        assert len(secret) == SHARE_BYTES
        assert int.from_bytes(secret, "little") < PRIME
    assert random_secret(lambda count: b"\xff" * count) == ((2**384 - 1) % PRIME).to_bytes(SHARE_BYTES, "little")


@refused("shamir.txt")
def test_what_cannot_be_is_refused(row: Row) -> None:
    row.play(globals())


@pytest.mark.parametrize("secret", [b"k" * 31, b"k" * 33, b"\xff" * 32])
def test_secrets_that_are_no_field_elements_are_refused_without_showing_them(secret: bytes) -> None:
    with pytest.raises(ParameterError, match="secret: expected a field element") as caught:
        share(secret, 2, [1, 2])
    assert caught.value.__suppress_context__
    for shown in (str(caught.value), repr(caught.value)):
        assert "kkk" not in shown
        assert "xff" not in shown


def test_the_lowest_points_count_and_no_others() -> None:
    secret = random_secret()
    shares = share(secret, 2, [5, 3, 1])
    assert reconstruct({5: b"not a share", 3: shares[3], 1: shares[1]}, 2) == secret
    assert reconstruct({5: shares[5], 3: shares[3], 1: bytes(SHARE_BYTES)}, 2) != secret  # not noticed, as stated


def test_weights_are_kept() -> None:
    shamir.weights_at_zero.cache_clear()
    for _ in range(5):
        reconstruct(share(random_secret(), 3, [4, 2, 8, 6]), 3)
    kept = shamir.weights_at_zero.cache_info()
    assert (kept.misses, kept.hits) == (1, 4)
    assert shamir.weights_at_zero((1, 2, 3)) == (3, PRIME - 3, 1)  # 3 f(1) - 3 f(2) + f(3) = f(0) for parabolas
