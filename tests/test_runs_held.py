"""Two processes never write one run folder: the second is refused by one sentence, and a killed one holds nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import call, here  # noqa: F401  # a fixture
from test_contract import federation_of

from moretta.engines.folder_lock import LOCK
from moretta.errors import ParameterError

TRAIN = ["train", "run.toml", "--out", "mine", "--set", "run.checkpoint-every=1"]


def test_a_folder_that_is_trained_in_is_nobody_elses(tmp_path: Path) -> None:
    sentences = []

    def another(number: int, *_: object) -> None:
        for resume in (False, True):
            with pytest.raises(ParameterError) as refused:
                federation_of("fedsgd", out=tmp_path / "run").train(3, resume=resume, progress=False)
            sentences.append(str(refused.value))

    result = federation_of("fedsgd", out=tmp_path / "run").train(2, progress=another)
    assert len(sentences) == 4
    assert all(f"is in use by process {os.getpid()} on " in sentence for sentence in sentences)
    assert result.record["rounds"] == 2
    assert not (tmp_path / "run" / LOCK).exists()
    assert federation_of("fedsgd", out=tmp_path / "run").train(3, resume=True, progress=False).record["rounds"] == 3
    assert not (tmp_path / "run" / LOCK).exists()


def test_a_run_that_never_began_leaves_neither_folder_nor_lock(tmp_path: Path) -> None:
    def refuse() -> None:
        raise ParameterError("no")

    with pytest.raises(ParameterError, match=r"^no$"):
        federation_of("fedsgd", out=tmp_path / "run").train(2, begin=refuse, progress=False)
    assert not (tmp_path / "run").exists()


def test_a_process_that_is_killed_in_a_round_can_be_gone_on_with(here: Path) -> None:  # noqa: F811
    dies = (
        "import sys, time; from moretta.commands import main; from moretta.run.loop import Session\n"
        "add = Session._ends_with\n"
        "def ends(self, line):\n"
        "    add(self, line); print('round', flush=True); time.sleep(120)\n"
        "Session._ends_with = ends; sys.argv = ['moretta', *sys.argv[1:]]; main.main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", dies, *TRAIN], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "round\n"
        for more in ([], ["--resume"]):
            refused = call(*TRAIN, *more)
            assert refused.code == 2
            assert f"mine is in use by process {process.pid} on " in refused.sentence
        process.send_signal(signal.SIGKILL)
    assert json.loads((here / "mine" / LOCK).read_text())["pid"] == process.pid
    done = call(*TRAIN, "--resume", "--json")
    assert done.code == 0, done.err
    assert done.told["rounds"] == 3
    assert not (here / "mine" / LOCK).exists()
