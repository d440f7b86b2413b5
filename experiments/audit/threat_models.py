"""Play and audit the runs of docs/threat-models.md, keep the results in results/, and write the pages' tables.

python experiments/audit/threat_models.py [--out DIR] [NAME ..]     trains and audits: about half an hour
python experiments/audit/threat_models.py --tables                  only writes the tables of the kept results
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from reproduction import as_json

from moretta.protocols.common.severity import is_whole

HERE = Path(__file__).parent
NAMES = ("threat-models", "threats-pbpfl", "threats-fedsgd", "threats-cgd", "threats-baffle")
PAGES = tuple(HERE.parents[1] / "docs" / f"{name}.md" for name in NAMES)
RESULTS = HERE / "results"
DIGITS, WDBC = "experiments/audit/digits.toml", "examples/wdbc.toml"
CE, NONE = "protocol.loss=cross-entropy", "secure-aggregation.scheme=none"
CGD = ("protocol.name=cgd", CE, "protocol.learning-rate=0.5", "data.batch-size=0", "model.hidden=[32]")

RUNS: dict[str, list[str]] = {
    "wdbc-pbpfl": [WDBC],
    "digits-pbpfl": [DIGITS],
    "digits-pbpfl-all": [DIGITS, "protocol.partitions=10"],
    "digits-pbpfl-ce": [DIGITS, CE, "protocol.variant=paper", "protocol.partitions=5"],
    "digits-fedsgd": [DIGITS, "protocol.name=fedsgd", CE],
    "single-images": ["experiments/audit/single_images.toml"],
    "single-images-masked": ["experiments/audit/single_images.toml", "secure-aggregation.scheme=pairwise"],
    "digits-cgd": [DIGITS, *CGD, "run.rounds=200", "run.record-views=[1, 2, 3, 4, 5, 6, 200]"],
    "digits-cgd-two": [DIGITS, *CGD, "data.silos=2"],
    "grid": ["experiments/audit/grid.toml"],
    "linear": ["experiments/audit/linear.toml"],
    "digits-baffle": [DIGITS, "protocol.name=baffle", CE],
}
"""A run file, and what of it is set otherwise, by the name of the run."""


@dataclass(frozen=True)
class Sweep:
    """One attack as a setting changes. run: as of `RUNS`."""

    attack: str
    setting: str
    values: Sequence[float]
    run: Sequence[str]


SWEEPS: dict[str, Sweep] = {
    "gamma-by-partitions": Sweep(
        "gamma-least-squares", "protocol.partitions", (1, 2, 5, 10), [DIGITS, "run.rounds=20"]
    ),
    "inversion-by-delta": Sweep(
        "confined-inversion", "protocol.delta", (1e-4, 1e-3, 1e-2, 1e-1, 0.5), ["experiments/audit/confined.toml"]
    ),
    "inversion-by-delta-with-bias": Sweep(
        "confined-inversion",
        "protocol.delta",
        (1e-3, 0.5),
        ["experiments/audit/confined.toml", "model.bias=true", "data.silos=2", "protocol.loss=mse"],
    ),
    "directions-by-k": Sweep(
        "k-rank-projection",
        "protocol.k",
        (10, 100, 1000, 2500),
        [DIGITS, "protocol.name=baffle", CE, "run.rounds=6", "data.batch-size=1"],
    ),
}
"""What stands below a protocol's table: how much of a leak depends on one setting."""


DEFENCES = (
    "fedsgd",
    "fedsgd dp-noise=1 dp-clip=1",
    "pbpfl loss=mse partitions=1",
    "pbpfl loss=mse partitions=all",
    "pbpfl partitions=1",
    "pbpfl partitions=all variant=paper",
    "cgd delta=0.1",
    "baffle k=100 optimizer=adam learning-rate=0.03",
)
"""What `compare` sets side by side, of experiments/audit/defences.toml."""


EVERY = (*RUNS, *SWEEPS, "defences")


def commands(name: str, out: Path) -> tuple[list[str], list[str]]:
    """Return the two commands of a run: the one that trains, and the one that audits."""
    file, *settings = RUNS[name]
    sets = [word for setting in settings for word in ("--set", setting)]
    return ["train", file, "--out", str(out / name), *sets], ["audit", str(out / name)]


def swept(name: str, out: Path) -> list[list[str]]:
    """Return the commands of a sweep, two for each value."""
    sweep, found = SWEEPS[name], []
    file, *settings = sweep.run
    for value in sweep.values:
        sets = [word for setting in (*settings, f"{sweep.setting}={value}") for word in ("--set", setting)]
        folder = str(out / f"{name}-{value}")
        found += [["train", file, "--out", folder, *sets], ["audit", folder]]
    return found


def measure_sweep(name: str, out: Path) -> None:
    """Train and audit for each value of a sweep, and keep what its attack came to."""
    kept, words = [], swept(name, out)
    for value, trained, audited in zip(SWEEPS[name].values, words[::2], words[1::2], strict=True):
        if not Path(audited[1], "result.json").exists():
            _moretta(trained)
        found = {one["attack"]: one for one in _moretta(audited)["attacks"]}
        kept.append({"value": value, **found[SWEEPS[name].attack]})
    _keep(name, {"commands": [f"moretta {shlex.join(one)}" for one in swept(name, Path("runs"))[:2]], "sweep": kept})


