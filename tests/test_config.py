"""The run file: what it accepts, the sentence each mistake earns, and that writing it down loses nothing."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from moretta.config import run_files
from moretta.data.references import OWN_CODE
from moretta.errors import ParameterError
from moretta.protocols.baffle.params import BAFFLE
from moretta.protocols.cgd.params import CGD
from moretta.protocols.common.training import Training
from moretta.protocols.fedsgd.params import FedAvg, FedSGD
from moretta.protocols.pbpfl.params import PBPFL

DESIGN = """
[run]
name = "wdbc"
rounds = 300
seed = 7

[data]
source = "wdbc"
silos = 3
partition = "iid"
batch-size = 32

[model]
source = "mlp"
hidden = [32, 32]

[protocol]
name = "pbpfl"
loss = "mse"
learning-rate = 0.1

[secure-aggregation]
scheme = "pairwise"
ring-bits = 64

[engine]
name = "in-process"
"""

SMALL = """
[run]
rounds = 1
[data]
source = "rows.csv"
[model]
source = "mlp"
[protocol]
name = "fedsgd"
"""

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "small.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def sentence(path: Path, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(ParameterError) as caught:
        run_files.load(path, overrides)
    text = str(caught.value)
    assert "\n" not in text
    assert "pydantic" not in text
    return text


# What loads.


def test_the_example_of_the_design_loads(write: Write, tmp_path: Path) -> None:
    run_file = run_files.load(write(DESIGN))
    assert run_file == run_files.RunFile(
        run=run_files.Run(name="wdbc", rounds=300, seed=7),
        data=run_files.Data(source="wdbc"),
        model=run_files.Model(source="mlp", arguments={"hidden": [32, 32]}),
        protocol=PBPFL(),
        base=tmp_path,
        agreed=OWN_CODE,
    )


def test_defaults(write: Write, tmp_path: Path) -> None:
    run_file = run_files.load(write(SMALL))
    assert run_file.run.name == "small"
    assert run_file.run.dtype == "float32"
    assert run_file.run.checkpoint_every == 10
    assert run_file.run.record_views is False
    assert run_file.run.out is None
    assert run_file.data.silos == 3
    assert run_file.data.standardise is None
    assert run_file.protocol == FedSGD()
    assert run_file.secure_aggregation.scheme == "pairwise"
    assert run_file.resolve(run_file.data.source) == tmp_path / "rows.csv"


@pytest.mark.parametrize(("scheme", "least"), [("pairwise", 2), ("additive-shares", 2), ("none", 1)])
def test_the_fewest_survivors_follow_the_scheme(scheme: str, least: int) -> None:
    assert run_files.SecureAggregation.model_validate({"scheme": scheme}).least == least
    assert run_files.SecureAggregation.model_validate({"scheme": scheme, "min-survivors": 3}).least == 3


@pytest.mark.parametrize(("bits", "limit"), [(64, 2.0**16), (32, 2.0**4)])
def test_the_limit_follows_the_ring(bits: int, limit: float) -> None:
    assert run_files.SecureAggregation.model_validate({"ring-bits": bits}).largest == limit
    assert run_files.SecureAggregation.model_validate({"ring-bits": bits, "limit": 3}).largest == 3


def test_every_key_has_a_value_that_loads(write: Write) -> None:
    run_file = run_files.load(
        write("""
        [run]
        name = "all keys"
        rounds = 20
        seed = 9223372036854775807
        out = "runs/all"
        base = "elsewhere"
        dtype = "float64"
        device = "cuda:1"
        checkpoint-every = 5
        evaluate-every = 2
        record-views = [3, 1, 3]
        insecure-secret-seed = 4
        [data]
        source = "mine:rows"
        silos = 4
        partition = "dirichlet"
        alpha = 1
        batch-size = 0
        path = "cache"
        target = "diagnosis"
        task = "classification"
        test-fraction = 0.1
        validation-fraction = 0.1
        encoding = "ordinal"
        missing = "indicator"
        domains = ["plain", "recoloured"]
        image-size = 32
        standardise = true
        [model]
        source = "mine:net"
        kernel-size = 3
        shape = [[1, 2], [3]]
        act = "relu"
        bias = false
        [protocol]
        name = "fedavg"
        loss = "cross-entropy"
        learning-rate = 1
        momentum = 0.9
        weight-decay = 1e-4
        local-epochs = 2
        [secure-aggregation]
        scheme = "pairwise"
        ring-bits = 32
        limit = 8
        threshold = 3
        degree = 2
        corrupt-rate = 0
        dropout-rate = 0.3
        min-survivors = 3
        weights = "public"
        roster = "roster.toml"
        identity = "keys/{silo}"
        [engine]
        strict = true
        deadline = 30
        """)
    )
    assert run_file.run.record_views == (1, 3)
    assert run_file.run.out == Path("runs/all")
    assert run_file.base.name == "elsewhere"
    assert (run_file.data.domains, run_file.data.image_size) == (("plain", "recoloured"), 32)
    assert run_file.model.arguments == {"kernel_size": 3, "shape": [[1, 2], [3]], "act": "relu", "bias": False}
    assert isinstance(run_file.protocol, FedAvg)
    assert run_file.protocol.local_epochs == 2
    assert run_file.secure_aggregation == run_files.SecureAggregation(
        ring_bits=32,
        limit=8,
        threshold=3,
        degree=2,
        corrupt_rate=0,
        dropout_rate=0.3,
        min_survivors=3,
        weights="public",
        roster=Path("roster.toml"),
        identity="keys/{silo}",
    )
    assert run_file.engine.deadline == 30.0


def test_local_training_needs_no_second_silo(write: Write) -> None:
    for name in ("local", "centralised"):
        assert run_files.load(write(SMALL), ["data.silos=1", f"protocol.name={name}"]).data.silos == 1
    assert run_files.load(write(SMALL), ["data.silos=1", "secure-aggregation.scheme=none"]).data.silos == 1


@pytest.mark.parametrize(
    ("toml", "delta"),
    [
        ("0.25", 0.25),
        ("1", 1.0),
        ("[0.01, 0.1]", (0.01, 0.1)),
        ("[0.1, 0.1]", (0.1, 0.1)),
        ("{silo-1 = 0.1, silo-2 = 2}", {"silo-1": 0.1, "silo-2": 2.0}),
    ],
)
def test_delta_is_a_number_a_range_or_one_a_participant(write: Write, toml: str, delta: object) -> None:
    run_file = run_files.load(write(SMALL), [*CGD_RUN, f"protocol.delta={toml}"])
    assert isinstance(run_file.protocol, CGD)
    assert run_file.protocol.delta == delta
    assert run_files.load(write(run_files.dump(run_file))) == run_file


def test_cgd_has_the_papers_defaults(write: Write) -> None:
    given = run_files.load(write(SMALL), CGD_RUN).protocol
    assert given == CGD(loss="cross-entropy", learning_rate=0.5, delta=0.01, around="zero", vertical="joint")
    assert (given.schedule, given.mu, given.decay_from, given.blind) == ("constant", 0.0, 0, None)


def test_every_key_of_cgd_has_a_value_that_loads(write: Write) -> None:
    values = ["delta=0.5", "around=model", "vertical=independent", "schedule=inverse-square", "mu=0.5", "decay-from=7",
              "blind=false", "loss=mse", "learning-rate=2", "warm-start=start.pt"]  # fmt: skip
    for engine in ("in-process", "fused", "exact-ring"):
        overrides = [*CGD_RUN, *(f"protocol.{value}" for value in values), f"engine.name={engine}"]
        run_file = run_files.load(write(SMALL), overrides)
        assert run_file.engine.name == engine
        assert run_file.protocol == CGD(
            delta=0.5, around="model", vertical="independent", schedule="inverse-square", mu=0.5, decay_from=7,
            blind=False, loss="mse", learning_rate=2.0, warm_start=Path("start.pt"),
        )  # fmt: skip
        assert run_files.load(write(run_files.dump(run_file))) == run_file


def test_baffle_has_its_own_defaults(write: Write) -> None:
    given = run_files.load(write(SMALL), BAFFLE_RUN).protocol
    assert given == BAFFLE(optimizer="adam", learning_rate=0.003, k=100, sigma=1e-3, form="mean", ema=0.995)
    assert (given.direction, given.orthogonal, given.trainable) == ("rademacher", False, ())
    assert (given.k_last, given.seed_pool, given.local_epochs, given.privacy) == (None, None, None, None)


def test_every_key_of_baffle_has_a_value_that_loads(write: Write) -> None:
    shared = ["k=64", "k-last=16384", "sigma=0.01", "form=base", "ema=0.5", "trainable=['2', '0.bias', 'conv*']",
              "learning-rate=0.5", "loss=cross-entropy", "label-smoothing=0.1"]  # fmt: skip
    alike: dict[str, Any] = {
        "k": 64, "k_last": 16384, "sigma": 0.01, "form": "base", "ema": 0.5, "trainable": ("2", "0.bias", "conv*"),
        "learning_rate": 0.5, "loss": "cross-entropy", "label_smoothing": 0.1,
    }  # fmt: skip
    rows: list[tuple[list[str], dict[str, Any]]] = [
        (["orthogonal=true", "directions=own"], {"orthogonal": True, "directions": "own"}),
        (["ema-each=epoch", "epoch-rounds=3", "clip-entry=0.3", "first-rate=0.02", "betas=[0.9, 0.99]"],
         {"ema_each": "epoch", "epoch_rounds": 3, "clip_entry": 0.3, "first_rate": 0.02, "betas": (0.9, 0.99)}),
        (["lr-schedule=milestones", "milestones=[60, 120]", "milestone-factor=0.2"],
         {"lr_schedule": "milestones", "milestones": (60, 120), "milestone_factor": 0.2}),
        (["batch-statistics=true"], {"batch_statistics": True}),
        (["direction=gaussian", "seed-pool=16384"], {"direction": "gaussian", "seed_pool": 16384}),
        (["local-epochs=2", "optimizer=sgd"], {"local_epochs": 2, "optimizer": "sgd"}),
        (["dp-noise=0.5", "dp-clip=3", "dp-delta=1e-6"], {"dp_noise": 0.5, "dp_clip": 3.0, "dp_delta": 1e-6}),
    ]  # fmt: skip
    used = {"perturb", "linear"}  # which do not go with most of the others
    words = ["perturb=blocks", "linear=activations", "k={'*' = 4}"]
    run_file = run_files.load(write(SMALL), [*BAFFLE_RUN, *(f"protocol.{word}" for word in words)])
    assert run_file.protocol == BAFFLE(perturb="blocks", linear="activations", k={"*": 4})
    assert run_files.load(write(run_files.dump(run_file))) == run_file
    for words, values in rows:
        run_file = run_files.load(write(SMALL), [*BAFFLE_RUN, *(f"protocol.{word}" for word in [*shared, *words])])
        assert run_file.protocol == BAFFLE(**alike, **values)
        assert run_files.load(write(run_files.dump(run_file))) == run_file
        used |= {word.partition("=")[0] for word in [*shared, *words]}
    own = set(BAFFLE.model_fields) - set(Training.model_fields) - {"name"}
    assert {name.replace("_", "-") for name in own} <= used


def test_k_goes_from_the_first_rounds_to_the_last_ones() -> None:
    for k, last in ((10, 1000), (1000, 10), (7, 7)):
        growing = BAFFLE(k=k, k_last=last)
        counts = [growing.k_of(number, 21) for number in range(1, 22)]
        assert (counts[0], counts[-1]) == (k, last)
        assert counts == sorted(counts, reverse=k > last)
    assert BAFFLE(k=10, k_last=1000).k_of(11, 21) == 100  # by the same factor each round
    assert BAFFLE(k=10, k_last=1000).k_of(1, 1) == 10
    assert BAFFLE(k=10).k_of(21, 21) == 10


def test_a_simulation_needs_no_second_silo(write: Write) -> None:
    for engine in ("fused", "exact-ring"):
        assert run_files.load(write(SMALL), [*CGD_RUN, "data.silos=1", f"engine.name={engine}"]).data.silos == 1


# What does not. Each row: what is put into SMALL by --set, and the sentence after the file's name.

GRID = ["data.partition=grid", "data.grid=[2, 2]"]
BY_FEATURE = ["data.partition=by-feature", "data.columns=[[0, 1], [2]]"]
DELTA = "a number above 0, two of them for a range, or a table of one for each participant"
CGD_RUN, DECAY = ["protocol.name=cgd"], ["protocol.schedule=inverse-square"]
BAFFLE_RUN = ["protocol.name=baffle"]
EDGE_RUN = [*BAFFLE_RUN, 'engine.edge=["silo-1"]']
MU = 'mu and decay-from belong to schedule = "inverse-square"; add it or remove them'
PLAIN_STEPS = "cgd takes plain gradient steps, the same for every participant; remove optimizer, momentum and clip-norm"
ORTHOGONAL = 'orthogonal directions are fresh Rademacher ones; use direction = "rademacher" and no seed-pool'
OWN_STEPS = "with local-epochs silos step by themselves, by Adam or by SGD without momentum; remove momentum"
BAD = [
    # unknown keys and sections
    (["protocol.learning-rat=1"], "[protocol] learning-rat is not known; did you mean learning-rate?"),
    (["protocol.learning_rate=1"], "[protocol] learning_rate is not known; did you mean learning-rate?"),
    (["run.learning-rate=1"], "[run] learning-rate is not known; it is a key of [protocol]"),
    (["run.rho=1"], "[run] rho is not known; it is a key of [protocol]"),
    (["run.batch-size=1"], "[run] batch-size is not known; it is a key of [data]"),
    (["data.batch_sizes=1"], "[data] batch_sizes is not known; did you mean batch-size?"),
    (["engine.zzz=1"], "[engine] zzz is not known; the keys here are name, sites, torch-versions, workers,"
     " strict, deadline, message-mib, edge, edge-precision, memory-limit-mib, micro-batch, faults"),
    (["modle.source=mlp"], "the section [modle] is not known; did you mean [model]?"),
    (["secure_aggregation.scheme=none"], "the section [secure_aggregation] is not known; did you mean"
     " [secure-aggregation]?"),
    (["zzz.a=1"], "the section [zzz] is not known; the sections are [run], [data], [model], [protocol],"
     " [secure-aggregation], [engine]"),
    # keys of another protocol
    (["protocol.rho=3"], "[protocol] rho is a key of pbpfl, not of fedsgd; remove it"),
    (["protocol.local-epochs=3"], "[protocol] local-epochs is a key of fedavg, fedprox and baffle, not of fedsgd;"
     " remove it"),
    (["protocol.local_epochs=3"], "[protocol] local_epochs is a key of fedavg, fedprox and baffle, not of fedsgd;"
     " remove it"),
    (["protocol.sigma=3"], "[protocol] sigma is a key of baffle, not of fedsgd; remove it"),
    (["protocol.name=pbpfl", "protocol.seed_pool=8"], "[protocol] seed_pool is a key of baffle, not of pbpfl; remove"
     " it"),
    (["protocol.name=cgd", "protocol.dp-noise=1"], "[protocol] dp-noise is a key of fedsgd and baffle, not of cgd;"
     " remove it"),
    (["protocol.mu=3"], "[protocol] mu is a key of fedprox and cgd, not of fedsgd; remove it"),
    (["protocol.delta=3"], "[protocol] delta is a key of cgd, not of fedsgd; remove it"),
    (["protocol.name=cgd", "protocol.rho=3"], "[protocol] rho is a key of pbpfl, not of cgd; remove it"),
    (["protocol.variant=paper"], "[protocol] variant is a key of pbpfl, not of fedsgd; remove it"),
    (["protocol.name=pbpfl", "protocol.variant=papre"], '[protocol] variant: expected "probabilities" or "paper", got'
     ' "papre"; did you mean "paper"?'),
    (["protocol.clip-norm=0"], "[protocol] clip-norm: expected more than 0, got 0"),
    (["run.early-stopping=9"], "[run] early-stopping needs rows to validate on; give [data] validation-fraction, for"
     " example 0.1"),
    (["protocol.learning-rate=true"], "[protocol] learning-rate: expected a number, got true"),
    (["run.participation=0"], "[run] participation: expected more than 0, got 0"),
    (["protocol.loss=mse", "protocol.label-smoothing=0.1"], "label-smoothing and class-weights belong to loss ="
     ' "cross-entropy"; remove them'),
    # secure aggregation
    (["secure-aggregation.treshold=2"], "[secure-aggregation] treshold is not known; did you mean threshold?"),
    (["secure-aggregation.threshold=0"], "[secure-aggregation] threshold: expected 1 or more, got 0"),
    (["secure-aggregation.corrupt-rate=1"], "[secure-aggregation] corrupt-rate: expected less than 1, got 1"),
    (["secure-aggregation.weights=hiden"], '[secure-aggregation] weights: expected "hidden" or "public", got "hiden";'
     ' did you mean "hidden"?'),
    (["secure-aggregation.scheme=additive"], '[secure-aggregation] scheme: expected "pairwise", "additive-shares" or'
     ' "none", got "additive"; did you mean "additive-shares"?'),
    (["secure-aggregation.scheme=none", "secure-aggregation.threshold=2"], "[secure-aggregation] threshold belongs to"
     ' scheme = "pairwise", not to "none"; remove it'),
    (["secure-aggregation.scheme=additive-shares", "secure-aggregation.degree=2"], "[secure-aggregation] degree belongs"
     ' to scheme = "pairwise", not to "additive-shares"; remove it'),
    (["secure-aggregation.roster=roster.toml"], "[secure-aggregation] roster and identity belong together: who the"
     ' silos are, and where each one\'s own key is, for example identity = "keys/{silo}"; give both or none'),
    (["secure-aggregation.min-survivors=1"], '[secure-aggregation] min-survivors = 1 with scheme = "pairwise": the sum'
     " of one silo is its own data; give at least 2"),
    (["secure-aggregation.min-survivors=4"], "[secure-aggregation] min-survivors = 4, and [data] silos is 3; give at"
     " most as many"),
    # the faults of the engine, whose rows are tables
    (["engine.faults=3"], "[engine.faults]: expected a section, got 3"),
    (["engine.faults.dropp=[]"], "[engine.faults] dropp is not known; did you mean drop?"),
    (["engine.faults.zzz=1"], "[engine.faults] zzz is not known; the keys here are drop, drop-probability, delay,"
     " corrupt, seed"),
    (["engine.faults.deadline=3"], "[engine.faults] deadline is not known; it is a key of [engine]"),
    (["engine.drop=[]"], "[engine] drop is not known; it is a key of [engine.faults]"),
    (["protocol.drop=[]"], "[protocol] drop is not known; it is a key of [engine.faults]"),
    (["engine.faults.seed=-1"], "[engine.faults] seed: expected 0 or more, got -1"),
    (["engine.faults.seed=nan"], "[engine.faults] seed: expected a finite number, got nan"),
    (["engine.faults.drop-probability=1"], "[engine.faults] drop-probability: expected less than 1, got 1"),
    (["engine.faults.drop-probability=-0.1"], "[engine.faults] drop-probability: expected 0 or more, got -0.1"),
    (["engine.faults.drop=silo-1"], '[engine.faults] drop: expected a list such as [{round = 3, silo = "silo-1"}], got'
     ' "silo-1"'),
    (["engine.faults.delay=[3]"], '[engine.faults] delay: expected a list such as [{round = 3, silo = "silo-1",'
     " seconds = 30}], got [3]"),
    (["engine.faults.drop=[{round = 1}]"], "[engine.faults.drop] silo is missing; add it"),
    (["engine.faults.corrupt=[{silo = 'a'}]"], "[engine.faults.corrupt] round is missing; add it"),
    (["engine.faults.delay=[{round = 1, silo = 'a'}]"], "[engine.faults.delay] seconds is missing; add it"),
    (["engine.faults.delay=[{round = 1, silo = 'a', seconds = 0}]"], "[engine.faults.delay] seconds: expected more"
     " than 0, got 0"),
    (["engine.faults.drop=[{round = 0, silo = 'a'}]"], "[engine.faults.drop] round: expected 1 or more, got 0"),
    (["engine.faults.drop=[{round = 1, silo = ''}]"], '[engine.faults.drop] silo: expected a string that is not empty,'
     ' got ""'),
    (["engine.faults.drop=[{rounds = 1, silo = 'a'}]"], "[engine.faults.drop] rounds is not known; did you mean"
     " round?"),
    (["engine.faults.drop=[{round = 1, silo = 'a', seconds = 3}]"], "[engine.faults.drop] seconds is not known; the"
     " keys here are round, silo, phase"),
    (["engine.faults.drop=[{round = 1, silo = 'a', phase = 'uplod'}]"], '[engine.faults.drop] phase: expected "set-up",'
     ' "upload" or "unmasking", got "uplod"; did you mean "upload"?'),
    # many machines
    (["engine.name=flare"], '[engine] sites is missing; name = "flare" needs the names of the silos, for example'
     ' sites = ["north", "south"]'),
    (["engine.sites=['a', 'b']"], '[engine] sites is for name = "flare", not "in-process"; remove it'),
    (["engine.name=flare", "engine.sites=['a', 'b']"], '[engine] name = "flare" and [data] source = "sites" belong'
     " together: where silos are on machines of their own, each one's silo.toml names its rows, and a run file never"
     ' does; got name = "flare" and source = "rows.csv"'),
    (["engine.name=flare", "engine.sites=['a', 'a']"], "[engine] sites has a name twice; give each site its own"),
    (["engine.name=flare", "engine.sites=['a', 'A']"], "[engine] sites: two names differ by capitals alone; give each "
     "site its own"),
    (["engine.name=flare", "engine.sites=['a b']"], '[engine] sites: "a b" cannot be the name of a site; expected 1 to'
     ' 63 letters, digits, dashes and underscores, and not "server" or "admin"'),
    (["engine.name=flare", "engine.sites=['a']", "engine.edge=['a']"], '[engine] edge: with name = "flare" a site says'
     " so itself, by moretta join --edge"),
    (["data.source=sites", "engine.name=flare", "engine.sites=['a', 'b', 'c']"], '[data] source = "sites" needs '
     "schema, which says what a table's columns mean, or for arrays inputs, the shape of a sample, and either classes"
     " or outputs, for example inputs = [30] and classes = 2"),
    (["data.missing=mean", "columns.age.kind=number"], "[data] inputs, classes, outputs and missing follow from the"
     " schema of the table; remove them"),
    (["data.source=sites", "data.inputs=[30]", "data.classes=2", "data.target=y"], "[data] target is about rows, and"
     ' with source = "sites" each site\'s own silo.toml says where its rows are and how to read them; remove it here'),
    (["data.source=sites", "data.inputs=[30]", "data.classes=2", "engine.name=flare", "engine.sites=['a', 'b', 'c']",
      "data.channel-mean=[0.5]", "data.channel-deviation=[1]"],
     "[data] channel-mean is for images, which a schema names in a column of files; remove it"),
    (["data.inputs=[3]"], '[data] inputs is for source = "sites", not "rows.csv"; remove it'),
    (["data.source=sites", "data.inputs=[30]", "data.classes=2", "engine.name=flare", "engine.sites=['a', 'b']",
      "protocol.name=local"], "[protocol] local is a baseline for one machine, with nothing to do for many; choose"
     " fedsgd, fedavg, fedprox, pbpfl, cgd or baffle"),
    # wrong values
    (["protocol.name=fedsdg"], '[protocol] name: expected "fedsgd", "fedavg", "fedprox", "local", "centralised",'
     ' "pbpfl", "cgd" or "baffle", got "fedsdg"; did you mean "fedsgd"?'),
    (["protocol.name=baffl"], '[protocol] name: expected "fedsgd", "fedavg", "fedprox", "local", "centralised",'
     ' "pbpfl", "cgd" or "baffle", got "baffl"; did you mean "baffle"?'),
    (["protocol.name=3"], '[protocol] name: expected "fedsgd", "fedavg", "fedprox", "local", "centralised", "pbpfl",'
     ' "cgd" or "baffle", got 3'),
    (["protocol.loss=mae"], '[protocol] loss: expected "mse" or "cross-entropy", got "mae"; did you mean "mse"?'),
    (["protocol.name=fedavg", "protocol.optimizer=adam"], '[protocol] optimizer: expected "sgd", got "adam"'),
    (["secure-aggregation.ring-bits=48"], "[secure-aggregation] ring-bits: expected 64 or 32, got 48"),
    (["run.dtype=float16"], '[run] dtype: expected "float32" or "float64", got "float16"; did you mean "float64"?'),
    (["run.rounds=0"], "[run] rounds: expected 1 or more, got 0"),
    (["data.silos=0"], "[data] silos: expected 1 or more, got 0"),
    (["data.batch-size=-1"], "[data] batch-size: expected 0 or more, got -1"),
    (["data.test-fraction=1"], "[data] test-fraction: expected less than 1, got 1"),
    (["data.grid=[2]"], "[data] grid: expected how many row parts and column parts, for example [2, 2], got [2]"),
    (["data.grid=[2, 0]"], "[data] grid: expected how many row parts and column parts, for example [2, 2], got [2, 0]"),
    (["data.grid=[2, true]"], "[data] grid: expected how many row parts and column parts, for example [2, 2],"
     " got [2, true]"),
    (["data.columns=[]"], '[data] columns: expected a list of columns for each part, for example [["age", "job"],'
     ' ["balance"]], got []'),
    (["data.columns=['age']"], '[data] columns: expected a list of columns for each part, for example [["age", "job"],'
     ' ["balance"]], got ["age"]'),
    (["data.columns=[[1.5]]"], '[data] columns: expected a list of columns for each part, for example [["age", "job"],'
     ' ["balance"]], got [[1.5]]'),
    (["data.label-holder=one"], '[data] label-holder: expected the number of a column part, or a list of them,'
     ' got "one"'),
    (["data.image-size=0"], "[data] image-size: expected 1 or more, got 0"),
    (["data.domains=plain"], '[data] domains: expected a list, got "plain"'),
    (["data.domains=[]"], "[data] domains is empty; name at least one of plain, rotated, blurred, recoloured"),
    (["data.domains=['blured']"], '[data] domains: "blured" is unknown; did you mean "blurred"? Known: blurred, plain,'
     " recoloured, rotated"),
    (["data.domains=['plain', 'plain']"], '[data] domains names "plain" twice; name every domain once'),
    (["data.id-column=3"], "[data] id-column: expected a string in quotes, got 3"),
    (["run.seed=-1"], "[run] seed: expected 0 or more, got -1"),
    (["run.seed=9223372036854775808"], "[run] seed: expected a whole number of at most 64 bits, got a number of more"
     " than 64 bits"),
    (["protocol.learning-rate=inf"], "[protocol] learning-rate: expected a finite number, got inf"),
    (["protocol.learning-rate=nan"], "[protocol] learning-rate: expected a finite number, got nan"),
    (["protocol.learning-rate=0"], "[protocol] learning-rate: expected more than 0, got 0"),
    (["data.source="], '[data] source: expected a string that is not empty, got ""'),
    (["run.name=a/b"], '[run] name: expected a name of 1 to 100 characters without slashes, got "a/b"'),
    (["run.name=.."], '[run] name: expected a name of 1 to 100 characters without slashes, got ".."'),
    (["run.device=gpu"], '[run] device: expected "cpu", "cuda" or "cuda:" and a number, got "gpu"'),
    (["run.record-views=[0]"], "[run] record-views: expected true, false or a list of round numbers from 1 on,"
     " got [0]"),
    (["run.record-views=1"], "[run] record-views: expected true, false or a list of round numbers from 1 on, got 1"),
    # wrong types
    (['run.rounds="ten"'], '[run] rounds: expected a whole number, got "ten"'),
    (['run.rounds="10"'], '[run] rounds: expected a whole number, got "10"'),
    (["run.rounds=1.5"], "[run] rounds: expected a whole number, got 1.5"),
    (["run.rounds=true"], "[run] rounds: expected a whole number, got true"),
    (["run.rounds=[1, 2]"], "[run] rounds: expected a whole number, got [1, 2]"),
    (["run.rounds={a = 1}"], "[run] rounds: expected a whole number, got a table"),
    (["engine.strict=1"], "[engine] strict: expected true or false, got 1"),
    (["data.score-at-silos=class"], '[data] score-at-silos: expected true, false or "classes", got "class"'),
    (["protocol.learning-rate=fast"], '[protocol] learning-rate: expected a number, got "fast"'),
    (["data.target=3"], "[data] target: expected a string in quotes, got 3"),
    (["run.out=3"], "[run] out: expected a string in quotes, got 3"),
    (["run.base=3"], "[run] base: expected a string in quotes, got 3"),
    # values that do not fit each other
    (["data.partition=dirichlet"], '[data] alpha is missing; partition = "dirichlet" needs it, for example'
     " alpha = 0.5"),
    (["data.partition=same-rows", "protocol.name=fedsgd", "protocol.dp-noise=1", "protocol.dp-clip=1"],
     '[data] partition = "same-rows" gives every silo the same rows, and epsilon is of rows that one silo has; remove'
     " it, or dp-noise and dp-clip"),
    (["data.augment=turn", "data.standardise=true"], '[data] augment = "turn" is for pixels in [0, 1]; remove it, or'
     " standardise, channel-mean and channel-deviation"),
    (["data.alpha=1"], '[data] alpha belongs to partition = "dirichlet", not to "iid"; remove it'),
    (["data.grid=[2, 2]"], '[data] grid belongs to partition = "by-feature" or "grid", not to "iid"; remove it'),
    (["data.columns=[[0]]", *GRID], '[data] columns belongs to partition = "by-feature", not to "grid"; remove it'),
    (["data.label-holder=1"], '[data] label-holder belongs to partition = "by-feature" or "grid", not to "iid"; remove'
     " it"),
    (["data.partition=grid"], '[data] grid is missing; partition = "grid" needs it, for example grid = [2, 2]'),
    (["data.partition=by-feature"], '[data] columns is missing; partition = "by-feature" needs it, for example columns'
     ' = [["age", "job"], ["balance"]]'),
    (["data.silos=3", *GRID], "[data] silos = 3 and grid = [2, 2] differ: that grid has 4 participants; remove silos"),
    (["data.silos=3", *BY_FEATURE], "[data] silos = 3 does not fit 2 column parts; it counts every pair of a row part"
     " and a column part, so give a multiple of 2"),
    (["data.grid=[2, 3]", *BY_FEATURE], "[data] grid = [2, 3] has 3 column parts, but columns has 2; make them the"
     " same"),
    (["data.label-holder=3", *GRID], "[data] label-holder: expected the number of a column part, 1 to 2, got 3"),
    (["data.label-holder=[1, 0]", *GRID], "[data] label-holder: expected the number of a column part, 1 to 2, got 0"),
    (["data.label-holder=[1, 1, 1]", *GRID], "[data] label-holder has 3 numbers for 2 row parts; give one number for"
     " all, or one for each"),
    (["data.columns=[[0], []]", "data.partition=by-feature"], "[data] columns: part 2 is empty; give it a column or"
     " remove it"),
    (["data.test-fraction=0.5", "data.validation-fraction=0.5"], "[data] test-fraction 0.5 and validation-fraction"
     " 0.5 leave no rows to train on; their sum must be less than 1"),
    (["protocol.optimizer=adam", "protocol.momentum=0.9"], 'momentum = 0.9 belongs to optimizer = "sgd",'
     ' and optimizer is "adam", which has its own; remove one of them'),
    (["data.silos=1"], '[secure-aggregation] scheme = "pairwise" needs two silos or more, and [data] silos is 1; one'
     ' silo needs scheme = "none"'),
    # cgd
    ([*CGD_RUN, "protocol.delta=0"], f"[protocol] delta: expected {DELTA}, got 0"),
    ([*CGD_RUN, "protocol.delta=-0.1"], f"[protocol] delta: expected {DELTA}, got -0.1"),
    ([*CGD_RUN, "protocol.delta=[0.2, 0.1]"], "delta = [0.2, 0.1]: expected the lower number first"),
    ([*CGD_RUN, "protocol.delta={silo-1 = nan}"], "[protocol] delta: expected a finite number, got a table"),
    ([*CGD_RUN, "protocol.around=one"], '[protocol] around: expected "zero" or "model", got "one"'),
    ([*CGD_RUN, "protocol.vertical=both"], '[protocol] vertical: expected "joint" or "independent", got "both"'),
    ([*CGD_RUN, "protocol.schedule=cosine"], '[protocol] schedule: expected "constant" or "inverse-square", got'
     ' "cosine"'),
    ([*CGD_RUN, "protocol.mu=0.5"], MU),
    ([*CGD_RUN, "protocol.decay-from=5"], MU),
    ([*CGD_RUN, *DECAY, "protocol.mu=1"], "[protocol] mu: expected less than 1, got 1"),
    ([*CGD_RUN, *DECAY, "protocol.mu=-0.5"], "[protocol] mu: expected 0 or more, got -0.5"),
    ([*CGD_RUN, *DECAY, "protocol.decay-from=-1"], "[protocol] decay-from: expected 0 or more, got -1"),
    ([*CGD_RUN, "protocol.momentum=0.9"], PLAIN_STEPS),
    ([*CGD_RUN, "protocol.optimizer=adam"], PLAIN_STEPS),
    ([*CGD_RUN, "protocol.clip-norm=1"], PLAIN_STEPS),
    ([*CGD_RUN, "protocol.lr-schedule=cosine"], "cgd has a schedule of its own; remove lr-schedule and first-rate, use"
     ' schedule = "inverse-square"'),
    ([*CGD_RUN, "protocol.class-weights=[1, 2]"], "cgd weighs participants by their rows; remove class-weights"),
    ([*CGD_RUN, "protocol.warm-start=a.pt"], 'warm-start needs around = "model", as starts confined around zero forget'
     " it"),
    ([*CGD_RUN, "protocol.blind=1"], "[protocol] blind: expected true or false, got 1"),
    ([*CGD_RUN, "data.silos=1"], '[secure-aggregation] scheme = "pairwise" needs two silos or more, and [data] silos is'
     ' 1; one silo needs scheme = "none"'),
    *[
        ([f"protocol.name={protocol}", f"engine.name={engine}"], f'[engine] name = "{engine}" simulates cgd alone;'
         f' {protocol} needs "in-process"')
        for protocol in ("fedsgd", "fedavg", "fedprox", "local", "centralised", "pbpfl", "baffle")
        for engine in ("fused", "exact-ring")
    ],
    (["engine.name=fusd"], '[engine] name: expected "in-process", "flare", "fused" or "exact-ring", got "fusd"; did'
     ' you mean "fused"?'),
    (["protocol.name=pbpfl", "secure-aggregation.ring-bits=32"], "[secure-aggregation] ring-bits = 32 is too coarse"
     " for pbpfl, whose corrections multiply the rounding; use ring-bits = 64"),
    # baffle
    ([*BAFFLE_RUN, "protocol.k=1"], "[protocol] k: expected 2 or more, got 1"),
    ([*BAFFLE_RUN, "engine.edge=true"], "[engine] edge: expected a list, got true"),
    ([*BAFFLE_RUN, "engine.edge=all"], '[engine] edge: expected a list, got "all"'),
    ([*BAFFLE_RUN, "engine.edge=[3]"], "[engine] edge[0]: expected a string in quotes, got 3"),
    ([*EDGE_RUN, "engine.edge-precision=float8"], '[engine] edge-precision: expected "float32", "float16" or'
     ' "int8-activations", got "float8"; did you mean "float32"?'),
    ([*EDGE_RUN, "engine.memory-limit-mib=0"], "[engine] memory-limit-mib: expected more than 0, got 0"),
    ([*EDGE_RUN, "engine.micro-batch=0"], "[engine] micro-batch: expected 1 or more, got 0"),
    ([*EDGE_RUN, "engine.memory-limit=80"], "[engine] memory-limit is not known; did you mean memory-limit-mib?"),
    *[
        ([*BAFFLE_RUN, f"engine.{value}"], f"[engine] {value.split('=')[0]} is for edge clients, and there are none;"
         ' name some, for example edge = ["silo-1"], or remove it')
        for value in ("edge-precision=float16", "memory-limit-mib=80", "micro-batch=8")
    ],
    *[
        ([f"protocol.name={protocol}", 'engine.edge=["silo-1"]'], "[engine] edge: edge clients"
         f" only run models forward, as baffle has it, and {protocol} has not; remove it")
        for protocol in ("fedsgd", "fedavg", "fedprox", "local", "centralised", "pbpfl", "cgd")
    ],
    ([*BAFFLE_RUN, "protocol.k=0"], "[protocol] k: expected 2 or more, got 0"),
    ([*BAFFLE_RUN, "protocol.k=2.5"], "[protocol] k: expected a whole number, got 2.5"),
    ([*BAFFLE_RUN, "protocol.k=16385"], "[protocol] k: expected at most 16384, got 16385"),
    ([*BAFFLE_RUN, "protocol.k-last=1"], "[protocol] k-last: expected 2 or more, got 1"),
    ([*BAFFLE_RUN, "protocol.k-last=16385"], "[protocol] k-last: expected at most 16384, got 16385"),
    ([*BAFFLE_RUN, "protocol.k_last=8"], "[protocol] k_last is not known; did you mean k-last?"),
    ([*BAFFLE_RUN, "protocol.sigma=0"], "[protocol] sigma: expected more than 0, got 0"),
    ([*BAFFLE_RUN, "protocol.sigma=-0.001"], "[protocol] sigma: expected more than 0, got -0.001"),
    ([*BAFFLE_RUN, "protocol.sigma=inf"], "[protocol] sigma: expected a finite number, got inf"),
    ([*BAFFLE_RUN, "protocol.form=centre"], '[protocol] form: expected "mean", "base", "twice-forward" or "central",'
     ' got "centre"; did you mean "central"?'),
    ([*BAFFLE_RUN, "protocol.form=zzz"], '[protocol] form: expected "mean", "base", "twice-forward" or "central",'
     ' got "zzz"'),
    ([*BAFFLE_RUN, "protocol.direction=gausian"], '[protocol] direction: expected "rademacher" or "gaussian", got'
     ' "gausian"; did you mean "gaussian"?'),
    ([*BAFFLE_RUN, "protocol.orthogonal=1"], "[protocol] orthogonal: expected true or false, got 1"),
    ([*BAFFLE_RUN, "protocol.orthogonal=true", "protocol.direction=gaussian"], ORTHOGONAL),
    ([*BAFFLE_RUN, "protocol.orthogonal=true", "protocol.seed-pool=800"], ORTHOGONAL),
    ([*BAFFLE_RUN, "protocol.seed-pool=0"], "[protocol] seed-pool: expected 1 or more, got 0"),
    ([*BAFFLE_RUN, "protocol.seed-pool=100"], "seed-pool = 100: expected a multiple of 8, and at least the 100"
     " directions of a round"),
    ([*BAFFLE_RUN, "protocol.seed-pool=96"], "seed-pool = 96: expected a multiple of 8, and at least the 100 directions"
     " of a round"),
    ([*BAFFLE_RUN, "protocol.seed-pool=104", "protocol.form=twice-forward"], "seed-pool = 104: expected a multiple of"
     " 8, and at least the 200 directions of a round"),
    ([*BAFFLE_RUN, "protocol.seed-pool=104", "protocol.k-last=105"], "seed-pool = 104: expected a multiple of 8, and at"
     " least the 105 directions of a round"),
    ([*BAFFLE_RUN, "protocol.ema=1"], "[protocol] ema: expected less than 1, got 1"),
    ([*BAFFLE_RUN, "protocol.ema=-0.5"], "[protocol] ema: expected 0 or more, got -0.5"),
    ([*BAFFLE_RUN, "protocol.trainable=head"], '[protocol] trainable: expected a list, got "head"'),
    ([*BAFFLE_RUN, "protocol.trainable=[3]"], "[protocol] trainable[0]: expected a string in quotes, got 3"),
    ([*BAFFLE_RUN, "protocol.local-epochs=0"], "[protocol] local-epochs: expected 1 or more, got 0"),
    ([*BAFFLE_RUN, "protocol.directions=mine"], '[protocol] directions: expected "shared" or "own", got "mine"'),
    ([*BAFFLE_RUN, "protocol.directions=own", "protocol.dp-noise=1", "protocol.dp-clip=1"], "dp-noise goes on scalars"
     ' along directions that all silos share, so that they share the noise; remove directions = "own", with which a'
     " whole estimate is uploaded"),
    ([*BAFFLE_RUN, "protocol.local-epochs=1", "protocol.optimizer=sgd", "protocol.momentum=0.9"], OWN_STEPS),
    ([*BAFFLE_RUN, "protocol.local-epochs=1", "protocol.dp-noise=1", "protocol.dp-clip=1"], "dp-noise goes on the"
     " scalars of the batch level; remove local-epochs, with which a silo's whole difference is uploaded"),
    ([*BAFFLE_RUN, "protocol.dp-noise=1"], "dp-noise is given and dp-clip is not; they belong together (the noise has"
     " the deviation dp-noise times dp-clip): give both, or neither for no differential privacy"),
    ([*BAFFLE_RUN, "protocol.dp-clip=0"], "[protocol] dp-clip: expected more than 0, got 0"),
    ([*BAFFLE_RUN, "protocol.dp-delta=1"], "[protocol] dp-delta: expected less than 1, got 1"),
    ([*BAFFLE_RUN, "protocol.momentum=0.9"], 'momentum = 0.9 belongs to optimizer = "sgd", and optimizer is "adam",'
     " which has its own; remove one of them"),
    ([*BAFFLE_RUN, "protocol.rho=3"], "[protocol] rho is a key of pbpfl, not of baffle; remove it"),
    # constructor's arguments
    (["model.hidden={a = 1}"], "[model] hidden: expected a number, a string, true, false or a list, got a table"),
    (["model.hidden=[{a = 1}]"], "[model] hidden: expected a number, a string, true, false or a list, got [a table]"),
    (["model.hidden=[nan]"], "[model] hidden: expected a finite number, got [nan]"),
    (["model.2d=1"], "[model] 2d cannot be the name of a constructor's argument; rename it"),
    (["model.a-b=1", "model.a_b=1"], "[model] a-b is given twice, with a dash and with an underscore; remove one"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "expected"), BAD, ids=[" ".join(row[0]) for row in BAD])
def test_a_mistake_earns_one_sentence(write: Write, overrides: list[str], expected: str) -> None:
    path = write(SMALL)
    assert sentence(path, tuple(overrides)) == f"{path}: {expected}"


FILES = [
    (SMALL.replace("rounds = 1", ""), ": [run] rounds is missing; add it"),
    (SMALL.replace('name = "fedsgd"', ""), ": [protocol] name is missing; choose fedsgd, fedavg, fedprox, local,"
     " centralised, pbpfl, cgd or baffle"),
    (SMALL.replace('[model]\nsource = "mlp"', ""), ": the section [model] is missing; add it, with its key source"),
    ("", ": the section [run] is missing; add it, with its key rounds"),
    ("rounds = 3\n" + SMALL, ": the key rounds stands before any section; put it under [run]"),
    ("run = 3", ": [run]: expected a section, got 3"),
    ("[[run]]\nrounds = 3", ": [run]: expected a section, got [a table]"),
    (SMALL.replace("rounds = 1", "rounds = 2024-01-01"), ": [run] rounds: expected a number, a string in quotes, true,"
     " false or a list (put a date in quotes), got 2024-01-01"),
    ("[run]\nrounds = = 3", ", line 2: this is not TOML: invalid value"),
    ("[run]\nrounds = 3\nrounds = 4\n", ", line 3: this is not TOML: cannot overwrite a value"),
    ("[run", ", at its end: this is not TOML: expected ']' at the end of a table declaration"),
    ("[run]\nrounds = " + "[" * 5000, " is nested too deeply for a run file; write flat lists"),
    ("[run]\n" + "a." * 5000 + "a = 1", " is nested too deeply for a run file; write flat lists"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), FILES, ids=range(len(FILES)))
def test_a_bad_file_earns_one_sentence(write: Write, text: str, expected: str) -> None:
    path = write(text)
    assert sentence(path).startswith(f"{path}{expected}")


def test_deep_lists_and_long_numbers_earn_a_sentence(write: Write) -> None:
    for value in ("[" * 230 + "]" * 230, "1" * 5000, "0x" + "f" * 5000):
        sentence(write(SMALL.replace("rounds = 1", f"rounds = {value}")))
        sentence(write(SMALL.replace('"mlp"', f'"mlp"\nhidden = {value}')))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    lost = tmp_path / "lost.toml"
    assert sentence(lost) == f"the run file {lost} does not exist; give the path of a TOML file"
    assert sentence(tmp_path) == f"the run file {tmp_path} cannot be read (Is a directory); give a TOML file"
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert sentence(binary) == f"{binary} is not text in UTF-8; save the run file as UTF-8"


def test_a_byte_order_mark_and_carriage_returns_are_read(tmp_path: Path) -> None:
    path = tmp_path / "notepad.toml"
    path.write_bytes(b"\xef\xbb\xbf" + SMALL.replace("\n", "\r\n").encode())
    assert run_files.load(path).run.name == "notepad"


@settings(deadline=None)
@given(st.text(max_size=60))
def test_any_text_loads_or_earns_a_parameter_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(text, encoding="utf-8")
    sentence(path)  # no text this short has all four sections


# Overrides.


def test_overrides_take_the_place_of_the_file(write: Write) -> None:
    overrides = ["run.rounds = 7", "protocol.learning-rate=0.5", "data.path=a b", "run.name=007",
                 "data.target=2024-01-01", "model.hidden=[4, 5]", "model.act=x = 1", "run.record-views=true",
                 "engine.strict=true"]  # fmt: skip
    run_file = run_files.load(write(SMALL), overrides)
    assert run_file.run.rounds == 7
    assert run_file.run.name == "007"
    assert run_file.run.record_views is True
    assert run_file.protocol.learning_rate == 0.5
    assert run_file.data.path == Path("a b")
    assert run_file.data.target == "2024-01-01"
    assert run_file.model.arguments == {"hidden": [4, 5], "act": "x = 1"}
    assert run_file.engine.strict is True


def test_an_override_smuggles_no_second_key(write: Write) -> None:
    assert run_files.load(write(SMALL), ["data.target=1\nsilos = 9"]).data.target == "1\nsilos = 9"


@pytest.mark.parametrize("text", ["rounds=3", "run.rounds", "=3", "run.=3", ".rounds=3", ""])
def test_an_override_that_is_none(write: Write, text: str) -> None:
    assert sentence(write(SMALL), (text,)) == f'--set: expected section.key=value, got "{text}"'


def test_an_override_below_a_value(write: Write) -> None:
    said = sentence(write(SMALL), ("run.rounds.a=3",))
    assert said == "--set run.rounds.a: rounds is a value and not a section; give section.key=value"


# Writing.

NUMBER = st.floats(min_value=1e-6, max_value=1e6)
TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=9)
SEED = st.integers(0, 2**63 - 1)
SCALAR = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | TEXT


def _some(optional: dict[str, st.SearchStrategy[Any]], **required: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(required, optional=optional)


PROTOCOL = st.one_of(
    _some(
        {"learning-rate": NUMBER, "weight-decay": NUMBER},
        name=st.sampled_from(sorted(set(run_files.PROTOCOLS) - {"cgd"})),
    ),
    _some(
        {
            "delta": NUMBER
            | st.tuples(NUMBER, NUMBER).map(sorted)
            | st.dictionaries(TEXT, NUMBER, min_size=1, max_size=3),
            "learning-rate": NUMBER,
            "around": st.sampled_from(["zero", "model"]),
            "mu": st.floats(0, 0.99),
            "decay-from": st.integers(0, 99),
            "blind": st.booleans(),
        },
        name=st.just("cgd"),
        schedule=st.just("inverse-square"),
    ),
    _some({"local-epochs": st.integers(1, 9), "momentum": st.floats(0, 0.99)}, name=st.just("fedavg")),
    _some({"rho": NUMBER, "partitions": st.integers(1, 9)}, name=st.just("pbpfl")),
    _some(
        {
            "k": st.integers(2, 99),
            "k-last": st.integers(2, 99),
            "sigma": NUMBER,
            "form": st.sampled_from(["mean", "base", "twice-forward", "central"]),
            "direction": st.sampled_from(["rademacher", "gaussian"]),
            "seed-pool": st.integers(25, 99).map(lambda count: 8 * count),
            "ema": st.floats(0, 0.99),
            "trainable": st.lists(TEXT, max_size=3),
        },
        name=st.just("baffle"),
    ),
    _some(
        {
            "orthogonal": st.booleans(),
            "local-epochs": st.integers(1, 9),
            "directions": st.sampled_from(["shared", "own"]),
            "optimizer": st.sampled_from(["sgd", "adam"]),
        },
        name=st.just("baffle"),
    ),
)
FAULT: dict[str, st.SearchStrategy[Any]] = {"round": st.integers(1, 9), "silo": TEXT}
PHASE: dict[str, st.SearchStrategy[Any]] = {"phase": st.sampled_from(["set-up", "upload", "unmasking"])}
FAULTS = _some(
    {
        "drop": st.lists(_some(PHASE, **FAULT)),
        "drop-probability": st.floats(0, 0.99),
        "delay": st.lists(_some(PHASE, **FAULT, seconds=NUMBER)),
        "corrupt": st.lists(_some(PHASE, **FAULT)),
        "seed": SEED,
    }
)
RUN_FILE = st.fixed_dictionaries(
    {
        "run": _some(
            {
                "seed": SEED,
                "out": st.sampled_from(["a", "a/b", "/a b/ü", ".."]),
                "base": st.sampled_from(["a", "../a", "/a"]),
                "record-views": st.booleans() | st.lists(st.integers(1, 99)),
                "insecure-secret-seed": SEED,
            },
            rounds=st.integers(8, 10**9),  # a fault is in one of them, or in the release
        ),
        "data": _some({"silos": st.integers(2, 99), "target": TEXT, "standardise": st.booleans()}, source=TEXT),
        "model": st.builds(
            lambda arguments, source: {**arguments, "source": source},
            st.dictionaries(
                st.from_regex(r"[a-z]([_a-z0-9]{0,5}[a-z0-9])?", fullmatch=True), SCALAR | st.lists(SCALAR)
            ),
            TEXT,
        ),
        "protocol": PROTOCOL,
    },
    optional={
        "secure-aggregation": _some(
            {
                "limit": NUMBER,
                "scheme": st.sampled_from(["pairwise", "additive-shares", "none"]),
                "corrupt-rate": st.floats(0, 0.99),
                "weights": st.sampled_from(["hidden", "public"]),
            }
        ),
        "engine": _some({"strict": st.booleans(), "deadline": NUMBER, "faults": FAULTS}),
    },
)


@settings(deadline=None)
@given(RUN_FILE)
def test_what_is_dumped_loads_as_the_same_from_anywhere(
    tmp_path_factory: pytest.TempPathFactory, tables: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "round.toml"
    path.write_text(tomli_w.dumps(tables), encoding="utf-8")
    run_file = run_files.load(path)
    elsewhere = tmp_path_factory.getbasetemp() / "elsewhere" / "run.toml"
    elsewhere.parent.mkdir(exist_ok=True)
    elsewhere.write_text(run_files.dump(run_file), encoding="utf-8")
    again = run_files.load(elsewhere)
    assert again == run_file
    assert run_files.dump(again) == run_files.dump(run_file)
    assert run_files.digest(again) == run_files.digest(run_file)


def test_a_dump_says_what_was_left_open(write: Write, tmp_path: Path) -> None:
    tables = tomllib.loads(run_files.dump(run_files.load(write(SMALL))))
    assert tables["run"]["base"] == str(tmp_path)
    assert tables["run"]["name"] == "small"
    assert tables["data"]["batch-size"] == 32
    assert tables["protocol"]["learning-rate"] == 0.1
    assert tables["secure-aggregation"] == {
        "scheme": "pairwise",
        "ring-bits": 64,
        "corrupt-rate": 0.1,
        "dropout-rate": 0.1,
        "weights": "hidden",
    }
    assert tables["engine"] == {
        "name": "in-process",
        "message-mib": 1024,
        "sites": [],
        "torch-versions": [],
        "strict": False,
        "edge": [],
        "edge-precision": "float32",
    }


# The digest.


def test_the_digest_knows_no_order_and_no_folder(write: Write) -> None:
    digest = run_files.digest(run_files.load(write(DESIGN)))
    sections = re.split(r"\n(?=\[)", DESIGN.strip())
    turned = "\n".join("\n".join([head, *reversed(keys)]) for head, *keys in map(str.splitlines, reversed(sections)))
    assert turned != DESIGN
    assert run_files.digest(run_files.load(write(turned))) == digest
    assert re.fullmatch("[0-9a-f]{64}", digest)


@pytest.mark.parametrize(
    "override",
    ["run.rounds=301", "run.out=x", "run.record-views=true", "run.checkpoint-every=1", "run.evaluate-every=2",
     "run.base=x", "engine.strict=true", "engine.deadline=3", "secure-aggregation.limit=65536", "data.batch-size=32",
     "engine.faults.drop-probability=0.1", "engine.faults.drop=[{round = 1, silo = 'silo-1'}]"],
)  # fmt: skip
def test_the_digest_leaves_out_what_may_change(write: Write, override: str) -> None:
    path = write(DESIGN)
    assert run_files.digest(run_files.load(path, [override])) == run_files.digest(run_files.load(path))


@pytest.mark.parametrize(
    "override",
    ["run.name=x", "run.seed=8", "run.dtype=float64", "run.insecure-secret-seed=0", "data.silos=4", "data.batch-size=0",
     "data.domains=['plain']", "data.image-size=64",
     "model.hidden=[32]", "model.hidden=[32.0, 32]", "protocol.learning-rate=0.2", "protocol.rho=4",
     "protocol.name=fedsgd", "secure-aggregation.scheme=none", "secure-aggregation.limit=4",
     "secure-aggregation.scheme=additive-shares", "secure-aggregation.threshold=3",
     "secure-aggregation.weights=public"],
)  # fmt: skip
def test_the_digest_changes_with_the_run(write: Write, override: str) -> None:
    path = write(DESIGN)
    assert run_files.digest(run_files.load(path, [override])) != run_files.digest(run_files.load(path))


@pytest.mark.parametrize(
    "override",
    ["protocol.delta=0.02", "protocol.delta=[0.01, 0.02]", "protocol.delta={silo-1 = 0.01}", "protocol.around=model",
     "protocol.vertical=independent", "protocol.schedule=inverse-square", "protocol.blind=false", "engine.name=fused"],
)  # fmt: skip
def test_the_digest_changes_with_cgds_settings(write: Write, override: str) -> None:
    path = write(SMALL)
    assert run_files.digest(run_files.load(path, [*CGD_RUN, override])) != run_files.digest(
        run_files.load(path, CGD_RUN)
    )


def test_the_digest_knows_who_rounds_otherwise(write: Write) -> None:
    path = write(SMALL)

    def digest(*values: str) -> str:
        return run_files.digest(run_files.load(path, [*BAFFLE_RUN, *(f"engine.{value}" for value in values)]))

    edge = digest('edge=["silo-2", "silo-1"]')
    assert edge != digest()
    assert edge == digest('edge=["silo-1", "silo-2"]', "memory-limit-mib=80", "micro-batch=4")
    assert len({edge, digest('edge=["silo-1"]'), digest('edge=["silo-1"]', "edge-precision=float16")}) == 3


@pytest.mark.parametrize(
    "override",
    ["protocol.k=64", "protocol.k-last=100", "protocol.sigma=0.01", "protocol.form=base", "protocol.direction=gaussian",
     "protocol.orthogonal=true", "protocol.seed-pool=128", "protocol.ema=0", "protocol.trainable=['0']",
     "protocol.dp-delta=1e-6"],
)  # fmt: skip
def test_the_digest_changes_with_baffles_settings(write: Write, override: str) -> None:
    path = write(SMALL)
    assert run_files.digest(run_files.load(path, [*BAFFLE_RUN, override])) != run_files.digest(
        run_files.load(path, BAFFLE_RUN)
    )


def test_the_number_of_rounds_belongs_to_a_run_whose_rate_depends_on_it(write: Write) -> None:
    path, longer = write(SMALL), ["run.rounds=2"]
    growing = [*BAFFLE_RUN, "protocol.k-last=200"]
    for rate in (["protocol.lr-schedule=cosine"], [*CGD_RUN, *DECAY, "protocol.mu=0.5"], growing):
        assert run_files.digest(run_files.load(path, rate)) != run_files.digest(run_files.load(path, [*rate, *longer]))
    for rate in ([], CGD_RUN, BAFFLE_RUN):
        assert run_files.digest(run_files.load(path, rate)) == run_files.digest(run_files.load(path, [*rate, *longer]))


def test_how_often_the_model_is_tested_belongs_to_a_run_that_early_stopping_ends(write: Write) -> None:
    path = write(DESIGN)
    early = ["run.early-stopping=9", "data.validation-fraction=0.2"]
    digests = {run_files.digest(run_files.load(path, [*early, *more])) for more in ([], ["run.evaluate-every=2"])}
    assert len(digests) == 2


# From Python.


def test_faults_are_a_section_of_the_engine(write: Write) -> None:
    text = (
        SMALL
        + """
