"""Recorded views: what is read back is what was sent, byte for byte, or one error."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moretta.engines.views import MAGIC, Recorder, Seen, read
from moretta.errors import ParameterError

SEEN = [
    Seen("sent", "north", b"first"),
    Seen("received", "north", b""),
    Seen("sent", "süd \u2028 \"'", bytes(range(256)) * 3),
]


def recorded(folder: Path, seen: list[Seen] = SEEN, number: int = 3, session: int = 0) -> Path:
    recorder = Recorder(folder, True, session)
    assert recorder.wants(number)
    for one in seen:
        recorder.saw("server", one.direction, one.peer, one.data)
    recorder.flush()
    return folder / "server" / f"round-{number:06d}.{session}.bin"


def test_what_is_read_is_what_was_noted(tmp_path: Path) -> None:
    path = recorded(tmp_path)
    assert list(read(path)) == SEEN
    assert path.read_bytes().startswith(b"moretta views 1\n")


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["sent", "received"]), st.text(max_size=9), st.binary(max_size=40))))
def test_any_messages_come_back(
    tmp_path_factory: pytest.TempPathFactory, messages: list[tuple[str, str, bytes]]
) -> None:
    seen = [Seen(*one) for one in messages if _encodable(one[1])]
    path = recorded(tmp_path_factory.mktemp("views"), seen)
    assert (list(read(path)) if seen else []) == seen


def _encodable(text: str) -> bool:
    return all(not "\ud800" <= letter <= "\udfff" for letter in text)


def test_only_wanted_rounds_are_wanted(tmp_path: Path) -> None:
    assert [Recorder(tmp_path, True).wants(number) for number in (1, 2, 9)] == [True, True, True]
    assert [Recorder(tmp_path, False).wants(number) for number in (1, 2, 9)] == [False, False, False]
    assert [Recorder(tmp_path, (2, 9)).wants(number) for number in (1, 2, 9)] == [False, True, True]


def test_a_file_for_each_role_round_and_session(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, (4, 5), session=2)
    for number in (4, 5):
        for role in ("server", "north"):
            assert recorder.wants(number)
            recorder.saw(role, "sent", "south", b"%d" % number)
    assert not tmp_path.joinpath("server").exists()  # nothing is written before the round's end
    recorder.flush()
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert files == [f"{role}/round-00000{number}.2.bin" for role in ("north", "server") for number in (4, 5)]
    assert [seen.data for seen in read(tmp_path / "north" / "round-000005.2.bin")] == [b"5"]
    recorder.flush()  # and nothing is written twice
    assert [seen.data for seen in read(tmp_path / "north" / "round-000005.2.bin")] == [b"5"]


def test_a_resumed_run_overwrites_nothing(tmp_path: Path) -> None:
    first, second = recorded(tmp_path, session=0), recorded(tmp_path, SEEN[:1], session=1)
    assert list(read(first)) == SEEN
    assert list(read(second)) == SEEN[:1]


def test_a_file_cut_anywhere_gives_whole_messages_or_one_sentence(tmp_path: Path) -> None:
    data, path = recorded(tmp_path).read_bytes(), tmp_path / "cut.bin"
    whole = {len(MAGIC)}  # where a cut leaves nothing torn
    for count in (1, 2):
        whole.add(recorded(tmp_path / str(count), SEEN[:count]).stat().st_size)
    for end in range(len(data)):
        path.write_bytes(data[:end])
        if end in whole:
            assert list(read(path)) == SEEN[: sorted(whole).index(end)]
        else:
            with pytest.raises(ParameterError, match=r"cut\.bin"):
                list(read(path))


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_damage_gives_messages_or_one_sentence_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = recorded(tmp_path_factory.mktemp("views"), SEEN[:2])
    damaged = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged)
    try:
        seen = list(read(path))
    except ParameterError as error:
        said = str(error)
        assert str(path) in said
    else:
        assert all(isinstance(part, str) for one in seen for part in (one.direction, one.peer))


@pytest.mark.parametrize("line", [b"[]", b"7", b"null", b"{}", b'{"direction": "sent"}', b'"direction"', b"{", b"\xff"])
def test_a_line_that_says_nothing_is_damage(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "odd.bin"
    path.write_bytes(MAGIC + len(line).to_bytes(8, "little") + line + bytes(8))
    with pytest.raises(ParameterError, match=r"odd\.bin: the recorded view is damaged"):
        list(read(path))


@pytest.mark.parametrize("data", [b"", b"moretta views 2\n", b"something else"])
def test_another_format_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "other.bin"
    path.write_bytes(data)
    with pytest.raises(ParameterError, match=r"other\.bin: expected recorded views of format 1"):
        list(read(path))


def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"none\.bin"):
        list(read(tmp_path / "none.bin"))
