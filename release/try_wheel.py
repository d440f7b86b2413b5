"""Install a wheel into new environments, outside of the checkout, and use it as somebody would who has nothing else.

    python release/try_wheel.py dist

First with no extra: data are in the package, and training says what to add. Then with `[torch]`, which takes minutes:
the demo of `make demo`, with its page, and `moretta check`. Environments and runs are in a temporary folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
DEMO = ("compare", "wdbc.toml", "--protocols", "centralised,local,fedsgd,pbpfl", "--out", "demo", "--json")
CHECK = ("check", "--model", "mlp", "--input", "30", "--classes", "2")
SENTENCE = "moretta: this command needs torch; install it by: pip install 'moretta[torch]'"
LOOK = """
import sys, moretta
from importlib.resources import files
package = files("moretta")
assert str(package).startswith(sys.prefix), package
assert (package / "py.typed").is_file()
assert len((package / "protocols/baffle/silo/gaussian.npy").read_bytes()) == 65664
assert (package / "report/templates/page.html.j2").is_file()
assert moretta.__version__ == sys.argv[1], moretta.__version__
"""


def environment(folder: Path, wheel: Path, extra: str = "") -> Path:
    """Make an environment with the wheel and an extra, and return the folder of its programs."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    words = [folder / "bin/python", "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    subprocess.run([*words, "--constraint", ROOT / "constraints.txt", f"{wheel}{extra}"], check=True)
    return folder / "bin"


def clean() -> Mapping[str, str]:
    """Return this process's environment without what could let a checkout be imported."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def moretta(programs: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of an environment in a folder."""
    return subprocess.run(
        [programs / "moretta", *words], cwd=folder, env=clean(), capture_output=True, text=True, check=False
    )


def try_base(programs: Path, folder: Path, version: str) -> None:
    """Use what is installed with no extra. Raises AssertionError or CalledProcessError where it is not as it should be.

    folder: empty, and the working folder.
    """
    subprocess.run([programs / "python", "-c", LOOK, version], cwd=folder, env=clean(), check=True)
    assert moretta(programs, folder, "--version").stdout == f"{version}\n"
    (folder / "wdbc.toml").write_text((ROOT / "examples/wdbc.toml").read_text())
    done = moretta(programs, folder, "train", "wdbc.toml")
    assert done.returncode == 2, done
    assert " ".join(done.stderr.split()) == SENTENCE, done.stderr


def try_torch(programs: Path, folder: Path, version: str) -> None:
    """Run the demo. Raises as `try_base`. folder: empty, and the working folder."""
    subprocess.run([programs / "python", "-c", LOOK, version], cwd=folder, env=clean(), check=True)
    (folder / "wdbc.toml").write_text((ROOT / "examples/wdbc.toml").read_text())
    done = moretta(programs, folder, *DEMO)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert len(told["runs"]) == 4, told
    assert (folder / told["report"]).stat().st_size > 0
    checked = moretta(programs, folder, *CHECK)
    assert checked.returncode == 0, checked.stderr


def main() -> None:
    """Try the wheel of a folder."""
    [wheel] = Path(sys.argv[1]).resolve().glob("*.whl")
    version = wheel.name.split("-")[1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for extra, attempt in (("", try_base), ("[torch]", try_torch)):
            (folder / f"work{extra}").mkdir()
            attempt(environment(folder / f"env{extra}", wheel, extra), folder / f"work{extra}", version)
            print(f"{wheel.name}{extra} works on Python {sys.version.split()[0]}", flush=True)


if __name__ == "__main__":
    main()