[engine]
deadline = 60.0
[engine.faults]
drop-probability = 0.25
delay = [{ round = 2, silo = "silo-2", seconds = 90 }]
[[engine.faults.drop]]
round = 3
silo = "silo-1"
phase = "set-up"
[[engine.faults.drop]]
round = 4
silo = "silo-1"
"""
    )
    found = run_files.load(write(text), ["run.rounds=3"]).engine
    drop = (
        run_files.Fault(round=3, silo="silo-1", phase="set-up"),
        run_files.Fault(round=4, silo="silo-1", phase="upload"),
    )
    delay = (run_files.Delay(round=2, silo="silo-2", seconds=90.0),)
    assert found == run_files.Engine(
        deadline=60.0, faults=run_files.Faults(drop=drop, drop_probability=0.25, delay=delay, corrupt=(), seed=0)
    )
    assert run_files.load(write(SMALL)).engine.faults is None


@pytest.mark.parametrize(
    ("overrides", "silos"),
    [
        (["data.partition=grid", "data.grid=[3, 4]"], 12),
        (["data.partition=grid", "data.grid=[3, 4]", "data.silos=12", "data.label-holder=[1, 4, 2]"], 12),
        (["data.partition=by-feature", "data.columns=[['age', 3], ['job']]"], 2),
        (["data.partition=by-feature", "data.columns=[['age', 3], ['job']]", "data.silos=6"], 6),
        (["data.partition=by-feature", "data.columns=[[0], [1]]", "data.grid=[5, 2]", "data.label-holder=2"], 10),
    ],
)
def test_a_grid_says_how_many_silos_there_are(write: Write, overrides: list[str], silos: int) -> None:
    run_file = run_files.load(write(SMALL), [*overrides, "data.id-column=patient"])
    assert run_file.data.silos == silos
    assert run_files.load(write(run_files.dump(run_file))).data == run_file.data


def test_python_users_give_grids_too() -> None:
    data = run_files.Data(source="a.csv", partition="by-feature", columns=(("age",), ("job", 2)), label_holder=(2,))
    assert (data.silos, data.columns, data.label_holder) == (2, (("age",), ("job", 2)), (2,))
    assert run_files.Data(source="wdbc", partition="grid", grid=(2, 3)).silos == 6
    assert run_files.Data(source="wdbc").silos == 3


def test_python_users_write_underscores_and_cannot_change_them_later() -> None:
    data = run_files.Data(source="wdbc", batch_size=8)
    with pytest.raises(ValidationError):
        data.batch_size = 9
    with pytest.raises(ParameterError, match="Run: rounds: expected 1 or more, got 0"):
        run_files.Run(rounds=0)
    with pytest.raises(ParameterError, match="alpha"):
        run_files.Data(source="wdbc", partition="dirichlet")
    with pytest.raises(ParameterError, match="one silo needs scheme"):
        run_files.RunFile(
            run=run_files.Run(rounds=1),
            data=run_files.Data(source="wdbc", silos=1),
            model=run_files.Model(source="mlp"),
            protocol=FedSGD(),
        )


def test_reading_a_run_file_needs_no_torch() -> None:
    code = "import sys, moretta.config.run_files; sys.exit(bool({'torch', 'sklearn'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
