"""A terminal that has few signs: every command prints, with other signs in the place of those that it lacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PLAYED = """
import json, sys
from moretta.commands.main import main

for words in json.loads(sys.argv.pop()):
    sys.argv = ["moretta", *words]
    try:
        main()
    except SystemExit as end:
        print("\\n", words[0], "ended with", end.code or 0)
"""
WARDS, OUTCOMES = ("Łódź α", "Łódź β"), ("nein → 否", "да")
TABLE = "größe,ward,ill\n" + "".join(f"{40 + row},{WARDS[row % 2]},{OUTCOMES[row // 2 % 2]}\n" for row in range(40))
SCHEMA = """
[columns."größe"]
kind = "number"
unit = "µg"
[columns.ward]
kind = "category"
categories = ["Łódź α", "Łódź β"]
[columns.ill]
kind = "target"
classes = ["nein → 否", "да"]
"""
RUN = """
[run]
name = "prüfung"
rounds = 2
[data]
source = "files"
schema = "schema.toml"
[data.files]
north = "t.csv"
south = "t.csv"
[model]
source = "mlp"
hidden = [2]
[protocol]
name = "fedsgd"
loss = "cross-entropy"
"""
COMMANDS = {
    "--help": ["--help"],
    "reproduce": ["reproduce"],
    "check": ["check", "--model", "mlp", "--input", "2", "--classes", "2"],
    "schema": ["schema", "init", "t.csv", "--out", "proposed.toml"],
    "look": ["look", "run.toml", "--by-silo", "--withhold", "0"],
    "train": ["train", "run.toml", "--out", "größer"],
    "compare": ["compare", "größer", "größer"],
    "predict": ["predict", "größer", "--data", "t.csv", "--out", "p.csv"],
    "report": ["report", "größer"],
    "doctor": ["doctor", "--run", "run.toml"],
    "watch": ["watch", "Ωmega → nowhere"],
}  # fmt: skip
TERMINALS = {
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "windows": {"PYTHONIOENCODING": "cp1252"},
    "strict": {"PYTHONIOENCODING": "ascii:strict"},
}


@pytest.mark.parametrize("kind", TERMINALS)
def test_every_command_prints_to_a_terminal_of_few_signs(kind: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(TABLE, encoding="utf-8")
    (tmp_path / "schema.toml").write_text(SCHEMA, encoding="utf-8")
    (tmp_path / "run.toml").write_text(RUN, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", PLAYED, json.dumps(list(COMMANDS.values()))],
        cwd=tmp_path,
        env=os.environ | TERMINALS[kind],
        capture_output=True,
        timeout=500,
    )
    encoding = TERMINALS[kind]["PYTHONIOENCODING"].partition(":")[0]
    out, err = done.stdout.decode(encoding), done.stderr.decode(encoding)
    assert done.returncode == 0, err
    assert not any(word in out + err for word in ("Traceback", "UnicodeEncodeError", "Logging error"))
    ends = dict(line.strip().split(" ended with ") for line in out.splitlines() if " ended with " in line)
    assert list(ends) == list(COMMANDS)
    failed = {name: code for name, code in ends.items() if code != "0" and name != "doctor"}  # no kit is here
    assert failed == {"reproduce": "2", "watch": "2"}, out + err
    assert "gr" in err  # the run's name, as far as it can be said
    assert "?d? ?" in out if kind != "windows" else "Łódź".encode("cp1252", "replace").decode("cp1252") in out
