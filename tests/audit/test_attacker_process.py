"""An attack in its process: what it is not given it does not get, and what goes wrong in it is said in one sentence."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from recorded import recorded

from moretta.audit import attacker, auditor
from moretta.audit.attacker import AttackFailed, AttackOrigin
from moretta.audit.attacks.pbpfl.head_offset import GAMMA
from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given, always
from moretta.audit.evidence.case import Architecture, Case, PublicRun
from moretta.audit.evidence.truth import Truth
from moretta.engines import confinement

NATIVE = ("safe_open", "parent's cwd", "parent's fds")
WITHOUT_KERNEL = """
from moretta.audit import attacker
from moretta.engines import confinement
confinement.landlock = lambda: 0
attacker.main()
"""
LANDLOCK = "sys.exit(not __import__('moretta.engines.confinement').engines.confinement.kernel([]))"

SMUGGLER = '''
"""Tries whatever Python has to get at what it was not given; claims, for each try, whether it got anything."""

import builtins
import ctypes
import gc
import importlib
import io
import mmap
import multiprocessing
import os
import pathlib
import resource
import socket
import sqlite3
import stat
import subprocess
import sys

import numpy as np
from safetensors import safe_open

RUN = {run!r}
SECRET = bytes.fromhex({secret!r})
PARENT = os.getppid()


def read(path):
    with open(path, "rb") as file:
        return file.read()


def named(text):
    """Whether something names the run folder."""
    return RUN.encode() in (text if isinstance(text, bytes) else str(text).encode())


def moretta_truth():
    module = importlib.import_module("moretta.audit.evidence.truth")  # it is installed, and empty of any run
    federations = [one for one in gc.get_objects() if type(one).__name__ in ("Federation", "Truth", "Silo")]
    assert federations or module.Truth(pathlib.Path(RUN), None, 1, 1)


def held_in_memory():
    needles = [one for one in gc.get_objects() if isinstance(one, dict) and any(v == SECRET for v in one.values()
               if isinstance(v, bytes) and one is not globals())]
    assert needles


def spawn():
    process = multiprocessing.get_context("spawn").Process(target=print)
    process.start()


def swallow_arguments():
    assert named(sys.argv) or named(os.environ) or named(os.getcwd()) or named(sys.path) or named(sys.orig_argv)


def own_process():
    seen = [read(f"/proc/self/{{name}}") for name in ("cmdline", "environ", "mountinfo")]
    assert any(map(named, seen))


def rebound(module, name, value):
    """Read a secret while a name of Python's own stands for something else."""
    was = getattr(module, name)
    setattr(module, name, value)
    try:
        read(RUN + "/result.json")
    finally:
        setattr(module, name, was)


def numbered():
    with io.FileIO(Number(RUN + "/result.json")) as file:
        file.read()


class Number(str):
    """A path that says it is the number of an open file."""

    __class__ = int


def origins_line():
    """Hold a descriptor of the socket by which the process that this one is a fork of starts others, not confined."""
    for number in range(256):
        try:
            line = os.fstat(number)
        except OSError:
            continue
        if stat.S_ISSOCK(line.st_mode):
            return
    raise LookupError


