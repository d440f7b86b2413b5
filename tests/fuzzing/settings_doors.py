"""Files of settings, and what a run leaves to go on from."""

from __future__ import annotations

import shutil

import numpy as np
from door import BETWEEN, ROOT, Door, counted, folder, never, parts, uncounted, written

from moretta.config import run_files, silo_file
from moretta.contract import framing
from moretta.data.tables import rows, schema
from moretta.engines import checkpoint, views
from moretta.errors import ParameterError
from moretta.secure_aggregation.identity import Identity, Roster, public_line


def open_run_file(data: bytes) -> None:
    """A run file as it lies here and as sites are sent it; what is written of it reads back."""
    found = run_files.load(written("run.toml", data))
    with never(ParameterError):
        again = run_files.loads(run_files.dumps(found), folder() / "run.toml")
    if run_files.digest(again) != run_files.digest(found):
        raise AssertionError("a run file reads back as another one")


def examples() -> list[bytes]:
    found = [path.read_bytes() for path in sorted((ROOT / "examples").glob("*.toml"))]
    table = b"\n[columns.age]\nkind = 'number'\nblanks = 'mean'\n[columns.ill]\nkind = 'target'\nclasses = ['0', '1']\n"
    return [*found, found[-1].replace(b'source = "wdbc"', b'source = "rows.csv"') + table]


def run_file_words() -> list[str]:
    found = {*run_files._KNOWN, *run_files.PROTOCOLS, *schema.KINDS, "columns", "true", "false", "inf", "nan"}
    return sorted(found.union(*run_files._KNOWN.values()))


def open_silo_file(data: bytes) -> None:
    silo_file.load(written("silo.toml", data))


FULL_SILO = b"""[silo]
name = "north"
out = "moretta"
identity = "keys/north"
roster = "roster.toml"
models = ["nets:build"]
[data]
source = "patients.csv"
separator = ";"
decimal = ","
alignment = "alignment.json"
test-fraction = 0.2
[mapping]
drop = ["phone"]
rename = { Alter = "age" }
recode = { Station = { Medicine = "medicine", OPS = "surgery" } }
units = { Kreatinin = { factor = 0.0113, offset = 0.0 } }
[limits]
message-mib = 1024
parameters = 100_000_000
memory-limit-mib = 80
micro-batch = 4
threads = 2
device = "cpu"
[runs]
protocols = ["pbpfl"]
rounds = 100_000
local-epochs = 1000
look = true
scores = true
[privacy]
fewest-silos = 3
scheme = "pairwise"
blind = true
roster = true
dp-noise = 1.0
unit = "row"
max-epsilon = 8.0
delta = 1e-5
per = "run"
apart = 2
repeat-whole-rows = false
repeat-statistics = false
"""


def silo_files() -> list[bytes]:
    key = public_line(Identity(b"s" * 32).public_key)
    short = f'[silo]\nname = "north"\nserver-key = "{key}"\n[data]\nsource = "p.csv"\nrows-in-order = true\n'
    return [FULL_SILO, short.encode()]


def silo_file_words() -> list[str]:
    kinds = (
        *(silo_file.SiloSection, silo_file.RowsSection, silo_file.Limits, silo_file.Floors),
        *(silo_file.ColumnMapping, silo_file.Conversion),
    )
    return sorted({key for kind in kinds for key in run_files.keys_of(kind)})


def open_roster(data: bytes) -> None:
    Roster.load(written("roster.toml", data))


def rosters() -> list[bytes]:
    lines = [public_line(Identity(bytes([number]) * 32).public_key) for number in (1, 2)]
    silos = "".join(f'[[silo]]\nname = "s{number}"\nkey = "{line}"\n' for number, line in enumerate(lines))
    return [silos.encode()]


def open_schema(data: bytes) -> None:
    found = schema.load(written("schema.toml", data))
    rows.expansion_of(found)
    rows.rules_of(found)


FULL = b"""[columns.stage]
kind = "ordered"
categories = ["I", "II"]
blanks = "median"
unseen = "blank"
[columns.age]
kind = "number"
range = [0, 120]
blanks = "indicator"
censored = "half"
[columns.ward]
kind = "category"
categories = ["A", "B"]
blanks = "category"
[columns.seen]
kind = "date"
format = "%d.%m.%Y"
range = [2020-01-01, 2024-12-31]
blanks = "median"
[columns.patient]
kind = "id"
[columns.died]
kind = "target"
classes = ["no", "yes"]
"""


def schemas() -> list[bytes]:
    return [FULL, b'[columns.file]\nkind = "file"\n[columns.y]\nkind = "target"\nrange = [0.0, 1.0]\n']


def open_checkpoint(data: bytes) -> None:
    place = folder() / "checkpoint" / "round-000003"
    place.mkdir(parents=True, exist_ok=True)
    text, states = parts(data, 2)
    (place / "run.json").write_bytes(text)
    (place / "server.safetensors").write_bytes(counted(states, 8))
    checkpoint.last_checkpoint(place.parent)


def checkpoints() -> list[bytes]:
    state = {"w": np.ones((2, 2), np.float32), "root": b"r" * 32, "norms": [0.5, 1.0], "round": 3}
    place = folder() / "made"
    checkpoint.save_checkpoint(place, checkpoint.CheckpointId("run", 3, 0, "d"), {"server": state})
    made = place / "round-000003"
    states = (made / "server.safetensors").read_bytes()
    return [(made / "run.json").read_bytes() + BETWEEN + uncounted(states, 8)]


def open_views(data: bytes) -> None:
    """An index, and a file of it: as it is, or the lines and messages that the door frames."""
    place = folder() / "views"
    place.mkdir(exist_ok=True)
    index, *file = data.split(BETWEEN)
    (place / views.INDEX).write_bytes(index)
    list(views.parse(b"".join(file) if len(file) == 1 else views.MAGIC + framing.framed(*file), "views"))
    views.Views.open(place, "run", views.digest(place))


def recorded() -> list[bytes]:
    place = folder() / "recorded"
    shutil.rmtree(place, ignore_errors=True)
    recorder = views.Recorder(place, True, run="run")
    recorder.wants(1)
    recorder.saw("server", "sent", "north", b"message")
    recorder.flush()
    (file,) = (place / "server").glob("*.bin")
    index, line = (place / views.INDEX).read_bytes(), b'{"direction": "sent", "peer": "north"}'
    return [BETWEEN.join([index, file.read_bytes()]), BETWEEN.join([index, line, b"message", line, b""])]


DOORS = {
    "run-file": Door(open_run_file, ParameterError, examples, run_file_words, 5),
    "silo-file": Door(open_silo_file, ParameterError, silo_files, silo_file_words, 3),
    "roster": Door(open_roster, ParameterError, rosters),
    "schema": Door(open_schema, ParameterError, schemas, run_file_words, 3),
    "checkpoint": Door(open_checkpoint, ParameterError, checkpoints),
    "views": Door(open_views, ParameterError, recorded, share=3),
}
