"""`pip install moretta` with no extra: whoever asks for more is told what to add, by one sentence with the command."""

from __future__ import annotations

from pathlib import Path

from test_cli import prepare
from test_without_torch import without

EXTRAS = (
    *("torch", "sklearn", "scipy", "matplotlib", "jinja2", "markupsafe", "pyarrow", "PIL", "pydicom", "nvflare"),
    "flwr",
    "nibabel",
    *("onnx", "onnxscript", "onnxruntime", "dp_accounting", "tensorboard", "pandas"),
)
SILO = '[silo]\nname = "north"\n[data]\nsource = "patients.csv"\n'
COMMANDS = """
import re

EVERY = [
    (("train", "run.toml", "--out", "mine"), "torch"),
    (("compare", "run.toml", "--protocols", "fedsgd,pbpfl", "--out", "mine"), "torch"),
    (("audit", "mine"), "torch"),
    (("report", "mine"), "torch"),
    (("predict", "mine", "--data", "patients.csv", "--out", "out.csv"), "torch"),
    (("export", "mine", "--out", "model.onnx"), "torch"),
    (("look", "patients.csv"), "tables"),
    (("serve", "run.toml"), "flare"),
    (("join", "kit", "--silo", "silo.toml"), "flare"),
    (("join", "kit", "--silo", "silo.toml", "--edge"), "edge-flare"),
    (("join", "kit", "--silo", "silo.toml", "--reply", "silo.toml"), "flare"),
    (("kit", "new", "kits", "--host", "localhost"), "flare"),
    (("kit", "sign", "silo.toml", "--kits", "kits"), "flare"),
]
for words, extra in EVERY:
    code, out, err = call(*words)
    assert (code, out) == (2, ""), (words, code, out, err)
    assert len(err.splitlines()) == 1, (words, err)
    assert re.search(rf"(run|install it by): pip install 'moretta\\[{extra}\\]'$", err), (words, err)
assert not any(pathlib.Path(name).exists() for name in ("mine", "kits", "out.csv"))

# a site makes its key without any of them
code, out, err = call("join", "kit", "--silo", "silo.toml", "--request")
assert (code, err) == (0, ""), err
assert pathlib.Path("kit/client.key").stat().st_mode & 0o777 == 0o600
"""
PYTHON = """
import numpy as np
import moretta
from moretta.errors import MissingExtra

def needs(extra, act):
    try:
        act()
    except MissingExtra as error:
        assert str(error).replace('"', "'").rstrip(".").endswith(f"pip install 'moretta[{extra}]'"), error
        assert "\\n" not in str(error)
    else:
        raise AssertionError(f"nothing was said of {extra}")

needs("torch", lambda: moretta.Federation)
needs("flower", lambda: __import__("moretta.flower"))
needs("torch", lambda: moretta.Result)
needs("torch", lambda: moretta.load)
try:
    from moretta import Federation
except MissingExtra:
    pass

from moretta.data.images import pixels, scans
from moretta.data.tables.schema import Number, Schema
from moretta.protocols.common import accountant

needs("tables", lambda: moretta.read_table("patients.csv", Schema(columns={"age": Number()})))
needs("images", lambda: pixels.squares(np.zeros((1, 3, 4, 4), np.uint8), 8))
needs("images", lambda: scans.read_dicom(b"", "scan"))
needs("dp", lambda: accountant.noise_for(1.0, 1e-5, 0.5, 9))

def edge():
    import moretta.protocols.baffle.edge.onnx_forward

needs("edge", edge)
"""


def test_every_command_says_what_to_add(tmp_path: Path) -> None:
    prepare(tmp_path)
    (tmp_path / "silo.toml").write_text(SILO)
    without(EXTRAS, COMMANDS, tmp_path)


def test_from_python_too(tmp_path: Path) -> None:
    prepare(tmp_path)
    without(EXTRAS, PYTHON, tmp_path)
