"""Every block of code of README and the pages is played, or is known and named here with where it is played instead."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import signal
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import Block, blocks
from reference import BESIDE, RUN_FILE, SILO_FILE
from test_cli import call
from test_cli_watch import ADDRESS, COMMAND
from test_readme import assert_known

from moretta.config import run_files
from moretta.contract.settings import kebab
from moretta.data.tables import schema as schemas

ROOT = Path(__file__).parents[1]

PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
]
NAMES = [str(path.relative_to(ROOT)) for path in PAGES if any(blocks(path.read_text(encoding="utf-8")))]

# Pages that are played from their first block to their last, in a folder of their own.
SHORT = ("docs/troubles.md",)
LONG = ("docs/start.md", "docs/python.md", "docs/privacy.md", "docs/images.md")

# Blocks that are not played here, by page: why, and which test plays them or what they stand for.
ELSEWHERE = {
    "README.md": ("its shell is played below, beside tables that it names", "tests/test_readme.py"),
    "CONTRIBUTING.md": ("code to add to the package", "tests/test_docs.py"),
    "docs/alignment.md": ("four steps of two partners", "tests/test_cli_align.py"),
    "docs/arrays.md": ("fragments around the reader's own arrays", "tests/test_several_arrays.py"),
    "docs/baffle.md": ("settings, one after the other", "tests/protocols/baffle/test_baffle_trains.py"),
    "docs/benchmarks.md": ("minutes of measuring", "tests/test_benchmarks.py"),
    "docs/cgd.md": ("settings, one after the other, and a script on MNIST", "tests/protocols/cgd/test_cgd_leaks.py"),
    "docs/data.md": ("tables of three hospitals", "tests/test_hospitals.py"),
    "docs/deploy.md": ("several machines", "tests/deployment/test_fault_scenarios.py"),
    "docs/dossier.md": ("answers and identities of the reader's", "tests/report/test_dossier.py"),
    "docs/index.md": ("the beginning of other pages", "tests/test_readme.py"),
    "docs/models.md": ("a module of the reader's", "tests/test_exactness_command.py"),
    "docs/reproduction.md": ("hours, and data sets that are not here", "tests/test_reproduction.py"),
    "docs/secure-aggregation.md": ("keys of several silos, and a benchmark", "tests/test_cli_keys.py"),
    "docs/threat-models.md": ("an hour of attacks, whose results are kept", "tests/audit/test_threat_models.py"),
    "docs/watch.md": ("pages that wait for somebody", "tests/test_cli_watch.py"),
    "docs/notebooks/tables.md": ("a notebook", "tests/test_site.py"),
    "docs/notebooks/images.md": ("a notebook", "tests/test_site.py"),
}
WORDS = ("python", "sh", "toml", "text")


def blocks_of(name: str) -> list[Block]:
    return list(blocks((ROOT / name).read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", NAMES)
def test_every_block_is_played_or_named(name: str) -> None:
    found = blocks_of(name)
    for block in found:
        assert block.word in WORDS, f"{name}:{block.first + 1}: what is a block of {block.word}?"
    if any(block.word in ("python", "sh") for block in found):
        assert (name in SHORT + LONG) != (name in ELSEWHERE), name
        assert name not in ELSEWHERE or (ROOT / ELSEWHERE[name][1]).exists()


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
                    assert (ROOT / word).exists(), word
        case "python":
            script = next(word for word in words[1:] if not word.startswith("-"))
            assert (ROOT / script).exists(), script
        case "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case "pip":
            extras = set(re.findall(r"\w[\w-]*", "".join(re.findall(r"\[(.*?)\]", line))))
            known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert extras <= set(known), extras
        case "nvflare" | "printf":
            pass
        case other:
            raise AssertionError(f"{other} is no command that is known")


SECTIONS = {
    name: {kebab(key) for key in kind.model_fields} | set(BESIDE.get(name, ())) for name, kind in RUN_FILE.items()
}
SILO_SECTIONS = {name: {kebab(key) for key in kind.model_fields} for name, kind in SILO_FILE.items()}


@pytest.mark.parametrize("name", NAMES)
def test_every_block_of_toml_has_known_keys(name: str, tmp_path: Path) -> None:
    for block in blocks_of(name):
        if block.word != "toml":
            continue
        where = f"{name}:{block.first + 1}"
        tables = tomllib.loads(block.text)
        if tables.keys() >= {"run", "data", "model", "protocol"}:
            (tmp_path / "run.toml").write_text(block.text)
            assert run_files.load(tmp_path / "run.toml"), where
            continue
        if "target" in {column["kind"] for column in tables.get("columns", {}).values()}:
            assert schemas.of(tables, where)
        for section, keys in tables.items():
            if section in ("columns", "server") or not isinstance(keys, dict):  # nor a dossier's answers
                continue
            if section in ("protocol", "model"):
                known = {one for kind in run_files.PROTOCOLS.values() for one in map(kebab, kind.model_fields)}
                assert section == "model" or set(keys) <= known, where
                continue
            known = SECTIONS.get(section, set()) | SILO_SECTIONS.get(section, set())
            assert set(keys) <= known, f"{where}: [{section}] {set(keys) - known}"


# -- playing -----------------------------------------------------------------------------------------------------------

NOT_PLAYED = ("pip install", "make ")  # of installations, which tests stand on


def play(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Play a page: write the files that its blocks name, run Python and commands, compare the output that follows."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    text, known = (ROOT / name).read_text(encoding="utf-8").splitlines(), {"__name__": "page"}
    found = blocks_of(name)
    for block, after in zip(found, [*found[1:], None], strict=True):
        told = after.text if after and after.word == "text" and not "".join(text[block.last + 1 : after.first]) else ""
        file = re.match(r"# ([\w-]+\.(?:toml|py))\n", block.text)
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
    if line.startswith(NOT_PLAYED):
        return
    if not line.startswith("moretta "):
        subprocess.run(["sh", "-c", line], check=True)
        return
    words = shlex.split(line, comments=True)[1:]
    if words[0] == "watch":
        run_until_ctrl_c(words)
        return
    done = call(*words)
    if told.startswith("moretta: "):
        assert done.code in (1, 2), f"{where}: {line}"
        assert measured(done.err.strip().splitlines()[-1]) == measured(" ".join(told.split())), f"{where}: {line}"
    else:
        assert done.code == 0, f"{where}: {line}: {done.err}"


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
    return re.sub(r"(magnitude |\+-)[\d.e+]+", r"\1a number", sentence)


@pytest.mark.parametrize("name", SHORT)
def test_a_short_page_plays(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(name, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", LONG)
def test_a_long_page_plays(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(name, tmp_path)
    play(name, tmp_path, monkeypatch)
    if name == "docs/start.md":
        for page in ("first", "three"):
            assert (tmp_path / "runs" / page / "report.html").exists()


IMAGES = """
[run]
rounds = 1
[data]
source = "image-folder"
path = "scans"
labels = "labels.csv"
target = "finding"
group-column = "patient"
image-size = 16
silos = 2
[model]
source = "lenet"
[protocol]
name = "fedsgd"
loss = "cross-entropy"
"""


def prepare(name: str, folder: Path) -> None:
    """Put what a page speaks of beside it."""
    if name != "docs/images.md":
        return
    from PIL import Image

    (folder / "scans").mkdir()
    (folder / "new-scans").mkdir()
    for number in range(12):
        image = Image.new("L", (8, 8), 20 * number)
        image.save(folder / "scans" / f"{number}.png")
        image.save(folder / "new-scans" / f"{number}.png")
    lines = [f"{number}.png,P{number // 2},{'nodule' if number > 5 else 'clear'}" for number in range(12)]
    (folder / "labels.csv").write_text("\n".join(["file,patient,finding", *lines]) + "\n")
    page = next(block for block in blocks_of(name) if block.text.startswith("[columns.file]"))
    (folder / "schema.toml").write_text(page.text)
    (folder / "run.toml").write_text(IMAGES)
    assert call("train", folder / "run.toml", "--out", folder / "runs" / "mine").code == 0


def test_the_shell_of_the_readme_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn.datasets import load_breast_cancer

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("examples", "experiments"):
        os.symlink(ROOT / name, tmp_path / name)
    rows = load_breast_cancer()
    write_rows(tmp_path / "patients.csv", list(rows.feature_names), rows.data[:20])
    network = "nn.Sequential(nn.Flatten(), nn.Linear(3072, 8), nn.ReLU(), nn.Linear(8, 10))"
    (tmp_path / "my_models.py").write_text(f"from torch import nn\n\n\ndef build():\n    return {network}\n")
    (block,) = [block for block in blocks_of("README.md") if "moretta train" in block.text]
    for line in lines_of(block):
        if "schema init" not in line:  # asks in a terminal; tests/test_schema_commands.py
            run_line(line, "", "README.md")
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 21


def write_rows(path: Path, names: Sequence[str], rows: Any) -> None:
    path.write_text("\n".join([",".join(names), *(",".join(map(str, row)) for row in rows)]) + "\n")
