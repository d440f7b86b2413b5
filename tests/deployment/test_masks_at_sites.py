"""Masks as targets at sites, also without PyTorch: what they train and release is what one machine's run says."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from moretta.errors import ParameterError

if TYPE_CHECKING:
    from pathlib import Path

    from loopback import Machines

MODEL = "nets_of_masks:net"
NETS = "from torch import nn\n\n\ndef net():\n    return nn.Conv2d(1, 2, 3, padding=1)\n"
FEDSGD = 'name = "fedsgd"\nlearning-rate = 0.1\nloss = "cross-entropy"'
BAFFLE = 'name = "baffle"\nlearning-rate = 0.01\nk = 8'


@pytest.fixture(autouse=True)
def _no_module_is_left() -> Iterator[None]:
    yield
    sys.modules.pop("nets_of_masks", None)


def of_masks(many: Machines, declared: str = "mask = [2, 2]\nclasses = 2", edge: str = "") -> Machines:
    """Make all rows images of 2 x 2 pixels, each pixel of one of two classes. edge: the site without PyTorch."""

    def rows(held: dict[str, Any], part: str) -> None:
        held[part] = held[part].reshape(-1, 1, 2, 2)
        held[part.replace("x", "y")] = (held[part][:, 0] > 0.5).astype(np.int64)

    def text(written: str) -> str:
        written = written.replace("standardise = true", "standardise = false")
        return written.replace("inputs = [4]", "inputs = [1, 2, 2]").replace("classes = 3", declared)

    many.change(MODEL, NETS, rows, text)
    if edge:
        many.let_be_edge(edge)
    return many


@pytest.mark.parametrize(("protocol", "edge"), [(FEDSGD, ""), (BAFFLE, "silo-2")])
def test_sites_train_masks_as_one_machine_does(
    protocol: str, edge: str, machines: Callable[..., Machines], tmp_path: Path
) -> None:
    if edge:
        pytest.importorskip("onnxruntime")
    many = of_masks(machines(protocol, rounds=2), edge=edge)
    one, out = tmp_path / "one", tmp_path / "many"
    many.on_one_machine(one).train(many.rounds, 7)
    many.start()
    result = many.serve(out)
    assert result.record["dropped"] == []
    released = (one / "released.safetensors").read_bytes()
    assert (out / "released.safetensors").read_bytes() == released
    for folder in (one, out, *map(many.kept, many.names)):
        assert json.loads((folder / "inputs.json").read_text())["mask"] == [2, 2]


@pytest.mark.parametrize(
    ("declared", "change", "said"),
    [
        (
            "mask = [2, 2]\nclasses = 2",
            lambda y: y[:, :1],
            "silo `silo-1`: expected masks of 2 x 2 positions, as in the run; got 2 positions",
        ),
        ("mask = [2, 2]\nclasses = 2", lambda y: y[:, 0, 0] * 0.5, "expected masks as whole numbers"),
        (
            "outputs = 8",
            lambda y: y,
            "the targets are masks, but the run file names no mask; set their shape and classes",
        ),
    ],
)
def test_a_site_with_other_targets_is_told_which(
    declared: str, change: Callable[[np.ndarray], np.ndarray], said: str, machines: Callable[..., Machines]
) -> None:
    many = of_masks(machines(FEDSGD), declared)
    path = many.folder / "silo-1" / "rows.npz"
    held = dict(np.load(path))
    np.savez(path, **{**held, "y": change(held["y"])})
    with pytest.raises(ParameterError, match=said):
        many._site("silo-1", many.folder / "silo-1" / "silo.toml")


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        (
            "mask = [2, 2]\noutputs = 8",
            "mask is the shape of masks with a class at each position, so classes says how many",
        ),
        ("mask = []\nclasses = 2", "mask"),
        ("mask = [2, 0]\nclasses = 2", "mask"),
    ],
)
def test_a_run_file_says_the_shape_of_masks(declared: str, said: str, machines: Callable[..., Machines]) -> None:
    with pytest.raises(ParameterError, match=said):
        of_masks(machines(FEDSGD), declared)
