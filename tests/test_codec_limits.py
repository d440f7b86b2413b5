"""What a peer's bytes may take of memory: little, whatever they are, and next to none of what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from moretta.contract.codec import ENTRIES_LIMIT, HEADER_LIMIT, Codec, type_of
from moretta.contract.messages import Message, Stamp, Tensors, message
from moretta.errors import CodecError
from moretta.secure_aggregation import agreement
from moretta.secure_aggregation.additive import AddShares

# Decodes the bytes that it reads, in a process of its own, and prints how many MiB that has taken: of Python, numpy and
# safetensors.
MEASURED = """
import sys
from moretta.contract.codec import Codec
from moretta.errors import CodecError
from moretta.secure_aggregation.schemes import MESSAGES

def peak():
    with open("/proc/self/status") as stream:
        return next(int(line.split()[1]) for line in stream if line.startswith("VmHWM:")) / 1024

data, codec = sys.stdin.buffer.read(int(sys.argv[1])), Codec(MESSAGES)
before = peak()
try:
    codec.decode(data)
except CodecError:
    print(peak() - before)
"""


def added_shares(entry: str) -> str:
    """Return a header whose fields are read, up to its end; the process decodes by the same schema."""
    return f'[3,"{type_of(AddShares)}","r",1,0,0,{entry}]'


# Text of at most so many bytes, and of at most so many entries.
KINDS: dict[str, Callable[[int, int], str]] = {
    "lists": lambda size, most: "[" + "[]," * min((size - 8) // 3, most // 2) + "[]]",
    "objects": lambda size, most: "[" + '{"a":1},' * min((size - 20) // 8, most // 3) + "{}]",
    "texts": lambda size, most: "[" + '"éééé",' * min((size - 20) // 11, most) + "{}]",
    "numbers": lambda size, most: "[" + "9.9," * min((size - 20) // 4, most) + "{}]",
    "arrays": lambda size, most: added_shares(
        "{" + ",".join(f'"{number}":["u1",0]' for number in range(min(size // 20, most // 4))) + "}"
    ),
    "named bytes": lambda size, most: added_shares(
        "{" + ",".join(f'"{number}":0' for number in range(min(size // 12, most // 2))) + "}"
    ),
    "one wide text": lambda size, most: '"' + "a" * (size - 20) + '\U0001f600"',
    "a wide text in a list": lambda size, most: '[3,"' + "a" * (size - 100) + '\U0001f600"]',
}
MOST = 64.0  # MiB; the sum beside `HEADER_LIMIT` in `moretta.contract.codec`


@message("test/tensors")
class Several(Message):
    tensors: Tensors


@pytest.mark.skipif(sys.platform != "linux", reason="the most memory of a process is read from /proc")
@pytest.mark.parametrize(
    ("kind", "size", "entries"),
    [
        ("lists", 16 << 20, 1 << 30),  # which took 401 MiB before headers had limits that suffice
        ("objects", 16 << 20, 1 << 30),
        *((kind, HEADER_LIMIT, ENTRIES_LIMIT - 100) for kind in KINDS),  # the most of each that is read
    ],
)
def test_no_header_takes_much_memory(kind: str, size: int, entries: int) -> None:
    text = KINDS[kind](size, entries).encode()
    data = size.to_bytes(4, "little") + text.ljust(size)
    command = [sys.executable, "-c", MEASURED, str(len(data))]
    done = subprocess.run(command, input=data, capture_output=True, check=True)
    assert float(done.stdout) < MOST


@pytest.mark.parametrize("many", ["[],", '{"a":1},', '"a",', "1,"])
def test_a_header_of_too_many_entries_is_refused_before_it_is_read(many: str) -> None:
    text = b"[3," + many.encode() * 250_000 + b"0]"
    with pytest.raises(CodecError, match=r"expected a header of at most 200000 entries; got \d+"):
        Codec([Several]).decode(len(text).to_bytes(4, "little") + text)


@pytest.mark.parametrize("shape", [[2**63 - 1] * 65, ["9" * 4299] * 900, [2**63]])
def test_a_shape_of_many_large_numbers_is_refused_before_they_are_multiplied(shape: list[int | str]) -> None:
    """The product of as many as fit into a header would take minutes."""
    entry = f'{{"w":["f4",{",".join(map(str, shape))}]}}'
    text = f'[3,"{type_of(Several)}","r",1,0,0,{entry}]'.encode()
    with pytest.raises(CodecError, match="its shape: up to 64 whole numbers of 63 bits"):
        Codec([Several]).decode(len(text).to_bytes(4, "little") + text + bytes(8))


def test_a_message_is_no_longer_than_its_receiver_allows() -> None:
    sent = Several(stamp=Stamp("r", 1, 0), tensors={"w": np.zeros(1000)})
    data = Codec([Several]).encode(sent)
    assert isinstance(Codec([Several], largest=len(data)).decode(data), Several)
    with pytest.raises(CodecError, match=f"expected a message of at most {len(data) - 1} bytes; got {len(data)}"):
        Codec([Several], largest=len(data) - 1).decode(data)


def test_models_of_10000_tensors_and_keys_of_10000_silos_fit() -> None:
    small = np.zeros((1, 1, 1, 1), np.float32)
    names = (
        f"encoder.layers.{number}.feed_forward.linear_projection.parametrizations.weight" for number in range(10_000)
    )
    whole = Several(stamp=Stamp("r" * 128, 1, 0), tensors=dict.fromkeys(names, small))
    assert Codec([Several]).decode(Codec([Several]).encode(whole)).stamp == whole.stamp
    codec = Codec([agreement.PeerKeys])
    silos = [f"hospital-of-saint-somebody-{number}" for number in range(10_000)]
    keys = {silo: (number + 9).to_bytes(32, "little") for number, silo in enumerate(silos)}
    relayed = agreement.PeerKeys(stamp=Stamp("r", 1, 0), keys=keys, signatures=dict.fromkeys(silos, bytes(64)))
    assert len(codec.encode(relayed)) < HEADER_LIMIT
    assert codec.decode(codec.encode(relayed)).keys == keys
