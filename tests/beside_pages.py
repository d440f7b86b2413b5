"""The pages with blocks of code, what may be said above a block, and what pages speak of: tables, models, runs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from blocks import Block, blocks
from test_cli import call
from test_raw_rows import NAMES as COLUMNS
from test_raw_rows import RUN, SCHEMA, table, write
from torch import nn

ROOT = Path(__file__).parents[1]

PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
]
NAMES = [str(path.relative_to(ROOT)) for path in PAGES if any(blocks(path.read_text(encoding="utf-8")))]
MARK = re.compile(r"^<!-- not played: \S.* -->$", re.MULTILINE)


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks_of(name: str) -> list[Block]:
    return list(blocks(text_of(name)))


def is_marked(page: str, block: Block) -> bool:
    """Say whether the line above a block says why no test plays it."""
    above = [line for line in page.splitlines()[: block.first] if line.strip()]
    return bool(above and MARK.fullmatch(above[-1]))


def prepare(name: str, folder: Path) -> dict[str, Any]:
    """Put what a page speaks of into a folder, and return the names that its Python stands on."""
    (folder / "my_models.py").write_text(MODEL)
    for one in ("examples", "experiments"):
        os.symlink(ROOT / one, folder / one)
    return (BESIDE[name](folder) if name in BESIDE else None) or {}


MODEL = """
from torch import nn


def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 8), nn.ReLU(), nn.Linear(8, 10))
"""


def of_readme(folder: Path) -> None:
    from sklearn.datasets import load_breast_cancer

    rows = load_breast_cancer()
    write_rows(folder / "patients.csv", list(rows.feature_names), rows.data[:20])


def of_index(folder: Path) -> dict[str, Any]:
    (folder / "examples").unlink()
    (folder / "examples").mkdir()
    (folder / "examples" / "wdbc.toml").write_text(SHORT_RUN)  # README's, which is played as it is, takes minutes
    random = np.random.default_rng(0)
    x = random.normal(size=(4, 30, 8)).astype("float32")
    rows = [(one, (one.sum(1) > 0).astype("int64")) for one in x]
    test = {"x_test": rows[3][0], "y_test": rows[3][1]}
    return {"model": nn.Linear(8, 1), "rows": dict(zip(("north", "south", "west"), rows, strict=False)), **test}


def of_alignment(folder: Path) -> None:
    for name, column, ids in (("a", "patient", "P3 P1 P2"), ("b", "customer", "p1 P2 P9")):
        (folder / name.upper()).mkdir()
        write_rows(folder / name.upper() / f"{name}.csv", [column, "age"], [[one, 1] for one in ids.split()])


def of_data(folder: Path) -> None:
    for seed, name in enumerate(("patients", "north", "south", "new")):
        write(folder / f"{name}.csv", table(seed, 60), COLUMNS)
    (folder / "run.toml").write_text(RUN.replace("[model]", 'schema = "schema.toml"\n[model]'))
    (folder / "decided.toml").write_text(SCHEMA)


def of_predictions(folder: Path) -> None:
    of_data(folder)
    (folder / "decided.toml").rename(folder / "schema.toml")
    assert call("train", folder / "run.toml", "--out", folder / "runs" / "mine").code == 0


SHORT_RUN = """
[run]
rounds = 1
record-views = true
[data]
source = "wdbc"
[model]
source = "mlp"
[protocol]
name = "fedsgd"
"""


def of_dossier(folder: Path) -> None:
    (folder / "run.toml").write_text(SHORT_RUN)
    assert call("train", folder / "run.toml", "--out", folder / "runs" / "mine").code == 0
    assert call("keys", "new", "--out", folder / "keys" / "hospital-a").code == 0
    line = (folder / "keys" / "hospital-a" / "identity.pub").read_text().strip()
    (folder / "roster.toml").write_text(f'[[silo]]\nname = "hospital-a"\nkey = "{line}"\n')
    (folder / "answers.toml").write_text(toml_of("docs/dossier.md", "controllers"))


def of_deploy(folder: Path) -> None:
    (folder / "silo.toml").write_text(toml_of("docs/deploy.md", '[silo]\nname = "north"'))


IMAGES = """
[run]
rounds = 1
[data]
source = "image-folder"
path = "scans"
labels = "labels.csv"
target = "finding"
group-column = "patient"
image-size = 16
silos = 2
[model]
source = "lenet"
[protocol]
name = "fedsgd"
loss = "cross-entropy"
"""


def of_images(folder: Path) -> None:
    from PIL import Image

    (folder / "scans").mkdir()
    (folder / "new-scans").mkdir()
    for number in range(12):
        image = Image.new("L", (8, 8), 20 * number)
        image.save(folder / "scans" / f"{number}.png")
        image.save(folder / "new-scans" / f"{number}.png")
    lines = [[f"{number}.png", f"P{number // 2}", "nodule" if number > 5 else "clear"] for number in range(12)]
    write_rows(folder / "labels.csv", ["file", "patient", "finding"], lines)
    (folder / "schema.toml").write_text(toml_of("docs/images.md", "[columns.file]"))
    (folder / "run.toml").write_text(IMAGES)
    assert call("train", folder / "run.toml", "--out", folder / "runs" / "mine").code == 0


def toml_of(name: str, beginning: str) -> str:
    return next(block.text for block in blocks_of(name) if block.text.startswith(beginning))


def write_rows(path: Path, names: Sequence[str], rows: Any) -> None:
    path.write_text("\n".join([",".join(names), *(",".join(map(str, row)) for row in rows)]) + "\n")


BESIDE: Mapping[str, Callable[[Path], dict[str, Any] | None]] = {
    "README.md": of_readme,
    "docs/alignment.md": of_alignment,
    "docs/data.md": of_data,
    "docs/deploy.md": of_deploy,
    "docs/dossier.md": of_dossier,
    "docs/images.md": of_images,
    "docs/index.md": of_index,
    "docs/predictions.md": of_predictions,
}
