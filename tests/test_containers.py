"""Images of a server and of sites: the Containerfile is read, and its steps are played where no container engine is."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import subprocess
import tomllib
import venv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGETS = ("server", "site", "edge-site")


@dataclass
class Stage:
    """A stage of the Containerfile: on what it stands, and its instructions in order."""

    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)


def stages() -> dict[str, Stage]:
    text = re.sub(r"^#.*\n", "", (ROOT / "Containerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, Stage] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        word, rest = line.split(None, 1)
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            found[name] = Stage(base)
        else:
            list(found.values())[-1].steps.append((word, rest))
    return found


def lineage(target: str) -> list[tuple[str, str]]:
    """All instructions of a target, those of the stages that it stands on first."""
    stage = stages()[target]
    return [*(lineage(stage.base) if stage.base in stages() else []), *stage.steps]


def test_images_name_their_versions_and_hold_no_secret() -> None:
    found, least = stages(), PROJECT["requires-python"].removeprefix(">=")
    assert set(TARGETS) <= set(found)
    extras = set()
    for name, stage in found.items():
        assert stage.base in found or stage.base == f"docker.io/library/python:{least}-slim"
        constrained = False
        for word, rest in lineage(name):
            assert word in {"RUN", "COPY", "ENV", "ARG", "USER", "WORKDIR", "ENTRYPOINT", "CMD", "EXPOSE"}
            assert not re.search(r"secret|token|passw|\.key|identity", rest, re.IGNORECASE), rest
            constrained = constrained or (word == "ENV" and "PIP_CONSTRAINT=/build/constraints.txt" in rest)
            if word == "RUN" and " pip " in rest:
                assert constrained, rest
                extras |= {each for some in re.findall(r"whl\)\[(.*?)\]", rest) for each in some.split(",")}
    assert {"flare", "edge-flare"} <= extras <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("target", TARGETS)
def test_a_party_is_nobody_special_and_gets_packages_alone(target: str) -> None:
    steps = lineage(target)
    users = [rest for word, rest in steps if word == "USER"]
    assert users == ["10001:10001"]
    assert [rest for word, rest in steps if word == "COPY"] == [
        f"--from={'without-torch' if target == 'edge-site' else 'with-torch'} /opt/moretta /opt/moretta"
    ]
    assert steps.index(("WORKDIR", "/work")) > steps.index(("USER", users[0]))


def test_nothing_of_a_checkout_goes_into_the_build_but_the_package() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ignored[0] == "*"
    copied = {each for word, rest in stages()["wheel"].steps if word == "COPY" for each in rest.split()[:-1]}
    assert copied == {each[1:] for each in ignored if each.startswith("!")}
    assert {"**/__pycache__", "**/*.egg-info"} <= set(ignored)


class Container:
    """The RUN and COPY steps of a stage, done in a folder that stands for the root of an image's file system.

    There is no container engine here: base images, users and ports are left out, and so is what needs root.
    """

    def __init__(self, root: Path, python: Path) -> None:
        self._root, self._env = root, {"PATH": f"{python}:/usr/bin:/bin"}
        self._here = root

    def build(self, stage: str) -> None:
        for word, rest in lineage(stage):
            match word:
                case "WORKDIR":
                    self._here = Path(self._placed(rest))
                    self._here.mkdir(parents=True, exist_ok=True)
                case "ENV":
                    self._env |= {name: self._placed(value) for name, value in
                                  (each.split("=", 1) for each in shlex.split(rest))}  # fmt: skip
                case "ARG":
                    name, value = rest.split("=", 1)
                    assert value.startswith("https://")
                    # a machine whose pip has wheels of its own has PyTorch among them, and need not reach that index
                    self._env[name] = "https://pypi.org/simple" if "PIP_FIND_LINKS" in os.environ else value
                case "COPY":
                    *sources, target = rest.split()
                    for source in sources:
                        self._copy(ROOT / source, self._here / target)
                case "RUN":
                    given = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
                    given["PIP_NO_COMPILE"] = "1"  # which an image does, and which would take half of the time here
                    words = ["/bin/sh", "-ec", self._placed(rest)]
                    done = subprocess.run(
                        words, cwd=self._here, env={**given, **self._env}, capture_output=True, text=True, check=False
                    )
                    assert done.returncode == 0, f"RUN {rest}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"

    def _placed(self, text: str) -> str:
        return re.sub(r"(?<![\w/.:])/(build|opt/moretta|work)\b", rf"{self._root}/\1", text)

    def _copy(self, source: Path, target: Path) -> None:
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(source, target, dirs_exist_ok=True, ignore=ignore)
        else:
            shutil.copy2(source, target / source.name if target.is_dir() else target)

    def run(self, target: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a target's entry point with its own command, or with other words, in /work."""
        steps = dict(lineage(target))
        entry, given = (shlex.split(re.sub(r"[\[\],]", " ", steps[word])) for word in ("ENTRYPOINT", "CMD"))
        work = self._root / "work"
        work.mkdir(exist_ok=True)
        return subprocess.run(
            [self._root / "opt/moretta/bin" / entry[0], *(words or given)],
            cwd=work,
            env=clean(),
            capture_output=True,
            text=True,
            check=False,
        )


def clean() -> Mapping[str, str]:
    return dict(runpy.run_path(str(ROOT / "release/try_wheel.py"))["clean"]())


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an official image has: `python` with pip, and nothing of this checkout."""
    folder = tmp_path_factory.mktemp("python")
    venv.create(folder, with_pip=True)
    return folder / "bin"


def built(stage: str, root: Path, python: Path) -> Container:
    container = Container(root, python)
    container.build(stage)
    return container


def check_runs(container: Container, *targets: str) -> None:
    for target in targets:
        assert container.run(target, "--version").stdout == f"{PROJECT['version']}\n"
        bare = container.run(target)  # nothing is mounted at /work
        assert bare.returncode == 2, bare
        assert re.fullmatch(r"moretta: [^\n]*(run|silo)\.toml[^\n]*\n", bare.stderr), bare


@pytest.mark.slow
def test_the_steps_of_the_edge_image_make_a_site_without_torch(tmp_path: Path, python: Path) -> None:
    container = built("without-torch", tmp_path, python)
    check_runs(container, "edge-site")
    programs = tmp_path / "opt/moretta/bin"
    look = "import onnxruntime, nvflare, pyarrow, importlib.util as u; assert not u.find_spec('torch')"
    subprocess.run([programs / "python", "-c", look], env=clean(), check=True)
    assert not (programs / "pip").exists()


@pytest.mark.slow
def test_the_steps_of_the_other_images_make_a_server_and_a_site(tmp_path: Path, python: Path) -> None:
    """Minutes: PyTorch is installed."""
    container = built("with-torch", tmp_path, python)
    check_runs(container, "server", "site")
    look = "import torch, nvflare, onnx, pydicom, dp_accounting"
    subprocess.run([tmp_path / "opt/moretta/bin/python", "-c", look], env=clean(), check=True)
    made = container.run("server", "kit", "new", "kits", "--host", "server.example.org")
    assert made.returncode == 0, made
    assert (tmp_path / "work/kits/authority/root.key").stat().st_mode & 0o777 == 0o600
