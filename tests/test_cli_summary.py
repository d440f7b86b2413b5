"""What a person reads at the end of a run: warnings, epsilon with its delta and unit, the best round."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import typer
from test_cli import Called, call, here  # noqa: F401  # a fixture

from moretta import __version__
from moretta.commands import main as cli

TRAIN = ("train", "run.toml", "--out", "mine")
EXPOSED = {
    "fedsgd": "a silo: can work out the other’s gradient in rounds of fewer than three silos",
    "pbpfl": "obfuscated only by the perturbation of the model",
    "cgd": "the other's gradient",
}


def leaves(command: object, *path: str) -> list[tuple[str, ...]]:
    found = getattr(command, "commands", None)
    if found is None:
        return [path]
    return [leaf for name, child in found.items() for leaf in leaves(child, *path, name)]


COMMANDS = leaves(typer.main.get_command(cli.app))


@pytest.mark.parametrize("protocol", EXPOSED)
def test_two_partners_are_warned_in_terminal_log_and_result(here: Path, protocol: str) -> None:  # noqa: F811
    two = ("--set", "data.silos=2", "--set", f"protocol.name={protocol}", "--set", "run.rounds=1")
    with mock.patch.object(logging.getLogger(), "handlers", []):  # pytest's own, which a run takes for a program's
        done = call(*TRAIN, *two)
    assert done.code == 0, done.err
    result = json.loads((here / "mine" / "result.json").read_text())
    (sentence,) = [one for one in result["warnings"] if EXPOSED[protocol] in one]
    assert done.err.count(f"warning: {sentence}") == 1
    assert f"WARNING {sentence}" in (here / "mine" / "log.txt").read_text()


def test_epsilon_is_told_with_delta_and_unit(here: Path) -> None:  # noqa: F811
    pytest.importorskip("dp_accounting")
    noised = ("protocol.name=fedsgd", "protocol.dp-noise=1", "protocol.dp-clip=1", "protocol.dp-delta=1e-5")
    done = call(*TRAIN, *(word for one in noised for word in ("--set", one)))
    assert done.code == 0, done.err
    facts = json.loads((here / "mine" / "result.json").read_text())["facts"]
    said = " ".join(done.out.split())
    assert f"ε = {facts['epsilon']:.3g} and δ = 1e-05 for one example added or removed at one silo" in said
    assert f"Epsilon, of one example at one silo {facts['epsilon']:.3g}" in said
    assert f"ε = {facts['epsilon']:.3g}" in (here / "mine" / "log.txt").read_text()


def test_the_best_round_is_told(here: Path) -> None:  # noqa: F811
    wanted = (
        "run.early-stopping=1",
        "data.validation-fraction=0.2",
        "protocol.learning-rate=50",
        "run.evaluate-every=1",
    )
    done = call(*TRAIN, *(word for one in wanted for word in ("--set", one)))
    assert done.code == 0, done.err
    best = json.loads((here / "mine" / "result.json").read_text())["facts"]["best_round"]
    assert f"Best round {best:.0f}" in " ".join(done.out.split())


def test_a_quiet_run_says_nothing(here: Path) -> None:  # noqa: F811
    assert call(*TRAIN, "--quiet", "--set", "data.silos=2") == Called(0, "", "")
    assert (here / "mine" / "result.json").exists()
    told = call("train", "run.toml", "--out", "other", "--quiet", "--json")
    assert (told.code, told.err) == (0, "")
    assert told.told["rounds"] == 3
    failed = call(*TRAIN, "--quiet")
    assert failed.code == 2
    assert "exists and is not empty" in failed.sentence
    assert "round 3 of 3" in call("train", "run.toml", "--out", "third").err  # and the next command is not quiet
    assert call("report", "mine", "--quiet") == Called(0, "", "")


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_tells_misuse_as_an_object(words: tuple[str, ...]) -> None:
    done = call(*words, "--bogus-option", "--json")
    assert done.code == 2
    assert json.loads(done.out)["error"] == done.sentence
    assert "No such option" in done.sentence


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_a_short_help_and_can_be_quiet(words: tuple[str, ...]) -> None:
    done = call(*words, "-h")
    assert (done.code, done.err) == (0, "")
    for option in ("--json", "--quiet"):
        assert option in done.out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["trian"], 2, "No such command"),
        (["train"], 2, "Missing argument"),
        (["schema"], 2, "No such option"),
        (["train", "none.toml"], 2, "none.toml does not exist"),
        (["train", "run.toml", "--out", "mine", "--set", "engine.deadline=1e-9"], 1, "go on with --resume"),
    ],
)
def test_what_goes_wrong_is_one_object(here: Path, words: list[str], code: int, said: str) -> None:  # noqa: F811
    done = call(*words, "--json", "--quiet") if words[0] == "train" and len(words) > 1 else call(*words, "--json")
    assert (done.code, done.out.count("\n")) == (code, 1)
    told = json.loads(done.out)
    assert told.keys() == {"format", "error", "exit_code"}
    assert told["exit_code"] == code
    assert said in told["error"] == done.sentence


def test_a_mistake_of_ours_is_an_object_too() -> None:
    command = [sys.executable, "-c", BREAKS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert json.loads(done.stdout) == {
        "format": 1,
        "error": "unexpected failure (ZeroDivisionError); the traceback is on stderr",
        "exit_code": 1,
    }
    assert "Traceback" in done.stderr


BREAKS = """
import sys
from moretta.commands import main
from moretta.config import run_files
run_files.load = lambda *_: 1 / 0
sys.argv = ["moretta", "train", "run.toml", "--json"]
main.main()
"""


def test_the_package_is_a_command(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "moretta", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{__version__}\n", "")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_is_told_how_to_complete(shell: str) -> None:
    run = "import sys; from moretta.commands.main import main; sys.argv = ['moretta']; main()"

    def asked(**variables: str) -> str:
        environment = os.environ | variables
        command = [sys.executable, "-c", run]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment).stdout

    script = asked(_MORETTA_COMPLETE=f"source_{shell}")
    assert "_MORETTA_COMPLETE" in script
    assert "moretta" in script
    if shell == "bash":
        assert asked(_MORETTA_COMPLETE="complete_bash", COMP_WORDS="moretta comp", COMP_CWORD="1").split() == [
            "compare"
        ]
        found = asked(_MORETTA_COMPLETE="complete_bash", COMP_WORDS="moretta compare --se", COMP_CWORD="2").split()
        assert set(found) == {"--seeds", "--set"}
    assert "--show-completion" in call("--help").out