def compared(out: Path) -> list[str]:
    """Return the command that compares the defences."""
    variants = [word for variant in DEFENCES for word in ("--variant", variant)]
    return ["compare", "experiments/audit/defences.toml", *variants, "--audit", "--out", str(out / "defences")]


def measure(name: str, out: Path) -> None:
    """Train where that has not been done, audit, and keep the audit."""
    if name in SWEEPS:
        measure_sweep(name, out)
        return
    if name == "defences":
        found = _moretta(compared(out))
        _keep(name, {"commands": [f"moretta {shlex.join(compared(Path('runs')))}"], "leaks": found["leaks"]})
        return
    trained, audited = commands(name, out)
    if not (out / name / "result.json").exists():
        _moretta(trained)
    found = _moretta(audited)
    _keep(name, {"commands": [f"moretta {shlex.join(words)}" for words in commands(name, Path("runs"))], **found})


def _keep(name: str, kept: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(as_json(kept))


def _moretta(words: list[str]) -> dict[str, Any]:
    print("moretta", *words, file=sys.stderr)
    command = [str(Path(sys.executable).parent / "moretta"), *words, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout)


def table(name: str) -> str:
    """Return a run's table, as the page has it."""
    kept = json.loads((RESULTS / f"{name}.json").read_text())
    lines = ["<!-- not played: hours of attacks, whose results are kept -->", ""]
    lines += [f"    {command}" for command in kept["commands"]]
    if "leaks" in kept:
        return "\n".join([*lines, "", *_side_by_side(kept["leaks"])])
    if "sweep" in kept:
        lines += [
            "",
            f"| {SWEEPS[name].setting} | `{SWEEPS[name].attack}` | score (95 %) | chance |",
            "|---|---|---|---|",
        ]
        lines += [f"| {one['value']:g} | {_sentence(one)} | {_scored(one)} |" for one in kept["sweep"]]
        return "\n".join(lines)
    lines += ["", "| role | attack | measured | score (95 %) | chance |", "|---|---|---|---|---|"]
    for one in kept["attacks"]:
        lines.append(f"| {one['role']} | `{one['attack']}` | {_sentence(one)} | {_scored(one)} |")
    if missed := "; ".join(f"`{one['attack']}`: {one['because']}" for one in kept["not_run"]):
        lines += ["", f"Not tried: {missed}."]
    return "\n".join(lines)


def _sentence(one: dict[str, Any]) -> str:
    """Return what the audit printed, but an interval that contains every score is no failure, as audits now say."""
    ended = "this is no evidence" if is_whole(*one["interval"]) else "this attack failed"
    return one["sentence"].replace("this attack failed", ended)


def _scored(one: dict[str, Any]) -> str:
    """Return the last two cells of an attack's line."""
    low, high = one["interval"]
    return f"{one['score']:.3g} ({low:.3g} to {high:.3g}) | {one['chance']:.3g}"


def _side_by_side(leaks: list[dict[str, Any]]) -> list[str]:
    """Return the table of defences: the successful attack furthest above chance, by whom."""
    lines = [
        "| run | accuracy | seconds | kB a silo and round | to the server | to a silo | to colluders or outsiders |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for one in leaks:
        cells = [_worst(one[group]) for group in ("server", "silo", "others")]
        costs = f"{one['accuracy']:.3f} | {one['seconds']:.1f} | {one['bytes_per_silo_per_round'] / 1000:.1f}"
        lines.append(f"| {one['run']} | {costs} | {' | '.join(cells)} |")
    return lines


def _worst(leak: dict[str, Any]) -> str:
    if leak["worst"] is None:
        return f"{leak['tried']} tried, all failed" if leak["tried"] else "none tried"
    worst = leak["worst"]
    return f"{worst['score']:.3g} (chance {worst['chance']:.3g}) `{worst['attack']}`"


def filled(page: str) -> str:
    """Return the page with each table between its marks."""

    def fill(mark: re.Match[str]) -> str:
        if not (RESULTS / f"{mark[1]}.json").exists():
            return mark[0]
        return f"<!-- measured: {mark[1]} -->\n\n{table(mark[1])}\n\n<!-- end -->"

    return re.sub(r"<!-- measured: (\S+) -->.*?<!-- end -->", fill, page, flags=re.DOTALL)


def main() -> None:
    """Measure what is asked for, all if nothing is, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(EVERY)}")
    parser.add_argument("--out", type=Path, default=Path("runs/threat-models"))
    parser.add_argument("--tables", action="store_true")
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in EVERY]
    if unknown:
        parser.error(f"{', '.join(unknown)}: expected some of {', '.join(EVERY)}")
    for name in () if given.tables else given.names or EVERY:
        measure(name, given.out)
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
