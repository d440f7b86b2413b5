"""Write the golden vectors beside this file: ``python tests/vectors/generate.py``.

Expected values are computed here a second time, from the standards: HKDF from the standard library's HMAC, X25519 as
RFC 7748's ladder, Ed25519 and ChaCha20-Poly1305 in whole numbers, ring elements as exact fractions, messages from the
description of their format. Only AES itself is borrowed (and pinned by NIST's published vector). Nothing of Moretta is
imported.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
import json
import sys
from collections.abc import Iterator
from decimal import Decimal, getcontext
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

HERE = Path(__file__).parent
STAMP = ("vectors", 3, 1, 2)  # run, round, attempt, take
ROOTS = {name: bytes([number]) * 32 for number, name in enumerate(("anna", "bea", "città", "dora"), start=1)}
Data = dict[str, tuple[int, dict[str, list[float]]]]  # a silo's weight and tensors
DATA: Data = {
    "anna": (1, {"w": [0.5, -1.0, 2.0], "b": [3.0, -3.5]}),
    "bea": (20, {"w": [0.25, 0.0, -3.0], "b": [0.0, 1.0]}),
    "città": (300, {"w": [-0.125, 1e-3, 3.5], "b": [-1e-3, 0.75]}),
    "dora": (7, {"w": [1.0, -0.0, -2.5], "b": [2.0, -2.0]}),
}
LIMIT, MOST_WEIGHT = 4.0, 400


def purpose(*parts: int | str | bytes) -> bytes:
    out = b"moretta/1"
    for part in parts:
        kind = {int: b"i", str: b"s", bytes: b"b"}[type(part)]
        content = part.to_bytes(8, "big", signed=True) if isinstance(part, int) else part
        content = content.encode() if isinstance(content, str) else content
        out += kind + len(content).to_bytes(4, "big") + content
    return out


def parts_of(*parts: int | str | bytes) -> bytes:
    return purpose(*parts).removeprefix(b"moretta/1")


def asked_for(encoding: dict[str, int]) -> bytes:
    """Return the digest of what an upload answers, where the tests' message asks that carries nothing but this."""
    said = purpose("message", "test/train") + parts_of("encoding") + parts_of("mapping", len(encoding))
    said += b"".join(parts_of(name) + parts_of("plain", encoding[name]) for name in sorted(encoding))
    return hashlib.sha256(purpose("asked", hashlib.sha256(said).digest())).digest()


def _written(parts: list[int | str | bytes]) -> list[Any]:
    return [{"hex": part.hex()} if isinstance(part, bytes) else part for part in parts]


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
                    "purpose": _written(parts),
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
    pairs = Pairs(STAMP, ROOTS)
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
            "public_keys": {name: key.hex() for name, key in pairs.public.items()},
            "threshold": pairs.threshold,
            "min_survivors": MIN_SURVIVORS,
            "cohort_digest": pairs.digest.hex(),
            "pair_seeds": {f"{one} {other}": seed.hex() for (one, other), seed in pairs.seeds.items()},
        },
    }


FIELD = 2**255 - 19
MIN_SURVIVORS = 2
LOST = "bea"


class Pairs:
    """Four silos after a set-up: complete graph, threshold floor(2 n / 3) + 1, hidden weights, keys from their roots.

    roster: its digest. A set-up belongs to an attempt, whatever the take.
    """

    def __init__(self, stamp: tuple[str, int, int, int], roots: dict[str, bytes], roster: str = "") -> None:
        self.stamp, self.roots, self.names = stamp, roots, sorted(roots)
        base, attempt = (9).to_bytes(32, "little"), stamp[:3]
        private = {name: hkdf(root, purpose("key agreement", *attempt, name, 0)) for name, root in roots.items()}
        self.public = {name: x25519(key, base) for name, key in private.items()}
        self.threshold = 2 * len(roots) // 3 + 1
        keys = [part for name in self.names for part in (name, self.public[name])]
        settings = (0, self.threshold, MIN_SURVIVORS, 0, roster)
        self.digest = hashlib.sha256(purpose("cohort", *settings, *keys)).digest()
        self.seeds = {
            (one, other): hkdf(
                x25519(private[one], self.public[other]), purpose("pair", *attempt, self.digest, one, other)
            )
            for one in self.names
            for other in self.names
            if one < other
        }


class Uploads:
    """What the four upload in one sum, and every secret of it."""

    def __init__(self, pairs: Pairs, data: Data, bits: int, tag: int = 0) -> None:
        """tag: the length of the tag of blinded uploads; 0 without one."""
        self.pairs, self.data, self.bits = pairs, data, bits
        self.fraction_bits = fraction_bits(LIMIT, MOST_WEIGHT, len(pairs.names), bits)
        tensors = {name: len(values) for name, values in data[pairs.names[0]][1].items()}
        tensors |= {"blind tag": tag} if tag else {}
        encoding = dict.fromkeys(tensors, self.fraction_bits) | {"most weight": MOST_WEIGHT}
        self.asked = asked_for(encoding)
        summed: list[int | str | bytes] = [self.asked]
        for name in sorted(tensors):
            summed += [name, 1, tensors[name]]  # its name, axes, and their lengths
        for name in sorted(encoding):
            summed += [name, encoding[name]]
        self.label = (*pairs.stamp, pairs.digest, hashlib.sha256(purpose("sum", *summed)).digest())
        self.mask_keys = {pair: hkdf(seed, purpose("mask", *self.label, *pair)) for pair, seed in pairs.seeds.items()}
        self.secrets: dict[str, bytes] = {}
        self.shares: dict[str, dict[str, bytes]] = {}
        for name, root in pairs.roots.items():
            random = keystream(hkdf(root, purpose("self-mask", *self.label, 0)), 48 * pairs.threshold)
            drawn = [int.from_bytes(random[i : i + 48], "little") % FIELD for i in range(0, len(random), 48)]
            self.secrets[name] = drawn[0].to_bytes(32, "little")
            self.shares[name] = {
                holder: value_at(x, drawn, list(range(len(drawn)))).to_bytes(32, "little")
                for x, holder in enumerate(pairs.names, start=1)
            }
        self.summed = hashlib.sha256(purpose("self-mask shares", *self.label)).digest()

    def plain(self, me: str) -> list[int]:
        """Return the weight and the tensors in the order of their names, as elements of the ring."""
        weight, tensors = self.data[me]
        scaled = [value * weight for name in sorted(tensors) for value in tensors[name]]
        return [weight, *(ring_element(value, 1, self.fraction_bits, self.bits) for value in scaled)]

    def masked(self, me: str) -> list[int]:
        total, size = self.plain(me), self.bits // 8
        masks = [(1, hkdf(self.secrets[me], purpose("self-mask", *self.label, me)))]
        masks += [((me == one) - (me == other), key) for (one, other), key in self.mask_keys.items()]
        for sign, key in masks:
            mask = words(keystream(key, len(total) * size), self.bits)
            total = [(entry + sign * word) % 2**self.bits for entry, word in zip(total, mask, strict=True)]
        return total

    def sealed(self, maker: str, holder: str) -> bytes:
        seed = self.pairs.seeds[min(maker, holder), max(maker, holder)]
        return aes_siv(hkdf(seed, purpose("seal", maker, holder)), self.shares[maker][holder], self.summed)

    def share_digest(self, maker: str, holder: str) -> bytes:
        return hashlib.sha256(self.summed + self.shares[maker][holder]).digest()

    def others(self, me: str) -> list[str]:
        return [name for name in self.pairs.names if name != me]

    def message(self, me: str) -> Fields:
        weight, *entries = self.masked(me)
        tensors = {}
        for name, values in sorted(self.data[me][1].items()):
            tensors[name], entries = entries[: len(values)], entries[len(values) :]
        return {
            "maker": me,
            "tensors": tensors,
            "weight": weight,
            "asked": self.asked.hex(),
            "committed": hashlib.sha256(purpose("self-mask secret", *self.label, me, self.secrets[me])).hexdigest(),
            "sealed": "".join(self.sealed(me, holder).hex() for holder in self.others(me)),
            "digests": "".join(self.share_digest(me, holder).hex() for holder in self.pairs.names),
        }


def sum_vectors() -> dict[str, Any]:
    source = "this generator: exact fractions, HKDF and AES-128-CTR, Shamir's polynomial, AES-SIV"
    return {
        "rfc8439": {"source": "RFC 8439, section 2.8.2", **RFC8439},
        "rfc5297": {"source": "RFC 5297, appendix A.1", **RFC5297},
        "uploads": [
            {
                "source": source,
                "stamp": STAMP,
                "roots": {name: root.hex() for name, root in ROOTS.items()},
                "bits": bits,
                "limit": LIMIT,
                "most_weight": MOST_WEIGHT,
                "fraction_bits": uploads.fraction_bits,
                "label": _written(list(uploads.label)),
                "mask_keys": {" ".join(pair): key.hex() for pair, key in uploads.mask_keys.items()},
                "silos": {
                    name: {
                        "weight": DATA[name][0],
                        "values": DATA[name][1],
                        "secret": uploads.secrets[name].hex(),
                        "shares": {holder: share.hex() for holder, share in uploads.shares[name].items()},
                        "upload": uploads.message(name),
                    }
                    for name in uploads.pairs.names
                },
            }
            for bits in (32, 64)
            for uploads in [Uploads(Pairs(STAMP, ROOTS), DATA, bits)]
        ],
        "dropout": _dropout(),
        "blinded": [_blinded(Uploads(Pairs(STAMP, ROOTS), DATA, bits, tag)) for bits, tag in ((32, 10), (64, 5))],
    }


