"""Values that pass between forked processes: whatever goes in comes out, of the same type and to the bit."""

from __future__ import annotations

import socket
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from moretta.contract.messages import DTYPES, Array, Message, Stamp, Tensors, message
from moretta.engines import frames
from moretta.errors import PeerError

PLAIN = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=["Cs"]))
)  # fmt: skip
ARRAYS = st.sampled_from(sorted(DTYPES, key=str)).flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, min_side=0, max_side=4))
)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
VALUES = st.recursive(
    PLAIN | st.binary(max_size=40) | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(NAMES, inner, max_size=4)
    ),
    max_leaves=12,
)


@message("frames/all")
class All(Message):
    """A field of several kinds."""

    array: Array
    tensors: Tensors
    octets: bytes
    names: tuple[str, ...]


def across(value: Any) -> Any:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=frames.send, args=(ours, frames.packed(value)))
        sender.start()
        found = frames.receive(theirs)
        sender.join()
    return found


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    match one:
        case np.ndarray():
            return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
        case dict():
            return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
        case list() | tuple():
            return len(one) == len(other) and all(map(same, one, other))
        case float():
            return repr(one) == repr(other)  # NaN is no number to compare
    return bool(one == other)


@given(VALUES)
def test_what_goes_in_comes_out(value: Any) -> None:
    assert same(across(value), value)


def test_arrays_need_not_lie_in_a_row() -> None:
    whole = np.arange(24.0).reshape(4, 6)
    found = across({"columns": whole[:, ::2], "turned": whole.T, "one": whole[1:2, 2].reshape(())})
    assert same(found, {"columns": whole[:, ::2].copy(), "turned": whole.T.copy(), "one": np.asarray(8.0)})


def test_a_message_is_checked_where_it_arrives() -> None:
    stamp, kinds = Stamp("run", 1, 2, 3), {All.TAG: All}
    sent = All(stamp=stamp, array=np.ones(3), tensors={"a": np.zeros((2, 0))}, octets=b"\x00", names=("x", "y"))
    found = frames.message_of(across(frames.fields_of(sent)), kinds)
    assert isinstance(found, All)
    assert (found.stamp, found.octets, found.names) == (stamp, b"\x00", ("x", "y"))
    assert same(found.array, sent.array)
    sent.array[1] = np.nan  # as a silo's own code may, once it has made its answer
    with pytest.raises(PeerError, match="NaN"):
        frames.message_of(across(frames.fields_of(sent)), kinds)
    with pytest.raises(PeerError, match="expected one of"):
        frames.message_of(across(frames.fields_of(sent)), {})


def test_the_end_of_the_other_side_is_noticed_in_the_middle_of_a_frame() -> None:
    ours, theirs = socket.socketpair()
    frames.send(ours, frames.packed({"x": np.ones(4)}))
    whole = theirs.recv(1 << 20)
    for cut in (0, 7, 20, len(whole) - 1):
        one, other = socket.socketpair()
        one.sendall(whole[:cut])
        one.close()
        with other, pytest.raises(EOFError):
            frames.receive(other)
    ours.close()
    theirs.close()


def test_other_values_are_refused() -> None:
    with pytest.raises(TypeError):
        frames.packed({"x": object()})


def test_a_frame_has_as_many_arrays_as_a_worker_s_silos_send() -> None:
    """A header of a message may have fewer: 2,000 silos with 65 tensors each."""
    value = [{str(place): np.full((1, 1), place, np.float32) for place in range(65)} for _ in range(2000)]
    assert same(across(value), value)
