"""A new project: a small made-up table for each silo, a model, a run file, and a test."""

import re
import shutil
import tempfile
from pathlib import Path

import numpy as np

from moretta.engines.files import naming, rename
from moretta.errors import ParameterError

ROWS = {"north": 160, "south": 120, "east": 80}
WARDS = ("surgery", "medicine", "children")

SCHEMA = """\
# What the columns of every silo's table mean; docs/schema.md has the kinds and their keys.

[columns.patient]
kind = "id"                     # each row's own; no input of the model

[columns.age]
kind = "number"
unit = "years"
range = [0, 120]                # a value outside is refused

[columns.pressure]
kind = "number"
unit = "mmHg"
range = [40, 260]
blanks = "median"               # an empty cell becomes the median over all silos

[columns.ward]
kind = "category"
categories = ["surgery", "medicine", "children"]

[columns.outcome]
kind = "target"
classes = ["well", "ill"]       # in the order of the model's outputs
"""

RUN = """\
# One training run:    moretta train run.toml

[run]
name = "{name}"
rounds = 60
seed = 7

[data]
source = "files"                # a table for each silo
schema = "schema.toml"
test-fraction = 0.25            # of each table, held back for the server's test

[data.files]
north = "data/north.csv"
south = "data/south.csv"
east = "data/east.csv"

[model]
source = "model:build"          # the function `build` of model.py
columns = 5                     # age, pressure, and one for each ward

[protocol]
name = "fedavg"                 # or fedsgd, fedprox, pbpfl, cgd, baffle: README.md of Moretta says what each hides
loss = "cross-entropy"
learning-rate = 0.1
local-epochs = 2
"""

SILO = """\
# What one site would say of itself, were each silo on a machine of its own (docs/deploy.md):
# moretta join KIT --silo silo.toml

[silo]
name = "north"
models = ["model:build"]        # code that runs may have built here; read it first

[data]
source = "data/north.csv"       # nobody but this site knows where its rows are
"""

MODEL = '''\
"""The model: any PyTorch module that takes a batch of rows and gives one number for each class."""

from torch import nn


def build(columns: int, hidden: int = 16, classes: int = 2) -> nn.Module:
    """Return a network with a hidden layer; the keys of [model] in run.toml are its arguments."""
    return nn.Sequential(nn.Linear(columns, hidden), nn.ReLU(), nn.Linear(hidden, classes))
'''

TEST = '''\
"""The run file, the tables and the model fit each other, and the model learns: call pytest here."""

from pathlib import Path

from moretta.config import run_files
from moretta.run.assembly import federation_of

HERE = Path(__file__).parent


def test_it_learns(tmp_path):
    run_file = run_files.load(HERE / "run.toml")
    federation = federation_of(run_file, tmp_path / "run")
    result = federation.train(run_file.run.rounds, run_file.run.seed, progress=False)
    assert result.test["accuracy"] > 0.8
    assert (tmp_path / "run" / "result.json").exists()
'''

README = """\
# {name}

Three hospitals train one model together, and no table leaves its owner. The tables are made up; put
yours in their place.

    moretta look run.toml                              # rows, blanks, classes
    moretta train run.toml --out runs/{name}
    moretta report runs/{name}                         # one page
    moretta audit runs/{name} --allow-code             # after: train --set run.record-views=true
    moretta predict runs/{name} --data data/north.csv --out predictions.csv --allow-code
    pytest                                             # does it still run, and learn?

| file | what it is |
|---|---|
| `data/` | a table for each silo |
| `schema.toml` | what their columns mean |
| `model.py` | the model, `build` |
| `run.toml` | one run: data, model, protocol |
| `silo.toml` | what a site says of itself, once each silo has a machine of its own |
| `test_project.py` | a test that plays the run |
"""


def create(folder: Path) -> list[Path]:
    """Write a project into a new or empty folder, and return its files, sorted.

    The folder's name is the run's.

    Raises:
        ParameterError: The folder has content, or its name has other characters than letters, digits, dots, dashes and
            underscores. Nothing is written.
    """
    name = folder.absolute().name
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", name):
        raise ParameterError(f"{name!r:.80}: expected a name of 1 to 64 letters, digits, dots, dashes and underscores")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ParameterError(f"{folder} exists already and is not empty; name a new folder, or empty this one")
    place = folder if folder.exists() else folder.absolute().parent  # not replaced, as a shell may be in it
    place.mkdir(parents=True, exist_ok=True)
    with naming(folder):
        made = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=place))
        try:
            _write(made, name)
            made.chmod(0o755)
            if place == folder:
                for path in sorted(made.iterdir()):
                    rename(path, folder / path.name)
                made.rmdir()
            else:
                rename(made, folder)  # whole or not at all
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _write(folder: Path, name: str) -> None:
    texts = {"schema.toml": SCHEMA, "silo.toml": SILO, "model.py": MODEL, "test_project.py": TEST}
    texts |= {"run.toml": RUN.format(name=name), "README.md": README.format(name=name)}
    (folder / "data").mkdir()
    for number, (silo, rows) in enumerate(ROWS.items()):
        texts[f"data/{silo}.csv"] = table(silo, rows, number)
    for path, text in texts.items():
        (folder / path).write_text(text, encoding="utf-8")


def table(silo: str, rows: int, seed: int) -> str:
    """Return a made-up table as CSV, always the same; age, pressure and ward predict much of the outcome."""
    drawn = np.random.default_rng(seed)
    lines = ["patient,age,pressure,ward,outcome"]
    for number in range(rows):
        age, pressure, ward = drawn.uniform(1, 95), drawn.normal(130, 20), drawn.integers(len(WARDS))
        risk = (age - 50) / 15 + (pressure - 130) / 15 + (0.5, 0.0, -0.5)[ward] + drawn.normal(0, 0.5)
        cell = "" if drawn.random() < 0.05 else f"{pressure:.0f}"
        lines.append(f"{silo}-{number:03d},{age:.0f},{cell},{WARDS[ward]},{'ill' if risk > 0 else 'well'}")
    return "\n".join(lines) + "\n"
