"""What is handed out: source distribution and wheel have what they need, and nothing else."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import moretta

ROOT = Path(__file__).parent.parent
contents, resolve, try_wheel = (runpy.run_path(str(ROOT / "release" / f"{name}.py")) for name in
                                ("contents", "resolve", "try_wheel"))  # fmt: skip
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


APART = ("fuzz", "trackers", "flower")  # extras that are no part of dev, nor of constraints.txt


# -- what pip is told --------------------------------------------------------------------------------------------------


def test_everything_of_dev_is_asked_for_and_constrained() -> None:
    wanted = resolve["requirements"](PROJECT)
    assert not [each for each in wanted if each.startswith("moretta")]
    named = {re.split(r"[<>=\[]", each)[0].lower() for each in wanted}
    extras = {name: group for name, group in PROJECT["optional-dependencies"].items() if name not in APART}
    for group in [PROJECT["dependencies"], *extras.values()]:
        assert {re.split(r"[<>=\[]", each)[0].lower() for each in group} - {"moretta"} <= named
    lines = (ROOT / "constraints.txt").read_text().lower().replace("_", "-").splitlines()
    pinned = {line.partition("==")[0] for line in lines if "==" in line}
    assert named <= pinned, f"constraints.txt lacks {', '.join(sorted(named - pinned))}"
    assert {"setuptools", "build"} <= pinned


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("ERROR: No matching distribution found for onnx>=1.16", "onnx"),
        ("ERROR: No matching distribution found for dm-tree", "dm-tree"),
        ("ERROR: Cannot install nvflare==2.9.0 because these package versions have conflicting", "nvflare"),
    ],
)
def test_what_has_no_wheel_is_named(said: str, name: str, tmp_path: Path) -> None:
    look = resolve["without_wheels"]
    answers = iter([said, None])
    asked: list[list[str]] = []

    def ask_pip(python: str, wanted: list[str], made: Path) -> str | None:
        asked.append(wanted)
        return next(answers)

    look.__globals__["_ask_pip"] = ask_pip
    assert look("3.14", ["numpy>=1", f"{name}>=1", f"{name}script>=1"], tmp_path) == [name]
    assert asked[-1] == ["numpy>=1", f"{name}script>=1"]


def test_the_metadata_are_true() -> None:
    assert PROJECT["version"] == moretta.__version__
    assert (ROOT / PROJECT["readme"]).is_file()
    assert f"Apache License\n{' ' * 27}Version 2.0" in (ROOT / "LICENSE").read_text()
    assert PROJECT["license"] == "Apache-2.0"
    least = PROJECT["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {least}" in PROJECT["classifiers"]
    others = [
        each for each in PROJECT["classifiers"] if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", each)
    ]
    assert len(others) == 1, "a Python that no test runs on is claimed"


# -- source distribution and wheel -------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two files, made from a copy of what git tracks."""
    pytest.importorskip("build", reason="the dev extra has it")
    if not (ROOT / ".git").exists():
        pytest.skip("what is tracked can be told in a checkout only")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in contents["tracked"]():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    for name in ("data/rows.npz", "runs/one/result.json", "src/moretta/__pycache__/x.cpython-311.pyc", "keys/a.key"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(b"what lies about in a checkout")
    words = [sys.executable, "-m", "build", "--outdir", str(out), str(source)]
    done = subprocess.run(
        words,
        env={**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return out


@pytest.mark.slow
def test_they_have_all_that_is_tracked_and_nothing_else(dist: Path) -> None:
    [sdist], [wheel], files = list(dist.glob("*.tar.gz")), list(dist.glob("*.whl")), contents["tracked"]()
    assert contents["wrong_in_wheel"](wheel, files) == []
    assert contents["wrong_in_sdist"](sdist, files) == []
    assert contents["wrong_in_wheel"](wheel, files | {"src/moretta/more.j2"}) == [f"{wheel.name} lacks moretta/more.j2"]
    assert contents["wrong_in_sdist"](sdist, files - {"LICENSE"}) == [f"{sdist.name} has LICENSE, which is not tracked"]


@pytest.mark.slow
def test_the_wheel_works_where_nothing_else_is(dist: Path, tmp_path: Path) -> None:
    """Minutes: two new environments, PyTorch in one of them, and the demo."""
    [wheel] = dist.glob("*.whl")
    for extra, attempt in (("", "try_base"), ("[torch]", "try_torch")):
        programs = try_wheel["environment"](tmp_path / f"env{extra}", wheel, extra)
        (tmp_path / f"work{extra}").mkdir()
        try_wheel[attempt](programs, tmp_path / f"work{extra}", PROJECT["version"])
