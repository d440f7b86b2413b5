"""Write the golden vectors beside this file: ``python tests/vectors/generate.py``.

Expected values are computed here a second time, from the standards: HKDF from the standard library's HMAC, X25519 as
RFC 7748's ladder in whole numbers, ring elements as exact fractions, messages from the description of their format.
Only AES itself is borrowed (and pinned by NIST's published vector). Nothing of Moretta is imported.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

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


Fields = dict[str, Any]
Change = Callable[[Fields], Any]

# Their order in a file: by itemsize, then as safetensors lists its dtypes.
DTYPES = {
    "uint64": "U64", "int64": "I64", "float64": "F64", "float32": "F32", "uint32": "U32", "int32": "I32",
    "float16": "F16", "int16": "I16", "uint8": "U8", "int8": "I8", "bool": "BOOL",
}  # fmt: skip


def is_array(value: object) -> bool:
    return isinstance(value, np.ndarray)


def is_arrays(value: object) -> bool:
    return isinstance(value, dict) and all(map(is_array, value.values())) and bool(value)


def wire(tag: str, fields: Fields, /, **header: Any) -> bytes:
    """Return a message's bytes as the format describes them, without Moretta and without a look at what is allowed."""
    flat = {name: value for name, value in fields.items() if is_array(value)}
    for name, value in fields.items():
        flat |= {f"{name}/{key}": item for key, item in value.items()} if is_arrays(value) else {}
    plain = {name: value for name, value in fields.items() if not (is_array(value) or is_arrays(value))}
    run, number, attempt = STAMP
    inner = {"format": 1, "type": tag, "run": run, "round": number, "attempt": attempt, "fields": plain} | header
    text = json.dumps(inner, separators=(",", ":"), sort_keys=True)
    outer: Fields = {"__metadata__": {"moretta": text}}
    body = b""
    for name, array in sorted(flat.items(), key=lambda item: (list(DTYPES).index(item[1].dtype.name), item[0])):
        content = array.astype(array.dtype.newbyteorder("<")).tobytes()
        place = [len(body), len(body) + len(content)]
        outer[name] = {"dtype": DTYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": place}
        body += content
    top = json.dumps(outer, separators=(",", ":"), ensure_ascii=False).encode()
    top += b" " * (-len(top) % 8)
    return len(top).to_bytes(8, "little") + top + body


def readable(value: Any) -> Any:
    if is_array(value):
        return {"dtype": value.dtype.name, "shape": list(value.shape), "values": value.ravel().tolist()}
    return {name: readable(item) for name, item in value.items()} if isinstance(value, dict) else value


def good_messages() -> dict[str, tuple[str, Fields]]:
    """Return where a message's figures come from and its fields, by type; one for each type of every protocol."""
    keys = {name: x25519(root, (9).to_bytes(32, "little")).hex() for name, root in ROOTS.items()}
    f32, f64, i64, u64 = (functools.partial(np.array, dtype=name) for name in ("f4", "f8", "i8", "u8"))
    model = {
        "0.weight": f32([[0.5, -0.25], [1.0, 2.0], [-3.0, 0.0]]),
        "0.bias": f32([0.125, -0.0, 7.0]),
        "1.num_batches_tracked": i64(4),
    }
    schema = hashlib.sha256(b"0.weight:(3, 2):torch.float32\n0.bias:(3,):torch.float32\n").hexdigest()
    made, rfc = "chosen here", "public keys by RFC 7748's ladder from the roots of agreement.json"
    p = [[0.25, 0.25, 0.5], [0.125, 0.5, 0.375]]
    return {
        "secure-aggregation/advertise-key": (made, {}),
        "secure-aggregation/key-advert": (rfc, {"public_key": keys["anna"]}),
        "secure-aggregation/peer-keys": (rfc, {"keys": keys}),
        "secure-aggregation/keys-accepted": (made, {}),
        "secure-aggregation/masked": (
            "chosen here; uint64, with the ring's largest element",
            {"tensors": {"w": u64(range(6)).reshape(2, 3), "b": u64([2**64 - 1])}, "weight": u64(7)},
        ),
        "secure-aggregation/plain": (
            "chosen here; a zero with a sign, and an array without axes",
            {"tensors": {"w": f32([[1.5, -0.0]]), "loss": f64(0.25)}, "weight": 7},
        ),
        "secure-aggregation/ask-moments": (
            made,
            {
                "what": "inputs",
                "order": 1,
                "center": f64([0.0, 2.5]),
                "encoding": {"moments/1/inputs": 41, "most weight": 3},
            },
        ),
        "enrolment/begin": (
            "schema: SHA-256 over a linear layer's tensors, a line `name:shape:dtype` each; the rest chosen here",
            {"schema": schema, "mean": f64([0.5, -2.0]), "deviation": f64([1.0, 0.25])},
        ),
        "enrolment/ready": (made, {}),
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
            case int():
                for why, wrong in (("a float", float(value)), ("true", True), ("text", str(value)), ("2^63", 2**63)):
                    yield f"`{name}` {why}", changed(fields, name, wrong)
            case float():
                for why, wrong in (("whole", 1), ("NaN", float("nan")), ("infinite", float("inf")), ("text", "0.5")):
                    yield f"`{name}` {why}", changed(fields, name, wrong)
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


def _as(path: str, *values: Any, dtype: str = "") -> Change:
    """Return the change of a field: to other values in the same dtype (one alone as it is), or to another dtype."""

    def change(fields: Fields) -> Any:
        if dtype:
            return fields[path].astype(dtype)
        return np.array(values[0] if len(values) == 1 else values, dtype=fields[path].dtype)

    return change


# What each message's own check refuses: the field, why, and the change of the field's value.
OWN: dict[str, list[tuple[str, str, Change]]] = {
    "secure-aggregation/key-advert": [
        ("public_key", "a key of low order", lambda fields: "00" * 32),
        ("public_key", "a key of 31 bytes", lambda fields: fields["public_key"][2:]),
        ("public_key", "a key that is not hexadecimal", lambda fields: "xy" * 32),
    ],
    "secure-aggregation/peer-keys": [
        ("keys", "two silos with one key", lambda fields: fields["keys"] | {"bea": fields["keys"]["anna"]}),
        ("keys", "one silo alone", lambda fields: {"anna": fields["keys"]["anna"]}),
        ("keys", "a key of low order", lambda fields: fields["keys"] | {"bea": "01" + "00" * 31}),
    ],
    "secure-aggregation/masked": [
        ("weight", "a float among ring elements", _as("weight", dtype="float64")),
        ("weight", "elements of two rings", _as("weight", dtype="uint32")),
        ("weight", "two weights", _as("weight", 7, 7)),
    ],
    "secure-aggregation/plain": [
        ("weight", "a weight of zero", lambda fields: 0),
        ("weight", "a weight below zero", lambda fields: -7),
        ("tensors", "flags for numbers", lambda fields: {"w": np.array([True])}),
    ],
    "secure-aggregation/ask-moments": [
        ("order", "a third moment", lambda fields: 3),
        ("order", "a zeroth moment", lambda fields: 0),
        ("center", "a center of float32", _as("center", dtype="float32")),
        ("center", "a center of two axes", _as("center", [[0.0, 2.5]])),
        ("center", "a center without axes", _as("center", 0.5)),
    ],
    "enrolment/begin": [
        ("mean", "more means than deviations", _as("mean", 0.5, -2.0, 1.0)),
        ("mean", "means of two axes", _as("mean", [[0.5, -2.0]])),
        ("mean", "a mean without axes", _as("mean", 0.5)),
        ("deviation", "a deviation of zero", _as("deviation", 1.0, 0.0)),
        ("deviation", "a deviation below zero", _as("deviation", 1.0, -0.25)),
    ],
    "local/stepped": [
        ("rows", "no rows", lambda fields: 0),
        ("rows", "rows below zero", lambda fields: -32),
        ("rows", "the fewest rows there are", lambda fields: -(2**63)),
    ],
    "pbpfl/train-on": [
        ("parts", "a part of 10^7", _as("parts", 0, 1, 10**7)),
        ("parts", "one part of 4 10^12", _as("parts", 0, 1, 4 * 10**12)),
        ("parts", "a part of 2^63 - 1", _as("parts", 0, 1, 2**63 - 1)),
        ("parts", "a part below zero", _as("parts", 0, -1, 1)),
        ("parts", "a part left out", _as("parts", 0, 2, 0)),
        ("parts", "parts counted from 1", _as("parts", 1, 2, 1)),
        ("parts", "parts as floats", _as("parts", dtype="float64")),
        ("parts", "parts as int32", _as("parts", dtype="int32")),
        ("parts", "parts as uint64", _as("parts", dtype="uint64")),
        ("parts", "a part too few", _as("parts", 0, 1)),
        ("parts", "parts of two axes", _as("parts", [[0, 1, 0]])),
        ("direction", "a direction of float32", _as("direction", dtype="float32")),
        ("direction", "a direction of whole numbers", _as("direction", dtype="int64")),
        ("direction", "a direction without axes", _as("direction", 0.5)),
    ],
    "pbpfl/predictions": [
        ("z", "an output above its row's largest", _as("z", [[0.0, 1.5, -2.0], [-0.25, -88.0, 0.0]])),
        ("z", "outputs near float32's largest", _as("z", [[0.0, -3e38, -2.0], [-0.25, -88.0, 0.0]])),
        ("z", "outputs near float64's largest", lambda fields: np.array([[0.0, -1.5e308], [0.0, -1.0]])),
        ("z", "outputs as whole numbers", _as("z", dtype="int64")),
        ("z", "one row of outputs too few", _as("z", [[0.0, -1.5, -2.0]])),
        ("z", "no outputs", _as("z", [[], []])),
        ("z", "outputs of one axis", _as("z", 0.0, -1.5)),
        ("alpha", "an alpha near float64's largest", lambda fields: np.array([1.7e308, 0.0])),
        ("alpha", "alpha as whole numbers", _as("alpha", dtype="int32")),
        ("alpha", "an alpha too many", _as("alpha", 3.0, -0.5, 1.0)),
        ("alpha", "alpha of two axes", _as("alpha", [[3.0], [-0.5]])),
        ("alpha", "alpha without axes", _as("alpha", 3.0)),
    ],
    "pbpfl/softmax": [
        ("y", "a row of y too few", _as("y", [[0.125, 0.5, 0.25]])),
        ("y", "y of one axis", _as("y", 0.125, 0.5)),
        ("k", "a row of k too many", _as("k", [[-2.0, 2.0], [1.0, -4.0], [0.0, 0.0]])),
        ("k", "k without axes", _as("k", 0.5)),
    ],
}  # fmt: skip


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
        yield tag, f"the fields of {other}", wire(tag, everything[other])
        for why, wrong in wrong_fields(fields):
            yield tag, why, wire(tag, wrong)
        for name, why, change in OWN.get(tag, []):
            yield tag, why, wire(tag, changed(fields, name, change(fields)))
    tag = "secure-aggregation/keys-accepted"  # the header is every message's
    wrong_headers = {
        "an attempt below zero": {"attempt": -1}, "an attempt of true": {"attempt": True},
        "a round of 2^31": {"round": 2**31}, "a round with a fraction": {"round": 3.0},
        "a run without a name": {"run": ""}, "a run of 129 characters": {"run": "r" * 129},
        "a wire format of the future": {"format": 2}, "a wire format of true": {"format": True},
        "a surplus header entry": {"surplus": 1}, "a list of fields": {"fields": []},
    }  # fmt: skip
    for why, header in wrong_headers.items():
        yield tag, why, wire(tag, {}, **header)
    tag = "pbpfl/predictions"  # the headers of arrays are all arrays'
    data = wire(tag, everything[tag])
    for why, was, now in [
        ("a row more than the bytes", b"[2,3]", b"[3,3]"),
        ("an axis that is not there", b"[2,3]", b"[-2,3]"),
        ("more entries than 64 bits count", b"[2,3]", b"[4611686018427387904,8]"),
        ("float64 without the bytes", b'"F32"', b'"F64"'),
        ("bytes of two arrays overlap", b"[8,32]", b"[0,24]"),
        ("bytes beyond the end", b"[8,32]", b"[9,33]"),
    ]:
        length = int.from_bytes(data[:8], "little")
        top = data[8 : 8 + length].rstrip().replace(was, now, 1)
        assert was in data
        top += b" " * (-len(top) % 8)
        yield tag, why, len(top).to_bytes(8, "little") + top + data[8 + length :]


def message_vectors() -> dict[str, Any]:
    good = [
        {"type": tag, "source": source, "fields": readable(fields), "bytes": wire(tag, fields).hex()}
        for tag, (source, fields) in good_messages().items()
    ]
    tampered = [{"type": tag, "why": why, "bytes": data.hex()} for tag, why, data in tampered_messages()]
    assert not {case["bytes"] for case in tampered} & {case["bytes"] for case in good}
    assert all(len({(case["type"], case[what]) for case in tampered}) == len(tampered) for what in ("why", "bytes"))
    return {
        "source": "this generator: wire format 1 (docstring of moretta.codec) written with json and numpy alone",
        "stamp": STAMP,
        "good": good,
        "tampered": tampered,
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
