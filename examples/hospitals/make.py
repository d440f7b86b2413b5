"""Make a set of tables as hospitals have them, and the run files that train on it. Nothing here is a real patient.

    python examples/hospitals/make.py FOLDER [--rows 800] [--seed 7]

    north.csv        visits: comma, blanks, "<5", a free text
    south.csv        the same columns in another order; semicolons, decimal commas, latin-1, n/a for no value
    east.parquet     again another order; no ward of its kind, so a category that this hospital lacks
    new.csv          new patients, whose outcome nobody knows yet
    clinic.csv       one partner's columns of its patients, with the outcome
    insurer.parquet  another partner's columns, of patients mostly the clinic's; ids in small letters
    both.csv         later patients of both partners, all columns, to test by
    *.toml           the schemas and run files beside this script

Patients come back, also to another hospital. Needs numpy, and pyarrow for the Parquet files.
"""

from __future__ import annotations

import argparse
import csv
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

WARDS = ("Innere Medizin", "Chirurgie", "Gynäkologie", "Intensiv")
STAGES = ("I", "II", "III")
PLANS = ("basic", "plus", "private")
NORTH = ("visit_id", "patient", "admitted", "age", "bmi", "crp", "ward", "smoker", "stage", "remark", "readmitted")
SOUTH = ("admitted", "readmitted", "ward", "stage", "patient", "crp", "smoker", "age", "remark", "bmi", "visit_id")
EAST = ("stage", "ward", "age", "crp", "bmi", "smoker", "visit_id", "remark", "patient", "readmitted", "admitted")
CLINIC = ("patient", "age", "bmi", "crp", "smoker", "stage", "readmitted")
INSURER = ("plan", "claims", "patient", "premium", "chronic")

Columns = dict[str, NDArray[np.object_]]


def people(random: np.random.Generator, count: int, first: int = 0) -> Columns:
    """Return what is true of each person, a row each; None where nobody asked."""
    plan = random.integers(0, len(PLANS), count)
    found = {
        "patient": [f"P-{number:05}" for number in range(first, first + count)],
        "age": np.clip(random.normal(58, 17, count), 18, 97).round(),
        "bmi": random.normal(26, 4, count).round(1),
        "smoker": random.choice(["yes", "no"], count, p=[0.3, 0.7]),
        "plan": np.array(PLANS)[plan],
        "claims": random.poisson(3, count).astype(float),
        "premium": (300 + 90 * plan + random.normal(0, 25, count)).round(2),
        "chronic": random.choice(["yes", "no"], count, p=[0.35, 0.65]),
    }
    columns = {name: np.array(values, object) for name, values in found.items()}
    columns["bmi"][random.random(count) < 0.12] = None
    columns["smoker"][random.random(count) < 0.08] = None
    columns["claims"][random.random(count) < 0.05] = None
    return columns


def visits(random: np.random.Generator, of: Columns, count: int, letter: str, wards: Sequence[str]) -> Columns:
    """Return visits, a row each: some people have several. letter: what visit ids begin with."""
    who = np.sort(random.integers(0, len(of["patient"]), count))
    columns = {name: values[who] for name, values in of.items()}
    numbers = random.choice(90_000, count, replace=False) + 10_000
    days = np.datetime64("2023-01-01") + random.integers(0, 730, count)
    stage = random.integers(0, 3, count)
    crp = random.gamma(1.6, 14, count).round(1)
    columns |= {
        "visit_id": np.array([f"{letter}{number}" for number in numbers], object),
        "admitted": days.astype(object),
        "ward": random.choice(np.array(wards, object), count),
        "stage": np.array(STAGES, object)[stage],
        "crp": np.array([value if value >= 5 else "<5" for value in crp.tolist()], object),
        "remark": np.array([f"seen by team {random.integers(900)}, room {random.integers(900)}" for _ in who], object),
    }
    columns["crp"][random.random(count) < 0.06] = None
    columns["readmitted"] = outcome(random, columns, crp, stage)
    return columns


