from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from moretta.errors import ParameterError
from moretta.secure_aggregation.keystream import (
    Keystream,
    SecretRoot,
    derive,
    encode_names,
    encode_parts,
    encode_purpose,
)

VECTORS = json.loads((Path(__file__).parent / "vectors" / "keystream.json").read_text(encoding="utf-8"))
DERIVATIONS = VECTORS["derivations"]
KEY = bytes(range(32))

parts = st.one_of(st.integers(-(2**63), 2**63 - 1), st.text(st.characters(exclude_categories=["Cs"])), st.binary())


def purpose_of(case: dict[str, Any]) -> list[int | str | bytes]:
    return [bytes.fromhex(part["hex"]) if isinstance(part, dict) else part for part in case["purpose"]]


def test_nist_counter_mode() -> None:
    vector = VECTORS["nist_ctr"]
    stream = Keystream(bytes.fromhex(vector["key"] + vector["counter"]))
    assert stream.octets(64).tobytes().hex() == vector["output"]


@pytest.mark.parametrize("case", VECTORS["rfc5869"], ids=lambda case: case["source"])
def test_rfc5869(case: dict[str, str]) -> None:
    output = bytes.fromhex(case["output"])
    salt = bytes.fromhex(case["salt"]) or None
    key = HKDF(hashes.SHA256(), len(output), salt=salt, info=bytes.fromhex(case["info"]))
    assert key.derive(bytes.fromhex(case["secret"])) == output


@given(st.binary(min_size=16, max_size=200), st.lists(parts, max_size=4))
def test_a_derivation_is_that_of_the_cryptography_library(secret: bytes, purpose: list[Any]) -> None:
    theirs = HKDF(hashes.SHA256(), 32, salt=None, info=encode_purpose(*purpose))
    assert derive(secret, *purpose) == theirs.derive(secret)


@pytest.mark.parametrize("case", DERIVATIONS["cases"], ids=lambda case: str(case["purpose"]))
def test_derivations(case: dict[str, Any]) -> None:
    root, purpose = bytes.fromhex(DERIVATIONS["root"]), purpose_of(case)
    assert encode_purpose(*purpose).hex() == case["info"]
    assert derive(root, *purpose).hex() == case["key"]
    assert SecretRoot(root).stream(*purpose).octets(40).tobytes().hex() == case["stream"]


@given(st.lists(parts, max_size=4), st.lists(parts, max_size=4))
def test_different_purposes_have_different_encodings(one: list, other: list) -> None:
    same = [(type(part), part) for part in one] == [(type(part), part) for part in other]
    assert (encode_purpose(*one) == encode_purpose(*other)) == same


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_integers_are_little_endian_and_read_once(bits: int) -> None:
    octets = Keystream(KEY).octets(bits).tobytes()
    stream = Keystream(KEY)
    drawn = np.concatenate([stream.integers(3, bits), stream.integers(0, bits), stream.integers(5, bits)])
    size = bits // 8
    assert drawn.dtype == np.dtype(f"uint{bits}")
    assert drawn.tolist() == [int.from_bytes(octets[size * i : size * (i + 1)], "little") for i in range(8)]


def test_distributions() -> None:
    # 40,000 draws; tolerances are six standard errors, so a fixed key that fails shows a fault, not chance.
    count = 40_000
    uniform, normal = Keystream(KEY).uniform(count), Keystream(KEY).normal(count)
    assert 0.0 <= uniform.min() <= uniform.max() < 1.0
    assert abs(uniform.mean() - 0.5) < 6 / np.sqrt(12 * count)
    assert abs(normal.mean()) < 6 / np.sqrt(count)
    assert abs(normal.var() - 1.0) < 6 * np.sqrt(2 / count)
    assert len(Keystream(KEY).normal(7)) == 7


@pytest.mark.parametrize("count", [0, 1, 100])
def test_permutations(count: int) -> None:
    assert sorted(Keystream(KEY).permutation(count)) == list(range(count))


def test_nothing_is_drawn_for_nothing() -> None:
    stream = Keystream(KEY)
    for empty in (stream.octets(0), stream.uniform(0), stream.normal(0), stream.permutation(0)):
        assert empty.size == 0
    assert stream.octets(16).tobytes() == Keystream(KEY).octets(16).tobytes()


def test_roots() -> None:
    assert SecretRoot.fresh().reveal() != SecretRoot.fresh().reveal()
    assert SecretRoot.insecure(1, "a").reveal() == SecretRoot.insecure(1, "a").reveal()
    assert len({SecretRoot.insecure(seed, role).reveal() for seed in (1, 2) for role in ("a", "b")}) == 4
    with pytest.raises(ParameterError, match="expected 32 bytes, got 16"):
        SecretRoot(bytes(16))
    with pytest.raises(ParameterError, match="expected 32 bytes, got 16"):
        Keystream(bytes(16))


def test_secrets_are_not_in_representations() -> None:
    root = SecretRoot(KEY)
    assert repr(root) == str(root) == "SecretRoot(<redacted>)"
    assert repr(root.stream("x")) == "Keystream(<redacted>)"


def test_only_names_that_are_encoded_as_such_are_remembered() -> None:
    before = encode_names.cache_info().currsize
    derive(KEY, "purpose", "text of a message")
    parts = encode_parts("a person's id", "another's")
    assert encode_names.cache_info().currsize == before
    assert encode_names("a person's id", "another's") == parts
