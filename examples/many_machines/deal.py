"""Make what three hospitals and a server would each have, on one machine: to try many machines with.

    python examples/many_machines/deal.py runs/many

writes runs/many/server (run.toml, schema.toml, test.csv) and runs/many/north, south and west (patients.csv, silo.toml).
South's table has semicolons and decimal commas; west's has other names, words and units. Nothing here is a real
patient. In earnest every site has its own rows, writes its own silo.toml, and nobody deals anything.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "hospitals"))

from make import Columns, write_csv

SITES = {"north": 300, "south": 240, "west": 180}
SEED = 7
WARDS = ("medicine", "surgery", "intensive")
RUN = """[run]
name = "readmission"
rounds = 40
seed = 7

[data]
source = "sites"                # each site's silo.toml says where its rows are; this file never does
schema = "schema.toml"          # what their columns mean, the same for all
test = "test.csv"               # the server's own test rows, if it has any
standardise = true
batch-size = 64

[model]
source = "mlp"
hidden = [16]

[protocol]
name = "pbpfl"
loss = "cross-entropy"
learning-rate = 0.02
optimizer = "adam"

[engine]
name = "flare"
sites = ["north", "south", "west"]
deadline = 60                   # seconds that a silo may take for an answer; 600 if left out
"""
SCHEMA = """[columns.patient]
kind = "group"                  # has several visits, all of them in training or all held back

[columns.age]
kind = "number"
unit = "years"
range = [0, 120]

[columns.sex]
kind = "category"
categories = ["female", "male"]

[columns.ward]
kind = "category"
categories = ["medicine", "surgery", "intensive"]

[columns.creatinine]
kind = "number"
unit = "mg/dl"
range = [0, 30]
blanks = "median"

[columns.smoker]
kind = "category"
categories = ["no", "yes"]
blanks = "category"

[columns.readmitted]
kind = "target"
classes = ["no", "yes"]
"""
SILO = """[silo]
name = "{name}"                  # as in [engine] sites, and in the certificate of the site's kit
out = "moretta"                 # where its state is kept, and what runs release to it

[data]
source = "patients.csv"
test-fraction = 0.2             # of whole patients, which no run trains on
"""
SOUTH = """separator = ";"
decimal = ","
absent = ["n/a"]
"""
WEST = """
[mapping]
drop = ["Telefon"]

[mapping.rename]
Fall = "patient"
Alter = "age"
Geschlecht = "sex"
Station = "ward"
Kreatinin = "creatinine"
Raucher = "smoker"
Wiederaufnahme = "readmitted"

[mapping.recode]
Geschlecht = { w = "female", m = "male" }
Station = { Innere = "medicine", Chirurgie = "surgery", Intensiv = "intensive" }
Raucher = { ja = "yes", nein = "no" }
Wiederaufnahme = { ja = "yes", nein = "no" }

[mapping.units.Kreatinin]       # from umol/l to mg/dl
factor = 0.01131
unit = "umol/l"
"""
NAMES = ("patient", "age", "sex", "ward", "creatinine", "smoker", "readmitted")
GERMAN = ("Fall", "Alter", "Geschlecht", "Station", "Kreatinin", "Raucher", "Wiederaufnahme")
WORDS = {"female": "w", "male": "m", "medicine": "Innere", "surgery": "Chirurgie", "intensive": "Intensiv"}
WORDS |= {"yes": "ja", "no": "nein"}


def visits(random: np.random.Generator, count: int, letter: str) -> Columns:
    """Return the columns of a hospital's visits, None where there is no value; some patients have several."""
    ward, smoker = random.integers(0, 3, count), random.random(count) < 0.3
    age, creatinine = random.integers(18, 95, count), random.gamma(6, 0.18, count).round(2)
    risk = 0.06 * (age - 56) + 1.5 * (creatinine - 1.1) + 0.9 * (ward == 2) + 0.8 * smoker
    risk += random.logistic(0, 0.6, count)
    known, answers = random.random((2, count)) > 0.06, np.array(["no", "yes"], object)
    who = np.sort(random.integers(1000, 1000 + count, count))
    return {
        "patient": np.array([f"{letter}{number}" for number in who], object),
        "age": age.astype(object),
        "sex": random.choice(np.array(["female", "male"], object), count),
        "ward": np.array(WARDS, object)[ward],
        "creatinine": np.where(known[0], creatinine.astype(object), None),
        "smoker": np.where(known[1], answers[smoker.astype(int)], None),
        "readmitted": answers[(risk > 0.5).astype(int)],
    }


def as_west(columns: Columns) -> Columns:
    """Return columns with German names and words, creatinine in umol/l, and a column that nobody needs."""
    amounts = [None if one is None else f"{one * 88.4:.0f} umol/l" for one in columns["creatinine"]]
    columns = columns | {"creatinine": np.array(amounts, object)}
    found = {
        german: np.array([WORDS.get(cell, cell) for cell in columns[name]], object)
        for name, german in zip(NAMES, GERMAN, strict=True)
    }
    return found | {"Telefon": np.array([f"0{number}" for number in range(len(columns["age"]))], object)}


def main(out: Path) -> None:
    """Deal out visits."""
    random, server = np.random.default_rng(SEED), out / "server"
    server.mkdir(parents=True)
    (server / "run.toml").write_text(RUN)
    (server / "schema.toml").write_text(SCHEMA)
    write_csv(server / "test.csv", visits(random, 200, "T"), NAMES)
    for name, count in SITES.items():
        (out / name).mkdir()
        columns, written = visits(random, count, name[0].upper()), SILO.format(name=name)
        if name == "south":
            write_csv(out / name / "patients.csv", columns, NAMES[::-1], separator=";", decimal=",", absent="n/a")
            written += SOUTH
        elif name == "west":
            columns = as_west(columns)
            write_csv(out / name / "patients.csv", columns, list(columns))
            written += WEST
        else:
            write_csv(out / name / "patients.csv", columns, NAMES)
        (out / name / "silo.toml").write_text(written)
    print(f"made {server} and {', '.join(str(out / name) for name in SITES)}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/many"))
