"""Deal what a consortium has: three hospitals' visits, a fourth one's to judge by, and each party's settings.

    python examples/consortium/deal.py FOLDER [--seed 7]

    north/ south/ east/  visits.csv, as the hospital's own system writes it, and silo.toml
    west/                visits.csv of a hospital that takes no part: nobody trains on them
    server/              run.toml, and schema.toml, what columns mean

Nothing here is a real patient. Tables are made as `examples/hospitals/make.py` makes them, each hospital's patients its
own, and schema.toml is that example's. Needs numpy.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
HOSPITALS = HERE.parent / "hospitals"
sys.path.insert(0, str(HOSPITALS))

from make import EAST, NORTH, SOUTH, WARDS, Columns, people, visits, write_csv  # noqa: E402

ROWS = {"north": 1200, "south": 900, "east": 700, "west": 3000}
GERMAN = {
    "visit_id": "Besuch", "patient": "Fall", "admitted": "Aufnahme", "age": "Alter", "crp": "CRP", "ward": "Station",
    "smoker": "Raucher", "stage": "Stadium", "remark": "Bemerkung", "readmitted": "Wiederaufnahme", "phone": "Telefon",
}  # fmt: skip
YES_NO = {"yes": "ja", "no": "nein"}
WORDS: dict[str, dict[str, dict[str, str]]] = {
    "south": {
        **{"smoker": YES_NO, "readmitted": YES_NO, "crp": {"<5": "<0,5"}},
        **{"stage": {"I": "1", "II": "2", "III": "3"}},
    },
    "east": {"ward": {"Innere Medizin": "MED", "Chirurgie": "SURG", "Gynäkologie": "GYN"}},
}
WRITTEN: dict[str, dict[str, Any]] = {
    "north": {"names": NORTH},
    "south": {
        "names": [GERMAN.get(one, one) for one in (*SOUTH, "phone")],
        **{"separator": ";", "decimal": ",", "encoding": "latin-1", "absent": "n/a"},
    },
    "east": {"names": ("phone", *EAST), "separator": "\t", "absent": "-"},
    "west": {"names": NORTH},
}


def as_written(columns: Columns, name: str) -> Columns:
    """Return a hospital's columns by its own names, in its own words and units."""
    phone = np.array([f"0{number} {number * 37 % 9000 + 1000}" for number in range(100, 100 + len(columns["patient"]))])
    own = {**columns, "phone": phone.astype(object)}
    if name == "south":  # mg/dl
        own["crp"] = np.array([one / 10 if isinstance(one, float) else one for one in own["crp"]], object)
    for column, words in WORDS.get(name, {}).items():
        own[column] = np.array([words.get(one, one) for one in own[column]], object)
    return {GERMAN.get(key, key): column for key, column in own.items()} if name == "south" else own


def deal(folder: Path, seed: int = 7) -> None:
    """Write everything into a folder, which is made."""
    random = np.random.default_rng(seed)
    for number, (name, rows) in enumerate(ROWS.items()):
        (folder / name).mkdir(parents=True, exist_ok=True)
        own = people(random, rows // 2, first=number * 10_000)
        wards = WARDS[:3] if name == "east" else WARDS
        found = as_written(visits(random, own, rows, name[0].upper(), wards), name)
        write_csv(folder / name / "visits.csv", found, **WRITTEN[name])
        if name != "west":
            shutil.copy(HERE / f"{name}.toml", folder / name / "silo.toml")
    (folder / "server").mkdir(exist_ok=True)
    shutil.copy(HERE / "run.toml", folder / "server")
    shutil.copy(HOSPITALS / "schema.toml", folder / "server")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write four hospitals' tables and all parties' settings.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    deal(given.folder, given.seed)
    print(given.folder)
