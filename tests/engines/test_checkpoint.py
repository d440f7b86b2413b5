"""Checkpoints: whole at any time, the last two kept, secret to all but the owner, damage told in one sentence."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from moretta.contract.roles import State
from moretta.engines.checkpoint import CheckpointId, begin_session, last_checkpoint, rounds_kept, save_checkpoint
from moretta.errors import ParameterError

STATE: State = {
    "model/weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "model/transposed": np.arange(6.0).reshape(2, 3).T,
    "scalar": np.array(2.5),
    "counter": np.array(7, dtype=np.int64),
    "nothing": np.zeros((0, 3), dtype=np.float64),
    "mask": np.array([2**64 - 1, 0], dtype=np.uint64),
    "flag": np.array([True, False]),
    "secret_root": bytes(range(32)),
    "alpha": 0.1 + 0.2,
    "loss": float("inf"),
    "rows": 2**60,
    "text": "süd \u2028",
}


def save(folder: Path, number: int, session: int = 0, states: dict[str, State] | None = None) -> CheckpointId:
    place = CheckpointId("run", number, session, "digest")
    save_checkpoint(folder, place, states or {"server": {"round": number}, "silo-a": {}})
    return place


def test_every_kind_of_state_comes_back_with_its_dtype_and_shape(tmp_path: Path) -> None:
    place = save(tmp_path, 10, states={"server": STATE, "silo-a.b": {}})
    found = last_checkpoint(tmp_path)
    assert found is not None
    assert found[0] == place
    assert set(found[1]) == {"server", "silo-a.b"}
    assert found[1]["silo-a.b"] == {}
    restored = found[1]["server"]
    assert set(restored) == set(STATE)
    for name, value in STATE.items():
        if isinstance(value, np.ndarray):
            back = restored[name]
            assert isinstance(back, np.ndarray)
            assert (back.dtype, back.shape, back.tobytes()) == (value.dtype, value.shape, value.tobytes())
        else:
            assert (type(restored[name]), restored[name]) == (type(value), value)


def test_there_is_none_before_the_first(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path / "checkpoint") is None
    (tmp_path / "round-x").mkdir()  # somebody else's
    assert last_checkpoint(tmp_path) is None
    assert not rounds_kept(tmp_path)


def test_the_last_two_are_kept_and_the_last_is_found(tmp_path: Path) -> None:
    for number in (0, 5, 10, 15):
        save(tmp_path, number)
    assert sorted(os.listdir(tmp_path)) == ["round-000010", "round-000015"]
    assert last_checkpoint(tmp_path) == (CheckpointId("run", 15, 0, "digest"), {"server": {"round": 15}, "silo-a": {}})


def test_rounds_past_a_million_are_still_in_order(tmp_path: Path) -> None:
    for number in (999_998, 999_999, 1_000_000, 1_000_001):
        save(tmp_path, number)
    found = last_checkpoint(tmp_path)
    assert found is not None
    assert found[0].round == 1_000_001
    assert sorted(os.listdir(tmp_path)) == ["round-1000000", "round-1000001"]


def test_only_the_owner_reads_what_roles_hold(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        save(tmp_path, 1, states={"server": STATE, "silo-a": {}})
    finally:
        os.umask(umask)
    folder = tmp_path / "round-000001"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for role in ("server", "silo-a"):
        assert stat.S_IMODE((folder / f"{role}.safetensors").stat().st_mode) == 0o600


def test_what_a_crash_left_is_cleared_away(tmp_path: Path) -> None:
    for number in (3, 7):
        left = tmp_path / f".round-{number:06d}.partial"
        left.mkdir()
        (left / "server.safetensors").write_bytes(b"half of a secret")
    assert last_checkpoint(tmp_path) is None
    save(tmp_path, 7)
    assert os.listdir(tmp_path) == ["round-000007"]


def test_a_session_is_noted_in_place(tmp_path: Path) -> None:
    save(tmp_path, 0)
    save(tmp_path, 4)
    begin_session(tmp_path, CheckpointId("run", 4, 1, "digest"))
    assert last_checkpoint(tmp_path) == (CheckpointId("run", 4, 1, "digest"), {"server": {"round": 4}, "silo-a": {}})
    assert sorted(os.listdir(tmp_path)) == ["round-000000", "round-000004"]


Damage = Callable[[Path], object]
DAMAGES: dict[str, Damage] = {
    "no run.json": lambda folder: (folder / "run.json").unlink(),
    "run.json cut short": lambda folder: (folder / "run.json").write_text('{"format": 1, "run"'),
    "run.json empty": lambda folder: (folder / "run.json").write_text(""),
    "run.json a text": lambda folder: (folder / "run.json").write_text('"text"'),
    "run.json a list": lambda folder: (folder / "run.json").write_text("[1]"),
    "run.json a number": lambda folder: (folder / "run.json").write_text("7"),
    "run.json of bytes": lambda folder: (folder / "run.json").write_bytes(b"\xff\xfe\x00"),
    "run.json without format": lambda folder: _edit(folder, "format", None),
    "run.json without round": lambda folder: _edit(folder, "round", None),
    "run.json with more": lambda folder: _edit(folder, "more", 1),
    "a round that is text": lambda folder: _edit(folder, "round", "ten"),
    "a round below 0": lambda folder: _edit(folder, "round", -1),
    "another round": lambda folder: _edit(folder, "round", 11),
    "a session that is none": lambda folder: _edit(folder, "session", None, keep=True),
    "a role cut short": lambda folder: _cut(folder / "server.safetensors", -1),
    "a role without its end": lambda folder: _cut(folder / "server.safetensors", 40),
    "an empty role": lambda folder: _cut(folder / "silo-a.safetensors", 0),
    "a role of other bytes": lambda folder: (folder / "silo-a.safetensors").write_bytes(b"\xff" * 200),
    "a role that is a folder": lambda folder: (
        (folder / "silo-a.safetensors").unlink(), (folder / "silo-a.safetensors").mkdir()
    ),
    "a role of another tool": lambda folder: _without_metadata(folder / "server.safetensors"),
    "a role with metadata that is a list": lambda folder: _without_metadata(folder / "server.safetensors", "[]"),
    "a role with a number in braces": lambda folder: _without_metadata(
        folder / "server.safetensors", '{"x": {"bytes": 7}}'
    ),
}  # fmt: skip


def _edit(folder: Path, key: str, value: object, keep: bool = False) -> None:
    content = json.loads((folder / "run.json").read_text())
    content[key] = value
    if value is None and not keep:
        del content[key]
    (folder / "run.json").write_text(json.dumps(content))


def _cut(path: Path, end: int) -> None:
    path.write_bytes(path.read_bytes()[:end])


def _without_metadata(path: Path, metadata: str | None = None) -> None:
    from safetensors.numpy import save_file

    save_file({"x": np.zeros(2)}, path, None if metadata is None else {"moretta": metadata})


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damage_is_one_sentence_that_offers_the_one_before(tmp_path: Path, damage: Damage) -> None:
    save(tmp_path, 5)
    save(tmp_path, 10, states={"server": STATE, "silo-a": {}})
    damage(tmp_path / "round-000010")
    with pytest.raises(
        ParameterError, match=r"round-000010(: the checkpoint is damaged .*one before|/.* it is not a plain file)"
    ) as caught:
        last_checkpoint(tmp_path)
    assert len(str(caught.value).splitlines()) == 1
    assert bytes(range(32)).hex() not in str(caught.value)  # the secret root
    shutil.rmtree(tmp_path / "round-000010")  # as it says
    found = last_checkpoint(tmp_path)
    assert found is not None
    assert found[0].round == 5


def test_another_format_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, 10)
    for other in (1, 3):
        _edit(tmp_path / "round-000010", "format", other)
        with pytest.raises(ParameterError, match=r"round-000010: expected a checkpoint of format 2"):
            last_checkpoint(tmp_path)


class Crash(BaseException):
    """A process that ends here."""


STEPS = [
    (os, "open"), (os, "fsync"), (os, "mkdir"), (os, "rename"), (os, "replace"), (os, "unlink"), (os, "rmdir"),
    (shutil, "rmtree"),
]  # fmt: skip


def test_a_crash_at_any_step_leaves_the_last_checkpoint_or_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same save is cut short before its first, second, third .. touch of the file system."""
    crashes = 0
    for survived in range(1000):
        folder = tmp_path / str(survived)
        save(folder, 1)
        save(folder, 2)
        left = survived

        def counted(function: Callable[..., object]) -> Callable[..., object]:
            def step(*arguments: object, **named: object) -> object:
                nonlocal left
                if left == 0:
                    raise Crash
                left -= 1
                return function(*arguments, **named)

            return step

        with monkeypatch.context() as patch:
            for module, name in STEPS:
                patch.setattr(module, name, counted(getattr(module, name)))
            try:
                save(folder, 3)
            except Crash:
                crashes += 1
        found = last_checkpoint(folder)
        assert found is not None
        assert found[0].round in (2, 3)
        assert found[1] == {"server": {"round": found[0].round}, "silo-a": {}}
        save(folder, 4)  # and the next save sees to what was left
        assert not [name for name in os.listdir(folder) if name.startswith(".")]
        if left:
            break
    assert crashes > 10


