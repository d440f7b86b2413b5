"""The README does what it says: its Python runs, its commands and links are there."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from test_cli import call

from moretta.commands import main as cli
from moretta.config import run_files


@pytest.fixture
def root(request: pytest.FixtureRequest) -> Path:
    return request.config.rootpath


@pytest.fixture
def readme(root: Path) -> str:
    return (root / "README.md").read_text()


def commands(text: str) -> list[list[str]]:
    """The lines of a text that call `moretta`, as words."""
    lines = [line.strip(" #") for line in text.splitlines()]
    found = [re.sub(r"^(Run|Compare) it: +", "", line) for line in lines]
    return [shlex.split(line, comments=True) for line in found if line.startswith("moretta ")]


@functools.cache
def shell() -> Any:
    """`moretta` with all its commands, made once for all that look."""
    return typer.main.get_command(cli.app)


def assert_known(words: list[str]) -> None:
    """A command of `moretta`, with as many arguments as it needs and flags that it has."""
    command, rest = shell(), words[1:]
    while hasattr(command, "commands"):
        command, *rest = command.commands[rest[0]], *rest[1:]
    context = command.make_context(words[1], list(rest), resilient_parsing=False)
    assert context.params


def leaves(command: Any) -> Iterator[Any]:
    """The commands of a group, and of the groups in it."""
    if not hasattr(command, "commands"):
        yield command
        return
    for one in command.commands.values():
        yield from leaves(one)


def test_the_python_of_the_readme_runs(readme: str) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    assert len(block.splitlines()) <= 20  # as its heading says
    out = io.StringIO()
    with contextlib.redirect_stdout(out), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the README leaves the first weights to chance
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})  # noqa: S102  # our own file
    said = re.fullmatch(r"accuracy (\d\.\d\d), (\d+) bytes up a round\n", out.getvalue())
    assert said
    assert float(said[1]) > 0.7  # of 200 rows, six deviations above a coin's
    assert int(said[2]) > 0


def test_the_commands_of_the_readme_are_there(readme: str) -> None:
    found = commands(readme)
    assert {words[1] for words in found} >= {"train", "compare", "report", "predict", "check", "keys"}
    for words in found:
        assert_known(words)
    with pytest.raises(Exception, match="bogus"):
        assert_known(["moretta", "report", "runs/mine", "--bogus"])


def test_every_command_takes_json() -> None:
    found = list(leaves(typer.main.get_command(cli.app)))
    assert {command.name for command in found} >= {"train", "new", "show"}
    for command in found:
        assert any("--json" in parameter.opts for parameter in command.params), command.name


def test_the_example_is_the_readmes_and_its_own_commands_are_there(readme: str, root: Path) -> None:
    for path in set(re.findall(r"examples/\S+\.toml", readme)):
        assert run_files.load(root / path).protocol.name in ("pbpfl", "cgd", "baffle")
        own = commands((root / path).read_text())
        assert len(own) == 2
        for words in own:
            assert_known(words)


def test_the_forward_example_learns_and_sends_few_numbers(root: Path, tmp_path: Path) -> None:
    path = root / "examples" / "baffle.toml"
    said = path.read_text()
    told = call("train", path, "--out", tmp_path / "run", "--json").told
    assert told["test"]["accuracy"] > 0.93  # of 359 rows; 0.96 when this was written
    up = told["bytes"]["up_per_silo_per_round"]
    assert f"upload {run_files.load(path).protocol.k + 1} numbers a round" in said
    assert 8 * 101 < up < 8 * 101 + 450  # with a header and the digest of what was asked
    assert up < 4 * told["parameters"] / 7  # of float32s: a seventh of the model


def test_the_check_of_the_readme_runs(readme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (check,) = [words for words in commands(readme) if words[1] == "check"]
    module, _, function = check[check.index("--model") + 1].partition(":")
    network = "nn.Sequential(nn.Flatten(), nn.Linear(3072, 8), nn.ReLU(), nn.Linear(8, 10))"
    (tmp_path / f"{module}.py").write_text(f"from torch import nn\n\ndef {function}():\n    return {network}\n")
    monkeypatch.chdir(tmp_path)
    done = call(*check[1:], "--json")
    assert done.told["passes"] is True


def test_make_targets_and_links_are_there(readme: str, root: Path) -> None:
    makefile = (root / "Makefile").read_text()
    for target in set(re.findall(r"make ([a-z-]+)", readme)) - {"make"}:
        if re.search(rf"^    make {target}\b|`make {target}`", readme, flags=re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    links = re.findall(r"\]\(([^)#]+)\)", readme)
    assert links
    for link in links:
        assert link.startswith("https://") or (root / link).exists(), link
    assert "runs/demo/report.html" in readme
    assert re.search(r"^DEMO := runs/demo$", makefile, flags=re.MULTILINE)
