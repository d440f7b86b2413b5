"""Large messages lie in files without a name, and what is made of them takes no memory but a chunk's."""

from __future__ import annotations

import json
import os
import resource
import stat
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refused_rows import Row, refused

from moretta.contract import framing
from moretta.contract.codec import Codec
from moretta.contract.messages import Array, Message, Stamp, Tensors, message
from moretta.contract.roles import Ask, Replies
from moretta.engines import mapped
from moretta.engines.checkpoint import CheckpointId, last_checkpoint, save_checkpoint
from moretta.engines.delivery import replies_of
from moretta.errors import CodecError
from moretta.secure_aggregation.encoding import CHUNK, unpacked

NOW = Stamp("run", 1, 0)


@message("test/large")
class Large(Message):
    one: Array
    tensors: Tensors
    text: str


CODEC = Codec([Large])


def large(size: int) -> Large:
    tensors = {"a": np.arange(size, dtype="u8"), "b": np.ones((3, 5), "f4"), "c": np.zeros((0, 2), "u1")}
    return Large(stamp=NOW, one=np.array(True), tensors=tensors, text="x")


def same(one: Message, other: Message) -> bool:
    return CODEC.encode(one) == CODEC.encode(other)


def laid_down(sent: Large) -> Large:
    kept = mapped.laid_down(sent)
    assert isinstance(kept, Large)
    return kept


def test_a_large_message_lies_in_a_file_and_a_small_one_stays() -> None:
    small = large(10)
    assert mapped.laid_down(small) is small
    sent = large(mapped.LARGE)
    kept = laid_down(sent)
    assert same(kept, sent)
    assert not any(array.flags.writeable for array in (kept.one, *kept.tensors.values()))
    assert all(array.flags.aligned for array in kept.tensors.values())


def test_files_have_no_name_and_are_for_their_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    modes = []
    allocate = mapped._allocate

    def seen(descriptor: int, length: int) -> None:
        modes.append((stat.S_IMODE(os.fstat(descriptor).st_mode), os.fstat(descriptor).st_nlink))
        allocate(descriptor, length)

    monkeypatch.setattr(mapped, "_allocate", seen)
    memory = mapped.room(mapped.LARGE)
    memory[:2] = b"ab"
    assert modes == [(0o600, 0)]
    assert list(tmp_path.iterdir()) == []


def test_where_the_disk_is_full_it_lies_in_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mapped, "_allocate", full)
    assert same(mapped.laid_down(sent := large(mapped.LARGE)), sent)
    assert "No space left" in caplog.text


def test_files_for_other_things_can_still_be_opened(caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        kept = [mapped.empty(mapped.LARGE, np.uint8) for _ in range(256)]
        with tempfile.TemporaryFile():
            assert len(kept) == 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "1 MiB are kept in memory" in caplog.text


def test_ten_uploads_take_no_memory_and_their_sum_a_chunks() -> None:
    sent, total = 10, mapped.LARGE  # words of 8 bytes each
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        uploads = [laid_down(large(total)) for _ in range(sent)]
        held = tracemalloc.get_traced_memory()[0] - before
        assert held < 8 * total / 100  # of ten times 8 total bytes
        replies = replies_of(
            Ask.all([str(k) for k in range(sent)], uploads[0], Large), lambda silo, _: uploads[int(silo)]
        )
        tracemalloc.reset_peak()
        (summed,) = unpacked(replies.empty(total, "u8"), {"a": (total,)}).values()
        np.copyto(summed, uploads[0].tensors["a"])
        for upload in uploads[1:]:
            np.add(summed, upload.tensors["a"], out=summed)
        assert tracemalloc.get_traced_memory()[1] - before < held + 16 * CHUNK
    finally:
        tracemalloc.stop()
    assert summed[-1] == sent * (total - 1)


def test_a_checkpoint_is_written_from_the_states_own_memory(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "model": np.arange(10 * CHUNK, dtype="f8"),
        "step": np.array(3.0),
        "secret": b"abc",
        "loss": float("inf"),
    }
    place = CheckpointId("run", 3, 0, "digest")
    save_checkpoint(tmp_path, place, {"server": state})  # what is imported is imported
    tracemalloc.start()
    try:
        save_checkpoint(tmp_path, place, {"server": state})
        assert tracemalloc.get_traced_memory()[1] < state["model"].nbytes / 4
    finally:
        tracemalloc.stop()
    found = last_checkpoint(tmp_path)
    assert found is not None
    assert found[0] == place
    kept = found[1]["server"]
    assert kept.keys() == state.keys()
    np.testing.assert_array_equal(kept["model"], state["model"])
    assert (kept["step"].shape, kept["step"], kept["secret"], kept["loss"]) == ((), 3.0, b"abc", float("inf"))


def test_replies_give_memory_as_numpy_does_where_no_engine_gives_another() -> None:
    assert Replies({}).empty is np.empty
    assert mapped.empty((2, 3), "f8").shape == (2, 3)
    assert mapped.empty(mapped.LARGE, "u1").flags.writeable


def test_what_is_encoded_in_parts_is_each_arrays_own_memory() -> None:
    sent = large(1000)
    pieces = CODEC.parts(sent)
    assert b"".join(pieces) == CODEC.encode(sent)
    assert any(isinstance(one, memoryview) and np.shares_memory(np.asarray(one), sent.tensors["a"]) for one in pieces)


def test_decoding_a_view_copies_no_array() -> None:
    memory = memoryview(bytearray(CODEC.encode(large(1000))))
    found = CODEC.decode(memory)
    assert isinstance(found, Large)
    assert same(found, large(1000))
    assert np.shares_memory(found.tensors["a"], np.asarray(memory))
    assert not found.tensors["a"].flags.writeable
    with pytest.raises(CodecError, match="at most 100 bytes"):
        Codec([Large], largest=100).decode(memory)


def tampered(change: Any) -> memoryview:
    data = CODEC.encode(large(10))
    place = framing.find(data, width=4)
    header = json.loads(data[place])
    change(header)
    behind = data[place.stop :].removeprefix(bytes(-place.stop % 8))
    text = json.dumps(header).encode()
    return memoryview(len(text).to_bytes(4, "little") + text + bytes(-(4 + len(text)) % 8) + behind)


ONE, TENSORS = 6, 7  # where in the header


def test_a_header_that_is_spelled_otherwise_reads_the_same() -> None:
    assert same(CODEC.decode(tampered(lambda header: None)), large(10))


@refused("mapped.txt")
def test_what_cannot_be_is_refused(row: Row) -> None:
    row.play(globals())


@given(st.data())
def test_a_view_reads_as_bytes_do(data: st.DataObject) -> None:
    good = bytearray(CODEC.encode(large(3)))
    for _ in range(data.draw(st.integers(0, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    outcomes = []
    for one in (bytes(good), memoryview(good)):
        try:
            outcomes.append(CODEC.encode(CODEC.decode(one)))
        except CodecError:
            outcomes.append(b"refused")
    assert outcomes[0] == outcomes[1]
