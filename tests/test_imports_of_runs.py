"""What is imported, and when: seconds are the benchmarks', sets of modules are held here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from sklearn.datasets import load_breast_cancer

from moretta.data import datasets

ROOT = Path(__file__).parents[1]
HEAVY = {"cryptography", "numpy", "onnx", "onnxruntime", "pandas", "pyarrow", "scipy", "sklearn", "torch"}


def modules_after(program: str, *arguments: str) -> set[str]:
    """Return what a new Python has imported at the end of a program, or what the program has in `found`."""
    told = "\nimport sys\nprint('modules', *globals().get('found', sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program + told, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_the_package_alone_imports_nothing_that_is_slow() -> None:
    assert not modules_after("import moretta") & (HEAVY | {"jinja2", "pydantic", "rich", "typer"})


HELPS = """
import sys, typer.main
from moretta.commands.main import app, main
names = [[], *([name] for name in typer.main.get_command(app).commands)]
assert ["train"] in names and ["kit"] in names
for words in names:
    sys.argv = ["moretta", *words, "--help"]
    try:
        main()
    except SystemExit as end:
        assert not end.code
"""


def test_no_commands_help_imports_what_commands_compute_with() -> None:
    found = modules_after(HELPS)
    assert not found & (HEAVY | {"jinja2", "moretta.config.run_files", "moretta.contract.messages"})


RUN = """
import sys, torch
by_itself = set(sys.modules)  # torch.distributed and torch.export too, in any process
from moretta.commands.main import main
sys.argv = ["moretta", "train", "examples/wdbc.toml", "--set", "run.rounds=1", "--json", "--out", sys.argv[1]]
try:
    main()
except SystemExit as end:
    assert not end.code

import numpy, moretta
silos = [moretta.Silo(name, numpy.eye(4, dtype="f4"), numpy.arange(4) % 2) for name in "ab"]
protocol = moretta.FedAvg(momentum=0.9)
moretta.Federation(torch.nn.Linear(4, 1), silos, protocol, test=(silos[0].x, silos[0].y)).train(1)
silos = [moretta.Silo(name, silos[0].x, silos[0].y) for name in "abcdef"]  # are stepped together
moretta.Federation(torch.nn.Linear(4, 2), silos, moretta.FedAvg(loss="cross-entropy")).train(1)
found = [name for name in sys.modules if name not in by_itself]
"""


def test_a_run_imports_no_compiler_and_no_statistics_and_of_torch_only_what_torch_itself_does(tmp_path: Path) -> None:
    found = modules_after(RUN, str(tmp_path / "run"))
    assert {"moretta", "safetensors"} <= found
    assert not found & (HEAVY - {"cryptography", "numpy"} | {"jinja2", "matplotlib", "sympy"})
    compilers = ("torch.distributed", "torch.export", "torch._dynamo", "torch._export", "torch._inductor")
    assert not [name for name in found if name.startswith(compilers)]


def test_the_breast_cancer_records_are_scikit_learns() -> None:
    theirs = load_breast_cancer()
    x, y = datasets.read_wdbc()
    assert (x == theirs.data).all()
    assert (y == theirs.target).all()
    assert (x.dtype, y.dtype) == (theirs.data.dtype, theirs.target.dtype)
    assert tuple(theirs.feature_names) == datasets.WDBC
    assert tuple(theirs.target_names) == datasets.WDBC_CLASSES
