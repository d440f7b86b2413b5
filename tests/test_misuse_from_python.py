"""Misuses from Python: each is refused in one sentence, which names the key and says what to do."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import moretta
from moretta import (
    BAFFLE,
    PBPFL,
    Engine,
    FedAvg,
    Federation,
    FedSGD,
    Local,
    Result,
    Schema,
    SecureAggregation,
    Silo,
    read_table,
)
from moretta.data.tables.schema import Number
from moretta.errors import MorettaError, ParameterError
from moretta.run.inputs import count_outputs

X = np.random.default_rng(0).normal(0, 1, (12, 4)).astype(np.float32)
Y = np.arange(12) % 3
SOFT = FedSGD(loss="cross-entropy")


def silos(**further: Any) -> list[Silo]:
    return [Silo("north", X, Y), Silo("south", X + 1, Y), *(Silo(name, *rows) for name, rows in further.items())]


def make(**settings: Any) -> Federation:
    chosen: dict[str, Any] = {"model": nn.Linear(4, 3), "silos": silos(), "protocol": SOFT}
    return Federation(**(chosen | settings))


class Pairs(Dataset[Any]):
    """Samples with their targets and one thing more."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> Any:
        return self.rows[place]


class InPlace(nn.Linear):
    """A model that writes to the rows that it is given."""

    def __init__(self) -> None:
        super().__init__(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(1.5))


