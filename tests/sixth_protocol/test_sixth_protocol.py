"""A sixth protocol lands by one folder and one line of the registry, and then is as good as the others."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import moretta

HERE = Path(__file__).parent
TESTS = HERE.parent
LAST, LINE = '    "moretta.protocols.baffle.protocol",\n', '    "moretta.protocols.fedsam.protocol",\n'


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with the folder of FedSAM, and one line more in the registry."""
    root = tmp_path_factory.mktemp("sixth")
    package = Path(moretta.__file__).parent
    shutil.copytree(package, root / "moretta")
    shutil.copytree(HERE / "fedsam", root / "moretta" / "protocols" / "fedsam")
    registry = root / "moretta" / "protocols" / "registry.py"
    text = registry.read_text()
    assert text.count(LAST) == 1
    registry.write_text(text.replace(LAST, LAST + LINE))
    return root


def python(source: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Call Python with the package of `source`, and with the cases of FedSAM where the contract suite finds them."""
    paths = os.pathsep.join(map(str, (source, HERE)))
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env=os.environ | {"PYTHONPATH": paths},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_shell_lists_it(source: Path) -> None:
    done = python(source, "-c", "from moretta.commands.main import main; main()", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Protocols: fedsgd, fedavg, fedprox, local, centralised, pbpfl, cgd, baffle, fedsam." in " ".join(
        done.stdout.split()
    )


def test_it_keeps_the_contract_and_every_command_knows_it(source: Path) -> None:
    suites = (TESTS / "test_contract.py", HERE / "test_fedsam.py")
    done = python(source, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "-k", "fedsam", *suites)
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
