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
from moretta.data.settings import Data
from moretta.engines.settings import Delay, Engine, Fault, Faults, Run
from moretta.errors import ParameterError
from moretta.models.catalogue import Model
from moretta.protocols.baffle.params import BAFFLE
from moretta.protocols.cgd.params import CGD
from moretta.protocols.common.training import Training
from moretta.protocols.fedsgd.params import FedAvg, FedSGD
from moretta.protocols.pbpfl.params import PBPFL
from moretta.secure_aggregation.settings import SecureAggregation

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
        run=Run(name="wdbc", rounds=300, seed=7),
        data=Data(source="wdbc"),
        model=Model(source="mlp", arguments={"hidden": [32, 32]}),
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
    assert SecureAggregation.model_validate({"scheme": scheme}).least == least
    assert SecureAggregation.model_validate({"scheme": scheme, "min-survivors": 3}).least == 3


@pytest.mark.parametrize(("bits", "limit"), [(64, 2.0**16), (32, 2.0**4)])
def test_the_limit_follows_the_ring(bits: int, limit: float) -> None:
    assert SecureAggregation.model_validate({"ring-bits": bits}).largest == limit
    assert SecureAggregation.model_validate({"ring-bits": bits, "limit": 3}).largest == 3


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
    assert run_file.secure_aggregation == SecureAggregation(
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
        (["dp-noise=0.5", "dp-clip=3", "dp-delta=1e-6", "dp-epsilon=8", "dp-unit=group", "dp-group-rows=4",
          "dp-colluding=1"],
         {"dp_noise": 0.5, "dp_clip": 3.0, "dp_delta": 1e-6, "dp_epsilon": 8.0, "dp_unit": "group",
          "dp_group_rows": 4, "dp_colluding": 1}),
    ]  # fmt: skip
    used = {"perturb", "linear", "checkpoint-minutes"}  # which do not go with most of the others
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

CGD_RUN, DECAY = ["protocol.name=cgd"], ["protocol.schedule=inverse-square"]
BAFFLE_RUN = ["protocol.name=baffle"]


FILES = [
    (SMALL.replace("rounds = 1", ""), ": [run] rounds is missing; add it"),
    (SMALL.replace('name = "fedsgd"', ""), ": [protocol] name is missing; choose fedsgd, fedavg, fedprox, local,"
     " centralised, pbpfl, cgd or baffle"),
    (SMALL.replace('[model]\nsource = "mlp"', ""), ": the section [model] is missing; add it, with its key source"),
    ("", ": the section [run] is missing; add it, with its key rounds"),
    ("rounds = 3\n" + SMALL, ": the key rounds comes before any section; put it under [run]"),
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
    assert sentence(lost) == f"the run file {lost} does not exist; name an existing TOML file"
    assert sentence(tmp_path) == f"the run file {tmp_path} cannot be read (Is a directory); name a readable TOML file"
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


@pytest.mark.parametrize(
    "value", ["False", "TRUE", "None", "NaN", ".5", "-.5", "5.", "1e", "1E-", "[.5]", "[True]", "{a = None}", '"open']
)
@pytest.mark.parametrize("key", ["model.flag", "run.name", "protocol.learning-rate"])
def test_a_value_that_is_nearly_toml_is_no_text(write: Write, key: str, value: str) -> None:
    assert sentence(write(SMALL), (f"{key}={value}",)).startswith(f"--set {key}: expected TOML, such as false, 0.5")
    tables: dict[str, Any] = {}
    run_files.override(tables, f"{key}='{value}'")
    section, name = key.split(".")
    assert tables == {section: {name: value}}


@pytest.mark.parametrize(
    "value", ["none", "007", "1.5.2", "2024-01-31", "no", "falsely", "e5", ".", "a b", "mod:build"]
)
def test_other_words_are_text(value: str) -> None:
    tables: dict[str, Any] = {}
    run_files.override(tables, f"model.flag={value}")
    assert tables == {"model": {"flag": value}}


def test_an_override_below_a_value(write: Write) -> None:
    said = sentence(write(SMALL), ("run.rounds.a=3",))
    assert said == "--set run.rounds.a: rounds is a value, not a section; write section.key=value"


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
                "record-views": st.booleans() | st.lists(st.integers(1, 8)),  # of the fewest rounds
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
).filter(lambda run: not (run["protocol"].get("blind") and run.get("secure-aggregation", {}).get("scheme") == "none"))


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
        Fault(round=3, silo="silo-1", phase="set-up"),
        Fault(round=4, silo="silo-1", phase="upload"),
    )
    delay = (Delay(round=2, silo="silo-2", seconds=90.0),)
    assert found == Engine(
        deadline=60.0, faults=Faults(drop=drop, drop_probability=0.25, delay=delay, corrupt=(), seed=0)
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
    data = Data(source="a.csv", partition="by-feature", columns=(("age",), ("job", 2)), label_holder=(2,))
    assert (data.silos, data.columns, data.label_holder) == (2, (("age",), ("job", 2)), (2,))
    assert Data(source="wdbc", partition="grid", grid=(2, 3)).silos == 6
    assert Data(source="wdbc").silos == 3


def test_python_users_write_underscores_and_cannot_change_them_later() -> None:
    data = Data(source="wdbc", batch_size=8)
    with pytest.raises(ValidationError):
        data.batch_size = 9
    with pytest.raises(ParameterError, match="Run: rounds: expected 1 or more, got 0"):
        Run(rounds=0)
    with pytest.raises(ParameterError, match="alpha"):
        Data(source="wdbc", partition="dirichlet")
    with pytest.raises(ParameterError, match="one silo needs scheme"):
        run_files.RunFile(
            run=Run(rounds=1),
            data=Data(source="wdbc", silos=1),
            model=Model(source="mlp"),
            protocol=FedSGD(),
        )


def test_reading_a_run_file_needs_no_torch() -> None:
    code = "import sys, moretta.config.run_files; sys.exit(bool({'torch', 'sklearn'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