class Votes(nn.Linear):
    """A model that gives whole numbers."""

    def __init__(self) -> None:
        super().__init__(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (super().forward(x) > 0).long()


class Detached(nn.Linear):
    """A model whose outputs have no gradient."""

    def __init__(self) -> None:
        super().__init__(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).detach()


class FollowedInTraining(nn.Linear):
    """A model whose outputs have a gradient when it trains alone."""

    def __init__(self) -> None:
        super().__init__(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(nn.functional.dropout(x, training=self.training))
        return outputs if self.training else outputs.detach()


def with_nothing() -> nn.Module:
    model = nn.Linear(4, 3)
    model.nothing = nn.Parameter(torch.zeros(0, 3))
    return model


def frozen_head(part: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    model.get_parameter(f"2.{part}").requires_grad_(False)
    return model


class Broken(nn.Linear):
    """A model whose weights are no numbers."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        nn.init.constant_(self.weight, float("nan"))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(X, Y, strict=True))


class Frozen(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :3]


TENSORS = TensorDataset(torch.tensor(X), torch.tensor(Y))
WORDS = np.array(["benign", "malign", "benign"] * 4)
Call = Callable[[], object]

# What is called, and what the sentence says.
MISUSES: Mapping[str, tuple[Call, str]] = {
    # keys
    "an unknown key": (
        lambda: make(standardize=True),
        r"Federation: standardize is not known; did you mean standardis",
    ),
    "a key of the protocol": (
        lambda: make(learning_rate=0.1),
        r"Federation: learning_rate is a setting of the protocol, such as FedSGD\(learning_rate=\.\.\)",
    ),
    "a sparse matrix among arrays": (
        lambda: make(silos=[Silo("a", {"w": sparse.csr_matrix(X)}, Y)]),
        r"silo `a`: x\['w'\]: got a sparse matrix; give all its numbers, as \.toarray\(\)",
    ),
    "a model that writes to its rows": (
        lambda: make(model=InPlace()),
        r"the model changes its input in place, .*write x = x \* 2 in the place of x\.mul_\(2\)",
    ),
    "the same under baffle": (
        lambda: make(model=InPlace(), protocol=BAFFLE(loss="cross-entropy", k=4)),
        r"the model changes its input in place",
    ),
    "votes for outputs": (
        lambda: make(model=Votes()),
        r"outputs of floats, got torch\.int64; leave out argmax or round",
    ),
    "outputs without a gradient": (lambda: make(model=Detached()), r"expected outputs with a gradient, .*use baffle"),
    "a parameter without numbers": (
        lambda: make(model=with_nothing()),
        r"model: `nothing`: expected numbers, got shape \[0, 3\]; leave it out",
    ),
    "a wrapper around a model": (
        lambda: make(model=nn.DataParallel(nn.Linear(4, 3))),
        r"expected the module itself, not DataParallel around it; give \.module",
    ),
    "a head with a frozen bias under pbpfl": (
        lambda: make(model=frozen_head("bias"), protocol=PBPFL(loss="cross-entropy")).train(1),
        r"`2\.bias` is frozen, and PBPFL needs the gradient of the whole head, .*freeze layers below the head alone",
    ),
    "a head with a frozen weight under pbpfl": (
        lambda: make(model=frozen_head("weight"), protocol=PBPFL(loss="cross-entropy")).train(1),
        r"`2\.weight` is frozen",
    ),
    "a lazy layer": (
        lambda: make(model=nn.Sequential(nn.LazyLinear(2))),
        r"model: `0\.weight`: .*a lazy layer's has none",
    ),
    "a model to load that is a function": (
        lambda: moretta.load(".", model=lambda: nn.Linear(4, 2)),  # type: ignore[arg-type]
        r'model: expected a name or "module:function"; got a function',
    ),
    "true for a share": (lambda: make(participation=True), r"participation: expected a number, got true"),
    "a schema as a dictionary": (
        lambda: make(table={"target": "y"}),
        r"table: expected a schema, such as Schema\.load\(FILE\), or None; got a dict",
    ),
    "a key of train": (lambda: make(rounds=3), r"Federation: rounds is an argument of train: .*train\(rounds=\.\.\)"),
    "an unknown key of train": (
        lambda: make().train(3, sed=1),  # type: ignore[call-arg]
        r"Federation.train: sed is not known; did you mean seed",
    ),
    "a protocol's key for train": (
        lambda: make().train(3, momentum=0.9),  # type: ignore[call-arg]
        r"Federation.train: momentum is a setting of",
    ),
    "an unknown key of a silo": (lambda: Silo("a", X, Y, id=Y), r"Silo: id is not known; did you mean ids\?"),  # type: ignore[call-arg]
    "an unknown key of a protocol": (
        lambda: FedSGD(learning_rat=0.1),  # type: ignore[call-arg]
        r"FedSGD: learning_rat is not known; did you mean learning_rate\?",
    ),
    "another protocol's key": (
        lambda: FedSGD(local_epochs=2),  # type: ignore[call-arg]
        r"FedSGD: local_epochs is a keyword of .*FedProx, not of FedSGD; ",
    ),
    "an unknown key of the engine": (lambda: Engine(worker=2), r"Engine: worker is not known; did you mean workers\?"),  # type: ignore[call-arg]
    "an unknown key of load": (lambda: moretta.load(".", trust=True), r"load: trust is not known; known are folder, "),  # type: ignore[call-arg]
    "a loss without its key": (
        lambda: FedSGD("mse"),  # type: ignore[call-arg]
        r'^FedSGD takes its settings by keyword, for example FedSGD\(loss="mse"\)$',
    ),
    "a rate without its key": (lambda: PBPFL(0.1), r"^PBPFL takes .*by keyword, .*PBPFL\(learning_rate=0\.1\)$"),  # type: ignore[call-arg]
    "workers without their key": (lambda: Engine(2), r"^Engine takes .*by keyword, .*Engine\(workers=2\)$"),  # type: ignore[call-arg]
    "a scheme without its key": (
        lambda: SecureAggregation("pairwise"),  # type: ignore[call-arg]
        r'^SecureAggregation takes .*by keyword, .*SecureAggregation\(scheme="pairwise"\)$',
    ),
    "columns without their key": (
        lambda: Schema({"age": Number()}),  # type: ignore[call-arg]
        r"^Schema takes .*by keyword, .*Schema\(columns=\.\.\)$",
    ),
    "a number to load": (lambda: moretta.load(3), r"load: expected the path of a run folder; got an int"),  # type: ignore[arg-type]
    "nothing to load": (lambda: moretta.load(None), r"load: expected the path of a run folder; got a NoneType"),  # type: ignore[arg-type]
    # values
    "words for a number": (lambda: FedSGD(learning_rate="fast"), r"FedSGD: learning_rate: .*, got \"fast\""),
    "true for a number": (
        lambda: FedSGD(learning_rate=True),
        r"^FedSGD: learning_rate: expected a number, got true$",
    ),
    "true for a whole number": (
        lambda: Engine(workers=True),
        r"^Engine: workers: expected a whole number, got true$",
    ),
    "a comma for a point": (lambda: FedSGD(learning_rate="0,1"), r'learning_rate: expected a number, got "0,1"'),
    "workers in words": (lambda: Engine(workers="two"), r'Engine: workers: expected a whole number, got "two"'),
    "a word for masks": (
        lambda: make(aggregation="pairwise"),
        r"aggregation: expected .*SecureAggregation\(\.\.\).*a str",
    ),
    "a word for an engine": (
        lambda: make(engine="fast"),
        r"engine: expected settings, Engine\(\.\.\), or None; got a str",
    ),
    "a word for metrics": (lambda: make(metrics="auc"), r"metrics: expected a list of functions, .*got a str"),
    "a number for a folder": (lambda: make(out=3), r"out: expected the path of a folder, or None; got an int"),
    "a word for a callback": (lambda: make().train(1, on_round="print"), r'on_round = "print": expected a function'),  # type: ignore[arg-type]
    "a word for a display": (lambda: make().train(1, progress="yes"), r'progress = "yes": expected true, false or a'),  # type: ignore[arg-type]
    "views without a folder": (
        lambda: make(record_views=True),
        r"^record_views: views are recorded in the run's folder, and there is none; name one, .*out=FOLDER",
    ),
    "views of some rounds without a folder": (lambda: make(record_views=(1, 2)), r"^record_views: views are recorded"),
    "what ends a run for a callback": (
        lambda: make().train(1, on_round=moretta.StopTraining),
        r"^on_round: expected a function of what is told .*; got the class StopTraining$",
    ),
    "a class for a display": (lambda: make().train(1, progress=dict), r"progress: expected .*; got the class dict$"),  # type: ignore[arg-type]
    "a callback of nothing": (
        lambda: make().train(1, on_round=lambda: None),  # type: ignore[arg-type,misc]
        r"on_round: expected a function of .*, called as on_round\(finished_round\); got one that takes \(\)$",
    ),
    "a display of one thing": (
        lambda: make().train(1, progress=lambda line: None),  # type: ignore[arg-type,misc]
        r"progress: expected .*, called as progress\(round, rounds, line\); got one that takes \(line\)$",
    ),
    "a rate below zero": (lambda: PBPFL(learning_rate=-1), r"PBPFL: learning_rate: expected more than 0, got -1"),
    "a misspelt loss": (
        lambda: FedAvg(loss="crossentropy"),
        r'FedAvg: loss: expected "mse" or "cross-entropy", got "crossentropy"; did you mean "cross-entropy"\?',
    ),
    "too few directions": (lambda: BAFFLE(k=1), r"BAFFLE: k: "),
    "a misspelt scheme": (
        lambda: SecureAggregation(scheme="pairwse"),
        r'SecureAggregation: scheme: expected .*, got "pairwse"; did you mean "pairwise"\?',
    ),
    "a precision that there is not": (
        lambda: make(dtype="float16"),
        r'Federation: dtype: expected "float32" or "float64", got "float16"',
    ),
    "a device that there is not": (lambda: make(device="gpu"), r'Federation: device: expected "cpu", "cuda" or '),
    "a batch below zero": (lambda: make(batch_size=-1), r"Federation: batch_size: expected 0 or more, got -1"),
    "a fraction of a row": (lambda: make(batch_size=2.5), r"Federation: batch_size: .*2\.5"),
    "a misspelt treatment": (lambda: make(missing="men"), r'missing = "men" is unknown; did you mean "mean"\?'),
    "a treatment of tables": (lambda: make(missing="indicator"), r'missing = "indicator" is unknown; .*error, mean'),
    "no rounds": (lambda: make().train(0), r"rounds = 0: expected at least 1"),
    "rounds in words": (lambda: make().train("10"), r'rounds = "10": expected a whole number'),  # type: ignore[arg-type]
    "half a round": (lambda: make().train(2.5), r"rounds = 2\.5: expected a whole number"),  # type: ignore[arg-type]
    "a seed in words": (lambda: make().train(1, seed="x"), r'seed = "x": expected a whole number'),  # type: ignore[arg-type]
    "stopping after nothing": (
        lambda: make(early_stopping=0),
        r"Federation: early_stopping: expected 1 or more, got 0",
    ),
    "names in one word": (
        lambda: make(feature_names="age"),
        r"feature_names: expected a list of words, .*got a str",
    ),
    "a number for names of columns": (
        lambda: make(feature_names=5),
        r"feature_names: expected a list of words, such as",
    ),
    "nothing for what to standardise": (lambda: make(standardise=None), r"standardise: expected True, False or names"),
    "a number for what to standardise": (lambda: make(standardise=1), r"standardise: expected True, False or names"),
    "too few names": (lambda: make(feature_names=["age"]), r"feature_names: expected 4 names, .*`north`; got 1"),
    "a name twice": (lambda: make(feature_names=list("aabc")), r"feature_names: 'a' is there twice; give each column"),
    # models and protocols
    "a class for a model": (
        lambda: make(model=nn.Linear),
        r"expected a module, got the class Linear; call it: Linear\(",
    ),
    "a number for a model": (
        lambda: make(model=3),
        r"model: expected a torch\.nn\.Module, a built-in name .*got an int",
    ),
    "a misspelt model": (lambda: make(model="mpl"), r'"mpl" is neither built in nor .*did you mean "mlp"\?'),
    "a model's unknown key": (
        lambda: make(model={"source": "mlp", "hiden": [3]}),
        r'no argument "hiden"; did you mean "hidden"\?',
    ),
    "a model's argument that no file can have": (
        lambda: make(model={"source": "mlp", "hidden": np.array([3])}),
        r"model: hidden = .*: expected what a run file may have",
    ),
    "a model without parameters": (lambda: make(model=Frozen()), r"model: expected one with parameters to train"),
    "a model of no numbers": (lambda: make(model=Broken()), r"model: `weight`: expected finite numbers, got NaN"),
    "a model without numbers": (
        lambda: make(model=nn.Linear(4, 3, device="meta")),
        r"model: `weight`: expected numbers, got the meta device, which has none; build the model on the CPU",
    ),
    "a buffer without numbers": (
        lambda: make(model=nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False, device="meta"))),
        r"model: `1\.running_mean`: expected numbers, got the meta device",
    ),
    "a model of other rows": (lambda: make(model=nn.Linear(7, 3)), r"the model cannot take rows of shape \[4\]"),
    "a model that gives pairs": (
        lambda: make(model=nn.LSTM(4, 3)),
        r"expected a model with outputs of shape \[rows, out",
    ),
    "a protocol's name": (
        lambda: make(protocol="fedsgd"),
        r"protocol: expected the settings of a protocol \(fedsgd.*got a str",
    ),
    "a protocol's class": (
        lambda: make(protocol=FedSGD),
        r"protocol: expected settings, got the class FedSGD; .*FedSGD\(\)",
    ),
    # silos
    "one silo by itself": (lambda: make(silos=silos()[0]), r'silos: expected a list such as \[Silo\("north", x, y\)'),
    "pairs for silos": (lambda: make(silos=[(X, Y)]), r"silos: expected each to be a Silo\(name, x, y\); got a tuple"),
    "silos by name": (lambda: make(silos={"a": (X, Y)}), r"silos: expected a list such as .*; got a dict"),
    "no silos": (lambda: make(silos=[]), r"a federation needs at least one silo; got none"),
    "one name twice but for capitals": (
        lambda: make(silos=[*silos(), Silo("North", X, Y)]),
        r"silo `north`: another silo's name differs from it by capitals alone; give each its own name",
    ),
    "a key of another protocol": (
        lambda: FedAvg(mu=0.1),  # type: ignore[call-arg]
        r"FedAvg: mu is a keyword of (CGD and )?FedProx, not of FedAvg; remove it",
    ),
    "one name twice": (
        lambda: make(silos=[*silos(), Silo("north", X, Y)]),
        r"two silos are called `north`; give each",
    ),
    "an empty silo": (
        lambda: make(silos=silos(east=(X[:0], Y[:0]))),
        r"silo `east`: expected .*at least one; got 0 rows",
    ),
    "a number for a name": (lambda: make(silos=[Silo(3, X, Y)]), r"silo name 3: expected text, 1 to 64 letters"),  # type: ignore[arg-type]
    "unequal columns": (
        lambda: make(silos=silos(east=(X[:, :3], Y))),
        r"silo `east`: expected rows of shape \[4\], as",
    ),
    "fewer targets than rows": (lambda: make(silos=silos(east=(X, Y[:5]))), r"`east`: .*12 rows and 5 targets"),
    "no axis of columns": (
        lambda: make(silos=[Silo("a", X[:, 0], Y)]),
        r"silo `a`: x: expected \[rows, col.*x\[:, None\]",
    ),
    "a value that is not there": (
        lambda: make(silos=silos(east=(np.where(X > 2, X, np.nan), Y))),
        r'silo `east`: expected finite inputs, got NaN .*say missing = "mean"',
    ),
    "whole numbers for a model of numbers": (
        lambda: make(silos=[Silo("a", np.ones((5, 4), int), Y[:5])]),
        r"whole numbers are token ids, so give numbers as floats: x\.astype\(numpy\.float32\)",
    ),
    "rows of unequal length": (
        lambda: Silo("a", [[1.0, 2.0], [3.0]], [0, 1]),
        r"silo `a`: x: expected numbers, with as",
    ),
    "a sparse matrix": (
        lambda: Silo("a", sparse.csr_matrix(X), Y),
        r"^silo `a`: x: got a sparse matrix; give all its numbers, as x\.toarray\(\)$",
    ),
    "a masked array": (
        lambda: Silo("a", np.ma.masked_array(X, X > 1), Y),
        r"^silo `a`: x: got a masked array; say what stands for masked values, as x\.astype\(float\)\.filled\(nan\)$",
    ),
    "masked targets": (
        lambda: Silo("a", X, np.ma.masked_array(Y, Y > 1)),
        r"^silo `a`: y: got a masked array; leave out the rows whose target is masked$",
    ),
    "masked rows in a list": (
        lambda: Silo("a", [np.ma.masked_array(row, row > 1) for row in X], Y),
        r"^silo `a`: x: got masked arrays in a list; say what stands for masked values$",
    ),
    "masked rows in a list by name": (
        lambda: make(silos=[Silo("a", {"w": [np.ma.masked_array(row, row > 1) for row in X]}, Y)]),
        r"^silo `a`: x\['w'\]: got masked arrays in a list",
    ),
    "a masked array among arrays": (
        lambda: make(silos=[Silo("a", {"w": np.ma.masked_array(X, X > 1)}, Y)]),
        r"silo `a`: x\['w'\]: got a masked array",
    ),
    "too few groups": (
        lambda: Silo("a", X, Y, groups=np.array(["p1", "p2"])),
        r"^silo `a`: groups: expected 12 words or whole numbers, one a row; got 2 values of type <U2$",
    ),
    "one group": (lambda: Silo("a", X, Y, groups=np.array("p1")), r"groups: expected 12 words or .*; got an ndarray$"),
    "groups that are not there": (
        lambda: Silo("a", X, Y, groups=np.array([None] * 12)),
        r"groups: expected 12 words or whole",
    ),
    "too few ids": (
        lambda: Silo("a", X, Y, ids=np.array(["p1"])),
        r"^silo `a`: ids: expected 12 words or whole numbers",
    ),
    "an unknown task": (
        lambda: make(task="clasification"),
        r'task = "clasification" is unknown; did you mean "classif',
    ),
    "too few names of classes": (
        lambda: make(class_names=["no", "yes"]),
        r"class_names: expected 3 different names, one for each class; got 'no' and 'yes'",
    ),
    "a class twice": (lambda: make(class_names=["a", "a", "b"]), r"class_names: expected 3 different names"),
    "a number for names of classes": (lambda: make(class_names=5), r"class_names: expected a list of words, such as"),
    "a sparse test set": (lambda: make(test=(sparse.coo_array(X), Y)), r"^test: x: got a sparse matrix; give"),
    "complex numbers": (lambda: Silo("a", X + 1j, Y), r"^silo `a`: x holds complex numbers; give real and imaginary"),
    "no inputs": (lambda: Silo("a", None, Y), r"^silo `a`: x is missing; give numbers; for a table .*read_table"),
    "columns by name for a layer": (
        lambda: make(model=nn.Linear(2, 3), silos=[Silo("a", {"age": X[:, 0], "bmi": X[:, 1]}, Y)]),
        r"cannot take the arrays age .*; columns of a table are one array as a DataFrame, or by moretta\.read_table",
    ),
    "columns by name for a Sequential": (
        lambda: make(model=nn.Sequential(nn.Linear(2, 3)), silos=[Silo("a", {"age": X[:, 0], "bmi": X[:, 1]}, Y)]),
        r"give a module whose forward takes age, bmi by keyword; columns of a table are one array as a DataFrame",
    ),
    "columns by name for a built-in model": (
        lambda: make(model="mlp", silos=[Silo("a", {"age": X[:, 0], "bmi": X[:, 1]}, Y)]),
        r'model "mlp" takes one array, .*; columns of a table are one array as a DataFrame',
    ),
    "words by name": (
        lambda: Silo("a", {"age": X[:, 0], "ward": WORDS}, Y),
        r"array `ward`: expected numbers .*; columns of a table are one array as a DataFrame, or by moretta\.read_tab",
    ),
    "words for inputs": (
        lambda: Silo("a", WORDS[:, None], Y),
        r"silo `a`: x holds words or objects.*moretta\.read_tab",
    ),
    "words for labels": (lambda: Silo("a", X, WORDS), r"silo `a`: y holds words .*numbered from 0.*numpy\.unique"),
    "no labels": (lambda: Silo("a", X), r"silo `a`: y is missing; give a target for each row"),
    "a Dataset and labels": (lambda: Silo("a", TENSORS, Y), r"silo `a`: a Dataset has its targets; leave out y"),
    "a DataLoader": (
        lambda: Silo("a", DataLoader(TENSORS)),
        r"silo `a`: got a DataLoader; give its dataset, as the prot",
    ),
    "a Dataset without an end": (
        lambda: Silo("a", Stream()),
        r"silo `a`: got a Stream, whose rows have no number; give",
    ),
    "an empty Dataset": (lambda: Silo("a", Pairs([])), r"silo `a`: the Dataset is empty; expected at least one sample"),
    "a Dataset of triples": (
        lambda: Silo("a", Pairs([(X[0], 1, 2)])),
        r"silo `a`: expected a Dataset that gives pairs",
    ),
    "a Dataset of unequal samples": (
        lambda: Silo("a", Pairs([(X[0], 1), (X[0, :2], 1)])),
        r"silo `a`: the Dataset's samples have different shapes; make them alike",
    ),
    # targets and the loss
    "a class too many": (
        lambda: make(silos=silos(east=(X, Y + 1))).train(1),
        r"`east`: expected classes 0 to 2 .*got 1",
    ),
    "numbers under cross-entropy": (
        lambda: make(silos=[Silo(n, X, Y + 0.5) for n in "ab"]).train(1),
        r'loss = "cross-entropy" needs classes as whole numbers.*y\.astype\(int\).*loss = "mse"',
    ),
    "two columns of classes": (
        lambda: make(silos=[Silo(n, X, np.stack([Y, Y], 1)) for n in "ab"]).train(1),
        r"silo `a`: expected one class a row, got targets of shape \[12, 2\]",
    ),
    "one output under cross-entropy": (
        lambda: make(model=nn.Linear(4, 1), silos=[Silo(n, X, Y % 2) for n in "ab"]).train(1),
        r'"cross-entropy" needs an output a class; the model has one: use loss = "mse"',
    ),
    "weights of other classes": (
        lambda: make(protocol=FedSGD(loss="cross-entropy", class_weights=(1.0, 2.0))),
        r"class-weights: expected 3, one an output of the model, got 2",
    ),
    # rows of the server
    "a test set of another width": (lambda: make(test=(X[:, :2], Y)), r"test: .*of shape \[4\] as the silos have; got"),
    "a test set without targets": (
        lambda: make(test=X),
        r"test: expected inputs and targets, \(x, y\), or a Dataset; g",
    ),
    "words in the test set": (lambda: make(test=(X, WORDS)), r"test: y holds words or objects"),
    "nothing to judge by": (lambda: make(early_stopping=3), r"early_stopping needs rows to judge by; give validation="),
    "half of what noise needs": (lambda: FedSGD(dp_noise=1.0), r"dp-noise is given and dp-clip is not; .*give both"),
    "masks for one silo": (lambda: make(silos=silos()[:1]).train(1), r'one silo needs scheme = "none"'),
    # tables
    "a table without a column": (
        lambda: read_table({"agee": [1.0]}, AGES, labelled=False),
        r"the table: expected a column 'age', as the schema has it.*did you mean \"agee\"\?",
    ),
    "columns of unequal length": (
        lambda: read_table({"age": [1.0], "bmi": [1.0, 2.0]}, AGES, labelled=False),
        r"the table: expected columns of equal length",
    ),
    "a table without a schema": (
        lambda: read_table({"age": [1.0]}, None, labelled=False),  # type: ignore[arg-type]
        r"read_table: schema: expected a Schema, such as Schema\(columns=.*got a NoneType",
    ),
    "a mapping for a schema": (
        lambda: read_table({"age": [1.0]}, {"age": "number"}, labelled=False),  # type: ignore[arg-type]
        r"read_table: schema: expected a Schema, such as Schema\(columns=.*got a dict",
    ),
    "a schema without a table": (
        lambda: read_table(None, AGES),
        r"read_table: expected the path of a file, a frame or a mapping of columns; got a NoneType",
    ),
    "a mark of blanks that there is not": (lambda: Number(blanks="men"), r'Number: blanks: expected .*got "men"; did'),
}
AGES: Schema = Schema(columns={"age": Number()})


@pytest.mark.parametrize(("misuse", "said"), MISUSES.values(), ids=MISUSES.keys())
def test_a_misuse_is_refused_in_one_sentence(misuse: Call, said: str) -> None:
    with pytest.raises(MorettaError, match=said) as caught:
        misuse()
    sentence = str(caught.value)
    assert len(sentence.splitlines()) == 1
    assert len(sentence) < 420
    assert "benign" not in sentence  # no cell is told


# -- Models that were trained ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    folder = tmp_path_factory.mktemp("misuse") / "run"
    made = make(model={"source": "mlp", "hidden": [3]}, feature_names=["a", "b", "c", "d"], out=folder)
    return made.train(1), folder


PREDICTIONS: Mapping[str, tuple[Any, str]] = {
    "another width": (X[:, :3], r"x: expected rows of shape \[4\], got 12 of \[3\]"),
    "one row without its axis": (X[0], r"x: expected samples of shape \[rows, columns or more\], got \[4\]"),
    "no rows": (X[:0], r"x: expected rows of shape \[4\], got 0 of \[4\]"),
    "words": (WORDS[:, None], r"x: x holds words or objects, and expected are numbers"),
    "a value that is not there": (np.full((2, 4), np.nan), r"x: column 'a' has 2 rows that are NaN or infinite"),
    "a sparse matrix": (sparse.csr_matrix(X), r"x: got a sparse matrix; give all its numbers, as x\.toarray\(\)"),
    "a masked array": (np.ma.masked_array(X, X > 1), r"x: got a masked array; say what stands for masked values"),
    "a Dataset": (TENSORS, r"x: got a Dataset; give its samples alone, as an array"),
    "other columns": (
        {"a": [1.0], "b": [1.0], "c": [2.0]},
        r"x: expected a column 'd', as the run has; it has a, b, c",
    ),
}


@pytest.mark.parametrize(("rows", "said"), PREDICTIONS.values(), ids=PREDICTIONS.keys())
def test_rows_that_cannot_be_predicted(run: tuple[Result, Path], rows: Any, said: str) -> None:
    with pytest.raises(ParameterError, match=said) as caught:
        run[0].predict(rows)
    assert len(str(caught.value).splitlines()) == 1


def no_run(folder: Path) -> None:
    for file in folder.iterdir():
        if file.is_file():
            file.unlink()


def cut_weights(folder: Path) -> None:
    path = folder / "released.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def weights_of_16_bits(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "released.safetensors"
    save_file({name: value.bfloat16() for name, value in load_file(path).items()}, path)


def other_weights(folder: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"0.weight": np.zeros((2, 2), np.float32)}, folder / "released.safetensors")


def torn_json(folder: Path) -> None:
    (folder / "inputs.json").write_text('{"format": 1, "shape"')


def less_json(folder: Path) -> None:
    told = json.loads((folder / "inputs.json").read_text())
    (folder / "inputs.json").write_text(json.dumps({"format": 1, "shape": told["shape"]}))


def strange_dtype(folder: Path) -> None:
    told = json.loads((folder / "inputs.json").read_text())
    (folder / "inputs.json").write_text(json.dumps(told | {"dtype": "object"}))


def test_a_saved_folder_names_no_path_of_this_machine(run: tuple[Result, Path], tmp_path: Path) -> None:
    for folder in (run[1], run[0].save(tmp_path / "saved")):
        made = json.loads((folder / "model.json").read_text())
        assert made["base"] == "."


def vast_model(folder: Path) -> None:
    made = {"format": 1, "source": "mlp", "arguments": {"hidden": [10**7, 10**7]}, "base": "."}
    (folder / "model.json").write_text(json.dumps(made))
    (folder / "graph.safetensors").unlink(missing_ok=True)


def deep_json(folder: Path) -> None:
    (folder / "inputs.json").write_text('{"format": 1, "shape": ' + "[" * 100_000)


def deep_model(folder: Path) -> None:
    made = {"format": 1, "source": "mlp", "arguments": {"layers": 10**12}, "base": "."}
    (folder / "model.json").write_text(json.dumps(made))


def strange_record(folder: Path) -> None:
    (folder / "result.json").write_text(json.dumps({"format": 1, "models": ["released.safetensors"]}))


def pipe_for_weights(folder: Path) -> None:
    (folder / "released.safetensors").unlink()
    os.mkfifo(folder / "released.safetensors")


def link_for_weights(folder: Path) -> None:
    weights = (folder / "released.safetensors").rename(folder / "elsewhere")
    (folder / "released.safetensors").symlink_to(weights)


def code(folder: Path) -> None:
    told = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps(told | {"source": "os:system", "arguments": {"command": "true"}}))


TAMPERED: Mapping[str, tuple[Callable[[Path], None], str]] = {
    "no run": (no_run, r"inputs\.json: expected a file of a finished run"),
    "weights that were cut": (cut_weights, r"released\.safetensors: expected a model of a finished run"),
    "weights in a dtype that NumPy has not": (weights_of_16_bits, r"NumPy has no BF16"),
    "weights of another model": (other_weights, r"expected arrays for the 4 tensors of the model"),
    "a file that was torn": (torn_json, r"inputs\.json: expected a file of a finished run"),
    "a file with less": (less_json, r"inputs\.json or model\.json is not as a run leaves it"),
    "a type that there is not": (strange_dtype, r"inputs\.json or model\.json is not as a run leaves it"),
    "a model of any size": (vast_model, r"what it says of its model does not fit the weights beside it"),
    "a file without end to its lists": (deep_json, r"inputs\.json: expected a file of a finished run"),
    "a model of any depth": (deep_model, r"model: layers must be 10,000 at most, got 1000000000000"),
    "a record without digests": (strange_record, r"result\.json: expected the models' SHA-256 by file"),
    "a pipe for weights": (pipe_for_weights, r"released\.safetensors: expected a model of a finished run"),
    "a link for weights": (
        link_for_weights,
        r"released\.safetensors: expected a model of a finished run; it is a link",
    ),
    "code in the place of a model": (code, r"names code that would be run as you: system of os .*allow_code=True"),
}


@pytest.mark.parametrize(("tamper", "said"), TAMPERED.values(), ids=TAMPERED.keys())
def test_folders_that_cannot_be_loaded(
    run: tuple[Result, Path], tamper: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    saved = run[0].save(tmp_path / "saved")
    tamper(saved)
    with pytest.raises(ParameterError, match=said) as caught:
        moretta.load(saved)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.filterwarnings("ignore")  # PyTorch's own of what it deprecates, and yet people have such models
@pytest.mark.parametrize("by", [torch.jit.script, torch.compile])
@pytest.mark.parametrize("protocol", [PBPFL(loss="cross-entropy"), BAFFLE(loss="cross-entropy", k=4)])
def test_layers_that_cannot_be_looked_into(by: Any, protocol: Any) -> None:
    for model, where in (
        (by(nn.Linear(4, 3)), "^model"),
        (nn.Sequential(by(nn.Linear(4, 4)), nn.Linear(4, 3)), "^`0`"),
    ):
        before = rf"{where}: expected a module of Python's, .* as it was before torch\.(jit|compile)"
        with pytest.raises(ParameterError, match=before):
            make(model=model, protocol=protocol).train(1)
        make(model=model).train(1)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_layer_may_write_to_its_input() -> None:
    layers = nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 3))
    assert make(model=torch.jit.script(layers)).train(1).history


def test_a_gradient_that_is_there_in_training_is_enough() -> None:
    with torch.no_grad():
        federations = make(model=FollowedInTraining()), make(model=nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)))
    for federation in federations:
        before = torch.get_rng_state()
        assert count_outputs(federation.model, federation.silos, None, torch.float32) == 3
        assert (torch.get_rng_state() == before).all()
        assert federation.train(1).history


def test_a_layer_may_write_to_its_input_where_its_own_models_are_compared() -> None:
    """Each silo's model was tested on the rows that the one before had changed."""
    first = nn.Hardswish(inplace=True), nn.Hardswish()
    found = []
    for layer in first:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(layer, nn.Linear(4, 3))
        x = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
        result = make(model=model, protocol=Local(loss="cross-entropy"), test=(x, np.arange(9) % 3)).train(2)
        found.append(result.test["per_silo"])
    assert found[0] == found[1]


def test_a_loaded_model_is_called_with_tensors(run: tuple[Result, Path], tmp_path: Path) -> None:
    loaded = moretta.load(run[0].save(tmp_path / "saved"))
    with pytest.raises(ParameterError, match=r"expected a tensor; got an ndarray: give it to predict or predict_proba"):
        loaded(np.zeros((2, 4), np.float32))


def test_views_past_the_last_round(tmp_path: Path) -> None:
    recorded = make(out=tmp_path / "run", record_views=(7, 9))
    with pytest.raises(ParameterError, match="from round 7 on, and this run has 5; name rounds from 1 to 5"):
        recorded.train(5)
    assert not (tmp_path / "run").exists()


def test_a_run_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(
        ParameterError, match=r"file/run cannot be made: Not a directory; expected a folder that may be"
    ):
        make(out=tmp_path / "file" / "run").train(1)


CLASSES = np.array([0, 1, 2, 1])
ONE_HOT = np.eye(3, dtype=np.float32)[CLASSES]
SOFT_LABELS = 0.8 * ONE_HOT + 0.1 / 1.5


@pytest.mark.parametrize(
    ("loss", "first", "second", "task"),
    [
        ("cross-entropy", SOFT_LABELS, CLASSES, "classification"),
        ("cross-entropy", CLASSES, SOFT_LABELS, "classification"),
        ("cross-entropy", SOFT_LABELS, SOFT_LABELS, "classification"),
        ("mse", CLASSES, ONE_HOT, "classification"),
        ("mse", ONE_HOT, ONE_HOT, "classification"),
        ("mse", SOFT_LABELS, SOFT_LABELS, "regression"),
    ],
)
def test_the_task_is_that_of_all_silos(loss: Any, first: Any, second: Any, task: str) -> None:
    x = np.random.default_rng(0).normal(size=(4, 4))
    federation = make(silos=[Silo("a", x, first), Silo("b", x, second)], protocol=FedSGD(loss=loss))
    assert federation.spec.task == task


def test_classes_here_and_numbers_there() -> None:
    x = np.zeros((4, 4))
    mixed = [Silo("a", x, SOFT_LABELS), Silo("b", x, CLASSES)]
    for silos_in_order in (mixed, mixed[::-1]):
        with pytest.raises(ParameterError, match=r"of silo `b` are classes and those of `a` are numbers; .* task = "):
            make(silos=silos_in_order, protocol=FedSGD(loss="mse"))
    make(silos=mixed, protocol=FedSGD(loss="mse"), task="classification")


def test_names_of_classes_as_numpy_gives_them() -> None:
    names, _ = np.unique(["no", "yes", "perhaps"], return_inverse=True)
    assert list(make(class_names=names).class_names) == ["no", "perhaps", "yes"]


def test_other_folders(run: tuple[Result, Path], tmp_path: Path) -> None:
    result, folder = run
    with pytest.raises(ParameterError, match="there is no such directory"):
        moretta.load(tmp_path / "nowhere")
    with pytest.raises(ParameterError, match="exists and is not empty; name another folder to save to"):
        result.save(folder)
    with pytest.raises(ParameterError, match="save: the run has no folder of its own; name one"):
        make().train(1).save()
    numbers = make(model=nn.Linear(4, 1), silos=[Silo(n, X, X[:, 0]) for n in "ab"], protocol=FedSGD()).train(1)
    with pytest.raises(ParameterError, match="predict_proba is for classes, and this model predicts numbers"):
        numbers.predict_proba(X)
    with pytest.raises(ParameterError, match="expected a model of silo `north`; it has one model for all"):
        moretta.load(folder, silo="north")


CALLS: Mapping[str, tuple[Callable[[Result], object], str]] = {
    "an unknown key of predict": (
        lambda run: run.predict(X, sil="a"),  # type: ignore[call-arg]
        r"^Result\.predict: sil is not known; did you mean silo\?$",
    ),
    "a key that predict has not": (
        lambda run: run.predict(X, threshold=0.5),  # type: ignore[call-arg]
        r"^Result\.predict: threshold is not known; known are x, silo, true_model$",
    ),
    "an unknown key of predict_proba": (
        lambda run: run.predict_proba(X, true=True),  # type: ignore[call-arg]
        r"^Result\.predict_proba: true is not known; ",
    ),
    "an unknown key of raw_model": (
        lambda run: run.raw_model(true_mode=True),  # type: ignore[call-arg]
        r"^Result\.raw_model: true_mode is not known; did you mean true_model\?$",
    ),
    "a key of a loaded model": (
        lambda run: run.raw_model().predict(X, silo="a"),  # type: ignore[call-arg]
        r"^TrainedModel\.predict: silo is not known; known are x$",
    ),
    "an unknown key of save": (
        lambda run: run.save(path="x"),  # type: ignore[call-arg]
        r"^Result\.save: path is not known; known are folder$",
    ),
    "an unknown key of report": (
        lambda run: run.report(pth="x"),  # type: ignore[call-arg]
        r"^Result\.report: pth is not known; did you mean path\?$",
    ),
    "an unknown key of audit": (
        lambda run: run.audit(attacks=["lemma-six"]),  # type: ignore[call-arg]
        r"^Result\.audit: attacks is not known; known are thorough, background, progress$",
    ),
    "a number to save to": (lambda run: run.save(3), r"save: expected the path of a new folder, or None; got an int"),  # type: ignore[arg-type]
    "a number for a page": (lambda run: run.report(3), r"report: expected the path of the page to write; got an int"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("misuse", "said"), CALLS.values(), ids=CALLS.keys())
def test_a_misuse_of_a_result_is_refused(
    run: tuple[Result, Path], misuse: Callable[[Result], object], said: str
) -> None:
    with pytest.raises(ParameterError, match=said) as caught:
        misuse(run[0])
    assert len(str(caught.value).splitlines()) == 1


def test_errors_name_keywords_and_no_options_of_the_shell(run: tuple[Result, Path], tmp_path: Path) -> None:
    mlp: Any = {"source": "mlp", "hidden": [3]}
    with pytest.raises(ParameterError, match=r"go on .* by resume=True, or name another folder by out=\.\.$"):
        make(model=mlp, out=run[1]).train(1)
    with pytest.raises(
        ParameterError, match=r"resume with those it was begun with, or name another folder by out=\.\.$"
    ):
        make(model=mlp, out=run[1], batch_size=3).train(2, resume=True)
    with pytest.raises(ParameterError, match=r"start without resume=True, in an empty folder$"):
        make(model=mlp, out=tmp_path / "--out").train(2, resume=True)
    make(out=tmp_path / "own").train(1)
    with pytest.raises(ParameterError, match=r'name that by model="module:function" \(or a built-in name\), or write'):
        moretta.load(tmp_path / "own")
    alone = make(protocol=moretta.Local(loss="cross-entropy"), model=mlp, out=tmp_path / "local").train(1)
    assert alone.folder is not None
    with pytest.raises(ParameterError, match=r"each silo has its own, name one by silo=\.\. \(north, south\)"):
        moretta.load(alone.folder)


# -- What is taken -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        (X.tolist(), Y.tolist()), (torch.tensor(X), torch.tensor(Y)), (X.astype(np.float64), Y.astype(np.int8)),
        (TENSORS, None), (Pairs([(row, int(target)) for row, target in zip(X, Y, strict=True)]), None),
    ],
    ids=["lists", "tensors", "arrays of other types", "a TensorDataset", "a Dataset"],
)  # fmt: skip
def test_rows_in_another_form_are_the_same_rows(given: tuple[Any, Any]) -> None:
    silo = Silo("a", *given) if given[1] is not None else Silo("a", given[0])
    assert isinstance(silo.x, np.ndarray)
    assert (silo.x.astype(np.float32) == X).all()
    assert (silo.y == Y).all()
    federation = make(silos=[silo, Silo("b", X, Y)], test=given if given[1] is not None else given[0])
    assert federation.test is not None
    assert (federation.test[0].astype(np.float32) == X).all()


def test_frames_agree_on_the_order_of_columns() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=["a", "b", "c", "d"])
    frame["d"] = pandas.array((X[:, 3] > 0), dtype="boolean")
    turned, y = frame[["c", "a", "d", "b"]], pandas.Series(Y)
    made = make(silos=[Silo("a", frame, y), Silo("b", turned, y)], test=(turned, y))
    assert made.feature_names == ("a", "b", "c", "d")
    assert made.test is not None
    assert (made.silos[0].x == made.silos[1].x).all()
    assert (made.test[0] == made.silos[0].x).all()
    result = made.train(2)
    assert (result.predict(turned) == result.predict(made.silos[0].x)).all()
    with pytest.raises(ParameterError, match=r"silo `b` lacks the column 'd' \(its 'dd'\?\), which `a` has; give all"):
        make(silos=[Silo("a", frame, y), Silo("b", turned.rename(columns={"d": "dd"}), y)])
    with pytest.raises(ParameterError, match=r"silo `b` has rows without names of columns, and `a` has a frame"):
        make(silos=[Silo("a", frame, y), Silo("b", X, Y)])
    with pytest.raises(ParameterError, match=r"silo `a`: column 'ward' holds words, .*moretta.read_table\(frame, sch"):
        Silo("a", frame.assign(ward="A"), y)
    with pytest.raises(ParameterError, match=r"x: expected a column 'c', as the run has; it has a, b, d"):
        result.predict(frame.drop(columns="c"))
    twice = pandas.concat([frame, frame[["a"]]], axis=1)
    with pytest.raises(ParameterError, match=r"silo `a`: column 'a' is there twice; give each its own name"):
        Silo("a", twice, y)
    absent = Silo("a", frame.assign(a=pandas.array([None, *X[1:, 0]], dtype="Float64")), y)
    assert np.isnan(absent.x[0, 0])


def test_targets_in_another_order_than_their_rows_are_refused() -> None:
    pandas = pytest.importorskip("pandas")
    frame, y = pandas.DataFrame(X, columns=list("abcd")), pandas.Series(Y)
    kept = frame["a"] > 0
    assert (Silo("a", frame[kept], y[kept]).y == Y[kept.to_numpy()]).all()
    with pytest.raises(ParameterError, match=r"silo `a`: the indices of x and y differ, .*give y\.to_numpy\(\)"):
        Silo("a", frame, y[::-1])
    with pytest.raises(ParameterError, match=r"test: the indices of x and y differ"):
        make(silos=[Silo("a", frame, y), Silo("b", frame, y)], test=(frame, y[::-1]))


def test_complex_numbers_of_a_frame_are_refused() -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.raises(ParameterError, match=r"silo `a`: column 'a' holds complex numbers"):
        Silo("a", pandas.DataFrame({"a": X[:, 0] * 1j}), Y)


def test_a_callback_may_be_wrapped_by_what_takes_more() -> None:
    def told(line: Mapping[str, Any]) -> None:
        lines.append(line)

    @functools.wraps(told)
    def adapted(number: int, of: int, line: Mapping[str, Any]) -> None:
        told(line)

    lines: list[Mapping[str, Any]] = []
    make().train(1, progress=adapted)
    assert lines
