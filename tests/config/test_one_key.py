"""A key is declared once: what a class gets is in the file, the reference, Python, `--set`, a site, the digest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from pydantic import PositiveInt
from pydantic.fields import FieldInfo

from moretta import Engine, Federation, FedSGD, SecureAggregation, Silo
from moretta.config import run_files
from moretta.contract.settings import Section
from moretta.deployment.agreed_settings import pinned_settings
from moretta.errors import ParameterError

TEXT = """
[run]
rounds = 2
[data]
source = "sites"
silos = 2
inputs = [3]
classes = 2
[model]
source = "mlp"
[protocol]
name = "fedsgd"
[secure-aggregation]
[engine]
name = "flare"
sites = ["north", "south"]
"""


@pytest.fixture
def declared(request: pytest.FixtureRequest) -> Iterator[type[Section]]:
    """Declare a key of one class as its source would, and nothing else."""
    kind: type[Section] = request.param
    fields, said = dict(kind.model_fields), kind.__doc__
    kind.__pydantic_fields__["stride"] = FieldInfo.from_annotated_attribute(PositiveInt, 3)
    kind.__doc__ = f"{said}\n\n    stride: how far it walks.\n"
    for one in (kind, run_files.RunFile):
        one.model_rebuild(force=True)
    yield kind
    kind.__pydantic_fields__.clear()
    kind.__pydantic_fields__.update(fields)
    kind.__doc__ = said
    for one in (kind, run_files.RunFile):
        one.model_rebuild(force=True)


@pytest.mark.parametrize(
    ("section", "declared"),
    [("protocol", FedSGD), ("secure-aggregation", SecureAggregation), ("engine", Engine)],
    indirect=["declared"],
)
def test_a_key_that_one_class_has_is_everywhere(section: str, declared: type[Section], tmp_path: Path) -> None:
    path, name = tmp_path / "run.toml", section.replace("-", "_")
    path.write_text(TEXT.replace(f"[{section}]", f"[{section}]\nstride = 5"))
    run_file = run_files.load(path)
    assert getattr(run_file, name).stride == 5
    assert "stride = 5" in run_files.dumps(run_file).partition(f"[{section}]")[2]
    other = run_files.load(path, [f"{section}.stride=7"])
    assert getattr(other, name).stride == 7
    assert run_files.digest(other) != run_files.digest(run_file)
    with pytest.raises(ParameterError, match=rf"\[{section}\] stride: expected 1 or more, got 0"):
        run_files.load(path, [f"{section}.stride=0"])

    sent = run_files.loads(run_files.dumps(run_files.shared(run_file)), path)
    assert getattr(sent, name).stride == 5
    assert pinned_settings(sent)[section]["stride"] == 5
    spec = run_files.specification_of(sent, sent.run, task="classification", standardise=True)
    assert getattr(spec, name).stride == 5

    (entry,) = reference._keys_of(declared, ["stride"], section)
    assert entry.startswith(f'- <a id="{section}-stride"></a>`stride`')
    assert "whole number, 1 or more · default: `3`" in entry

    rows = np.zeros((4, 3), np.float32), np.array([0, 1, 0, 1])
    keyword = "aggregation" if name == "secure_aggregation" else name
    given = {"protocol": FedSGD()} | {keyword: declared(stride=5)}  # type: ignore[call-arg]
    silos = [Silo("north", *rows), Silo("south", *rows)]
    federation = Federation(torch.nn.Linear(3, 2), silos, **given)  # type: ignore[arg-type]
    assert getattr(federation.spec, name).stride == 5
    assert federation.spec.settings[section]["stride"] == 5
