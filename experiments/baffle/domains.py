"""Table 3: BAFFLE fine-tunes a pre-trained network's last layer on silos of different domains; each one's accuracy.

    moretta train experiments/baffle/backbone.toml --set data.path=DIR/cifar100_subset --out runs/baffle-backbone
    python experiments/baffle/domains.py runs/baffle-backbone --data DIR

`domains.toml` is the run: CIFAR-10 made into four domains, five silos of each, all layers but the last frozen. First
written is its warm start, `domains.safetensors`: the pre-trained layers and a new last one. Frozen layers give the
same features in each of a round's K forward passes, so they are run once for each image here, and what is trained is
the last layer on features: the run that `trainable` makes of the whole network, up to rounding and the draw of
directions (a test compares outputs), in a hundredth of the time.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from records import SEED, Record, Row, name_of, parser, run
from reproduction import seeds
from safetensors.numpy import save_file
from torch import nn

from moretta.config import run_files
from moretta.config.run_files import RunFile
from moretta.data import datasets, domains, partition
from moretta.data.rows import Split
from moretta.data.silo import Silo
from moretta.errors import ParameterError
from moretta.models import catalogue
from moretta.protocols.common import modules
from moretta.protocols.common.training import Training
from moretta.protocols.fedsgd.params import FedSGD
from moretta.run import trained_model
from moretta.run.evaluation import evaluate, outputs_of
from moretta.run.federation import Federation

HERE = Path(__file__).parent
KS = (20, 50, 100, 200, 500)
Tests = Mapping[str, tuple[NDArray[np.generic], NDArray[np.generic]]]


def split(model: nn.Module) -> tuple[nn.Sequential, nn.Linear]:
    """Return all layers but the last, and the last, which is linear; they share the model's parameters."""
    layers = list(model.children())
    if not isinstance(model, nn.Sequential) or not isinstance(layers[-1], nn.Linear):
        raise ParameterError("expected a network that ends in a linear layer, such as a wrn")
    return nn.Sequential(*layers[:-1]), layers[-1]


def warm_start(backbone: nn.Module, model: nn.Module, path: Path) -> None:
    """Write the backbone's layers, and the last one of a fresh model for other classes."""
    head = f"{list(dict(model.named_children()))[-1]}."
    fresh = {name: value for name, value in modules.arrays(model).items() if name.startswith(head)}
    save_file({**modules.arrays(backbone), **fresh}, path)


def dealt(run_file: RunFile, dataset: Split, trunk: nn.Module) -> tuple[list[Silo], Tests]:
    """Return the silos of a run and the test rows of each domain, all as features."""
    wanted = run_file.data
    dataset = domains.into_domains(dataset, wanted.domains or (), run_file.run.seed)
    parts = partition.distribute(dataset, wanted, run_file.run.seed)
    silos = [Silo(silo.name, features(trunk, silo.x), silo.y) for silo in parts.silos]
    x, rows = features(trunk, dataset.test.x), dataset.test_rows_by_domain()
    return silos, {name: (x[rows[name]], dataset.test.y[rows[name]]) for name in wanted.domains or ()}


def features(trunk: nn.Module, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return what the frozen layers make of images, [rows, features]."""
    chunks = (outputs_of(trunk, torch.from_numpy(part)) for part in np.array_split(x, max(1, len(x) // 500)))
    return np.concatenate([part.numpy() for part in chunks])


def row_of(name: str, run_file: RunFile, protocol: Training, head: nn.Linear, silos: list[Silo], tests: Tests) -> Row:
    """Train the last layer and score it on each domain."""
    everywhere = tuple(np.concatenate(part) for part in zip(*tests.values(), strict=True))
    federation = Federation(
        model=nn.Sequential(head),
        silos=silos,
        protocol=protocol,
        test=(everywhere[0], everywhere[1]),
        aggregation=run_file.secure_aggregation,
        batch_size=run_file.data.batch_size,
        evaluate_every=run_file.run.rounds,
        insecure_secret_seed=run_file.run.insecure_secret_seed,
    )
    model = federation.train(run_file.run.rounds, run_file.run.seed).released
    assert model is not None
    scores = [
        100 * evaluate(model, torch.from_numpy(x), y, protocol.loss, "classification", metrics=False)["accuracy"]
        for x, y in tests.values()
    ]
    return Row(name, (*scores, float(np.mean(scores))))


def measure(given: argparse.Namespace) -> Record:
    """Train with each K, and by backpropagation."""
    rounds, rows = (given.rounds or 30, 4000) if given.quick else (given.rounds or 500, 50_000)
    if given.data is None:
        raise ParameterError("expected --data DIR, or the variable MORETTA_DATA")
    path = json.dumps(str((given.data / "cifar10").absolute()))
    run_file = run_files.load(HERE / "domains.toml", [f"data.path={path}", f"run.rounds={rounds}", *seeds(SEED)])
    dataset = datasets.load(run_file.data.model_copy(update={"domains": None}), seed=SEED)
    dataset = dataclasses.replace(dataset, train=dataset.train.of(np.arange(rows)))
    shape, arguments = dataset.train.x.shape[1:], dict[str, Any](run_file.model.arguments)
    model = catalogue.build(run_file.model.source, inputs=shape, outputs=dataset.outputs, seed=SEED, **arguments)
    start = HERE / "domains.safetensors"
    warm_start(trained_model.read(given.backbone).network, model, start)
    modules.load(model, modules.read_state_dict(start))
    trunk, head = split(model)
    silos, tests = dealt(run_file, dataset, trunk.eval())
    columns = (*tests, "mean")
    notes = [
        "The paper's figures are lost in the text that we have. It has Office-Home, a MobileNet trained on ImageNet; "
        "ours are CIFAR-10 in four domains of our making, and a WRN-10-2 trained on 10000 images of CIFAR-100, its "
        "BatchNorm as it was then.",
        "The paper freezes the backbone and trains the classification layers; so do we, on features made once.",
    ]
    title = f"Table 3: the last layer fine-tuned on twenty silos of four domains, {rounds} rounds, accuracy in per cent"
    settings = {"rounds": rounds, "rows": rows, "batch": run_file.data.batch_size, "seed": SEED}
    settings["public_secret_seed"] = SEED
    settings["parameters"] = sum(parameter.numel() for parameter in head.parameters())
    record = Record(name_of(given, "baffle-domains"), title, columns, settings, notes)
    protocol = run_file.protocol.model_copy(update={"trainable": (), "warm_start": None})
    for k in KS:
        record.add(row_of(f"K = {k}", run_file, protocol.model_copy(update={"k": k}), head, silos, tests))
    shared = {name: getattr(protocol, name) for name in ("loss", "learning_rate", "optimizer")}
    record.add(row_of("BP baseline", run_file, FedSGD(**shared), head, silos, tests))
    return record


if __name__ == "__main__":
    options = parser("Fine-tune the last layer of a pre-trained network on silos of different domains.")
    options.add_argument("backbone", type=Path, help="the run folder of backbone.toml")
    options.add_argument("--rounds", type=int, help="rounds, instead of 500, or 30 in the quick form")
    sys.exit(run(measure, options.parse_args()))
