"""Look at what `make dist` has made: the wheel has the whole package, and neither has anything else.

    python release/contents.py dist

What there is to pack is what git tracks, or, where there is no checkout, nothing that can be compared.
Exit code 1, with a line for each file, where something lacks or does not belong.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = "src/moretta/"
OURS_ALONE = (".ci/", ".github/", ".editorconfig", ".gitignore", ".pre-commit-config.yaml")  # of the repository
MADE = ("PKG-INFO", "setup.cfg", "src/moretta.egg-info/")  # by setuptools


def tracked() -> set[str]:
    """Return the files of the checkout, and new ones that git does not ignore."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return {name for name in found if (ROOT / name).is_file()}


def wrong_in_wheel(wheel: Path, files: set[str]) -> list[str]:
    """Return a line for each file of the package that a wheel lacks, or has and should not."""
    wanted = {name.removeprefix("src/") for name in files if name.startswith(PACKAGE)}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    return _differences(wheel.name, wanted, found)


def wrong_in_sdist(sdist: Path, files: set[str]) -> list[str]:
    """Return a line for each tracked file that a source distribution lacks, and for what it has beside those."""
    wanted = {name for name in files if not name.startswith(OURS_ALONE)}
    with tarfile.open(sdist) as archive:
        names = {each.name.partition("/")[2] for each in archive.getmembers() if each.isfile()}
    return _differences(sdist.name, wanted, {name for name in names if not name.startswith(MADE)})


def _differences(where: str, wanted: set[str], found: set[str]) -> list[str]:
    return [
        *(f"{where} lacks {name}" for name in sorted(wanted - found)),
        *(f"{where} has {name}, which is not tracked" for name in sorted(found - wanted)),
    ]


def main() -> None:
    """Print what is wrong, or how much there is."""
    [folder] = sys.argv[1:]
    [sdist], [wheel], files = list(Path(folder).glob("*.tar.gz")), list(Path(folder).glob("*.whl")), tracked()
    wrong = wrong_in_wheel(wheel, files) + wrong_in_sdist(sdist, files)
    print(
        "\n".join(wrong) or f"{sdist.name} and {wheel.name} have all of the {len(files)} tracked files that they should"
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
