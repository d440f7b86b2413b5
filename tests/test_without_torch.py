"""The base install: what works where torch, scikit-learn and matplotlib are absent, and what the rest says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import prepare

REFUSE = """
import contextlib, io, pathlib, sys, warnings
warnings.simplefilter("error")

ABSENT = {absent!r}

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())

def call(*words):
    from moretta.commands.main import main
    sys.argv, out, err = ["moretta", *words], io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
    return code, out.getvalue(), err.getvalue().strip()
"""
ALL = ("torch", "sklearn", "matplotlib", "scipy")


def without(absent: tuple[str, ...], program: str, folder: Path) -> None:
    """Run a program in a new Python that cannot import some packages."""
    script = folder / "program.py"
    script.write_text(REFUSE.format(absent=absent) + program)
    done = subprocess.run([sys.executable, script.name], cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_base_imports_sums_and_helps(tmp_path: Path) -> None:
    without(ALL, BASE, tmp_path)


BASE = """
import moretta
import moretta.config.run_files, moretta.data.datasets, moretta.data.partition, moretta.models.catalogue
import moretta.protocols.fedsgd.params, moretta.protocols.pbpfl.params, moretta.protocols.cgd.params
import moretta.secure_aggregation.schemes, moretta.contract.codec, moretta.secure_aggregation.keystream
import moretta.contract.roles, moretta.engines.driver
assert moretta.PBPFL(learning_rate=0.2).loss == "mse"
assert moretta.SecureAggregation().scheme == "pairwise"

code, out, err = call("--help")
assert (code, err) == (0, ""), err
import typer.main
from moretta.commands.main import app
commands = list(typer.main.get_command(app).commands)
assert {"train", "compare", "report", "predict", "check", "keys"} <= set(commands)
for command in commands:
    assert command in out
    code, helped, err = call(command, "--help")
    assert (code, err) == (0, ""), err
    assert "--json" in helped
assert call("--version") == (0, moretta.__version__ + "\\n", "")

# an identity is made and shown
code, made, err = call("keys", "new", "--out", "keys", "--json")
assert (code, err) == (0, ""), err
code, shown, err = call("keys", "show", "keys")
assert (code, err) == (0, "") and shown.splitlines()[0] in made, (shown, made, err)

# a table is read and dealt
pathlib.Path("rows.csv").write_text("a,b,c\\n" + "".join(f"{3 * (n % 20)},{n % 3},{n % 2}\\n" for n in range(30)))
data = moretta.data.settings.Data(source="rows.csv")
dealt = moretta.data.partition.distribute(moretta.data.datasets.load(data), data)
assert [len(silo.x) for silo in dealt.silos] == [8, 8, 8]

# a message survives the codec
import numpy as np
from moretta.contract.codec import Codec
from moretta.contract.roles import Replies
from moretta.contract.messages import Stamp
from moretta.secure_aggregation.schemes import MESSAGES, aggregator, contributor
from moretta.secure_aggregation.statistics import answer_moments, moments
from moretta.secure_aggregation.statistics import AskMoments

codec = Codec(MESSAGES)

def deliver(ask):
    answers = {}
    for silo, message in ask.messages.items():
        message = codec.decode(codec.encode(message))
        if isinstance(message, AskMoments):
            reply = answer_moments(silos[silo], message, columns[silo])
        else:
            reply = silos[silo].answer(message)
        answers[silo] = codec.decode(codec.encode(reply))
    return Replies(answers, {})

def play(exchange):
    replies = None
    while True:
        try:
            ask = exchange.send(replies)
        except StopIteration as end:
            return end.value
        replies = deliver(ask)

# and a masked sum comes to the mean over all rows
columns = {name: np.random.default_rng(seed).normal(seed, 1, (5 + seed, 2)) for seed, name in enumerate("abc")}
silos = {name: contributor("pairwise", name) for name in columns}
server = aggregator("pairwise")
assert play(server.setup(Stamp("run", 1, 0), list(silos))) is None
found = play(moments(server, Stamp("run", 1, 0), 2, "columns"))
together = np.concatenate(list(columns.values()))
assert np.allclose(found.mean, together.mean(0), atol=1e-6), found
assert "torch" not in sys.modules
"""


COMMANDS = """
lines = {
    ("train", "run.toml", "--out", "mine"): "torch",
    ("compare", "run.toml", "--protocols", "fedsgd,pbpfl", "--out", "mine"): "torch",
    ("report", "mine"): "torch",
    ("predict", "mine", "--data", "patients.csv", "--out", "out.csv"): "torch",
    ("check", "--model", "mlp", "--input", "4", "--classes", "2"): "torch",
}
for words, name in lines.items():
    code, out, err = call(*words)
    assert (code, out) == (2, ""), (words, code, out, err)
    assert len(err.splitlines()) == 1, err
    assert err.startswith("moretta: ") and "moretta[torch]" in err, err
    assert not pathlib.Path("mine").exists()
"""


def test_baffles_silo_answers_without_torch(tmp_path: Path) -> None:
    without((*ALL, "onnxruntime", "onnx"), BAFFLE, tmp_path)


BAFFLE = """
import importlib
for name in "recipe messages seeds directions estimate forward client".split():
    importlib.import_module(f"moretta.protocols.baffle.silo.{name}")