PRIME = 2**89 - 1
BLIND = hashlib.sha256(b"a secret of the members").digest()


def _blinded(uploads: Uploads) -> dict[str, Any]:
    """Return one sum that is relayed unread: the members' keys, what whoever adds up holds, and what members read."""
    names, bits, half = uploads.pairs.names, uploads.bits, uploads.bits // 2
    keys = {name: hkdf(BLIND, purpose("blind", *uploads.label, name)) for name in names}
    total = [sum(entries) % 2**bits for entries in zip(*map(uploads.plain, names), strict=True)]
    factors = words(keystream(hkdf(BLIND, purpose("tag", *uploads.label)), 8 * len(total)), 64)
    tags = {
        name: sum(c * (x - 2**bits if i and x >= 2 ** (bits - 1) else x) for i, (c, x) in enumerate(pairs)) % PRIME
        for name, pairs in ((name, list(zip(factors, uploads.plain(name), strict=True))) for name in names)
    }
    sent = {
        name: tags[name] + PRIME * int.from_bytes(hkdf(root, purpose("tag", *uploads.label, 0))[:8], "little")
        for name, root in uploads.pairs.roots.items()
    }
    tag = [sum(own >> half * i & 2**half - 1 for own in sent.values()) for i in range(160 // half)]
    blinded = [*total[:3], *tag, *total[3:]]  # weight, b, tag, w
    for key in keys.values():
        stream = words(keystream(key, len(blinded) * bits // 8), bits)
        blinded = [(entry + word) % 2**bits for entry, word in zip(blinded, stream, strict=True)]
    weight, *entries = blinded
    b, blind_tag, w = entries[:2], entries[2 : 2 + len(tag)], entries[2 + len(tag) :]
    moved = [(blind_tag[0] + 1) % 2**bits, *blind_tag[1:]]
    total_weight, *signed = [entry - 2**bits if entry >= 2 ** (bits - 1) else entry for entry in total]
    tampered: list[tuple[str, Fields]] = [
        ("another key", {"key": hashlib.sha256(BLIND).hexdigest()}),
        ("a silo too few", {"members": names[1:]}),
        ("a silo too many", {"members": [*names, "emil"]}),
        ("the next attempt", {"stamp": (*STAMP[:2], STAMP[2] + 1, STAMP[3])}),
        ("another round", {"stamp": (STAMP[0], STAMP[1] + 1, *STAMP[2:])}),
        ("the next take", {"stamp": (*STAMP[:3], STAMP[3] + 1)}),
        ("something else asked", {"asked": "00" * 32}),
        ("another run", {"stamp": ("vector", *STAMP[1:])}),
        ("a bit more behind the point", {"encoding": {"w": uploads.fraction_bits + 1}}),
        ("another bound of the weight", {"encoding": {"most weight": MOST_WEIGHT + 1}}),
        ("two tensors swapped", {"words": {"w": b, "b": w, "blind tag": blind_tag}}),
        ("an entry moved by one", {"words": {"w": [(w[0] + 1) % 2**bits, *w[1:]], "b": b, "blind tag": blind_tag}}),
        ("the tag moved by one", {"words": {"w": w, "b": b, "blind tag": moved}}),
        ("no tag", {"words": {"w": w, "b": b}}),
        ("one more row", {"weight": (weight + 1) % 2**bits}),
        ("the highest bit of the weight", {"weight": weight ^ 1 << (bits - 1)}),
        ("a weight beyond the bound", {"weight": (weight + MOST_WEIGHT) % 2**bits}),
        ("no weight", {"weight": (weight - total_weight) % 2**bits}),
    ]
    return {
        "source": "this generator, as the uploads, whose masks cancel; one keystream a silo on top, and tags",
        "stamp": STAMP,
        "roots": {name: root.hex() for name, root in ROOTS.items()},
        "bits": bits,
        "limit": LIMIT,
        "most_weight": MOST_WEIGHT,
        "silos": {name: {"weight": number, "values": values} for name, (number, values) in uploads.data.items()},
        "key": BLIND.hex(),
        "asked": uploads.asked.hex(),
        "label": _written(list(uploads.label)),
        "blind_keys": {name: key.hex() for name, key in keys.items()},
        "weight": weight,
        "tags": {name: hex(tag) for name, tag in tags.items()},
        "words": {"w": w, "b": b, "blind tag": blind_tag},
        "sum": {"weight": total_weight, "entries": signed, "fraction_bits": uploads.fraction_bits},
        "tampered": [{"why": why, "changes": changes} for why, changes in tampered],
    }


def _dropout() -> dict[str, Any]:
    """Return one sum with a roster, whose second silo uploads too late: every message from set-up to sum."""
    plain = {name: name.replace("à", "a") for name in ROOTS}  # a roster's names have no accents
    data = {plain[name]: numbers for name, numbers in DATA.items()}
    identities = {name: hashlib.sha256(name.encode()).digest() for name in data}
    public = {name: ed25519(key, b"")[0] for name, key in identities.items()}
    listed = [part for name in sorted(public) for part in (name, public[name], name)]
    roster = hashlib.sha256(purpose("roster", *listed)).hexdigest()
    stamp = (f"vectors.{roster[:16]}", *STAMP[1:])
    pairs = Pairs(stamp, {plain[name]: root for name, root in ROOTS.items()}, roster)
    uploads = Uploads(pairs, data, 64)
    left = [name for name in pairs.names if name != LOST]

    def signed(name: str, *parts: int | str | bytes) -> str:
        return ed25519(identities[name], purpose("signed", *parts))[1].hex()

    adverts = {
        name: {"public_key": key.hex(), "signature": signed(name, "key advert", roster, *stamp[:3], name, key)}
        for name, key in pairs.public.items()
    }
    confirmed = {
        name: {
            "signature": signed(name, "survivors", roster, *uploads.label, *left),
            "keys": {LOST: uploads.mask_keys[min(name, LOST), max(name, LOST)].hex()},
        }
        for name in left
    }
    unmask = {
        name: {
            "survivors": left,
            "signatures": {other: confirmed[other]["signature"] for other in left},
            "sealed": "".join(uploads.sealed(maker, name).hex() for maker in left if maker != name),
            "digests": "".join(uploads.share_digest(maker, name).hex() for maker in left if maker != name),
        }
        for name in left
    }
    total = [sum(entries) % 2**64 for entries in zip(*(uploads.plain(name) for name in left), strict=True)]
    total_weight, *entries = [entry - 2**64 if entry >= 2**63 else entry for entry in total]
    return {
        "source": "this generator, as the uploads; signatures by RFC 8032 in whole numbers",
        "stamp": stamp,
        "roots": {name: root.hex() for name, root in pairs.roots.items()},
        "identities": {name: key.hex() for name, key in identities.items()},
        "roster": {name: key.hex() for name, key in public.items()},
        "lost": LOST,
        "limit": LIMIT,
        "most_weight": MOST_WEIGHT,
        "silos": {name: {"weight": weight, "values": values} for name, (weight, values) in data.items()},
        "adverts": adverts,
        "cohort_digest": pairs.digest.hex(),
        "uploads": {name: uploads.message(name) for name in pairs.names},
        "survivors": left,
        "confirmed": confirmed,
        "unmask": unmask,
        "shares": {name: "".join(uploads.shares[maker][name].hex() for maker in left) for name in left},
        "secrets": {name: uploads.secrets[name].hex() for name in left},
        "sum": {"weight": total_weight, "entries": entries, "fraction_bits": uploads.fraction_bits},
        "tampered": list(_tampered_unmasking("anna", left, unmask["anna"], uploads)),
    }


def _tampered_unmasking(me: str, left: list[str], good: Fields, uploads: Uploads) -> Iterator[dict[str, Any]]:
    """Yield what one silo may be sent in the place of its `unmask`, and which makers' shares it then may give."""
    first, second = (name for name in left if name != me)
    seals = [uploads.sealed(maker, me).hex() for maker in (first, second)]
    digests = [uploads.share_digest(maker, me).hex() for maker in (first, second)]
    signatures = good["signatures"]
    with_the_lost = sorted([first, second, LOST])
    refused: list[tuple[str, Fields]] = [
        ("everybody survived", {"survivors": uploads.pairs.names}),
        ("fewer survive than were confirmed", {"survivors": left[:-1]}),
        ("a share less", {"sealed": seals[0], "digests": digests[0]}),
        (
            "a share of the lost silo",
            {
                "sealed": "".join(uploads.sealed(maker, me).hex() for maker in with_the_lost),
                "digests": "".join(uploads.share_digest(maker, me).hex() for maker in with_the_lost),
            },
        ),
        ("a signature too few", {"signatures": {name: signatures[name] for name in left[1:]}}),
        ("one's signature under another's name", {"signatures": {**signatures, first: signatures[second]}}),
        ("a signature of nobody's", {"signatures": {**signatures, first: ""}}),
        ("the lost silo signs too", {"signatures": {**signatures, LOST: signatures[first]}}),
    ]
    answered: list[tuple[str, Fields, list[str]]] = [
        ("a bit of a seal", {"sealed": f"{int(seals[0], 16) ^ 1:096x}" + seals[1]}, [me, second]),
        ("two seals swapped", {"sealed": seals[1] + seals[0]}, [me]),
        ("another digest", {"digests": digests[0] + "00" * 32}, [me, first]),
    ]
    for why, change in refused:
        yield {"why": why, "to": me, "unmask": {**good, **change}, "shares": None}
    for why, change, makers in answered:
        yield {"why": why, "to": me, "unmask": {**good, **change}, "shares": makers}


def chacha20_block(key: bytes, counter: int, nonce: bytes) -> bytes:
    """Return a block of the keystream (RFC 8439, section 2.3)."""
    start = [
        int.from_bytes(part[i : i + 4], "little") for part in (b"expand 32-byte k", key) for i in range(0, len(part), 4)
    ]
    start += [counter, *(int.from_bytes(nonce[i : i + 4], "little") for i in range(0, 12, 4))]
    state = list(start)

    def step(a: int, b: int, c: int, turn: int) -> None:
        state[a] = (state[a] + state[b]) % 2**32
        x = state[c] ^ state[a]
        state[c] = (x << turn | x >> (32 - turn)) % 2**32

    columns = [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
    diagonals = [(0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)]
    for a, b, c, d in 10 * (columns + diagonals):
        step(a, b, d, 16)
        step(c, d, b, 12)
        step(a, b, d, 8)
        step(c, d, b, 7)
    return b"".join(((x + y) % 2**32).to_bytes(4, "little") for x, y in zip(state, start, strict=True))


def chacha20_poly1305(key: bytes, nonce: bytes, plain: bytes, aad: bytes) -> bytes:
    """Return the sealed text with its tag (RFC 8439, section 2.8)."""
    blocks = b"".join(chacha20_block(key, 1 + n, nonce) for n in range(-(-len(plain) // 64)))
    sealed = bytes(one ^ other for one, other in zip(plain, blocks, strict=False))
    once = chacha20_block(key, 0, nonce)
    r = int.from_bytes(once[:16], "little") & 0x0FFFFFFC0FFFFFFC0FFFFFFC0FFFFFFF
    lengths = len(aad).to_bytes(8, "little") + len(sealed).to_bytes(8, "little")
    text = aad + bytes(-len(aad) % 16) + sealed + bytes(-len(sealed) % 16) + lengths
    total = 0
    for i in range(0, len(text), 16):
        total = (total + int.from_bytes(text[i : i + 16] + b"\1", "little")) * r % (2**130 - 5)
    return sealed + ((total + int.from_bytes(once[16:32], "little")) % 2**128).to_bytes(16, "little")


RFC8439 = {
    "key": bytes(range(0x80, 0xA0)).hex(),
    "nonce": "070000004041424344454647",
    "aad": "50515253c0c1c2c3c4c5c6c7",
    "plain": b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, "
    b"sunscreen would be it.".hex(),
    "sealed": "d31a8d34648e60db7b86afbc53ef7ec2a4aded51296e08fea9e2b5a736ee62d63dbea45e8ca9671282fafb69da92728b"
    "1a71de0a9e060b2905d6a5b67ecd3b3692ddbd7f2d778b8c9803aee328091b58fab324e4fad675945585808b4831d7bc3ff4def08e4b7a9d"
    "e576d26586cec64b61161ae10b594f09e26a7e902ecbd0600691",
}


def aes_block(key: bytes, block: bytes) -> bytes:
    return Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(block)


def xored(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


def doubled(block: bytes) -> bytes:
    """Return twice a block in GF(2^128), its first bit the highest."""
    number = int.from_bytes(block, "big") << 1
    return (number & (1 << 128) - 1 ^ (0x87 if number >> 128 else 0)).to_bytes(16, "big")


def cmac(key: bytes, text: bytes) -> bytes:
    """Return AES-CMAC (RFC 4493)."""
    whole, last = doubled(aes_block(key, bytes(16))), text[-(len(text) % 16 or 16) :]
    if len(last) < 16:
        whole, last = doubled(whole), last + b"\x80" + bytes(15 - len(last))
    total, blocks = bytes(16), text[: -(len(text) % 16 or 16)]
    for i in range(0, len(blocks), 16):
        total = aes_block(key, xored(total, blocks[i : i + 16]))
    return aes_block(key, xored(total, xored(last, whole)))


def aes_siv(key: bytes, plain: bytes, aad: bytes) -> bytes:
    """Return the synthetic counter block and the sealed text (RFC 5297)."""
    mac, counter = key[: len(key) // 2], key[len(key) // 2 :]
    told = xored(doubled(cmac(mac, bytes(16))), cmac(mac, aad))
    if len(plain) >= 16:
        text = plain[:-16] + xored(plain[-16:], told)
    else:
        text = xored(doubled(told), plain + b"\x80" + bytes(15 - len(plain)))
    synthetic = cmac(mac, text)
    start = int.from_bytes(synthetic, "big") & ~(1 << 63 | 1 << 31)
    blocks = (aes_block(counter, (start + n).to_bytes(16, "big")) for n in range(-(-len(plain) // 16)))
    return synthetic + xored(plain, b"".join(blocks)[: len(plain)])


RFC5297 = {
    "key": "fffefdfcfbfaf9f8f7f6f5f4f3f2f1f0f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff",
    "aad": "101112131415161718191a1b1c1d1e1f2021222324252627",
    "plain": "112233445566778899aabbccddee",
    "sealed": "85632d07c6e8f37f950acd320a2ecc9340c02b9690c4dc04daef7f6afe5c",
}


ED_P, ED_L = 2**255 - 19, 2**252 + 27742317777372353535851937790883648493
ED_D = -121665 * pow(121666, -1, ED_P) % ED_P
EdPoint = tuple[int, int]


def ed_point(y: int) -> EdPoint | None:
    """Return the point of this y whose x is even, if there is one (RFC 8032, section 5.1.3)."""
    square = (y * y - 1) * pow(ED_D * y * y + 1, -1, ED_P) % ED_P
    root = pow(square, (ED_P + 3) // 8, ED_P)
    for x in (root, root * pow(2, (ED_P - 1) // 4, ED_P) % ED_P):
        if x * x % ED_P == square:
            return (ED_P - x if x % 2 else x), y
    return None


def ed_add(one: EdPoint, other: EdPoint) -> EdPoint:
    (x1, y1), (x2, y2) = one, other
    t = ED_D * x1 * x2 * y1 * y2
    x, y = (x1 * y2 + x2 * y1) * pow(1 + t, -1, ED_P), (y1 * y2 + x1 * x2) * pow(1 - t, -1, ED_P)
    return x % ED_P, y % ED_P


def ed_multiply(scalar: int, point: EdPoint) -> EdPoint:
    total: EdPoint = (0, 1)
    for bit in f"{scalar:b}":
        total = ed_add(total, total)
        total = ed_add(total, point) if bit == "1" else total
    return total


def ed_bytes(point: EdPoint) -> bytes:
    return (point[1] | (point[0] & 1) << 255).to_bytes(32, "little")


def ed_hash(*parts: bytes) -> int:
    return int.from_bytes(hashlib.sha512(b"".join(parts)).digest(), "little")


ED_BASE = ed_point(4 * pow(5, -1, ED_P) % ED_P) or (0, 1)


def ed25519(private: bytes, message: bytes) -> tuple[bytes, bytes]:
    """Return public key and signature (RFC 8032, sections 5.1.5 and 5.1.6)."""
    hashed = hashlib.sha512(private).digest()
    a = int.from_bytes(hashed[:32], "little") & ~7 & ~(1 << 255) | (1 << 254)
    public = ed_bytes(ed_multiply(a, ED_BASE))
    r = ed_hash(hashed[32:], message) % ED_L
    commitment = ed_bytes(ed_multiply(r, ED_BASE))
    s = (r + ed_hash(commitment, public, message) * a) % ED_L
    return public, commitment + s.to_bytes(32, "little")


def ed_low_order() -> dict[bytes, EdPoint]:
    """Return the points of order 1, 2, 4 and 8 by each of their encodings, also those that RFC 8032 forbids."""
    points = (ed_multiply(ED_L, point) for y in range(2, 99) if (point := ed_point(y)))
    torsion = next(point for point in points if ed_multiply(4, point) != (0, 1))  # of order 8
    found = {}
    for x, y in (ed_multiply(n, torsion) for n in range(8)):
        for written in (y, y + ED_P):
            for sign in {x & 1, 1} if x == 0 else {x & 1}:
                if written < 2**255:
                    found[(written | sign << 255).to_bytes(32, "little")] = (x, y)
    return found


def ed_forgery(key: bytes, point: EdPoint, message: bytes) -> bytes:
    """Return a signature that fits a key of low order, made without any private key."""
    for s in range(99):
        guess = s % 8
        commitment = ed_add(ed_multiply(s, ED_BASE), ed_multiply(8 - guess, point))
        if ed_hash(ed_bytes(commitment), key, message) % 8 == guess:
            return ed_bytes(commitment) + s.to_bytes(32, "little")
    raise AssertionError(key)


RFC8032 = [  # section 7.1, tests 1 to 3: private key, public key, message, signature
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555"
        "fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da0"
        "85ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac1"
        "8ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
]


def identity_vectors() -> dict[str, Any]:
    names = ("hospital-a", "hospital-b", "hospital-c")
    private = {name: hashlib.sha256(name.encode()).digest() for name in names}
    public = {name: ed25519(key, b"")[0] for name, key in private.items()}
    engine_names = dict(zip(names, ("hospital-a", "site-2", "site-3"), strict=True))
    listed = [part for name in names for part in (name, public[name], engine_names[name])]
    digest = hashlib.sha256(purpose("roster", *listed)).hexdigest()
    me, other = names[:2]
    statement: list[int | str | bytes] = ["key advert", digest, *STAMP[:3], me, bytes(range(32))]
    statements = [statement, ["survivors", digest, *STAMP, *names], ["ab", "c"], ["a", "bc"], [-1], [""], []]
    signature = ed25519(private[me], purpose("signed", *statement))[1]
    commitment, s = signature[:32], int.from_bytes(signature[32:], "little")
    unknown = next(y for y in range(2, 99) if ed_point(y) is None)
    known = next(y for y in range(2, 19) if ed_point(y))

    def case(why: str, key: bytes, wrong: bytes, parts: list[int | str | bytes] = statement) -> dict[str, Any]:
        return {"why": why, "public_key": key.hex(), "statement": _written(parts), "signature": wrong.hex()}

    def flipped(data: bytes, bit: int) -> bytes:
        return (int.from_bytes(data, "little") ^ 1 << bit).to_bytes(len(data), "little")

    def signed(message: bytes) -> bytes:
        return ed25519(private[me], message)[1]

    changed: dict[str, list[int | str | bytes]] = {
        "another kind of statement": ["survivors", *statement[1:]],
        "another attempt": [*statement[:4], 2, *statement[5:]],
        "a round as text": [*statement[:3], "3", *statement[4:]],
        "bytes as text": [*statement[:-1], bytes(range(32)).decode()],
        "a part more": [*statement, ""],
        "a part less": statement[:-1],
        "two parts in one": ["key advert" + digest, *statement[2:]],
        "the word that all begin with, twice": ["signed", *statement],
    }
    return {
        "rfc8032": {
            "source": "RFC 8032, section 7.1, tests 1 to 3",
            "cases": [
                dict(zip(("private_key", "public_key", "message", "signature"), case, strict=True)) for case in RFC8032
            ],
        },
        "statements": {
            "source": "this generator: RFC 8032 in whole numbers; bytes in a statement are written as {hex}",
            "private_key": private[me].hex(),
            "public_key": public[me].hex(),
            "cases": [
                {
                    "statement": _written(parts),
                    "signed": purpose("signed", *parts).hex(),
                    "signature": ed25519(private[me], purpose("signed", *parts))[1].hex(),
                }
                for parts in statements
            ],
        },
        "tampered": [
            case("a bit of R", public[me], flipped(signature, 0)),
            case("the sign of R", public[me], flipped(signature, 255)),
            case("a bit of S", public[me], flipped(signature, 256)),
            case("S + L, the same modulo L", public[me], commitment + (s + ED_L).to_bytes(32, "little")),
            case("a byte short", public[me], signature[:-1]),
            case("a byte too many", public[me], signature + b"\0"),
            case("nothing", public[me], b""),
            case("another's key", public[other], signature),
            case("a key of 31 bytes", public[me][:-1], signature),
            case("a key of 33 bytes", public[me] + b"\0", signature),
            case("signed without the word that all begin with", public[me], signed(purpose(*statement))),
            *[case(why, public[me], signature, parts) for why, parts in changed.items()],
        ],
        "bad_keys": {
            "source": "this generator; each of low order comes with a signature that fits, made by nobody's key",
            "low_order": [
                case("low order", key, ed_forgery(key, point, purpose("signed", *statement)))
                for key, point in ed_low_order().items()
            ],
            "no_point": [
                unknown.to_bytes(32, "little").hex(),
                (unknown | 1 << 255).to_bytes(32, "little").hex(),
                (known + ED_P).to_bytes(32, "little").hex(),
                (2**255 - 1).to_bytes(32, "little").hex(),
            ],
        },
        "roster": {
            "source": "this generator: SHA-256 of names, keys and engine names in the order of names",
            "keys": {name: key.hex() for name, key in public.items()},
            "engine_names": engine_names,
            "digest": digest,
        },
    }


P = 2**255 - 19


def value_at(x: int, values: list[int], points: list[int]) -> int:
    """Return the value at x of the polynomial of least degree through values at points, by Lagrange's formula."""
    total = 0
    for value, point in zip(values, points, strict=True):
        for other in points:
            if other != point:
                value = value * (x - other) * pow(point - other, -1, P) % P
        total += value
    return total % P


def shamir_shares(secret: int, threshold: int, points: list[int], randomness: bytes) -> dict[str, str]:
    """Return shares of which the first threshold - 1 are drawn, and the others follow."""
    drawn = [int.from_bytes(randomness[48 * n : 48 * n + 48], "little") for n in range(threshold - 1)]
    known = [0, *points[: threshold - 1]]
    return {str(x): value_at(x, [secret, *drawn], known).to_bytes(32, "little").hex() for x in points}


def shamir_vectors() -> dict[str, Any]:
    def element(value: int) -> str:
        return value.to_bytes(32, "little").hex()

    good = []
    for secret, threshold, points in [
        (0, 2, [1, 2]),
        (P - 1, 2, [1, 2, 3]),
        (2**254 + 1, 3, [1, 2, 3, 4, 5]),
        (int.from_bytes(bytes(range(32)), "little"), 4, [9, 2, 77, 100, 31]),
        (7, 3, [P - 1, 1, 2**64]),
    ]:
        randomness = keystream(hkdf(ROOTS["anna"], purpose("shamir", threshold, len(points))), 48 * (threshold - 1))
        good.append(
            {
                "secret": element(secret),
                "threshold": threshold,
                "randomness": randomness.hex(),
                "shares": shamir_shares(secret, threshold, points, randomness),
            }
        )
    base = good[2]["shares"]
    assert isinstance(base, dict)
    two = {x: base[x] for x in ("2", "5")}
    return {
        "source": "this generator: Lagrange's formula in whole numbers; little-endian; 48 random bytes a share drawn",
        "published": {
            "source": "Wikipedia, Shamir's secret sharing: example of 1234 + 166 x + 94 x^2 over the integers, below p",
            "secret": element(1234),
            "threshold": 3,
            "shares": {str(x): element(y) for x, y in enumerate((1494, 1942, 2578, 3402, 4414, 5614), start=1)},
        },
        "good": good,
        "tampered": [
            {"why": why, "threshold": 3, "shares": shares, "error": error}
            for why, shares, error in [
                ("a share of p", base | {"2": element(P)}, "share of point 2: .* 2\\^255 - 19 or more"),
                ("a share of 2^256 - 1", base | {"1": "ff" * 32}, "share of point 1: .* 2\\^255 - 19 or more"),
                ("a share of 31 bytes", base | {"3": base["3"][2:]}, "share of point 3: .* 32 bytes, got 31"),
                ("a share of 33 bytes", base | {"3": base["3"] + "00"}, "share of point 3: .* 32 bytes, got 33"),
                ("an empty share", base | {"1": ""}, "share of point 1: .* 32 bytes, got 0"),
                ("two shares of three", two, "at least 3 shares, got 2"),
                ("no shares", {}, "at least 3 shares, got 0"),
            ]
        ],
    }


EVERYBODY, GROUP, ROW = (f"{group}/vectors" for group in ("keyring", "columns-1", "row=clinic 1"))  # run ids
DELTA, DISPLACEMENT = bytes(range(40)), bytes(range(255, 215, -1))


def starts() -> dict[str, Any]:
    """Return confined starts, in decimals of 50 digits, so that no machine's library decides their last bits."""
    getcontext().prec = 50
    pi = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534")

    def series(x: Decimal, first: int) -> Decimal:
        """Return cos (first = 0) or sin (first = 1) of x by Taylor's series."""
        term = total = x if first else Decimal(1)
        for n in range(first + 1, first + 99, 2):
            term *= -x * x / (n * (n + 1))
            total += term
        return total

    def uniform(stream: bytes) -> list[Decimal]:
        return [Decimal(word >> 11) / 2**53 for word in words(stream, 64)]

    def normal(key: bytes, count: int) -> list[float]:
        pairs = -(-count // 2)
        drawn = uniform(keystream(key, 16 * pairs))
        radii = [(-2 * (1 - u).ln()).sqrt() for u in drawn[:pairs]]
        turns = [2 * pi * u for u in drawn[pairs:]]
        both = [[r * series(t, first) for r, t in zip(radii, turns, strict=True)] for first in (0, 1)]
        return [float(number) for number in (both[0] + both[1])[:count]]

    low, high = 0.01, 0.1
    return {
        "source": "this generator: Box and Muller's transform in decimals of the root's keystream",
        "roots": {name: root.hex() for name, root in ROOTS.items()},
        "range": [low, high],
        "deltas": {
            name: float(
                Decimal(low) + Decimal(high - low) * uniform(keystream(hkdf(root, purpose("confined delta")), 8))[0]
            )
            for name, root in ROOTS.items()
        },
        "cases": [
            {
                "root": ROOTS[name].hex(),
                "tensor": tensor,
                "shape": shape,
                "normal": normal(hkdf(ROOTS[name], purpose("confined start", tensor)), int(np.prod(shape))),
            }
            for name, tensor, shape in [
                ("anna", "0.weight", [3, 2]),
                ("anna", "0.bias", [3]),
                ("bea", "0.weight", [3, 2]),
                ("bea", "0.weight", [2, 1, 3]),
                ("città", "größe", [5]),
                ("dora", "scale", []),
            ]
        ],
    }


def grid_of() -> dict[str, Any]:
    """Return a joint grid of one row and four column parts, and its digest."""
    parts = {name: [2 * number, 2 * number + 1] for number, name in enumerate(sorted(ROOTS))}
    row, head = "clinic 1", "bea"
    said = [part for name, held in parts.items() for part in (name, row, int(name == head), len(held), *held)]
    digest = hashlib.sha256(purpose("cgd grid", "joint", *said)).hexdigest()
    return {"row": row, "head": head, "columns": parts, "digest": digest}


def keyring() -> dict[str, Any]:
    """Return what participants seal for each other: a group's and a row's key, Delta, D, and digests of ids."""
    _, number, attempt, take = STAMP
    pairs = Pairs((EVERYBODY, number, attempt, take), ROOTS)
    maker, *others = pairs.names
    grid = grid_of()

    def seal(secret: bytes, content: bytes, *parts: int | str) -> str:
        nonce = hkdf(secret, purpose("nonce", *parts, hashlib.sha256(content).digest()))[:12]
        return (nonce + chacha20_poly1305(hkdf(secret, purpose(*parts)), nonce, content, b"")).hex()

    def key_of(run: str, who: str, session: int = 0) -> bytes:
        return hkdf(ROOTS[who], purpose("group key", run, number, attempt, take, session))

    def sealed_key(run: str, who: str, holder: str) -> str:
        seed = hkdf(pairs.seeds[min(who, holder), max(who, holder)], purpose("grid", bytes.fromhex(grid["digest"])))
        return seal(seed, key_of(run, who), "group key", run, number, attempt, take, who, holder)

    def sealed(run: str, what: str, who: str, content: bytes) -> str:
        return seal(key_of(run, maker), content, what, run, number, attempt, take, who)

    def digest(ids: list[str], run: str = ROW, at: int = number) -> str:
        content = parts_of(run, at, attempt, take, *ids)
        return hmac.new(hkdf(key_of(ROW, maker), purpose("ids")), content, hashlib.sha256).hexdigest()

    delta, moved = (sealed(ROW, "delta", maker, DELTA), sealed(GROUP, "displacement", maker, DISPLACEMENT))
    good = sealed_key(GROUP, maker, others[0])
    ids = ["p-1", "p-2", "p-3"]
    return {
        "source": "this generator: HKDF and HMAC from the standard library, RFC 8439 in whole numbers",
        "stamp": (EVERYBODY, number, attempt, take),
        "roots": {name: root.hex() for name, root in ROOTS.items()},
        "maker": maker,
        "grid": grid,
        "groups": {
            run: {
                "key": key_of(run, maker).hex(),
                "resumed": key_of(run, maker, 1).hex(),
                "sealed": {holder: sealed_key(run, maker, holder) for holder in others},
            }
            for run in (GROUP, ROW)
        },
        "tampered_keys": [  # each given to the first of the others, as the maker's of the first group
            {"why": "a bit", "sealed": f"{int(good, 16) ^ 1:0120x}"},
            {"why": "the first bit", "sealed": f"{int(good, 16) ^ 1 << 479:0120x}"},
            {"why": "another nonce", "sealed": f"{int(good, 16) ^ 1 << 400:0120x}"},
            {"why": "a byte short", "sealed": good[:-2]},
            {"why": "a byte long", "sealed": good + "00"},
            {"why": "nothing", "sealed": ""},
            {"why": "no seal", "sealed": key_of(GROUP, maker).hex()},
            {"why": "sealed for another", "sealed": sealed_key(GROUP, maker, others[1])},
            {"why": "sealed by another", "sealed": sealed_key(GROUP, others[1], others[0])},
            {"why": "sealed by the holder itself", "sealed": sealed_key(GROUP, others[0], maker)},
            {"why": "the key of another group", "sealed": sealed_key(ROW, maker, others[0])},
        ],
        "contents": [
            {"run": ROW, "what": "delta", "maker": maker, "content": DELTA.hex(), "sealed": delta},
            {"run": GROUP, "what": "displacement", "maker": maker, "content": DISPLACEMENT.hex(), "sealed": moved},
            {"run": GROUP, "what": "displacement", "maker": others[1], "content": "",
             "sealed": sealed(GROUP, "displacement", others[1], b"")},
        ],
        "tampered_contents": [
            {"why": "a bit", "run": ROW, "what": "delta", "maker": maker, "sealed": f"{int(delta, 16) ^ 1:0136x}"},
            {"why": "a byte short", "run": ROW, "what": "delta", "maker": maker, "sealed": delta[:-2]},
            {"why": "nothing", "run": ROW, "what": "delta", "maker": maker, "sealed": ""},
            {"why": "in the clear", "run": ROW, "what": "delta", "maker": maker, "sealed": DELTA.hex()},
            {"why": "another's", "run": ROW, "what": "delta", "maker": others[0], "sealed": delta},
            {"why": "another group's", "run": GROUP, "what": "delta", "maker": maker, "sealed": delta},
            {"why": "another thing", "run": ROW, "what": "displacement", "maker": maker, "sealed": delta},
            {"why": "of D, a bit", "run": GROUP, "what": "displacement", "maker": maker,
             "sealed": f"{int(moved, 16) ^ 1 << 200:0136x}"},
        ],
        "digests": [
            {"ids": some, "digest": digest(some)}
            for some in (ids, ids[::-1], ids[:2], ["p-1p-2", "p-3"], ["p-1", "p-2", "p-3", ""], [""], [], ["città"])
        ],
        "elsewhere": {"ids": ids, "next round": digest(ids, at=number + 1), "other run": digest(ids, f"{ROW} b")},
    }  # fmt: skip


def cgd_vectors() -> dict[str, Any]:
    return {"starts": starts(), "keyring": keyring()}


Fields = dict[str, Any]

# Their order in a field, and their names: by itemsize, then by this list. No message has int16 or int8.
DTYPES = {
    "uint64": "u8", "int64": "i8", "float64": "f8", "float32": "f4", "uint32": "u4", "int32": "i4",
    "float16": "f2", "int16": "i2", "uint8": "u1", "int8": "i1", "bool": "b1",
}  # fmt: skip
SCHEMA: dict[str, dict[str, str]] = json.loads((HERE / "schema.json").read_text(encoding="utf-8"))


def is_array(value: object) -> bool:
    return isinstance(value, np.ndarray)


def is_arrays(value: object) -> bool:
    return isinstance(value, dict) and all(map(is_array, value.values())) and bool(value)


def compact(value: object) -> bytes:
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half a character, which JSON can spell all the same
        return json.dumps(value, separators=(",", ":")).encode()


def type_of(tag: str, kinds: dict[str, str]) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(compact([tag, *map(list, kinds.items())])).digest()).decode()[:6]


def _from_hex(value: Any) -> bytes | None:
    try:
        return bytes.fromhex(value) if isinstance(value, str) and value == value.lower() else None
    except ValueError:
        return None


def _entry(kind: str, value: Any, behind: list[Any]) -> Any:
    """Return a field's entry in the header; what is not of its kind stands there as it is."""
    if is_array(value):
        behind.append(value)
        return [DTYPES[value.dtype.name], *value.shape]
    if is_arrays(value):
        ordered = sorted(value.items(), key=lambda item: (list(DTYPES).index(item[1].dtype.name), item[0]))
        return {name: _entry("array", item, behind) for name, item in ordered}
    if kind == "bytes" and (octets := _from_hex(value)) is not None:
        behind.append(octets)
        return len(octets)
    if kind == "several bytes" and isinstance(value, dict):
        return {name: _entry("bytes", value[name], behind) for name in sorted(value)}
    return {name: value[name] for name in sorted(value)} if isinstance(value, dict) else value


def described(tag: str, fields: Fields, /, **header: Any) -> tuple[list[Any], list[Any]]:
    """Return a message's header and what lies behind it, without a look at what is allowed.

    kinds: of the fields, those of the tag. fields: an entry in the place of all fields.
    """
    kinds, behind = header.get("kinds", SCHEMA[tag.lower()]), list[Any]()
    stamp = dict(zip(("run", "round", "attempt", "take"), STAMP, strict=True))
    head = {"format": 3, "type": type_of(tag, kinds), **stamp} | header
    beginning = [head[name] for name in ("format", "type", *stamp)]
    names = [*(name for name in kinds if name in fields), *(name for name in fields if name not in kinds)]
    entries = [_entry(kinds.get(name, ""), fields[name], behind) for name in names]
    return [*beginning, *([header["fields"]] if "fields" in header else entries)], behind


def laid(text: bytes, behind: list[Any]) -> bytes:
    """Return a message's bytes: the header's length, the header, and the rest, arrays at multiples of 8."""
    data = len(text).to_bytes(4, "little") + text
    for one in behind:
        if is_array(one):
            data += bytes(-len(data) % 8)
            one = one.astype(one.dtype.newbyteorder("<")).tobytes()
        data += one
    return data


def wire(tag: str, fields: Fields, /, **header: Any) -> bytes:
    """Return a message's bytes as the format describes them, without Moretta and without a look at what is allowed."""
    head, behind = described(tag, fields, **header)
    return laid(compact(head), behind)


def readable(value: Any) -> Any:
    if is_array(value):
        return {"dtype": value.dtype.name, "shape": list(value.shape), "values": value.ravel().tolist()}
    return {name: readable(item) for name, item in value.items()} if isinstance(value, dict) else value


def _keyed(what: str, value: bytes) -> bytes:
    return hmac.new(bytes(range(32)), purpose("test rows", what, value), hashlib.sha256).digest()[:16]


def good_messages() -> dict[str, tuple[str, Fields]]:
    """Return where a message's figures come from and its fields, by type; one for each type of every protocol."""
    keys = {name: x25519(root, (9).to_bytes(32, "little")).hex() for name, root in ROOTS.items()}
    signature = "51" * 64
    signed = {"signature": signature}
    f32, f64, i64, u64, u8 = (functools.partial(np.array, dtype=name) for name in ("f4", "f8", "i8", "u8", "u1"))
    model = {
        "0.weight": f32([[0.5, -0.25], [1.0, 2.0], [-3.0, 0.0]]),
        "0.bias": f32([0.125, -0.0, 7.0]),
        "1.num_batches_tracked": i64(4),
    }
    schema = hashlib.sha256(b"0.weight:(3, 2):torch.float32\n0.bias:(3,):torch.float32\n").hexdigest()
    made, rfc = "chosen here", "public keys by RFC 7748's ladder from the roots of agreement.json"
    p = [[0.25, 0.25, 0.5], [0.125, 0.5, 0.375]]
    parts = {name: bytes([number] * 32) for number, name in enumerate(keys, 1)}
    commitments = {
        name: hashlib.sha256(purpose("graph commitment", *STAMP, name, part)).hexdigest()
        for name, part in parts.items()
    }
    return {
        "spent": ("chosen here; the take after the stamp's", {"next_take": 3, "survivors": ["anna"], "whole": False}),
        "secure-aggregation/advertise-key": (made, {}),
        "secure-aggregation/key-advert": (f"{rfc}; the signature chosen here", {"public_key": keys["anna"], **signed}),
        "secure-aggregation/peer-keys": (
            f"{rfc}; the signatures chosen here, one silo without",
            {"keys": keys, "signatures": {name: "" if name == "bea" else signature for name in keys}},
        ),
        "secure-aggregation/keys-accepted": (made, {"cohort": "c0" * 32}),
        "secure-aggregation/advertise-committed": (made, {}),
        "secure-aggregation/committed-advert": (
            f"{rfc}; the signature chosen here; the commitment of the part of graph-part",
            {"public_key": keys["anna"], **signed, "commitment": commitments["anna"]},
        ),
        "secure-aggregation/committed-keys": (
            f"{rfc}; the signatures chosen here; commitments as in committed-advert, of the parts of graph-parts",
            {"keys": keys, "signatures": dict.fromkeys(keys, ""), "commitments": commitments},
        ),
        "secure-aggregation/graph-part": (made, {"part": parts["anna"].hex()}),
        "secure-aggregation/graph-parts": (made, {"parts": {name: part.hex() for name, part in parts.items()}}),
        "secure-aggregation/masked": (
            "chosen here; uint64, with the ring's largest element",
            {
                "maker": "anna",
                "tensors": {"w": u64(range(6)).reshape(2, 3), "b": u64([2**64 - 1])},
                "weight": u64(7),
                "asked": "a5" * 32,
                "committed": "cc" * 32,
                "sealed": "5e" * 48 + "5f" * 48,
                "digests": "d0" * 32 + "d1" * 32 + "d2" * 32,
            },
        ),
        "secure-aggregation/survivors": (made, {"survivors": ["anna", "città"]}),
        "secure-aggregation/confirmed": (made, {**signed, "keys": {"bea": "0b" * 32}}),
        "secure-aggregation/unmask": (
            "chosen here; one silo has not signed",
            {
                "survivors": ["anna", "bea", "città"],
                "signatures": {"anna": signature, "bea": ""},
                "sealed": "5e" * 48 + "5f" * 48,
                "digests": "d1" * 32 + "d2" * 32,
            },
        ),
        "secure-aggregation/self-mask-shares": (
            "chosen here; as with a roster, with the own secret",
            {"makers": ["anna", "bea"], "shares": "00" * 32 + "ff" * 32, "secret": "5e" * 32},
        ),
        "secure-aggregation/noised": (
            "chosen here; uint64, as masked, and two seeds of noise that may be taken off",
            {
                "maker": "anna",
                "tensors": {"w": u64(range(6)).reshape(2, 3), "b": u64([2**64 - 1])},
                "weight": u64(7),
                "asked": "a5" * 32,
                "committed": "cc" * 32,
                "sealed": "5e" * 112 + "5f" * 112,
                "digests": "d0" * 96 + "d1" * 96 + "d2" * 96,
                "noise": "e1" * 32 + "e2" * 32,
            },
        ),
        "secure-aggregation/unmask-noised": (
            "chosen here; one silo has not signed, and there are two seeds beside each self-mask's secret",
            {
                "survivors": ["anna", "bea", "città"],
                "signatures": {"anna": signature, "bea": ""},
                "sealed": "5e" * 112 + "5f" * 112,
                "digests": "d1" * 96 + "d2" * 96,
                "levels": 2,
            },
        ),
        "secure-aggregation/noised-shares": (
            "chosen here; as with a roster, with the own secret and seed",
            {
                "makers": ["anna", "bea"],
                "shares": "00" * 32 + "ff" * 32,
                "secret": "5e" * 32,
                "noise": "0e" * 32 + "f1" * 32,
                "seed": "e5" * 32,
            },
        ),
        "secure-aggregation/sealed-shares": (
            "chosen here; one ring element of 32 bits and a seal's tag",
            {"shares": {"bea": u8(range(20)), "città": u8(range(235, 255))}, "weight": 7, "asked": "a5" * 32},
        ),
        "secure-aggregation/add-shares": (made, {"shares": {"bea": u8(range(20)), "città": u8(range(20, 40))}}),
        "secure-aggregation/added-shares": (
            "chosen here; uint32, with the ring's largest element",
            {"words": np.array([7, 0, 2**32 - 1], dtype=np.uint32), "unopened": []},
        ),
        "secure-aggregation/plain": (
            "chosen here; a zero with a sign, and an array without axes",
            {"tensors": {"w": f32([[1.5, -0.0]]), "loss": f64(0.25)}, "weight": 7, "asked": "a5" * 32},
        ),
        "secure-aggregation/ask-moments": (
            made,
            {
                "what": "inputs",
                "order": 2,
                "center": f64([0.0, 2.5]),
                "columns": np.array([1, 4]),
                "encoding": {"moments/2/inputs": 41, "most weight": 3},
            },
        ),
        "secure-aggregation/ask-histogram": (
            made,
            {
                "what": "input columns",
                "columns": np.array([0, 3]),
                "low": f64([0.0, -5.0]),
                "high": f64([120.0, 5.0]),
                "encoding": {"histogram/input columns": 41, "most weight": 3},
            },
        ),
        "secure-sum/ask": (made, {"encoding": {"x": 41, "most weight": 3}}),
        "flower/ask-name": (made, {}),
        "flower/silo-name": (made, {"name": "anna"}),
        "flower/terms": (
            made,
            {
                "settings": "ring-bits = 32\n",
                "silos": ["anna", "bea", "dora"],
                "count": 2,
                "seed": 7,
                "most_weight": 4096,
                "weighted_by": "num-examples",
            },
        ),
        "flower/upload-names": (made, {"metrics": {"loss": 0, "recall": 3}}),
        "enrolment/begin": (
            "schema: SHA-256 over a linear layer's tensors, a line `name:shape:dtype` each; the rest chosen here",
            {
                "schema": schema,
                "table": "5a" * 32,
                "fill": f64([7.5, 0.0]),
                "mean": f64([0.5, -2.0]),
                "deviation": f64([1.0, 0.25]),
            },
        ),
        "enrolment/begin-scaled": (
            "schema: SHA-256 over a linear layer's tensors, a line `name:shape:dtype` each; the rest chosen here",
            {
                "schema": schema,
                "table": "5a" * 32,
                "fill": f64([7.5, 0.0]),
                "mean": f64([0.5, -2.0]),
                "deviation": f64([1.0, 0.25]),
                "target_mean": f64([50000.0]),
                "target_deviation": f64([12500.0]),
            },
        ),
        "enrolment/ready": (made, {}),
        "enrolment/ask-apart": (
            "the key of bytes 0 to 31 and HMAC-SHA256 by hand, of the ids P01 and P02; no groups",
            {
                "key": bytes(range(32)).hex(),
                "ids": u8(sorted(list(_keyed("ids", one)) for one in (b"P01", b"P02"))),
                "groups": u8([]).reshape(0, 16),
            },
        ),
        "enrolment/apart": (made, {}),
        "frozen/ask": (made, {"digest": bytes(range(32)).hex()}),
        "frozen/take": (made, {"tensors": model}),
        "frozen/holds": (made, {"held": True}),
        "scoring/score": (
            made,
            {"parameters": model, "encoding": {"score/rows": 41, "score/loss": 41, "most weight": 3}},
        ),
        "scoring/validate": (
            made,
            {"parameters": model, "encoding": {"validation/rows": 41, "validation/loss": 41, "most weight": 3}},
        ),
        "fedsgd/train-on": (
            "chosen here; a counter beside the floats, and fraction bits below zero",
            {"parameters": model, "encoding": {"0.weight": 40, "0.bias": -2, "most weight": 96}},
        ),
        "local/step": (made, {}),
        "local/stepped": (made, {"loss": 0.625, "rows": 32}),
        "local/show": (made, {}),
        "local/shown": (made, {"parameters": model}),
        "pbpfl/train-on": (
            "chosen here; three outputs in two parts",
            {
                "parameters": model,
                "parts": i64([0, 1, 0]),
                "direction": f64([0.5, -1.25, 2.0]),
                "encoding": {"scalars": 30, "most weight": 96},
            },
        ),
        "pbpfl/predictions": (
            "chosen here: each row's largest output is 0",
            {"z": f32([[0.0, -1.5, -2.0], [-0.25, -88.0, 0.0]]), "alpha": f32([3.0, -0.5])},
        ),
        "pbpfl/softmax": (
            "the paper's form: y = p exp(-delta) and k = (1 - exp(delta)) / xi with delta = +-ln 2 and xi = 1/2, 1/4",
            {
                # delta by row and part: (ln 2, -ln 2), (-ln 2, ln 2); parts as in pbpfl/train-on.
                "y": f64(p) * [[0.5, 2.0, 0.5], [2.0, 0.5, 2.0]],
                "k": f64([[-2.0, 2.0], [1.0, -4.0]]),
                "encoding": {"scalars": 30, "most weight": 96},
            },
        ),
        "pbpfl/ratios": (
            "chosen here: of two rows and two outputs, words lowest first",
            {"words": u64(range(2**63, 2**63 + 44)).reshape(2, 2, 1, 11), "alpha": f32([3.0, -0.5])},
        ),
        "pbpfl/blinded-softmax": (
            "chosen here: of two rows and two outputs, words lowest first; k as in pbpfl/softmax",
            {
                "totals": u64(range(80)).reshape(2, 2, 20),
                "rests": u64(range(40)).reshape(2, 2, 10),
                "k": f64([[-2.0, 2.0], [1.0, -4.0]]),
                "encoding": {"scalars": 30, "most weight": 96},
            },
        ),
        **cgd_messages(),
        **baffle_messages(),
        **edge_messages(),
    }


def cgd_messages() -> dict[str, tuple[str, Fields]]:
    made = "chosen here"
    u64, u8 = (functools.partial(np.array, dtype=name) for name in ("u8", "u1"))
    encoding = {"0.weight": 40, "loss": -2, "most weight": 96}
    return {
        "cgd/where": (made, {}),
        "cgd/here": ("chosen here; the latest round there is", {"steps": {"all": 0, "columns-2": 2**31 - 1}}),
        "cgd/draw-key": (made, {"members": ["anna", "bea", "città"]}),
        "cgd/group-key": (made, {"sealed": {"bea": "5e" * 48, "città": "5f" * 48}}),
        "cgd/take-key": (made, {"maker": "anna", "sealed": "5e" * 48}),
        "cgd/key-taken": (made, {"opened": True}),
        "cgd/use-alignment": (made, {"found": True}),
        "cgd/alignment-used": (made, {"digest": "d1" * 32}),
        "alignment/blind": (made, {"peer": "anna", "onward": False}),
        "alignment/blinded": (made, {"points": u8([9] + [0] * 31), "rules": "d2" * 32}),
        "alignment/blind-again": (made, {"peer": "anna", "points": u8([9] + [0] * 31), "rules": "d2" * 32}),
        "alignment/blinded-again": (made, {"points": u8([9] + [0] * 31)}),
        "alignment/match": (made, {"peer": "anna", "points": u8([9] + [0] * 31)}),
        "alignment/matched": ("chosen here; with the first partner nothing is kept", {"kept": u8([])}),
        "alignment/narrow": (made, {"maker": "anna", "kept": u8(range(40))}),
        "alignment/narrowed": (made, {}),
        "alignment/step": (
            made,
            {"number": 2, "rules": "d2" * 32, "own": u8([9] + [0] * 31), "again": u8([8] * 32), "digest": ""},
        ),
        "alignment/secrets": (
            made,
            {
                "number": 1,
                "root": "a5" * 32,
                "pad_to": 0,
                "rules": {"strip": 1, "unicode": 0},
                "source": "d3" * 32,
                "earlier": "",
                "theirs": u8([]),
            },
        ),
        "alignment/left": (made, {"earlier": "d4" * 32, "kept": u8(range(40))}),
        "cgd/describe-rows": (made, {}),
        "cgd/rows": (made, {"rows": 569, "digest": "d0" * 32}),
        "cgd/forward": (made, {"fraction_bits": 41}),
        "cgd/partial": ("chosen here; with the ring's largest element", {"words": u64([[0, 2**64 - 1], [7, 2**63]])}),
        "cgd/join": (
            "chosen here; of a head alone in its row, fraction bits below zero",
            {"words": np.empty((0, 0), dtype=np.uint64), "fraction_bits": -3},
        ),
        "cgd/deltas": ("chosen here; 4 bytes and a seal's tag", {"sealed": u8(range(20))}),
        "cgd/backward": ("chosen here; of a head alone, nothing is sealed", {"sealed": u8([])}),
        "cgd/done": (made, {}),
        "cgd/contribute": (made, {"encoding": encoding}),
        "cgd/descend": (
            "chosen here; words of the ring, of the weight too, and who is in the sum",
            {
                "tensors": {"0.weight": u64([[1, 2**64 - 1], [3, 0]]), "loss": u64(5)},
                "weight": u64(2**63),
                "silos": ["anna", "città"],
                "encoding": encoding,
            },
        ),
        "cgd/scored": (
            "chosen here; two limbs a figure, words of the ring, of the weight too",
            {
                "tensors": {"score/rows": u64([1, 2**64 - 1]), "score/loss": u64([0, 7])},
                "weight": u64(2),
                "silos": ["anna", "città"],
                "encoding": {"score/rows": 41, "score/loss": 41, "most weight": 3},
            },
        ),
        "cgd/step-alone": (made, {}),
        "cgd/show-displacement": (made, {}),
        "cgd/displacement": (made, {"sealed": u8(range(235, 255)), "steps": 12}),
        "cgd/catch-up": (made, {"maker": "anna", "sealed": u8(range(235, 255)), "steps": 12}),
    }


def baffle_messages() -> dict[str, tuple[str, Fields]]:
    def digest(*parts: int | str | bytes) -> Any:
        return hashlib.sha256(parts_of(*parts))

    made = "chosen here"
    names, roots = ["anna", "bea"], {"anna": ROOTS["anna"], "bea": ROOTS["bea"], "server": ROOTS["dora"]}
    cohort = digest("baffle cohort", *names).digest()
    contributions = {name: hkdf(root, purpose("baffle contribution", STAMP[0], cohort)) for name, root in roots.items()}
    commitments = {name: digest("baffle commitment", name, value).hexdigest() for name, value in contributions.items()}
    joined = [part for name in sorted(roots) for part in (name, contributions[name])]
    seed = hkdf(digest(*joined).digest(), purpose("baffle seed", cohort))
    fixed = hashlib.sha256().digest()  # of nothing
    layout = digest("baffle layout", "float32", "0.weight", "(2, 2)", "0.bias", "(2,)", fixed)
    parameters = np.array([0.5, -0.25, 1.0, -0.0, 7.0, 2.0**-149], dtype=np.float32)
    hashed = digest("baffle parameters", layout.hexdigest(), "<f4")
    hashed.update(parameters.tobytes())
    drawn = "SHA-256 of contributions, which are HKDF of agreement.json's roots (the server has dora's)"
    return {
        "baffle/commit": (made, {"cohort": names}),
        "baffle/committed": (drawn, {"commitment": commitments["anna"], "runs": "torch"}),
        "baffle/reveal": (drawn, {"commitments": commitments}),
        "baffle/revealed": ("HKDF of anna's root of agreement.json", {"contribution": contributions["anna"].hex()}),
        "baffle/agree": (
            f"{drawn}; layout: SHA-256 over a linear layer's names and shapes; the graph's bytes chosen here",
            {
                "contributions": {name: value.hex() for name, value in contributions.items()},
                "layout": layout.hexdigest(),
                "graph": np.array([8, 10, 0, 255], dtype=np.uint8),
                "graphs": {"float32": hashlib.sha256(bytes([8, 10, 0, 255])).hexdigest()},
            },
        ),
        "baffle/agreed": ("SHA-256 of HKDF of all contributions", {"digest": hashlib.sha256(seed).hexdigest()}),
        "baffle/estimate": (
            "chosen here, with a zero with a sign and float32's smallest number; their hash by SHA-256",
            {
                "parameters": parameters,
                "parameter_hash": hashed.hexdigest(),
                "k": 2,
                "encoding": {"scalars": 40, "most weight": 96},
            },
        ),
    }


def edge_messages() -> dict[str, tuple[str, Fields]]:
    made = "chosen here"
    state = {"seed/secret_root": np.full(32, 0x5E, dtype=np.uint8), "città": np.zeros(0, dtype=np.uint8)}
    return {
        "edge/be-silo": (made, {"settings": '{"name": "città"}', "state": state, "insecure": "0b" * 32}),
        "edge/restore": (made, {"state": state}),
        "edge/done": (made, {}),
        "edge/envelope": (
            "chosen here; of an error, which no answer follows",
            {
                "seconds": {"local_forward": 0.5, "aggregation": 2.0**-1074},
                "peak_mib": 70.25,
                "state": state,
                "error": "PeerError",
                "sentence": "expected a K of at most 100, as this silo is set, got 101",
            },
        ),
    }


def changed(fields: Fields, path: str, value: Any) -> Fields:
    """Return the fields with a new value for one, or, as `field/key`, for an entry of one."""
    name, slash, key = path.partition("/")
    return {**fields, name: {**fields[name], key: value} if slash else value}


def wrong_fields(fields: Fields) -> Iterator[tuple[str, Fields]]:
    """Yield what no message may do with its fields, whatever they mean."""
    yield "a surplus field", {**fields, "surplus": 1}
    yield "a surplus array", {**fields, "surplus": np.zeros(1)}
    for name, value in fields.items():
        without = {other: item for other, item in fields.items() if other != name}
        if is_arrays(value):  # of which any number may come, also none
            yield f"`{name}` without a name", changed(fields, name, {"": np.zeros(1)})
            yield f"`{name}`, one array for several", changed(fields, name, np.zeros(1))
        else:
            yield f"no `{name}`", without
        arrays = {name: value} if is_array(value) else {}
        arrays |= {f"{name}/{key}": item for key, item in value.items()} if is_arrays(value) else {}
        for path, array in arrays.items():
            if array.dtype.kind == "f":
                what = "-inf" if path.endswith("bias") else "nan"
                yield f"`{path}` with {what}", changed(fields, path, _with(array, -1, float(what)))
        if arrays:
            path, array = next(iter(arrays.items()))
            yield f"`{path}` as int16, a dtype of no message", changed(fields, path, array.astype(np.int16))
            continue
        match value:
            case str():
                yield f"`{name}` a number", changed(fields, name, 7)
                yield f"`{name}` with half a character", changed(fields, name, "\ud800")
            case bool():
                for why, wrong in (("a number", 1), ("text", "true")):
                    yield f"`{name}` {why}", changed(fields, name, wrong)
            case int():
                for why, wrong in (("a float", float(value)), ("true", True), ("text", str(value)), ("2^63", 2**63)):
                    yield f"`{name}` {why}", changed(fields, name, wrong)
            case float():
                for why, wrong in (("whole", 1), ("NaN", float("nan")), ("infinite", float("inf")), ("text", "0.5")):
                    yield f"`{name}` {why}", changed(fields, name, wrong)
            case list():
                for why, wrong in (("text", "anna"), ("in a table", {"anna": 1}), ("nothing", None)):
                    yield f"`{name}` {why}", changed(fields, name, wrong)
                yield f"`{name}` with a number", changed(fields, name, [*value, 7])
                yield f"`{name}` with an empty name", changed(fields, name, ["", *value])
            case dict():
                yield f"`{name}` a list", changed(fields, name, list(value.values()))
                yield f"`{name}` with an entry without a name", changed(fields, f"{name}/", next(iter(value.values())))
                yield f"`{name}` with an entry without a value", changed(fields, f"{name}/x", None)
                if name == "encoding":
                    for why, wrong in (
                        ("half a bit", 0.5),
                        ("true", True),
                        ("2^63", 2**63),
                        ("-2^63 - 1", -(2**63) - 1),
                    ):
                        yield f"`{name}` with {why}", changed(fields, f"{name}/most weight", wrong)


def _with(array: Any, at: int, value: float) -> Any:
    out = array.copy()
    out.flat[at] = value
    return out


def _as(fields: Fields, path: str, *values: Any, dtype: str = "") -> Any:
    """Return a field with other values in the same dtype (one alone as it is), or in another dtype."""
    if dtype:
        return fields[path].astype(dtype)
    return np.array(values[0] if len(values) == 1 else values, dtype=fields[path].dtype)


def _without(entries: Fields, name: str) -> Fields:
    return {other: value for other, value in entries.items() if other != name}


def own_checks(tag: str, fields: Fields) -> Iterator[tuple[str, str, Any]]:
    """Yield what a message's own check refuses, from the table beside this file: field, why, and its wrong value."""
    of = ""
    for line in (HERE / "wrong_messages.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            of = line[1:-1]
        elif of == tag:
            field, why, value = line.split(" | ", 2)
            yield field, why, eval(value, {"fields": fields, "np": np, "_as": _as, "_without": _without})


def tampered_messages() -> Iterator[tuple[str, str, bytes]]:
    """Yield type, what is wrong, and bytes that must not decode."""
    everything = {tag: fields for tag, (_, fields) in good_messages().items()}
    for tag, fields in everything.items():
        data = wire(tag, fields)
        yield tag, "a byte short", data[:-1]
        yield tag, "a byte too many", data + b"\0"
        yield tag, "half of it", data[: len(data) // 2]
        yield tag, "its tag in capitals", wire(tag.upper(), fields)
        other = next(name for name, theirs in everything.items() if set(theirs) - set(fields))
        yield tag, f"the fields of {other}", wire(tag, everything[other], kinds=SCHEMA[other])
        for why, wrong in wrong_fields(fields):
            yield tag, why, wire(tag, wrong)
        for name, why, value in own_checks(tag, fields):
            yield tag, why, wire(tag, changed(fields, name, value))
    tag = "secure-aggregation/keys-accepted"  # the header is every message's
    wrong_headers = {
        "an attempt below zero": {"attempt": -1}, "an attempt of true": {"attempt": True},
        "a take below zero": {"take": -1}, "a take of true": {"take": True}, "a take of 2^31": {"take": 2**31},
        "a round of 2^31": {"round": 2**31}, "a round with a fraction": {"round": 3.0},
        "a run without a name": {"run": ""}, "a run of 129 characters": {"run": "r" * 129},
        "a wire format of the future": {"format": 4}, "a wire format of true": {"format": True},
        "the wire format that was a file of safetensors": {"format": 2}, "a type in a list": {"type": []},
        "a list of fields": {"fields": []},
    }  # fmt: skip
    for why, header in wrong_headers.items():
        yield tag, why, wire(tag, everything[tag] if "fields" not in header else {}, **header)
    tag = "pbpfl/predictions"  # the headers of arrays are all arrays'
    head, behind = described(tag, everything[tag])
    text = compact(head)
    for why, was, now in [
        ("a row more than the bytes", b"2,3]", b"3,3]"),
        ("an axis that is not there", b"2,3]", b"-2,3]"),
        ("an axis of true", b"2,3]", b"2,true]"),
        ("more entries than 64 bits count", b"2,3]", b"4611686018427387904,8]"),
        ("float64 without the bytes", b'"f4"', b'"f8"'),
        ("a dtype without a shape", b'"f4"', b'["f4"]'),
    ]:
        assert was in text
        yield tag, why, laid(text.replace(was, now, 1), behind)
    data = bytearray(laid(text, behind))
    assert data[4 + len(text)] == 0
    data[4 + len(text)] = 1
    yield tag, "bits before an array", bytes(data)
    tag = "secure-aggregation/key-advert"  # the lengths of bytes are all bytes'
    head, behind = described(tag, everything[tag])
    for why, length in [("a length below zero", -1), ("a length of true", True), ("a length beyond the end", 2**62)]:
        yield tag, why, laid(compact([*head[:6], length, *head[7:]]), behind)


def message_vectors() -> dict[str, Any]:
    good = [
        {"type": tag, "source": source, "fields": readable(fields), "bytes": wire(tag, fields).hex()}
        for tag, (source, fields) in good_messages().items()
    ]
    tampered = [{"type": tag, "why": why, "bytes": data.hex()} for tag, why, data in tampered_messages()]
    assert not {case["bytes"] for case in tampered} & {case["bytes"] for case in good}
    assert all(len({(case["type"], case[what]) for case in tampered}) == len(tampered) for what in ("why", "bytes"))
    return {
        "source": "this generator: wire format 3 (moretta.contract.codec says what it is) by json and numpy alone",
        "stamp": STAMP,
        "good": good,
        "tampered": tampered,
    }


VECTORS = {
    "keystream": keystream_vectors,
    "ring": ring_vectors,
    "agreement": agreement_vectors,
    "sums": sum_vectors,
    "shamir": shamir_vectors,
    "messages": message_vectors,
    "identity": identity_vectors,
    "cgd": cgd_vectors,
}


def text_of(vectors: dict[str, Any]) -> str:
    """Return vectors as JSON, one line a vector."""
    return "{\n" + ",\n".join(f"{_text(name)}: {_lines(value)}" for name, value in vectors.items()) + "\n}\n"


def _lines(value: Any) -> str:
    if isinstance(value, list) and any(isinstance(each, dict | list) for each in value):
        return "[\n" + ",\n".join(f" {_text(each)}" for each in value) + "\n]"
    return _text(value)


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    for name, make in VECTORS.items():
        (HERE / f"{name}.json").write_text(text_of(make()), encoding="utf-8")
        print(f"{name}.json", file=sys.stderr)
