"""Recorded views: what is read back is what was sent, byte for byte, or one error."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moretta.engines.views import FORMAT, INDEX, MAGIC, Recorder, Seen, Views, digest, parse, read
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
    assert path.read_bytes().startswith(b"moretta views 2\n")


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
    wanted = [f"{role}/round-00000{number}.2.bin" for role in ("north", "server") for number in (4, 5)]
    assert files == sorted(["index.jsonl", *wanted])
    assert [seen.data for seen in read(tmp_path / "north" / "round-000005.2.bin")] == [b"5"]
    recorder.flush()  # and nothing is written twice
    assert [seen.data for seen in read(tmp_path / "north" / "round-000005.2.bin")] == [b"5"]


def test_a_resumed_run_overwrites_nothing(tmp_path: Path) -> None:
    first, second = recorded(tmp_path, session=0), recorded(tmp_path, SEEN[:1], session=1)
    assert list(read(first)) == SEEN
    assert list(read(second)) == SEEN[:1]


def test_a_file_cut_anywhere_gives_whole_messages_or_one_sentence(tmp_path: Path) -> None:
    data = recorded(tmp_path).read_bytes()
    whole = {len(MAGIC)}  # where a cut leaves nothing torn
    for count in (1, 2):
        whole.add(recorded(tmp_path / str(count), SEEN[:count]).stat().st_size)
    for end in range(len(data)):
        if end in whole:
            assert list(parse(data[:end], "cut.bin")) == SEEN[: sorted(whole).index(end)]
        else:
            with pytest.raises(ParameterError, match=r"cut\.bin"):
                list(parse(data[:end], "cut.bin"))


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return recorded(tmp_path_factory.mktemp("views"), SEEN[:2]).read_bytes()


@given(st.data())
def test_damage_gives_messages_or_one_sentence_and_nothing_else(undamaged: bytes, data: st.DataObject) -> None:
    damaged = bytearray(undamaged)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        seen = list(parse(bytes(damaged), "damaged.bin"))
    except ParameterError as error:
        said = str(error)
        assert "damaged.bin" in said
    else:
        assert all(isinstance(part, str) for one in seen for part in (one.direction, one.peer))


@pytest.mark.parametrize("line", [b"[]", b"7", b"null", b"{}", b'{"direction": "sent"}', b'"direction"', b"{", b"\xff"])
def test_a_line_that_says_nothing_is_damage(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "odd.bin"
    path.write_bytes(MAGIC + len(line).to_bytes(8, "little") + line + bytes(8))
    with pytest.raises(ParameterError, match=r"odd\.bin: the recorded view is damaged"):
        list(read(path))


@pytest.mark.parametrize("data", [b"", b"moretta views 1\n", b"something else"])
def test_another_format_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "other.bin"
    path.write_bytes(data)
    with pytest.raises(ParameterError, match=r"other\.bin: expected recorded views of format 2"):
        list(read(path))


def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"none\.bin"):
        list(read(tmp_path / "none.bin"))


def whole(home: Path) -> Path:
    """The views of two roles and three rounds of run "one", of which round 3 was played in two sessions."""
    folder = home / "views"
    for session, numbers in ((0, (1, 2, 3)), (1, (3,))):
        recorder = Recorder(folder, True, session, "one")
        for number in numbers:
            recorder.wants(number)
            for role in ("server", "north"):
                recorder.saw(role, "sent", "south", b"%d of session %d" % (number, session))
            recorder.flush()
    return folder


def opened(folder: Path) -> Views:
    return Views.open(folder, "one", digest(folder))


def test_views_are_opened_by_role_and_round_and_the_last_session_counts(tmp_path: Path) -> None:
    views = opened(whole(tmp_path))
    assert views.rounds == (1, 2, 3)
    assert set(views.files) == {"server", "north"}
    assert views.files["server"][3] == "server/round-000003.1.bin"
    assert b"3 of session 1" in views.data("server", 3)
    views.check()


def test_a_file_without_a_line_is_of_no_finished_round(tmp_path: Path) -> None:
    folder = whole(tmp_path)
    (folder / "server" / "round-000004.1.bin").write_bytes(MAGIC)
    assert opened(folder).rounds == (1, 2, 3)


@pytest.mark.parametrize("change", ["a byte", "cut", "longer", "another round", "gone", "a folder"])
def test_a_file_that_is_not_as_it_was_recorded_is_refused_by_name(tmp_path: Path, change: str) -> None:
    folder = whole(tmp_path)
    views, path = opened(folder), folder / "north" / "round-000002.0.bin"
    data = path.read_bytes()
    match change:
        case "a byte":
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        case "cut":
            path.write_bytes(data[:-1])
        case "longer":
            path.write_bytes(data + b"\0")
        case "another round":
            shutil.copy(folder / "north" / "round-000001.0.bin", path)
        case _:
            path.unlink()
    if change == "a folder":
        path.mkdir()
    says = r"expected a recorded view" if change in ("gone", "a folder") else r"is not as it was recorded \(SHA-256 dif"
    for refused in (lambda: views.data("north", 2), views.check, lambda: views.check(["north"])):
        with pytest.raises(ParameterError, match=rf"round-000002\.0\.bin.*{says}"):
            refused()
    views.check(["server"])
    assert views.data("north", 1)


@pytest.mark.parametrize("change", ["a line less", "another hash", "swapped", "empty"])
def test_an_index_that_was_changed_is_refused(tmp_path: Path, change: str) -> None:
    folder = whole(tmp_path)
    wanted, index = digest(folder), folder / INDEX
    lines = index.read_text().splitlines(keepends=True)
    changed = {
        "a line less": lines[:-1],
        "another hash": [*lines[:-1], lines[-1].replace('"sha256": "', '"sha256": "0')],
        "swapped": [lines[0], lines[2], lines[1], *lines[3:]],
        "empty": [],
    }
    index.write_text("".join(changed[change]))
    with pytest.raises(ParameterError, match=r"index\.jsonl is not the index that this run ended with"):
        Views.open(folder, "one", wanted)


def test_views_of_another_run_or_version_or_none_are_refused(tmp_path: Path) -> None:
    folder = whole(tmp_path)
    with pytest.raises(ParameterError, match=r"expected the views of this run, these are of another one"):
        Views.open(folder, "two", digest(folder))
    with pytest.raises(ParameterError, match=r"says nothing of views; was it written by this version"):
        Views.open(folder, "one", "")
    with pytest.raises(ParameterError, match=r"has no recorded views; run it again with record-views in \[run\]"):
        Views.open(tmp_path / "none", "one", digest(folder))
    assert digest(tmp_path / "none") == ""


@pytest.mark.parametrize(("head", "line", "says"), [
    ({"format": FORMAT + 1, "run": "one"}, {}, r"expected views of format 2; were they recorded by another version"),
    ([], {}, r"expected views of format 2"),
    ({"format": FORMAT, "run": "one"}, {"file": "../secret.bin", "sha256": "0"}, r"expected names of views, got"),
    ({"format": FORMAT, "run": "one"}, {"file": "server/round-000001.0.bin"}, r"index\.jsonl is damaged"),
    ({"format": FORMAT, "run": "one"}, "word", r"index\.jsonl is damaged"),
])  # fmt: skip
def test_an_index_of_something_else_is_one_sentence(tmp_path: Path, head: object, line: object, says: str) -> None:
    folder = tmp_path / "views"
    folder.mkdir()
    (folder / INDEX).write_text(f"{json.dumps(head)}\n{json.dumps(line)}\n")
    with pytest.raises(ParameterError, match=says) as caught:
        Views.open(folder, "one", hashlib.sha256((folder / INDEX).read_bytes()).hexdigest())
    assert "\n" not in str(caught.value)


def test_a_line_of_the_index_that_a_crash_cut_short_is_dropped_as_a_session_begins(tmp_path):
    first = Recorder(tmp_path, True, 0, "r")
    first.wants(1)
    first.saw("server", "sent", "a", b"x")
    first.flush()
    whole = (tmp_path / "index.jsonl").read_bytes()
    (tmp_path / "index.jsonl").write_bytes(whole + b'{"file": "server/round-0000')
    second = Recorder(tmp_path, True, 1, "r")
    assert (tmp_path / "index.jsonl").read_bytes() == whole
    second.wants(2)
    second.saw("server", "sent", "a", b"y")
    second.flush()
    assert Views.open(tmp_path, "r", digest(tmp_path)).rounds == (1, 2)