PACKAGE = os.path.dirname(np.__file__)
NATIVE = {{  # that Python's audit events do not tell of
    "safe_open": lambda: safe_open(RUN + "/model.safetensors", "numpy"),
    "parent's cwd": lambda: os.readlink(f"/proc/{{PARENT}}/cwd"),
    "parent's fds": lambda: os.readlink(f"/proc/{{PARENT}}/fd/0"),
}}
TRIES = {{
    "arguments": swallow_arguments,
    "own process": own_process,
    "parent's arguments": lambda: read(f"/proc/{{PARENT}}/cmdline"),
    "parent's variables": lambda: read(f"/proc/{{PARENT}}/environ"),
    "parent's memory": lambda: read(f"/proc/{{PARENT}}/mem"),
    "parent's folder": lambda: os.listdir(f"/proc/{{PARENT}}/cwd"),
    "open": lambda: read(RUN + "/result.json"),
    "open a secret": lambda: read(RUN + "/truth/round-000001/server.safetensors"),
    "open relative": lambda: read(os.path.relpath(RUN + "/result.json")),
    "open by a folder": lambda: os.open("result.json", os.O_RDONLY, dir_fd=os.open(RUN, os.O_RDONLY)),
    "open through the packages": lambda: read(PACKAGE + "/.." * 20 + RUN + "/result.json"),
    "os.open": lambda: os.open(RUN + "/result.json", os.O_RDONLY),
    "io.open": lambda: io.open(RUN + "/result.json").read(),
    "io.FileIO": lambda: io.FileIO(RUN + "/result.json").read(),
    "pathlib": lambda: pathlib.Path(RUN, "result.json").read_bytes(),
    "numpy": lambda: np.fromfile(RUN + "/result.json", np.uint8),
    "memmap": lambda: np.memmap(RUN + "/result.json"),
    "mmap": lambda: mmap.mmap(os.open(RUN + "/result.json", os.O_RDONLY), 0),
    "listdir": lambda: os.listdir(RUN),
    "listdir of the root": lambda: os.listdir("/"),
    "scandir": lambda: list(os.scandir(RUN)),
    "glob": lambda: [][0] if not list(pathlib.Path(RUN).glob("*")) else None,
    "walk": lambda: [][0] if not list(os.walk(RUN)) else None,
    "chdir": lambda: os.chdir(RUN),
    "chdir to the packages": lambda: os.chdir(PACKAGE),
    "fchdir to the packages": lambda: os.fchdir(os.open(PACKAGE, os.O_RDONLY)),
    "open by a folder of the packages": lambda: os.open(
        os.path.relpath(RUN + "/result.json", os.path.realpath(PACKAGE)), os.O_RDONLY,
        dir_fd=os.open(PACKAGE, os.O_RDONLY)),
    "os.path.realpath bound anew": lambda: rebound(os.path, "realpath", lambda path: PACKAGE),
    "os.readlink bound anew": lambda: rebound(os, "readlink", lambda path: PACKAGE),
    "os.fsdecode bound anew": lambda: rebound(os, "fsdecode", lambda path: PACKAGE),
    "os.fspath bound anew": lambda: rebound(os, "fspath", lambda path: PACKAGE),
    "isinstance bound anew": lambda: rebound(builtins, "isinstance", lambda one, kind: True),
    "type bound anew": lambda: rebound(builtins, "type", lambda one: int),
    "a path that says it is a number": numbered,
    "origin's line": origins_line,
    "limits": lambda: resource.prlimit(PARENT, resource.RLIMIT_CORE),
    "symlink": lambda: os.symlink(RUN, "/tmp/moretta-smuggled"),
    "write": lambda: open("/tmp/moretta-smuggled", "w"),
    "write beside itself": lambda: open(PACKAGE + "/smuggled", "w"),
    "remove": lambda: os.remove(np.__file__ + "-none"),
    "rename": lambda: os.rename(RUN, RUN + "-taken"),
    "sqlite": lambda: sqlite3.connect(RUN + "/result.json"),
    "socket": lambda: socket.socket(),
    "connection": lambda: socket.create_connection(("127.0.0.1", 9), 1),
    "subprocess": lambda: subprocess.run(["cat", RUN + "/result.json"]),
    "system": lambda: [][0] if os.system("true") else None,
    "exec": lambda: os.execv("/bin/cat", ["cat"]),
    "fork": lambda: os.fork(),
    "posix_spawn": lambda: os.posix_spawn("/bin/true", ["true"], {{}}),
    "spawn": spawn,
    "kill": lambda: os.kill(PARENT, 0),
    "ctypes": lambda: ctypes.CDLL(None).open(RUN.encode(), 0),
    "truth": moretta_truth,
    "memory": held_in_memory,
}}


def attack(case):
    got = {{}}
    for name, attempt in {{**TRIES, **NATIVE}}.items():
        try:
            attempt()
        except (Exception, SystemExit):
            got[name] = np.array(0)
        else:
            got[name] = np.array(1)
    return got