import moretta.protocols.baffle.params, moretta.protocols.common.targets
import moretta.protocols.common.silo_rows, moretta.protocols.common.batches, moretta.protocols.common.accountant
assert moretta.BAFFLE(k=8).form == "mean"

import numpy as np
from moretta.contract.codec import Codec
from moretta.secure_aggregation.keystream import SecretRoot
from moretta.contract.roles import Replies
from moretta.contract.messages import Stamp
from moretta.protocols.baffle.silo.client import Client
from moretta.protocols.baffle.silo.estimate import gradient
from moretta.protocols.baffle.silo.forward import Layout
from moretta.protocols.baffle.silo.messages import MESSAGES, Estimate
from moretta.protocols.baffle.silo.recipe import Recipe
from moretta.protocols.common.targets import RowLosses
from moretta.protocols.baffle.silo.seeds import SERVER, Seed, agree, parameter_hash
from moretta.protocols.common.silo_rows import MESSAGES as ROW_MESSAGES, Begin
from moretta.protocols.common.silo_setup import SiloSetup
from moretta.data.tables.preparation import Preparation
from moretta.secure_aggregation.schemes import MESSAGES as SUM_MESSAGES, aggregator

K = 512
codec = Codec((*SUM_MESSAGES, *ROW_MESSAGES, *MESSAGES))
recipe = Recipe("central", 1e-3, RowLosses("mse"), K)
w = np.array([0.5, -1.0, 2.0, 0.25])
layout = Layout.of({"weight": w[:3].reshape(1, 3), "bias": w[3:]}, {})

class Linear:
    def at_once(self, rows):
        return 4
    def __init__(self):
        self.layout = layout
    def outputs(self, parameters, x):
        return np.stack([x @ vector[:3, None] + vector[3] for vector in parameters])

random = np.random.default_rng(0)
data = {name: (random.normal(size=(rows, 3)), random.normal(size=(rows, 1))) for name, rows in [("a", 5), ("b", 7)]}
silos = {
    name: Client(SiloSetup(name, x, y, "schema", 0, 1, 1, "pairwise"), recipe, Linear())
    for name, (x, y) in data.items()
}

def play(exchange):
    replies = None
    while True:
        try:
            ask = exchange.send(replies)
        except StopIteration as end:
            return end.value
        answers = {}
        for silo, message in ask.messages.items():
            reply = silos[silo].answer(codec.decode(codec.encode(message)))
            answers[silo] = codec.decode(codec.encode(reply))
        replies = Replies(answers, {})

now, server, seed = Stamp("run", 1, 0), aggregator("pairwise"), Seed(SERVER, SecretRoot.fresh())
assert play(server.setup(now, list(silos))) is None
for silo in silos.values():
    silo.answer(Begin.of(now, "schema", "", Preparation.nothing()))
assert play(agree(now, list(silos), seed, layout, lambda precision: b"")) == ()  # no silo has a graph
wanted = server.want({"scalars": (K + 1,)}, {"scalars": 100.0}, 100)
hashed = parameter_hash(layout, w)
ask = Estimate(stamp=now, parameters=w, parameter_hash=hashed, k=K, encoding=wanted.fraction_bits)
total = play(server.sum(ask, wanted))
found = total.means["scalars"]
x, y = (np.concatenate(parts) for parts in zip(*data.values()))
off = x @ w[:3, None] + w[3] - y
directions = recipe.directions(K, 4, seed.seed, "run", 1, hashed)
true = np.append((off * x).mean(axis=0), off.mean())  # of the squared error over 2
each = np.stack([one - w for some in directions.perturbed(w, 1.0) for one in map(np.copy, some)])
assert total.weight == 12
assert np.allclose(found[:-1], each @ true, atol=1e-6), (found[:9], each[:8] @ true)  # exact, as the loss is quadratic
assert np.allclose(gradient("central", found[:-1], directions), true, atol=0.3 * np.linalg.norm(true))
assert abs(found[-1] - (off ** 2).mean() / 2) < 1e-4
assert not {"torch", "sklearn", "onnxruntime"} & set(sys.modules)
"""


def test_the_commands_that_need_torch_name_the_extra(tmp_path: Path) -> None:
    prepare(tmp_path)
    without(ALL, COMMANDS, tmp_path)


@pytest.mark.parametrize(
    ("absent", "words"),
    [
        (("sklearn",), ("train", "run.toml", "--set", "data.source=wdbc", "--out", "mine")),
        (("matplotlib",), ("report", "done")),
    ],
)
def test_one_package_absent(absent: tuple[str, ...], words: tuple[str, ...], tmp_path: Path) -> None:
    prepare(tmp_path)
    made = 'assert call("train", "run.toml", "--out", "done", "--set", "run.rounds=1")[0] == 0\n'
    program = f"""
code, out, err = call(*{words!r})
assert (code, out) == (2, ""), (code, out, err)
assert "moretta[torch]" in err.splitlines()[-1], err
assert not pathlib.Path("mine").exists() and not pathlib.Path("done/report.html").exists()
"""
    without(absent, (made if "done" in words else "") + program, tmp_path)
