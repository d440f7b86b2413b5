"""Samples of several arrays at sites: what they declare, train and release is what one machine's run says."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from moretta.errors import ParameterError, PolicyError

if TYPE_CHECKING:
    from loopback import Machines

NETS = """
import torch
from torch import nn

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.table, self.head = nn.Embedding(5, 3), nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, ids, table):
        return self.head(torch.tanh(self.words(ids).mean(1) + self.table(table)))
"""
MODEL = "nets_at_sites:Two"
FEDSGD = 'name = "fedsgd"\nlearning-rate = 0.1'
BAFFLE = 'name = "baffle"\nlearning-rate = 0.01\nk = 8'


@pytest.fixture(autouse=True)
def _no_module_is_left() -> Iterator[None]:
    yield
    sys.modules.pop("nets_at_sites", None)


def of_two(many: Machines) -> Machines:
    """Give all rows token ids beside their columns, and the run a model that takes both by keyword."""

    def rows(held: dict[str, Any], part: str) -> None:
        x = held.pop(part)
        held |= {f"{part}.table": x, f"{part}.ids": (np.abs(x[:, :2]) * 3).astype(np.int64) % 5}

    def text(written: str) -> str:
        written = written.replace("standardise = true", 'standardise = ["table"]')
        return written.replace("inputs = [4]", 'inputs = {ids = [2], table = [4]}\ntokens = ["ids"]')

    many.change(MODEL, NETS, rows, text)
    return many


@pytest.mark.parametrize(("protocol", "edge"), [(FEDSGD, False), (BAFFLE, True)])
def test_sites_train_what_one_machine_trains(
    protocol: str, edge: bool, machines: Callable[..., Machines], tmp_path: Path
) -> None:
    many = of_two(machines(protocol, rounds=2))
    if edge:
        many.let_be_edge("silo-2")
    one, out = tmp_path / "one", tmp_path / "many"
    many.on_one_machine(one).train(many.rounds, 7)
    many.start()
    result = many.serve(out)
    assert result.record["dropped"] == []
    released = (one / "released.safetensors").read_bytes()
    assert (out / "released.safetensors").read_bytes() == released
    inputs = json.loads((one / "inputs.json").read_text())
    assert list(inputs["arrays"]) == ["ids", "table"]
    for name in many.names:
        assert (many.kept(name) / "released.safetensors").read_bytes() == released
        assert json.loads((many.kept(name) / "inputs.json").read_text())["arrays"] == inputs["arrays"]


def test_a_site_with_other_arrays_is_told_which(machines: Callable[..., Machines]) -> None:
    many = of_two(machines(FEDSGD))
    path = many.folder / "silo-1" / "rows.npz"
    held = dict(np.load(path))
    np.savez(path, **{**held, "x.ids": held["x.ids"].astype(float)})
    said = "silo `silo-1`: rows.npz: x: array `ids` holds numbers, expected integers"
    with pytest.raises(ParameterError, match=said):
        many._site("silo-1", many.folder / "silo-1" / "silo.toml")


def test_an_edge_site_rounds_no_token_ids(machines: Callable[..., Machines]) -> None:
    many = of_two(machines(BAFFLE))
    many.let_be_edge("silo-2")
    path = many.folder / "silo-2" / "silo.toml"
    path.write_text(path.read_text() + '[limits]\nedge-precision = "float16"\n')
    with pytest.raises(PolicyError, match='"float16" would round the token ids of ids, which lie beside numbers'):
        many._site("silo-2", path)