'''


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """made(NAME, source) -> the function `attack` of a module of that source, in a folder of its own."""
    folder = tmp_path / "attacks"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    names = []

    def make(name: str, source: str, **changed: object) -> Attack:
        (folder / f"{name}.py").write_text(
            f"{source}\nfrom moretta.audit.evidence.attack import Attack, always\n"
            f"ATTACK = Attack('{name}', '', 'rows', 'silo', '', frozenset({{'fedsgd', 'pbpfl'}}), always, None, "
            "attack, None)\n"
        )
        importlib.invalidate_caches()
        names.append(name)
        module = importlib.import_module(name)
        return dataclasses.replace(module.ATTACK, given=nothing, score=counted, fits=always, **changed)

    yield make
    for name in names:
        sys.modules.pop(name, None)


def nothing(truth: Truth) -> Given:
    return Given({}, {"x": np.arange(3.0)}, "no message", "nothing")


def counted(claim: object, truth: Truth) -> AttackResult:
    return AttackResult("of one", float(claim["found"]), 0.0, (0.5, 1.5), "It found one")


def case(**arrays: object) -> Case:
    run = PublicRun("id", "fedsgd", "classification", {}, ("a",), {"a": 2}, (3,), 1, "float32", "none", None, 1, (1,))
    return Case(run, {"a": {}}, arrays, Architecture("mlp"))


def test_nothing_is_smuggled(tmp_path, made, monkeypatch):
    truth = recorded(tmp_path)
    folder = tmp_path / "out"
    secret = truth.states(2)["server"]
    root = next((value for value in secret.values() if isinstance(value, bytes)), b"\1" * 32)
    smuggler = made("smuggler", SMUGGLER.format(run=str(folder), secret=root.hex()))
    got = claim_of(smuggler, case(), 60)
    expected = set(got) if _has_landlock() else set(got) - set(NATIVE)
    assert len(got) > 50
    assert [name for name in expected if got[name]] == []
    monkeypatch.setattr(attacker, "PROGRAM", ["-c", WITHOUT_KERNEL])
    got = claim_of(smuggler, case(), 60)
    assert [name for name in set(got) - set(NATIVE) if got[name]] == []
    assert (folder / "result.json").exists()


def claim_of(attack: Attack, case: Case, seconds: float) -> Claim:
    with contextlib.closing(AttackOrigin()) as origin:
        return attacker.claim_of(attack, case, seconds, origin)


def _has_landlock() -> bool:
    return subprocess.run([sys.executable, "-c", f"import sys; {LANDLOCK}"], check=False).returncode == 0


def test_the_smuggler_would_find_what_there_is(tmp_path, made):
    """The same tries succeed here, in a process that nothing confines, or the test above would show nothing."""
    (tmp_path / "result.json").write_text("{}")
    smuggler = made("smuggler", SMUGGLER.format(run=str(tmp_path), secret="00"))
    tries = sys.modules[smuggler.module].TRIES
    for name in ("open", "open relative", "open through the packages", "pathlib", "numpy", "listdir", "glob", "walk",
                 "limits", "isinstance bound anew", "a path that says it is a number"):  # fmt: skip
        tries[name]()
    tries["subprocess"]()
    for name in ("os.open", "open by a folder", "open by a folder of the packages"):
        os.close(tries[name]())
    tries["socket"]().close()


WRONG = {
    "crashes": (
        "raise RuntimeError('the matrix is singular\\nand more')",
        r"^it ended with RuntimeError: the matrix is",
    ),
    "exits": ("import os; os._exit(3)", r"^its process ended \(3\)"),
    "dies": ("import os, signal; signal.raise_signal(signal.SIGSEGV)", r"^its process ended \(-11\)"),
    "says": ("return {'found': 'a word'}", r"^it ended with "),
    "returns nothing": ("return None", r"^it ended with AttributeError"),
    "writes": ("case.arrays['x'][0] = 1.0", r"^it ended with ValueError: assignment destination is read-only"),
    "hangs": ("import time; time.sleep(60)", r"^it had not ended after 4 s"),
    "reads": (
        "open('/etc/passwd')",
        r"^it ended with PermissionError: a confined process is given its input and nothing else",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_goes_wrong_is_one_sentence(made, wrong):
    line, says = WRONG[wrong]
    attack = made(f"wrong_{wrong.replace(' ', '_')}", f"def attack(case):\n    {line}\n")
    with pytest.raises(AttackFailed, match=says) as caught:
        claim_of(attack, case(x=np.arange(3.0)), 4 if wrong == "hangs" else 60)
    assert "\n" not in str(caught.value)


def test_an_attack_may_list_what_is_installed(made):
    listing = """
import os
import pathlib
import numpy as np


def attack(case):
    folder = pathlib.Path(np.__file__).parent
    return {"found": np.array([len(list(folder.iterdir())), len(list(os.walk(folder))), len(os.listdir(folder))])}
"""
    assert (claim_of(made("lists", listing), case(), 60)["found"] > 1).all()


def test_what_an_attack_prints_is_no_claim(made):
    noisy = "import os, sys\ndef attack(case):\n    print('x' * 99999); os.write(1, b'y'); sys.stderr.write('z')\n"
    claim = claim_of(made("noisy", f"{noisy}    return {{'found': case.arrays['x'] * 2}}"), case(x=np.arange(3.0)), 60)
    assert claim["found"].tolist() == [0.0, 2.0, 4.0]


def test_one_that_goes_wrong_is_reported_and_the_others_run_on(tmp_path, made, monkeypatch):
    patient = auditor.claim_of

    def impatient(attack: Attack, case: Case, seconds: float, origin: AttackOrigin) -> Claim:
        return patient(attack, case, 3.0 if attack.name == "one_hangs" else seconds, origin)

    monkeypatch.setattr(auditor, "claim_of", impatient)
    truth = recorded(tmp_path, protocol={"name": "pbpfl"}, run={"rounds": 8})

    def lacks(truth: Truth) -> Given:
        raise KeyError("rows")

    chosen = [
        made("one_crashes", "def attack(case):\n    raise RuntimeError('no')"),
        made("one_hangs", "def attack(case):\n    import time; time.sleep(60)"),
        made("one_misses", "def attack(case):\n    return {'other': case.arrays['x']}"),
        dataclasses.replace(made("one_lacks", "def attack(case):\n    return {}"), given=lacks),
        made("one_slow", "def attack(case):\n    return {}", slow=True),
        made("one_finds", "import numpy as np\ndef attack(case):\n    return {'found': np.array(1.0)}"),
        GAMMA,
    ]
    told = []
    found = auditor.audit(
        tmp_path / "out", truth.federation, 8, 5, chosen=chosen, progress=lambda *line: told.append(line)
    )
    assert [one["attack"] for one in found.attacks] == ["one_finds", "gamma-least-squares"], found.record["not_run"]
    why = {one["attack"]: one["because"] for one in found.record["not_run"]}
    assert list(why) == ["one_crashes", "one_hangs", "one_misses", "one_lacks", "one_slow"]
    assert why["one_crashes"] == "it ended with RuntimeError: no"
    assert why["one_hangs"] == "it had not ended after 3 s"
    assert why["one_misses"] == "it ended with KeyError: 'found'"
    assert why["one_lacks"] == "it ended with KeyError: 'rows'"
    assert why["one_slow"] == "it is slow; ask for it by --thorough"
    assert told[-1][:2] == (6, 6)


EAGER = '''
"""Smuggles as it is imported, before anybody calls it, and after it has bound the names of what is refused anew."""

