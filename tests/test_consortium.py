"""The consortium, played whole by processes of FLARE, and the parts that it and its compose file are made of."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_containers import lineage, stages
from test_readme import assert_known

from moretta.config import run_files, silo_file
from moretta.deployment import shared_settings

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "consortium"
SITES = ("north", "south", "east")


@pytest.fixture(scope="module")
def dealt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dealt")
    runpy.run_path(str(EXAMPLE / "deal.py"))["deal"](folder)
    return folder


def test_each_hospital_writes_in_its_own_way_and_all_fit_the_run(dealt: Path) -> None:
    run_file = run_files.load(dealt / "server" / "run.toml")
    heads = {name: (dealt / name / "visits.csv").read_bytes().splitlines()[0] for name in SITES}
    assert [b"," in heads["north"], b";" in heads["south"], b"\t" in heads["east"]] == [True, True, True]
    patients = set[str]()
    for name in SITES:
        silos, _ = shared_settings.silos_at(run_file, silo_file.load(dealt / name / "silo.toml"))
        (own,) = [silo for silo in silos if not silo.remote]
        assert own.groups is not None
        assert len(set(own.groups)) < len(own.x) > 400
        assert not patients & set(own.groups)
        patients |= set(own.groups)
    assert b"P-3" in (dealt / "west" / "visits.csv").read_bytes()
    assert not any(name.startswith("P-3") for name in patients)  # nobody trains on whom west judges by


def test_the_compose_file_has_the_run_s_parties_and_names_what_is_there(dealt: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="it comes with nvflare")
    text = (EXAMPLE / "compose.yaml").read_text()
    services: dict[str, Any] = yaml.safe_load(text)["services"]
    run_file = run_files.load(dealt / "server" / "run.toml")
    assert set(services) == {"server", *run_file.engine.sites}
    prepared = re.search(r"^#\s+(sh \S+prepare\.sh .*)", text, re.MULTILINE)
    assert prepared is not None
    _, script, folder, host, port = prepared[1].split()
    assert (ROOT / script).exists()
    for name, service in services.items():
        assert set(service) <= {"user", "environment", "build", "command", "volumes"}
        built = service["build"]
        assert (EXAMPLE / built["context"]).resolve() == ROOT
        steps = dict(lineage(built["target"]))
        assert (ROOT / built["dockerfile"]).exists()
        assert built["target"] in stages()
        (volume,) = service["volumes"]
        here, there = volume.split(":")
        assert (EXAMPLE / here).resolve() == ROOT / folder / name
        assert there == steps["WORKDIR"]
        words = service.get("command") or json.loads(steps["CMD"])
        assert_known(["moretta", *words])
        prepares = (EXAMPLE / "prepare.sh").read_text()
        for word in words:
            if word.endswith(".toml"):
                assert (dealt / name / word).exists()
            elif word in ("kit", "kits"):
                assert f"{'server' if name == 'server' else '$site'}/{word} " in prepares
    assert services["server"]["command"][-2:] == ["--host", host]
    assert ("EXPOSE", port) in lineage("server")


def test_the_scripts_call_commands_that_there_are() -> None:
    for name in ("prepare.sh", "play.sh"):
        subprocess.run(["sh", "-n", EXAMPLE / name], check=True)
        text = re.sub(r"\\\n", " ", (EXAMPLE / name).read_text())
        commands = re.findall(r"^\s*(?:\w+=\$\()?(moretta [^|>)&\n]*)", text, re.MULTILINE)
        assert commands
        for command in commands:
            assert_known(shlex.split(command.replace('"$port"', "8002")))


@pytest.mark.slow
def test_it_plays_from_raw_tables_to_a_judged_model_with_one_hospital_killed(tmp_path: Path) -> None:
    pytest.importorskip("nvflare", reason="the engine for many machines needs nvflare")
    from hospitals import free_port

    folder, programs = tmp_path / "consortium", tmp_path / "bin"
    programs.mkdir()
    for name, words in (("python", ""), ("moretta", "-m moretta")):
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
        (programs / name).chmod(0o755)
    given = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    subprocess.run(["python", EXAMPLE / "deal.py", folder], env=given, check=True)
    done = subprocess.run(
        ["sh", EXAMPLE / "play.sh", folder, str(free_port())],
        env=given,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    log = folder / "server" / "serve.log"
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{log.read_text() if log.exists() else ''}"
    assert re.search(r"; 0\.00\d\d apart, and at most 0\.01 is allowed$", done.stdout.strip())
    run = folder / "server" / "run"
    history = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    best = json.loads((run / "result.json").read_text())["facts"]["best_round"]
    assert best < len(history) < run_files.load(folder / "server" / "run.toml").run.rounds
    assert all((run / page).exists() for page in ("report.html", "dossier.html"))
    assert "all rows: 3000 rows of" in done.stdout
    assert not [one for one in psutil.process_iter() if str(folder) in words_of(one)]


def words_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return ""