def outcome(
    random: np.random.Generator, columns: Columns, crp: NDArray[np.float64], stage: NDArray[np.int64]
) -> NDArray[np.object_]:
    """Return who comes back within a month: by age, inflammation, stage and what the insurer knows."""
    age = columns["age"].astype(float)
    claims = np.array([3.0 if one is None else one for one in columns["claims"]])
    risk = 0.06 * (age - 58) + 0.05 * (crp - 22) + 1.2 * (stage - 1) + 0.35 * (claims - 3)
    risk += (columns["smoker"] == "yes") + (columns["chronic"] == "yes") - 0.9
    risk += 0.8 * (columns.get("ward", np.array([""])) == "Intensiv")
    return np.array(["no", "yes"], object)[(risk + random.logistic(0, 0.4, len(age)) > 0).astype(int)]


def write_csv(
    path: Path, columns: Columns, names: Sequence[str], *, separator: str = ",", decimal: str = ".",
    encoding: str = "utf-8", absent: str = "", day: str = "%Y-%m-%d",
) -> None:  # fmt: skip
    """Write columns as a hospital's own system would."""

    def cell(value: object) -> str:
        if value is None:
            return absent
        if isinstance(value, float):
            return f"{value:g}".replace(".", decimal)
        return value.strftime(day) if hasattr(value, "strftime") else str(value)

    with path.open("w", encoding=encoding, newline="") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerow(names)
        writer.writerows(zip(*(map(cell, columns[name]) for name in names), strict=True))


def write_parquet(path: Path, columns: Mapping[str, NDArray[np.object_]], names: Sequence[str]) -> None:
    """Write columns with types: words, numbers, dates. A column with "<5" is of words."""
    import pyarrow
    from pyarrow import parquet

    def values(name: str) -> list[object]:
        given = columns[name].tolist()
        if any(isinstance(one, str) for one in given):
            return [None if one is None else f"{one:g}" if isinstance(one, float) else one for one in given]
        return list(given)

    parquet.write_table(pyarrow.table({name: values(name) for name in names}), path)


def make(folder: Path, rows: int = 800, seed: int = 7) -> None:
    """Write everything into a folder, which is made. rows: of all three hospitals together."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    known = people(random, rows // 2)
    north, south, east = (
        visits(random, known, int(part * rows), letter, wards)
        for part, letter, wards in ((0.4, "N", WARDS), (0.35, "S", WARDS), (0.25, "E", WARDS[:3]))
    )
    write_csv(folder / "north.csv", north, NORTH)
    write_csv(folder / "south.csv", south, SOUTH, separator=";", decimal=",", encoding="latin-1", absent="n/a")
    write_parquet(folder / "east.parquet", east, EAST)
    fresh = visits(random, people(random, rows // 10, first=50_000), rows // 10, "X", WARDS)
    write_csv(folder / "new.csv", fresh, [name for name in reversed(NORTH) if name != "readmitted"])
    make_partners(folder, random, rows)
    for path in Path(__file__).parent.glob("*.toml"):
        shutil.copy(path, folder)


def make_partners(folder: Path, random: np.random.Generator, rows: int) -> None:
    """Write what a clinic and an insurer have, a row for each person; three quarters are known to both."""
    everybody = people(random, rows)
    stage = random.integers(0, 3, rows)
    crp = random.gamma(1.6, 14, rows).round(1)
    everybody["stage"] = np.array(STAGES, object)[stage]
    everybody["crp"] = np.array([value if value >= 5 else "<5" for value in crp.tolist()], object)
    everybody["readmitted"] = outcome(random, everybody, crp, stage)
    order, later = random.permutation(rows), rows // 8
    both, here = order[:later], order[later:]
    for name, columns, part, write in (
        ("clinic.csv", CLINIC, here[: 7 * len(here) // 8], write_csv),
        ("insurer.parquet", INSURER, here[len(here) // 8 :], write_parquet),
        ("both.csv", (*CLINIC, *(name for name in INSURER if name != "patient")), both, write_csv),
    ):
        mine = random.permutation(part)
        own = {key: values[mine] for key, values in everybody.items()}
        if name == "insurer.parquet":
            own["patient"] = np.array([f" {one.lower()}" for one in own["patient"]], object)
        write(folder / name, own, columns)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write three hospitals' tables, two partners', and their run files.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=800)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    make(given.folder, given.rows, given.seed)
    print(given.folder)
