"""Ids as points of Curve25519: RFC 9380's vectors, the curve's equation, and what peers may not send."""

from __future__ import annotations

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from moretta.data.alignment import curve
from moretta.errors import PeerError

P, A = 2**255 - 19, 486662

# RFC 9380, appendix J.4.2, curve25519_XMD:SHA-512_ELL2_NU_: msg, u[0], Q.x, P.x
SUITE = b"QUUX-V01-CS02-with-curve25519_XMD:SHA-512_ELL2_NU_"
VECTORS = [
    (
        b"",
        "608d892b641f0328523802a6603427c26e55e6f27e71a91a478148d45b5093cd",
        "51125222da5e763d97f3c10fcc92ea6860b9ccbbd2eb1285728f566721c1e65b",
        "1bb913f0c9daefa0b3375378ffa534bda5526c97391952a7789eb976edfe4d08",
    ),
    (
        b"abc",
        "46f5b22494bfeaa7f232cc8d054be68561af50230234d7d1d63d1d9abeca8da5",
        "7d56d1e08cb0ccb92baf069c18c49bb5a0dcd927eff8dcf75ca921ef7f3e6eeb",
        "7c22950b7d900fa866334262fcaea47a441a578df43b894b4625c9b450f9a026",
    ),
    (
        b"abcdef0123456789",
        "235fe40c443766ce7e18111c33862d66c3b33267efa50d50f9e8e5d252a40aaa",
        "3fbe66b9c9883d79e8407150e7c2a1c8680bee496c62fabe4619a72b3cabe90f",
        "31ad08a8b0deeb2a4d8b0206ca25f567ab4e042746f792f4b7973f3ae2096c52",
    ),
    (
        b"q128_" + b"q" * 128,
        "001e92a544463bda9bd04ddbe3d6eed248f82de32f522669efc5ddce95f46f5b",
        "227e0bb89de700385d19ec40e857db6e6a3e634b1c32962f370d26f84ff19683",
        "027877759d155b1997d0d84683a313eb78bdb493271d935b622900459d52ceaa",
    ),
    (
        b"a512_" + b"a" * 512,
        "1a68a1af9f663592291af987203393f707305c7bac9c8d63d6a729bdc553dc19",
        "3bcd651ee54d5f7b6013898aab251ee8ecc0688166fce6e9548d38472f6bd196",
        "5fd892c0958d1a75f54c3182a18d286efab784e774d1e017ba2fb252998b5dc1",
    ),
]


def number(point: np.ndarray) -> int:
    return int.from_bytes(point.tobytes(), "little")


def doubled(x: int) -> int:
    """Return x of 2 Q, by the curve's formula."""
    return (x * x - 1) ** 2 * pow(4 * x * (x * x + A * x + 1), -1, P) % P


@pytest.mark.parametrize(("message", "u", "q", "p"), VECTORS)
def test_rfc_9380(message: bytes, u: str, q: str, p: str) -> None:
    assert curve._hash([message], SUITE) == [int(u, 16)]
    found = number(curve.encode([message], SUITE)[0])
    assert found == int(q, 16)
    assert doubled(doubled(doubled(found))) == int(p, 16)  # clear_cofactor, which a clamped secret includes


def test_a_batch_is_its_messages_one_by_one() -> None:
    messages = [f"patient {n}".encode() for n in range(1030)]  # more than are inverted together
    together = curve.encode(messages)
    assert together.shape == (1030, 32)
    assert all(
        (curve.encode([one])[0] == found).all() for one, found in zip(messages[::100], together[::100], strict=True)
    )


@given(st.binary(max_size=80))
def test_points_are_on_the_curve(message: bytes) -> None:
    x = number(curve.encode([message])[0])
    assert 0 <= x < P
    assert pow(x * (x * x + A * x + 1), (P - 1) // 2, P) == 1


@given(st.integers(1, P - 1))
def test_jacobi_symbols_are_eulers_powers(a: int) -> None:
    assert curve._is_square(a) == (pow(a, (P - 1) // 2, P) == 1)


def test_secrets_commute_and_hide() -> None:
    points = curve.encode([b"one", b"two"])
    a, b = X25519PrivateKey.generate().private_bytes_raw(), X25519PrivateKey.generate().private_bytes_raw()
    assert (curve.blind(curve.blind(points, a), b) == curve.blind(curve.blind(points, b), a)).all()
    assert not (curve.blind(points, a) == points).all(axis=1).any()


def test_another_purpose_has_other_points() -> None:
    assert (curve.encode([b"one"]) != curve.encode([b"one"], b"another-purpose")).any()


# x of all points whose order divides 8, on the curve and on its twist (RFC 7748, section 7)
LOW = [
    0,
    1,
    P - 1,
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
]


@pytest.mark.parametrize("x", LOW)
def test_points_of_low_order_are_refused(x: int) -> None:
    points = curve.as_points(x.to_bytes(32, "little"))
    with pytest.raises(PeerError, match="low order"):
        curve.blind(np.concatenate([curve.encode([b"one"]), points]), bytes(range(32)))


@pytest.mark.parametrize("data", [b"", bytes(31), bytes(33), bytes(65)])
def test_other_lengths_are_refused(data: bytes) -> None:
    with pytest.raises(PeerError, match="32 bytes"):
        curve.as_points(data)


@pytest.mark.parametrize("x", [P, P + 1, 2**255 - 1, 2**255, 2**256 - 1, 2**255 + 9])
def test_numbers_that_are_no_coordinates_are_refused(x: int) -> None:
    with pytest.raises(PeerError, match="below 2"):
        curve.as_points(bytes([9]) + bytes(31) + x.to_bytes(32, "little"))


def test_the_largest_coordinate_is_one() -> None:
    assert len(curve.as_points((P - 1).to_bytes(32, "little") + bytes([0xEC]) + b"\xff" * 30 + b"\x7e")) == 2


def test_a_point_comes_once() -> None:
    with pytest.raises(PeerError, match="twice"):
        curve.as_points((bytes([9]) + bytes(31)) * 2)


def test_points_that_end_in_zeros_differ() -> None:
    assert len(curve.as_points(bytes(32) + bytes([1]) + bytes(31))) == 2


def test_random_points_are_multiples_of_the_base_point() -> None:
    seed = np.arange(64, dtype=np.uint8).reshape(2, 32)
    base = np.frombuffer(bytes([9]) + bytes(31), np.uint8).reshape(1, 32)
    assert (curve.random_points(seed)[1] == curve.blind(base, seed[1].tobytes())[0]).all()
