"""Write `measured.txt`: how many cases of each function of tests `make test` runs, by the seconds that a run took.

    make test-all PYTEST_ADDOPTS=--junitxml=seconds.xml
    python tests/measured.py seconds.xml

A function of several cases keeps as many, evenly spread, as take `CASES` seconds together, and at least one. A case
that takes more than `ONE` seconds is left to `make test-all`. Where `thorough.toml` has a function, that counts.
"""

from __future__ import annotations

import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parent
LIST = HERE / "measured.txt"
HEAD = "# How many cases of a function `make test` runs too; made by tests/measured.py from a run's seconds.\n"
CASES, ONE = 0.25, 0.5


def seconds(report: Path) -> dict[str, list[float]]:
    """Return the seconds of each case by function, `tests/x.py::test_y`, from a JUnit report."""
    found = defaultdict[str, list[float]](list)
    for case in ElementTree.parse(report).iter("testcase"):
        file, function = case.attrib["classname"].replace(".", "/"), case.attrib["name"].partition("[")[0]
        if "/Test" not in file:  # Hypothesis makes the classes of state machines
            found[f"{file}.py::{function}"].append(float(case.attrib["time"]))
    return found


def kept(cases: list[float]) -> int:
    """Return how many of a function's cases `make test` runs."""
    mean = sum(cases) / len(cases)
    if mean > ONE:
        return 0
    return min(len(cases), max(1, int(CASES / mean))) if mean else len(cases)


def main(report: Path) -> None:
    """Write the list from a report."""
    families = tomllib.loads((HERE / "thorough.toml").read_text(encoding="utf-8"))["family"]
    numbers = {name: (kept(cases), len(cases)) for name, cases in seconds(report).items() if name not in families}
    lines = (f"{keep} {name}\n" for name, (keep, cases) in sorted(numbers.items()) if keep < cases)
    LIST.write_text(HEAD + "".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
