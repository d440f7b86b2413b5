"""Ask a package index, for each Python that no test here runs on, whether wheels of all dependencies are there.

    python release/resolve.py            of 3.12, 3.13 and 3.14, in the versions of constraints.txt
    python release/resolve.py 3.13

Nothing is installed. What is asked for is what `[dev]` comes to, so every extra. A Python passes where pip finds one
set of wheels for all of it; this says that such an environment can be made, and not that Moretta works in it. What has
no wheel is printed, and the rest is asked for again without it, so that one look names all. Exit code 1 where any lacks
one. What is in SOURCES is pure Python of which the index has no wheel for any Python: pip makes one here first.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PYTHONS = ("3.12", "3.13", "3.14")
SOURCES = ("pyhocon",)  # which nvflare needs
MISSING = re.compile(r"No matching distribution found for ([A-Za-z0-9._-]+)|Cannot install ([A-Za-z0-9._-]+)==")


def requirements(project: dict[str, Any]) -> list[str]:
    """Return what `moretta[dev]` needs, with what every extra that it names needs in the place of that extra."""
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    found, names = dict[str, None](), ["", "dev"]
    for name in names:  # which grows
        for each in extras[name]:
            if own := re.fullmatch(r"moretta\[(.*)\]", each):
                names += [more for more in own[1].split(",") if more not in names]
            else:
                found[each] = None
    return list(found)


def without_wheels(python: str, wanted: list[str], made: Path) -> list[str]:
    """Return the packages of which pip finds no wheel for a Python on this kind of machine.

    A package is named also where it lacks nothing but a wheel of what it needs itself.
    Raises RuntimeError with pip's last line where it fails at something else.
    """
    failed: list[str] = []
    while (said := _ask_pip(python, wanted, made)) is not None:
        if (found := MISSING.search(said)) is None:
            raise RuntimeError(said.strip().splitlines()[-1])
        failed.append(found[1] or found[2])
        rest = [each for each in wanted if not re.match(rf"{re.escape(failed[-1])}(?![A-Za-z0-9._-])", each)]
        if len(rest) == len(wanted):  # what another package needs, and no line of ours
            return failed
        wanted = rest
    return failed


def _ask_pip(python: str, wanted: list[str], made: Path) -> str | None:
    """Return what pip says where it finds no set of wheels, and None where it does. made: wheels that are here."""
    words = ["install", "--dry-run", "--quiet", "--ignore-installed", "--target", str(made / "nothing")]
    words += ["--only-binary=:all:", "--python-version", python, "--find-links", str(made)]
    return _pip(*words, *wanted)


def _pip(*words: str) -> str | None:
    told = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    done = subprocess.run(
        [*told, "--constraint", str(ROOT / "constraints.txt")], capture_output=True, text=True, check=False
    )
    return None if done.returncode == 0 else done.stdout + done.stderr


def main() -> None:
    """Print a line a Python."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted, complete = requirements(project), True
    with tempfile.TemporaryDirectory() as folder:
        if said := _pip("wheel", "--quiet", "--no-deps", "--wheel-dir", folder, *SOURCES):
            sys.exit(said)
        if impure := [path.name for path in Path(folder).glob("*.whl") if not path.name.endswith("-none-any.whl")]:
            sys.exit(f"{', '.join(impure)} is of one Python only: take it out of SOURCES")
        for python in sys.argv[1:] or PYTHONS:
            failed = without_wheels(python, wanted, Path(folder))
            complete = complete and not failed
            said = f"no wheel of {', '.join(failed)}" if failed else f"wheels of all {len(wanted)} dependencies resolve"
            print(f"Python {python}: {said}; not run", flush=True)
    sys.exit(not complete)


if __name__ == "__main__":
    main()