SAVING = """
import os, sys
from pathlib import Path
import numpy as np
from moretta.engines.checkpoint import CheckpointId, save_checkpoint
folder = Path(sys.argv[1])
for first in sys.stdin:  # a process each, forked, as to start Python takes longer than to save
    child = os.fork()
    if child == 0:
        for number in range(int(first), 10**6):
            states = {"server": {"model/w": np.full(2000, number), "round": number}, "silo-a": {"round": number}}
            save_checkpoint(folder, CheckpointId("run", number, 0, ""), states)
            if number % 8 == 0:
                print(os.getpid(), flush=True)
    os.waitpid(child, 0)
    print("killed", flush=True)
"""


@pytest.fixture
def saving(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    words, pipe = [sys.executable, "-c", SAVING, str(tmp_path)], subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as process:
        yield process


def test_a_process_killed_while_it_saves_leaves_a_checkpoint_that_loads(
    tmp_path: Path, saving: subprocess.Popen[str]
) -> None:
    number = 0
    assert saving.stdin is not None
    assert saving.stdout is not None
    for kill in range(8):
        saving.stdin.write(f"{number}\n")
        saving.stdin.flush()
        child = int(saving.stdout.readline())  # it is saving
        time.sleep(0.0037 * kill)  # anywhere in one of the saves that follow
        os.kill(child, signal.SIGKILL)
        while saving.stdout.readline() != "killed\n":
            pass
        found = last_checkpoint(tmp_path)
        assert found is not None
        place, states = found
        assert place.round >= number
        assert states["silo-a"]["round"] == states["server"]["round"] == place.round
        assert (np.asarray(states["server"]["model/w"]) == place.round).all()
        number = place.round + 1


def test_arrays_come_back_in_the_order_of_their_names(tmp_path: Path) -> None:
    """Safetensors gives another order at each call, and what draws noise by array would differ between replays."""
    names = [f"{number:02d}" for number in range(24)]
    save(tmp_path, 1, states={"server": {name: np.zeros(2) for name in reversed(names)}})
    found = last_checkpoint(tmp_path)
    assert found is not None
    assert list(found[1]["server"]) == names