import os
import sys

import numpy as np

for name in ("_READS", "_WRITES", "_REFUSED", "_HARMLESS"):
    for module in (sys.modules["__main__"], sys.modules["moretta.engines.confinement"]):
        setattr(module, name, ())
GOT = []
for path in (f"/proc/{{os.getppid()}}/cmdline", {run!r} + "/truth/round-000001/server.safetensors"):
    try:
        with open(path, "rb") as file:
            GOT.append(len(file.read()))
    except OSError:
        GOT.append(0)
try:
    os.kill(os.getpid(), 0)
    GOT.append(1)
except OSError:
    GOT.append(0)


def attack(case):
    return {{"got": np.array(GOT)}}
'''


def test_nothing_is_smuggled_by_a_module_as_it_is_imported(tmp_path, monkeypatch):
    truth = recorded(tmp_path, run={"rounds": 1})
    (tmp_path / "eager").mkdir()
    own = "import types\n\nATTACK = types.SimpleNamespace(attack=attack)\n"
    (tmp_path / "eager" / "eager_attack.py").write_text(EAGER.format(run=str(truth.folder)) + own)
    monkeypatch.syspath_prepend(str(tmp_path / "eager"))
    module = importlib.import_module("eager_attack")
    eager = dataclasses.replace(GAMMA, attack=module.attack)
    claim = claim_of(eager, truth.case({}, {}, thorough=False), 60)
    assert claim["got"].tolist() == [0, 0, 0]


FORKER = """
import ctypes
import torch

fork = ctypes.CDLL(None).fork  # bound while nothing refuses that


def build():
    return torch.nn.Linear(3, 1)
"""
FORKS = """
import os
import sys
import time

import numpy as np


def attack(case):
    pid = sys.modules["forker"].fork()
    if pid:
        return {"found": np.array(pid)}
    os.closerange(0, 99)  # or it would be waited for
    time.sleep(600)
    os._exit(0)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what runs is read from /proc")
def test_nothing_that_an_attack_started_outlives_it(tmp_path, made):
    (tmp_path / "forker.py").write_text(FORKER)
    forking = dataclasses.replace(case(), architecture=Architecture("forker:build", {}, str(tmp_path)))
    pid = int(claim_of(made("forks", FORKS), forking, 60)["found"])
    stat = Path(f"/proc/{pid}/stat")
    deadline = time.monotonic() + 300  # by itself it would live longer
    while time.monotonic() < deadline and stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.05)
    assert time.monotonic() < deadline


def test_no_prefix_of_an_installation_is_readable_as_a_whole():
    """A run folder may lie below one: `python -m venv .` makes a project's folder the prefix."""
    folders = {folder.resolve() for folder in confinement.readable()}
    for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix):
        held = Path(prefix).resolve()
        assert folders.isdisjoint([held, *held.parents])
    assert {Path(np.__file__).resolve().parents[1], Path(os.__file__).resolve().parent} <= folders


def test_a_score_that_is_no_number_is_no_finding(tmp_path):
    truth = recorded(tmp_path, run={"rounds": 2}, protocol={"name": "pbpfl"})
    nan = dataclasses.replace(GAMMA, score=lambda claim, truth: AttackResult("m", float("nan"), 0.0, (0.0, 1.0), "s"))
    found = auditor.audit(truth.folder, truth.federation, truth.planned, truth.seed, chosen=[nan])
    assert [one["because"] for one in found.record["not_run"]] == ["it has no finite score"]


def test_first_weights_are_no_attackers(tmp_path):
    truth = recorded(tmp_path, run={"rounds": 1, "seed": 0}, protocol={"name": "pbpfl"})
    packed = truth.case({}, {}, thorough=False).pack()
    assert all(not value.any() for value in Case.unpack(packed).model().state_dict().values())


def test_what_builds_a_users_model_may_read_a_file_and_an_attack_has_it_all_the_same(tmp_path):
    (tmp_path / "widths.py").write_text(
        "from pathlib import Path\nfrom torch import nn\n\ndef build():\n"
        "    width = int((Path(__file__).parent / 'width.txt').read_text())\n"
        "    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))\n"
    )
    (tmp_path / "width.txt").write_text("12")
    truth = recorded(
        tmp_path, run={"rounds": 3}, protocol={"name": "pbpfl"}, model={"source": "widths:build", "hidden": None}
    )
    found = auditor.audit(truth.folder, truth.federation, truth.planned, truth.seed, chosen=[GAMMA])
    assert found.attacks, found.record["not_run"]


@pytest.mark.parametrize(("text", "written"), [
    ("an error of 2.5e-02", "an error of 0.025"),
    ("1.6e-04, not 1.1e+00", "1.6e-4, not 1.1"),
    ("1.2e+02 and 3.4e-16", "120 and 3.4e-16"),
])  # fmt: skip
def test_numbers_are_written_as_a_person_writes_them(text, written):
    assert auditor.plainly(text) == written
