"""Every block of code of README and the pages is played here, or a line above it says why no test plays it.

Blocks of TOML are read in test_settings_on_pages.py, and what pages speak of is made in beside_pages.py.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from beside_pages import MARK, NAMES, ROOT, blocks_of, is_marked, prepare, text_of
from blocks import Block, blocks
from reproduction import find
from test_cli import call
from test_cli_watch import ADDRESS, COMMAND
from test_readme import assert_known

from moretta.config import run_files

# Pages that are played from their first block to their last, in a folder of their own.
SHORT = (
    "docs/alignment.md",
    "docs/models.md",
    "docs/predictions.md",
    "docs/secure-aggregation.md",
    "docs/secure-sum.md",
    "docs/troubles.md",
)
LONG = (
    "README.md",
    "docs/arrays.md",
    "docs/data.md",
    "docs/deploy.md",
    "docs/dossier.md",
    "docs/images.md",
    "docs/index.md",
    "docs/own-code.md",
    "docs/privacy.md",
    "docs/differential-privacy.md",
    "docs/python.md",
    "docs/start.md",
    "docs/training.md",
)
ELSEWHERE = {"CONTRIBUTING.md": "tests/test_docs.py"}  # code to add to the package, played section by section

WORDS = ("python", "sh", "toml", "text")
COMMANDS = (
    "moretta",
    "python",
    "pip",
    "git",
    "make",
    "nvflare",
    "flwr",
    "flower-supernode",
    "flower-superlink",
    "podman",
    "ssh",
    "printf",
)


def unaccounted(page: str, played: bool) -> Iterator[Block]:
    """Yield the blocks of a page that are neither played nor marked, nor TOML (test_settings_on_pages.py) or output."""
    for block in blocks(page):
        output = block.word == "text" and not re.search(rf"^\s*({'|'.join(COMMANDS)}) ", block.text, re.MULTILINE)
        code = block.word in ("python", "sh") and (played or is_marked(page, block))
        if not (output or code or block.word == "toml"):
            yield block


@pytest.mark.parametrize("name", NAMES)
def test_every_block_is_played_or_marked(name: str) -> None:
    page, found = text_of(name), blocks_of(name)
    left = [f"{name}:{one.first + 1}" for one in unaccounted(page, name in (*SHORT, *LONG, *ELSEWHERE))]
    assert not left, f"{left}: play the page below, or say above the block <!-- not played: why -->"
    assert len(MARK.findall(page)) == sum(is_marked(page, one) and one.word in ("python", "sh") for one in found)
    assert name not in ELSEWHERE or name in (ROOT / ELSEWHERE[name]).read_text(encoding="utf-8")
    assert not re.search(r"^ *[`~]{3,}\{(code|code-block|sourcecode)\}", page, re.MULTILINE)


def test_a_block_that_nobody_plays_is_found() -> None:
    for new in ("```sh\nmoretta look x\n```", "    from x import y", "```text\nmoretta look x\n```", "```c\n1\n```"):
        assert len(list(unaccounted(f"A page:\n\n{new}\n", played=False))) == 1
    assert len(list(unaccounted("A page:\n\n```c\n1\n```\n", played=True))) == 1
    marked = "<!-- not played: hours -->\n\n    make x\n\nAnd:\n\n    make y\n"
    assert [block.text for block in unaccounted(marked, played=False)] == ["make y\n"]


@pytest.mark.parametrize("name", NAMES)
def test_every_command_is_known(name: str) -> None:
    for block in blocks_of(name):
        for line in lines_of(block) if block.word == "sh" else []:
            try:
                check(line)
            except Exception as error:
                raise AssertionError(f"{name}:{block.first + 1}: {line}: {error}") from error


def lines_of(block: Block) -> list[str]:
    """The commands of a block, without comments and output."""
    joined = re.sub(r"\\\n\s*", " ", block.text)
    return [line.strip() for line in joined.splitlines() if line.strip() and not line.strip().startswith("#")]


def check(line: str) -> None:
    """Raise where a command, an option, a target or a file that it names is not there."""
    words = shlex.split(re.sub(r"^[AB]\$ ", "", line), comments=True)
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    match words[0]:
        case "moretta":
            assert_known([re.sub(r"^DIR|^FOLDER|^KIT", "x", word) for word in words])
            for word in words:
                if word.startswith(("examples/", "experiments/")):
                    settings = [value for flag, value in itertools.pairwise(words) if flag == "--set"]
                    assert run_files.load(ROOT / word, settings)
            if words[1] == "reproduce" and len(words) > 2:
                assert words[2] in find(ROOT / "experiments"), words[2]
        case "python":
            script = next(word for word in words[1:] if not word.startswith("-"))
            assert (ROOT / script).exists(), script
        case "python3":  # before there is an environment with a `python`
            assert words[1:3] == ["-m", "venv"], line
        case "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case "pip":
            extras = set(re.findall(r"\w[\w-]*", "".join(re.findall(r"\[(.*?)\]", line))))
            known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert extras <= set(known), extras
        case one if one in COMMANDS:
            pass
        case other:
            raise AssertionError(f"{other} is no command that is known")


# -- playing -----------------------------------------------------------------------------------------------------------


def play(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Play a page: write the files that its blocks name, run Python and commands, compare the output that follows."""
    known = {"__name__": "page", **prepare(name, folder)}
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    page, found = text_of(name), blocks_of(name)
    text = page.splitlines()
    for block, after in zip(found, [*found[1:], None], strict=False):
        told = after.text if after and after.word == "text" and not "".join(text[block.last + 1 : after.first]) else ""
        file = re.match(r"# ([\w-]+\.(?:toml|py))\n", block.text)
        if is_marked(page, block):
            continue
        if file:
            Path(file[1]).write_text(block.text)
        elif block.word == "python":
            run_python(block, known, told, f"{name}:{block.first + 1}")
        elif block.word == "sh":
            lines = lines_of(block)
            for line in lines:
                run_line(line, told if line == lines[-1] else "", f"{name}:{block.first + 1}")


