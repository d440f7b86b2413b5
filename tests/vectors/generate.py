"""Write the golden vectors beside this file: ``python tests/vectors/generate.py``.

Expected values are computed here a second time, from the standards: HKDF from the standard library's HMAC, X25519 as
RFC 7748's ladder in whole numbers, ring elements as exact fractions. Only AES itself is borrowed (and pinned by NIST's
published vector), and the bytes of messages, which are pinned as they are so that a change of format is seen.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from moretta.codec import Codec
from moretta.protocol import Stamp
from moretta.secure_aggregation import MESSAGES
from moretta.secure_aggregation.agreement import AdvertiseKey, KeyAdvert, KeysAccepted, PeerKeys
from moretta.secure_aggregation.pairwise import MaskedUpload
from moretta.secure_aggregation.plain import PlainUpload
from moretta.secure_aggregation.statistics import AskMoments

HERE = Path(__file__).parent
STAMP = ("vectors", 3, 1)  # run, round, attempt
ROOTS = {name: bytes([number]) * 32 for number, name in enumerate(("anna", "bea", "città"), start=1)}
WEIGHTS = {"anna": 1, "bea": 20, "città": 300}
VALUES = {"anna": [0.5, -1.0, 2.0], "bea": [0.25, 0.0, -3.0], "città": [-0.125, 1e-3, 3.5]}
LIMIT, MOST_WEIGHT = 4.0, 400


def purpose(*parts: int | str | bytes) -> bytes:
    out = b"moretta/1"
    for part in parts:
        kind = {int: b"i", str: b"s", bytes: b"b"}[type(part)]
        content = part.to_bytes(8, "big", signed=True) if isinstance(part, int) else part
        content = content.encode() if isinstance(content, str) else content
        out += kind + len(content).to_bytes(4, "big") + content
    return out


def hkdf(secret: bytes, info: bytes, length: int = 32, salt: bytes = bytes(32)) -> bytes:
    extracted = hmac.new(salt, secret, hashlib.sha256).digest()
    out, block, counter = b"", b"", 1
    while len(out) < length:
        block = hmac.new(extracted, block + info + bytes([counter]), hashlib.sha256).digest()
        out, counter = out + block, counter + 1
    return out[:length]


def x25519(private: bytes, public: bytes) -> bytes:
    p, a24 = 2**255 - 19, 121665
    k = int.from_bytes(private, "little") & ~7 & ~(1 << 255) | (1 << 254)
    x1 = int.from_bytes(public, "little") & ((1 << 255) - 1)
    x2, z2, x3, z3, swapped = 1, 0, x1, 1, 0
    for t in reversed(range(255)):
        bit = k >> t & 1
        if bit ^ swapped:
            x2, x3, z2, z3 = x3, x2, z3, z2
        swapped = bit
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        aa, bb, da, cb = a * a, b * b, d * a, c * b
        e = aa - bb
        x3, z3 = (da + cb) ** 2 % p, x1 * (da - cb) ** 2 % p
        x2, z2 = aa * bb % p, e * (aa + a24 * e) % p
    if swapped:
        x2, z2 = x3, z3
    return (x2 * pow(z2, p - 2, p) % p).to_bytes(32, "little")


def keystream(key: bytes, length: int) -> bytes:
    first = int.from_bytes(key[16:], "big")
    counters = b"".join(((first + n) % 2**128).to_bytes(16, "big") for n in range(-(-length // 16)))
    return Cipher(algorithms.AES(key[:16]), modes.ECB()).encryptor().update(counters)[:length]


def words(stream: bytes, bits: int) -> list[int]:
    size = bits // 8
    return [int.from_bytes(stream[i : i + size], "little") for i in range(0, len(stream), size)]


def fraction_bits(limit: float, most_weight: int, parties: int, bits: int) -> int:
    room, f = 2 ** (bits - 1) - Fraction(parties, 2), 1100
    while Fraction(2) ** f * most_weight * Fraction(limit) * (1 + Fraction(1, 2**53)) >= room:
        f -= 1
    return f


def ring_element(value: float, weight: int, f: int, bits: int) -> int:
    return round(Fraction(2) ** f * weight * Fraction(value)) % 2**bits  # Python rounds ties to even


def keystream_vectors() -> dict[str, Any]:
    purposes: list[list[int | str | bytes]] = [[], ["mask"], ["mask", 1], ["mask1"], ["a", "b"], ["ab"], [b"ab"], [-1]]
    root = bytes(range(32))
    return {
        "nist_ctr": {
            "source": "NIST SP 800-38A, F.5.1 CTR-AES128.Encrypt: key, initial counter, output blocks",
            "key": "2b7e151628aed2a6abf7158809cf4f3c",
            "counter": "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff",
            "output": "ec8cdf7398607cb0f2d21675ea9ea1e4362b7c3c6773516318a077d7fc5073ae"
            "6a2cc3787889374fbeb4c81b17ba6c44e89c399ff0f198c6d40a31db156cabfe",
        },
        "rfc5869": [
            {
                "source": "RFC 5869, A.1",
                "secret": "0b" * 22,
                "salt": bytes(range(13)).hex(),
                "info": bytes(range(0xF0, 0xFA)).hex(),
                "output": "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
            },
            {
                "source": "RFC 5869, A.3 (no salt, as ours)",
                "secret": "0b" * 22,
                "salt": "",
                "info": "",
                "output": "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
            },
        ],
        "derivations": {
            "source": "this generator: HKDF from HMAC; bytes in a purpose are written as {hex}",
            "root": root.hex(),
            "cases": [
                {
                    "purpose": [{"hex": part.hex()} if isinstance(part, bytes) else part for part in parts],
                    "info": purpose(*parts).hex(),
                    "key": hkdf(root, purpose(*parts)).hex(),
                    "stream": keystream(hkdf(root, purpose(*parts)), 40).hex(),
                }
                for parts in purposes
            ],
        },
    }


def ring_vectors() -> dict[str, Any]:
    good = []
    for bits, limit, most_weight, parties, weight, values in [
        (64, 4.0, 400, 3, 20, [0.0, -0.0, 1.0, -1.0, 3.999, -4.0, 2.0**-60]),
        (32, 4.0, 400, 3, 20, [0.0, 1.0, -1.0, 3.999, -4.0, 1e-7]),
        (32, 16.0, 1, 2, 1, [1.5 * 2.0**-26, 2.5 * 2.0**-26, 0.5 * 2.0**-26, -0.5 * 2.0**-26, -1.5 * 2.0**-26]),
        (64, 1e-20, 7, 2, 3, [1e-20, -3e-21]),
        (64, 1e20, 1 << 40, 100, 1 << 33, [1e20, -7e19, 1e3]),
        (32, 1e6, (1 << 32) - 1, 2, 12345, [1e6, -2e5, 1.0]),
    ]:
        f = fraction_bits(limit, most_weight, parties, bits)
        arguments = {"bits": bits, "limit": limit, "most_weight": most_weight, "parties": parties, "weight": weight}
        elements = [ring_element(float(v * weight), 1, f, bits) for v in values]  # the product in float64, as stated
        good.append({**arguments, "values": [v.hex() for v in values], "fraction_bits": f, "words": elements})
    bad = [
        {"why": "beyond the range", "bits": 32, "fraction_bits": 20, "most_weight": 400, "parties": 3, "value": "6.0"},
        {"why": "not a number", "bits": 64, "fraction_bits": 20, "most_weight": 400, "parties": 3, "value": "nan"},
        {"why": "infinite", "bits": 64, "fraction_bits": 20, "most_weight": 400, "parties": 3, "value": "-inf"},
        {
            "why": "just on it",
            "bits": 32,
            "fraction_bits": 0,
            "most_weight": 1,
            "parties": 2,
            "value": str(2.0**31 - 1),
        },
    ]
    return {"source": "this generator: exact fractions; values are float.hex()", "good": good, "bad": bad}


def agreement_vectors() -> dict[str, Any]:
    base = (9).to_bytes(32, "little")
    private = {name: hkdf(root, purpose("key agreement", *STAMP, name, 0)) for name, root in ROOTS.items()}
    public = {name: x25519(key, base) for name, key in private.items()}
    names = sorted(public)
    digest = hashlib.sha256(purpose("cohort", *[part for name in names for part in (name, public[name])])).digest()
    seeds = {
        (one, other): hkdf(x25519(private[one], public[other]), purpose("pair", *STAMP, digest, one, other))
        for one in names
        for other in names
        if one < other
    }
    return {
        "rfc7748": {
            "source": "RFC 7748, section 6.1",
            "alice": "77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a",
            "alice_public": "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a",
            "bob": "5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb",
            "bob_public": "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f",
            "shared": "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742",
        },
        "low_order": {
            "source": "the points of order 1, 2, 4 and 8 as little-endian u, https://cr.yp.to/ecdh.html#validate",
            "keys": [
                bytes(32).hex(),
                (1).to_bytes(32, "little").hex(),
                "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
                "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
                *[(2**255 - 19 + n).to_bytes(32, "little").hex() for n in (-1, 0, 1)],
            ],
        },
        "setup": {
            "source": "this generator: RFC 7748's ladder and HKDF from HMAC",
            "stamp": STAMP,
            "roots": {name: root.hex() for name, root in ROOTS.items()},
            "public_keys": {name: key.hex() for name, key in public.items()},
            "cohort_digest": digest.hex(),
            "pair_seeds": {f"{one} {other}": seed.hex() for (one, other), seed in seeds.items()},
        },
        "uploads": [_uploads(digest, seeds, bits) for bits in (32, 64)],
    }


def _uploads(digest: bytes, seeds: dict[tuple[str, str], bytes], bits: int) -> dict[str, Any]:
    f = fraction_bits(LIMIT, MOST_WEIGHT, len(ROOTS), bits)

    def masked(me: str, plain: list[int], use: str) -> list[int]:
        total = list(plain)
        for (one, other), seed in seeds.items():
            key = hkdf(seed, purpose(use, *STAMP, digest, "w", one, other))
            sign = (me == one) - (me == other)
            mask = words(keystream(key, len(plain) * bits // 8), bits)
            total = [(entry + sign * word) % 2**bits for entry, word in zip(total, mask, strict=True)]
        return total

    return {
        "source": "this generator: ring elements as exact fractions, masks from HKDF and AES-128-CTR",
        "bits": bits,
        "limit": LIMIT,
        "most_weight": MOST_WEIGHT,
        "fraction_bits": f,
        "silos": {
            name: {
                "values": VALUES[name],
                "weight": WEIGHTS[name],
                "words": masked(name, [ring_element(v * WEIGHTS[name], 1, f, bits) for v in VALUES[name]], "mask"),
                "masked_weight": masked(name, [WEIGHTS[name]], "mask of weight")[0],
            }
            for name in sorted(ROOTS)
        },
    }


def message_vectors() -> dict[str, Any]:
    stamp, codec = Stamp(*STAMP), Codec(MESSAGES)
    keys = {name: x25519(root, (9).to_bytes(32, "little")) for name, root in ROOTS.items()}
    ring = {"w": np.arange(6, dtype=np.uint64).reshape(2, 3), "b": np.array([2**64 - 1], dtype=np.uint64)}
    floats = {"w": np.array([[1.5, -0.0]], dtype=np.float32), "loss": np.array(0.25)}
    encoding = {"moments/1/inputs": 41, "most weight": 3}
    messages = [
        AdvertiseKey(stamp=stamp),
        KeyAdvert(stamp=stamp, public_key=keys["anna"]),
        PeerKeys(stamp=stamp, keys=keys),
        KeysAccepted(stamp=stamp),
        MaskedUpload(stamp=stamp, tensors=ring, weight=np.array(7, dtype=np.uint64)),
        PlainUpload(stamp=stamp, tensors=floats, weight=7),
        AskMoments(stamp=stamp, what="inputs", order=1, center=np.array([0.0, 2.5]), encoding=encoding),
    ]
    encoded = {message.TAG: codec.encode(message) for message in messages}
    anna = keys["anna"].hex().encode()
    tampered = [
        ("a byte short", encoded["secure-aggregation/masked"][:-1]),
        ("a byte too many", encoded["secure-aggregation/masked"] + b"\0"),
        ("a tag of no schema", encoded["secure-aggregation/keys-accepted"].replace(b"keys-acc", b"kexs-acc")),
        (
            "an attempt below zero",
            encoded["secure-aggregation/keys-accepted"].replace(b'attempt\\":1', b'attempt\\":-'),
        ),
        ("a wire format of the future", encoded["secure-aggregation/keys-accepted"].replace(b'mat\\":1', b'mat\\":2')),
        ("a key of low order", encoded["secure-aggregation/key-advert"].replace(anna, b"00" * 32)),
        ("two silos with one key", encoded["secure-aggregation/peer-keys"].replace(keys["bea"].hex().encode(), anna)),
        ("a weight of zero", encoded["secure-aggregation/plain"].replace(b'weight\\":7', b'weight\\":0')),
        ("a third moment", encoded["secure-aggregation/ask-moments"].replace(b'order\\":1', b'order\\":3')),
        ("NaN in the clear", encoded["secure-aggregation/plain"].replace(b"\0\0\xc0\x3f", b"\0\0\xc0\x7f")),
        ("a float among ring elements", encoded["secure-aggregation/masked"].replace(b'"U64"', b'"F64"', 1)),
    ]
    assert len(messages) == len(MESSAGES)
    assert not {data for _, data in tampered} & set(encoded.values())
    return {
        "source": "moretta.codec, pinned: wire format 1",
        "good": [{"type": tag, "bytes": data.hex()} for tag, data in encoded.items()],
        "tampered": [{"why": why, "bytes": data.hex()} for why, data in tampered],
    }


VECTORS = {
    "keystream": keystream_vectors,
    "ring": ring_vectors,
    "agreement": agreement_vectors,
    "messages": message_vectors,
}

if __name__ == "__main__":
    for name, make in VECTORS.items():
        text = json.dumps(make(), indent=1, ensure_ascii=False) + "\n"
        (HERE / f"{name}.json").write_text(text, encoding="utf-8")
        print(f"{name}.json", file=sys.stderr)
