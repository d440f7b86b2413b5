"""A protocol and an attack of another package, installed beside Moretta, are as good as its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TESTS, PACKAGE = HERE.parent, HERE / "package"
PROJECT = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
LISTED = "import moretta.protocols.registry as r, moretta.audit.auditor as c\n"
LISTED += "print(*r.ENTRIES); print(*(one.name for one in c.all_attacks()))"


def install(folder: Path, groups: Mapping[str, Mapping[str, str]] = PROJECT["entry-points"]) -> Path:
    """Put the package into a folder as pip would, with these entry points."""
    shutil.copytree(PACKAGE / "fedsam", folder / "fedsam", ignore=shutil.ignore_patterns("__pycache__"))
    told = folder / f"moretta_fedsam-{PROJECT['version']}.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PROJECT['name']}\nVersion: {PROJECT['version']}\n")
    lines = [
        f"[{group}]\n" + "".join(f"{key} = {one}\n" for key, one in points.items()) for group, points in groups.items()
    ]
    (told / "entry_points.txt").write_text("\n".join(lines))
    return folder


def python(installed: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Call Python with a folder of installed packages, and with the cases of FedSAM where the contract suite looks."""
    paths = os.pathsep.join(filter(None, [str(installed), str(HERE), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env=os.environ | {"PYTHONPATH": paths},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("site"))


def test_the_shell_lists_it(installed: Path) -> None:
    done = python(installed, "-c", "from moretta.commands.main import main; main()", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Protocols: fedsgd, fedavg, fedprox, local, centralised, pbpfl, cgd, baffle, fedsam." in " ".join(
        done.stdout.split()
    )


def test_it_keeps_the_contract_and_every_command_knows_it(installed: Path) -> None:
    suites = (TESTS / "test_contract.py", HERE / "test_fedsam.py")
    done = python(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "-k", "fedsam", *suites)
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({"moretta.protocols": {"x": "fedsam.protokol:ENTRIES"}}, "ModuleNotFoundError: No module named"),
        ({"moretta.attacks": {"x": "fedsam.protocol:ATTACK"}}, "AttributeError: module 'fedsam.protocol' has no"),
    ],
)
def test_a_package_that_is_broken_is_left_out_and_named(
    tmp_path: Path, groups: Mapping[str, Mapping[str, str]], said: str
) -> None:
    done = python(install(tmp_path, groups), "-c", LISTED)
    assert done.returncode == 0, done.stderr
    assert "fedsam" not in done.stdout
    assert f"of package moretta-fedsam is left out: {said}" in done.stderr


def test_no_package_takes_a_name_that_moretta_has(tmp_path: Path) -> None:
    folder = install(tmp_path)
    for file, name, taken in (
        ("protocol.py", "fedsam", "fedsgd"),
        ("attacks.py", "model-in-the-clear", "silo-property"),
    ):
        text = (folder / "fedsam" / file).read_text()
        (folder / "fedsam" / file).write_text(text.replace(f'"{name}",\n', f'"{taken}",\n', 1))
    plain, done = python(HERE, "-c", LISTED), python(folder, "-c", LISTED)
    assert done.stdout == plain.stdout
    assert done.stderr.count("of package moretta-fedsam is left out: that name is taken") == 2
