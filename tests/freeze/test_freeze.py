"""Nothing moved: what record.json holds, computed again and compared section by section.

On a processor that rounds otherwise (`record.rounding`), digests and floats are left out: names, counts, sentences and
the shape of everything are still the same. To compare all there, make a record of the commit before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import record

SHOWN = 20  # differences at most, of a section
KEPT: dict[str, Any] = json.loads((record.HERE / "record.json").read_text())
ROUNDS_ALIKE = KEPT["machine"].get("rounding") == record.rounding()
ROUNDED = re.compile(r"[0-9a-f]{32,}|\d+\.\d+")  # digests and figures in sentences
BINNED = "reliability"  # counts of rows by bins of probabilities


def comparable(content: Any) -> Any:
    """Return JSON content without what follows from the last bits of a float."""
    if isinstance(content, dict):
        return {key: comparable(value) for key, value in content.items() if key != BINNED}
    if isinstance(content, list):
        return [comparable(value) for value in content]
    if isinstance(content, str):
        return ROUNDED.sub("rounded", content)
    return "float" if isinstance(content, float) else content


def differences(kept: Any, now: Any, where: str = "") -> Iterator[str]:
    """Yield where two pieces of JSON content differ, each in one line."""
    if isinstance(kept, dict) and isinstance(now, dict):
        for key in sorted({*kept, *now}):
            if key not in now:
                yield f"{where}/{key}: gone"
            elif key not in kept:
                yield f"{where}/{key}: new"
            else:
                yield from differences(kept[key], now[key], f"{where}/{key}")
    elif isinstance(kept, list) and isinstance(now, list) and len(kept) == len(now):
        for number, (one, other) in enumerate(zip(kept, now, strict=True)):
            yield from differences(one, other, f"{where}[{number}]")
    elif isinstance(kept, list) and isinstance(now, list):
        gone, new = ([one for one in a if one not in b] for a, b in ((kept, now), (now, kept)))
        yield f"{where}: gone {gone}, new {new}"
    elif kept != now or type(kept) is not type(now):
        yield f"{where}: was {kept!r:.200}, is {now!r:.200}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where runs lie that attacks and exit codes are read from afterwards."""
    return tmp_path_factory.mktemp("freeze")


def check(section: str, folder: Path) -> None:
    kept, now = KEPT[section], record.made(section, folder)
    found = list(differences(kept, now) if ROUNDS_ALIKE else differences(comparable(kept), comparable(now)))
    machines = f"recorded on {KEPT['machine']}, compared on {record.machine()}"
    assert not found, "\n".join([f"{len(found)} differences in {section}; {machines}", *found[:SHOWN]])


@pytest.mark.parametrize("section", record.SECTIONS)
def test_nothing_moved(section: str, folder: Path) -> None:
    needs_runs = section in ("attacks", "audits", "outputs", "surfaces") and not (folder / "runs").exists()
    if needs_runs:  # this test was chosen alone
        record.runs(folder)
    check(section, folder)