def run_python(block: Block, known: dict[str, Any], told: str, where: str) -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        exec(compile(block.text, where, "exec"), known)  # noqa: S102  # our own page
    assert not told or out.getvalue() == told, where


def run_line(line: str, told: str, where: str) -> None:
    words = shlex.split(line, comments=True)
    if words[0] in ("A$", "B$"):
        with contextlib.chdir(words[0][0]):
            run_line(line[3:], told, where)
            hand_over()
    elif words[0] == "python":
        subprocess.run([sys.executable, *words[1:]], check=True, capture_output=True)
    elif words[0] != "moretta":
        subprocess.run(["sh", "-c", line], check=True)
    elif words[1] == "watch":
        run_until_ctrl_c(words[1:])
    else:
        run_command(words[1:], told, f"{where}: {line}")


def run_command(words: Sequence[str], told: str, where: str) -> None:
    done = call(*words)
    if told.startswith("moretta: "):
        assert done.code in (1, 2), where
        assert measured(done.err.strip().splitlines()[-1]) == measured(" ".join(told.split())), where
        return
    assert done.code == 0, f"{where}: {done.err}"
    if words[:2] == ["schema", "init"] and Path("decided.toml").exists():  # its reader decides
        Path("decided.toml").replace("schema.toml")


def hand_over() -> None:
    """Give the other partner of two the files that this one has made for it."""
    for path in Path().glob("*.bin"):
        for other in ("A", "B"):
            if not (Path("..") / other / path).exists():
                shutil.copy(path, Path("..") / other)


def run_until_ctrl_c(words: Sequence[str]) -> None:
    """Run a command that waits for somebody, until its page is there."""
    with subprocess.Popen([*COMMAND, *words], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert ADDRESS.search(process.stderr.readline())
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()


def measured(sentence: str) -> str:
    """A sentence without numbers that follow from a run's secrets."""
    return re.sub(r"(magnitude is |\+-)[\d.e+]+", r"\1a number", sentence)


@pytest.mark.parametrize("name", SHORT)
def test_a_short_page_plays(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(name, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", LONG)
def test_a_long_page_plays(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(name, tmp_path, monkeypatch)
    if name == "docs/start.md":
        for page in ("first", "three"):
            assert (tmp_path / "runs" / page / "report.html").exists()
    if name == "README.md":
        assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 21
