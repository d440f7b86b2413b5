"""What a site refuses, played by a server that writes any text: each attack fails, and each line of the policy is why.

A mutant of the policy lacks one of its lines. Some named attack must get through it, else the line holds nothing.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
from test_cli import call

from moretta.config import run_files, silo_file
from moretta.config.silo_file import SiloFile
from moretta.contract.messages import Stamp
from moretta.deployment import checks, shared_settings, site_policy
from moretta.deployment.agreed_settings import MOST, MOVES, SiteAgreement, differences, pinned_settings
from moretta.deployment.checks import CheckResult
from moretta.deployment.doctor import examine
from moretta.deployment.site import Site, log_to
from moretta.engines.flare.envelope import Hello, digest_of
from moretta.errors import MorettaError, ParameterError, PolicyError, RangeError, RunFailed
from moretta.protocols.common import modules
from moretta.protocols.fedsgd.messages import TrainOn
from moretta.run import record
from moretta.secure_aggregation.cohort import Participation
from moretta.secure_aggregation.identity import Identity, public_line
from moretta.secure_aggregation.one_sum import Answers

RUN = """
[run]
name = "run"
rounds = 3
{run}
[data]
source = "sites"
inputs = [4]
classes = 3
{data}
[model]
{model}
[protocol]
{protocol}
[engine]
name = "flare"
sites = ["silo-1", "silo-2", "silo-3"]
{more}
"""
FEDSGD, BAFFLE = 'name = "fedsgd"', 'name = "baffle"'
MLP = 'source = "mlp"\nhidden = [5]'
PLAIN = '[secure-aggregation]\nscheme = "none"'
PRIVATE = 'name = "fedsgd"\ndp-noise = 1.0\ndp-clip = 1.0'


def text_of(*, run: str = "", data: str = "", model: str = MLP, protocol: str = FEDSGD, more: str = "") -> str:
    return RUN.format(run=run, data=data, model=model, protocol=protocol, more=more)


def site(folder: Path, silo: str = "", more: str = "", *, classes: int = 3, rows: int = 20) -> SiloFile:
    generator = np.random.default_rng(1)
    x = generator.normal(size=(rows, 4)).astype(np.float32)
    np.savez(folder / "rows.npz", x=x, y=np.arange(rows) % classes)
    (folder / "silo.toml").write_text(f'[silo]\nname = "silo-1"\n{silo}\n[data]\nsource = "rows.npz"\n{more}\n')
    return silo_file.load(folder / "silo.toml")


def rostered(folder: Path) -> SiloFile:
    (folder / "roster.toml").touch()
    return site(folder, 'roster = "roster.toml"\nidentity = "key"')


def refused_text(silo: Callable[[Path], SiloFile] = site, **sections: str) -> Callable[[ModuleType, Path], None]:
    return lambda policy, folder: policy.permitted(text_of(**sections), silo(folder))


SIX_IN_A_GRID = {"protocol": 'name = "cgd"\ndelta = 0.1', "data": 'partition = "grid"\ngrid = [3, 2]'}
TWO = Participation(("silo-1", "silo-2"), 2, 0)
BUDGET = f"{PRIVATE}\ndp-epsilon = 5.0"


def charged(*runs: str, batch: int = 0) -> Callable[[ModuleType, Path], None]:
    """Let runs be charged to a site's data set, which has room for one of them; the last one with another batch."""

    def attack(policy: ModuleType, folder: Path) -> None:
        file = site(folder, more='[privacy]\nmax-epsilon = 8.0\nper = "data set"')
        for place, run in enumerate(runs):
            size = f"\nbatch-size = {batch}" if batch and place else ""
            text = text_of(protocol=BUDGET, data=f"least-rows = 5{size}")
            policy.charge(run * 32, policy.permitted(text, file), file)

    return attack


def summed(
    text: str = "", players: Participation | None = None, more: str = "", roster: Sequence[str] = ()
) -> Callable[[ModuleType, Path], None]:
    def attack(policy: ModuleType, folder: Path) -> None:
        file, text_of_roster = site(folder, more=more), ""
        for name in roster:
            text_of_roster += f'[[silo]]\nname = "{name}"\nkey = "{public_line(Identity.fresh().public_key)}"\n'
        if roster:
            (file.base / "roster.toml").write_text(text_of_roster)
            own = {"roster": Path("roster.toml"), "identity": Path("key")}
            file = file.model_copy(update={"silo": file.silo.model_copy(update=own)})
        policy.permitted_sums(text, players or TWO, file)

    return attack


def damaged_ledger(policy: ModuleType, folder: Path) -> None:
    file = site(folder)
    file.out.mkdir()
    (file.out / policy.LEDGER).write_text("5.0\n")
    policy.charge("a" * 32, policy.permitted(text_of(protocol=BUDGET, data="least-rows = 5"), file), file)


def silo_of(silo: str = "", more: str = "") -> Callable[[Path], SiloFile]:
    return lambda folder: site(folder, silo, more)


def greeting(**changed: Any) -> Callable[[ModuleType, Path], None]:
    def attack(policy: ModuleType, folder: Path) -> None:
        text = text_of()
        run = policy.permitted(text, site(folder))
        model = None if "outputs" in changed else "m"
        fields: dict[str, Any] = {
            "job": digest_of(text),
            "model": "m",
            "versions": {**record.versions(), "torch": "2.6.0"},
        } | changed
        hello = Hello(run="r", round=0, session=0, torch=(), **fields)
        policy.greet(hello, text, run, None if model is None else "2.6.0", model)

    return attack


def regression(outputs: int) -> Callable[[ModuleType, Path], None]:
    def attack(policy: ModuleType, folder: Path) -> None:
        text = text_of(data="outputs = 2").replace("classes = 3", "")
        run = policy.permitted(text, site(folder))
        versions = record.versions()
        given: dict[str, Any] = {"job": digest_of(text), "model": "m", "versions": versions, "outputs": outputs}
        policy.greet(Hello(run="r", round=0, session=0, torch=(), **given), text, run)

    return attack


def huge_model(policy: ModuleType, folder: Path) -> None:
    file = site(folder, more="[limits]\nparameters = 10")
    run = policy.permitted(text_of(), file)
    policy.fitting_model(file, lambda: shared_settings._model(run, 0))


def other_settings(policy: ModuleType, folder: Path) -> None:
    file = site(folder)
    policy.admit(text_of(), file)
    policy.admit(text_of(data="least-rows = 7"), file)


def rounded_tokens(policy: ModuleType, folder: Path) -> None:
    text = text_of(data='tokens = ["ids"]\nstandardise = ["table"]', protocol=BAFFLE)
    text = text.replace("inputs = [4]", "inputs = {ids = [2], table = [4]}")
    policy.permitted(text, site(folder, "edge = true", '[limits]\nedge-precision = "float16"'))


def without_packages(policy: ModuleType, folder: Path) -> None:
    file = site(folder, "edge = true")
    with mock.patch.object(importlib.util, "find_spec", return_value=None):
        policy.permitted(text_of(protocol=BAFFLE), file)


def refused_text_is_noted(policy: ModuleType, folder: Path) -> None:
    """`moretta doctor` shows what a site refused."""
    file = site(folder)
    try:
        policy.admit(text_of(run="insecure-secret-seed = 3"), file)
    finally:
        assert SiteAgreement(file.out).waiting() is not None


def seeded_again(policy: ModuleType, folder: Path) -> None:
    """Resume under another seed: the same take of other rows, whose sum is subtracted from the first."""
    answers = Answers()
    for seed in (0, 7):
        policy.one_run("r", policy.permitted(text_of(run=f"seed = {seed}"), site(folder)), answers)


ATTACKS: Mapping[str, tuple[Callable[[ModuleType, Path], None], str]] = {
    "a seed of the site's secrets": (refused_text(run="insecure-secret-seed = 3"), r"insecure-secret-seed is set"),
    "code of a metric": (refused_text(run='metrics = ["nightly_cleanup:wipe"]'), r"\[run\] metrics is set"),
    "code of a tracker": (refused_text(run='trackers = ["nightly_cleanup:wipe"]'), r"\[run\] trackers is set"),
    "a tracker of the box": (refused_text(run='trackers = ["mlflow"]'), r"\[run\] trackers is set"),
    "a file to start from": (
        refused_text(protocol=f'{FEDSGD}\nwarm-start = "/etc/shadow"'), r"\[protocol\] warm-start is set",
    ),
    "where results go": (refused_text(run='out = "/etc/cron.d"'), r"\[run\] out is set"),
    "a roster of the server's": (
        refused_text(more='[secure-aggregation]\nroster = "r.toml"'), r"\[secure-aggregation\] roster is set",
    ),
    "a schema's file": (refused_text(data='schema = "/etc/passwd"'), r"^run.toml: \[data\] schema is a path on"),
    "a folder of modules": (refused_text(run='base = "/tmp"'), r"^run.toml: \[run\] base is a path on the machine"),
    "rows of the server's choice": (
        lambda policy, folder: policy.permitted(
            '[run]\nrounds = 3\n[data]\nsource = "wdbc"\n[model]\nsource = "mlp"\n[protocol]\nname = "fedsgd"\n',
            site(folder),
        ),
        "but not 'silo-1'",
    ),
    "another silo's place": (refused_text(lambda folder: _named(site(folder), "silo-9")), "but not 'silo-9'"),
    "code of a model": (
        refused_text(model='source = "time:sleep"\nseconds = 9'), "'time:sleep' of the run is code that this",
    ),
    "code of a loss": (refused_text(protocol=f'{FEDSGD}\nown-loss = "os:abort"'), "'os:abort' of the run is code that"),
    "code of a training loop": (
        refused_text(protocol='name = "fedavg"\nfit = "os:abort"'), "'os:abort' of the run is code that",
    ),
    "code of a loss at an edge client": (
        refused_text(silo_of("edge = true"), protocol=f'{BAFFLE}\nown-loss = "os:abort"'), "'os:abort' of the run is",
    ),
    "a protocol that the site does not play": (
        refused_text(silo_of(more='[runs]\nprotocols = ["pbpfl"]')), 'name = "fedsgd": .runs. protocols',
    ),
    "a protocol that an edge client cannot play": (refused_text(silo_of("edge = true")), "require baffle"),
    "a sigma that an edge client rounds away": (
        refused_text(
            silo_of("edge = true", '[limits]\nedge-precision = "float16"'), protocol=f"{BAFFLE}\nsigma = 1e-5"
        ),
        "sigma = 1e-05 is lost",
    ),
    "token ids that an edge client rounds": (rounded_tokens, "would round the token ids of ids"),
    "an edge client that cannot run": (without_packages, "edge clients need onnxruntime"),
    "more memory than an edge client has": (
        refused_text(silo_of("edge = true", "[limits]\nmemory-limit-mib = 10"), protocol=BAFFLE), "no edge client fits",
    ),
    "a run without end": (refused_text(silo_of(more="[runs]\nrounds = 2")), r"\[run\] rounds = 3: .* allows 2"),
    "a round without end": (
        refused_text(silo_of(more="[runs]\nlocal-epochs = 2"), protocol='name = "fedavg"\nlocal-epochs = 3'),
        r"\[protocol\] local-epochs = 3: .* allows 2",
    ),
    "a look at the rows": (refused_text(silo_of(more="[runs]\nlook = false"), data="look = true"), "look = true"),
    "scores on the rows": (
        refused_text(silo_of(more="[runs]\nscores = false"), data="score-at-silos = true"), r"\[data\] score-at-silos",
    ),
    "scores on the way": (
        refused_text(silo_of(more="[runs]\nscores = false"), data="validation-fraction = 0.2"),
        r"\[data\] validation-fraction",
    ),
    "a sum of too few": (refused_text(silo_of(more="[privacy]\nfewest-silos = 4")), r"\[privacy\] fewest-silos = 4"),
    "a low threshold": (
        refused_text(silo_of(more="[privacy]\nthreshold = 3"), more="[secure-aggregation]\nthreshold = 2"),
        r"\[privacy\] threshold = 3",
    ),
    "a low threshold in a grid's columns": (
        lambda policy, folder: policy.permitted(
            text_of(**SIX_IN_A_GRID).replace('"silo-3"]', '"silo-3", "silo-4", "silo-5", "silo-6"]'),
            silo_of(more="[privacy]\nthreshold = 4")(folder),
        ),
        r"\[privacy\] threshold = 4",
    ),
    "no masks": (refused_text(silo_of(more='[privacy]\nscheme = "pairwise"'), more=PLAIN), r"\[privacy\] scheme"),
    "sums that the server reads": (
        refused_text(silo_of(more="[privacy]\nblind = true"), protocol='name = "cgd"\ndelta = 0.1\nblind = false'),
        r"\[privacy\] blind = true",
    ),
    "no roster": (refused_text(silo_of(more="[privacy]\nroster = true")), r"\[privacy\] roster = true"),
    "too little noise": (
        refused_text(silo_of(more="[privacy]\ndp-noise = 2.0"), protocol=PRIVATE, data="least-rows = 5"),
        r"\[privacy\] dp-noise = 2.0",
    ),
    "noise that hides less than the site's unit": (
        refused_text(silo_of(more='[privacy]\nunit = "silo"'), protocol=PRIVATE, data="least-rows = 5"),
        r"\[privacy\] unit = silo .* hides one row",
    ),
    "rows hidden where groups are to be": (
        refused_text(silo_of(more='[privacy]\nunit = "group"'), protocol=PRIVATE, data="least-rows = 5"),
        r"\[privacy\] unit = group .* hides one row",
    ),
    "an epsilon above the site's": (
        refused_text(silo_of(more="[privacy]\nmax-epsilon = 2.0"), protocol=BUDGET, data="least-rows = 5"),
        r"\[privacy\] max-epsilon = 2.0 .* dp-epsilon = 5",
    ),
    "an epsilon without an end": (
        refused_text(silo_of(more="[privacy]\nmax-epsilon = 2.0"), protocol=PRIVATE, data="least-rows = 5"),
        r"\[privacy\] max-epsilon = 2.0 .* dp-epsilon = none",
    ),
    "a larger delta": (
        refused_text(silo_of(more="[privacy]\ndelta = 1e-6"), protocol=BUDGET, data="least-rows = 5"),
        r"\[privacy\] delta = 1e-06 .* dp-delta = 1e-05",
    ),
    "an epsilon at a delta that hides nothing": (
        refused_text(
            silo_of(more="[privacy]\nmax-epsilon = 8.0"), protocol=f"{BUDGET}\ndp-delta = 0.9", data="least-rows = 5"
        ),
        r"\[privacy\] delta = 1e-05 .* dp-delta = 0.9",
    ),
    "a unit behind noise of 0": (
        refused_text(
            silo_of(more='[privacy]\nunit = "row"'), protocol=PRIVATE.replace("1.0", "0.0", 1), data="least-rows = 5"
        ),
        r"\[privacy\] unit = row .* hides nothing",
    ),
    "more than the epsilon of the data set": (charged("a", "b"), "1 earlier runs may have spent 5, and this one asks"),
    "an id used again for other settings": (charged("a", "a", batch=3), "1 earlier runs may have spent 5"),
    "a run's id used again with another seed": (
        seeded_again, "expected the settings that this site began run r with, got others",
    ),
    "another framework's sums below a floor": (
        summed(more="[privacy]\nfewest-silos = 3"), r"\[privacy\] fewest-silos = 3",
    ),
    "a roster of the server's for another framework": (summed('roster = "r.toml"'), "names a roster or an identity"),
    "another framework's sums in the clear": (summed('scheme = "none"'), 'expected "pairwise", in which masks hide'),
    "a silo that is there twice": (
        summed(players=Participation(("silo-1", "silo-1"), 2, 0)), "expected each silo of the run once",
    ),
    "another silo's place in another framework": (
        summed(players=Participation(("silo-2", "silo-3"), 2, 0)), "'silo-1' among them",
    ),
    "some of a roster's silos": (summed(roster=("silo-1", "silo-2", "silo-3")), "the run's silos differ from those"),
    "a round of one silo": (summed(players=Participation(("silo-1", "silo-2"), 1, 0)), "expected 2 to 2 silos"),
    "another framework's sums at a site with a budget": (
        lambda policy, folder: policy.permitted_sums("", TWO, site(folder, more="[privacy]\nmax-epsilon = 2.0")),
        r"\[privacy\] max-epsilon = 2.0 .* dp-epsilon = none",
    ),
    "a record of epsilon that is damaged": (damaged_ledger, "record of its epsilon is damaged"),
    "no masks under a roster": (refused_text(rostered, more=PLAIN), "as it has a roster"),
    "noise of unknown lots": (refused_text(protocol=PRIVATE), r"\[data\] least-rows is missing"),
    "a model beyond the site's memory": (huge_model, "allows 10 in 10000 here"),
    "another Moretta": (greeting(versions={"moretta": "0.0.1", "torch": "2.6.0"}), "but the server 0.0.1"),
    "another text": (greeting(job="0" * 64), "settings differ from the server's"),
    "another PyTorch": (greeting(versions={**record.versions(), "torch": "1.0.0"}), "expected 1.0"),
    "another model": (greeting(model="n"), "builds another model than the server"),
    "a model that some classes do not fit": (greeting(outputs=2), "has 2 outputs"),
    "a model that some targets do not fit": (regression(3), "has 3 outputs"),
    "other settings than were agreed to": (other_settings, r"\[data\] least-rows: not set -> 7"),
    "a refusal that nobody sees": (refused_text_is_noted, r"\[run\] insecure-secret-seed is set"),
}  # fmt: skip


def _named(file: SiloFile, name: str) -> SiloFile:
    return file.model_copy(update={"silo": file.silo.model_copy(update={"name": name})})


@pytest.fixture(autouse=True)
def _a_canary_beside_silo_toml(tmp_path: Path) -> Iterator[None]:
    """Nothing that a server names is imported: the module would leave a file."""
    canary = (
        'from pathlib import Path\n\nPath(__file__).with_name("imported").touch()\n\n\ndef wipe(*_):\n    return 0.0\n'
    )
    (tmp_path / "nightly_cleanup.py").write_text(canary)
    yield
    assert not (tmp_path / "imported").exists()
    assert "nightly_cleanup" not in sys.modules


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_fails_by_a_sentence_that_names_the_key(name: str, tmp_path: Path) -> None:
    attack, sentence = ATTACKS[name]
    with pytest.raises(PolicyError, match=sentence) as caught:
        attack(site_policy, tmp_path)
    assert str(tmp_path) not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


HUGE = 10**12
IN_A_GRID = {"protocol": 'name = "cgd"\ndelta = 0.1', "data": 'partition = "grid"\ngrid = [1, 3]'}


@pytest.mark.parametrize(
    ("inputs", "sections", "shown"),
    [
        (f"[{HUGE}, {HUGE}]", {}, rf"\[{HUGE}, {HUGE}\]"),
        ("[2147483648]", {}, r"\[2147483648\]"),
        (str([1] * 100), {}, r"\[1, .*\]"),
        (str([2**62] * 5000), {}, r"\[4611686018427387904, .*"),
        (f"{{a = [{HUGE}, {HUGE}]}}", {"data": "standardise = []"}, "a table"),
        ("{a = [1073741824], b = [1073741824]}", {"data": "standardise = []"}, "a table"),
        ("[4194305]", IN_A_GRID, r"\[4194305\]: .* at most 4194304 numbers"),
    ],
)
def test_a_sample_that_no_machine_holds_is_refused_before_anything_is_made_of_it(
    inputs: str, sections: dict[str, str], shown: str, tmp_path: Path
) -> None:
    text = text_of(**sections).replace("inputs = [4]", f"inputs = {inputs}")
    with pytest.raises(PolicyError, match=rf"^run.toml: \[data\] inputs = {shown}"):
        site_policy.permitted(text, site(tmp_path))


def test_a_protocol_of_another_package_is_played_by_name_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_policy, "OWN", {name: one for name, one in site_policy.OWN.items() if name != "fedsgd"})
    with pytest.raises(PolicyError, match=r'name = "fedsgd": .runs. protocols in this site'):
        site_policy.permitted(text_of(), site(tmp_path))
    assert site_policy.permitted(text_of(), site(tmp_path, more='[runs]\nprotocols = ["fedsgd"]'))


def test_what_silo_toml_permits_is_played(tmp_path: Path) -> None:
    for sections in ({}, {"protocol": PRIVATE, "data": "least-rows = 5"}, {"run": "participation = 0.9"}):
        site_policy.permitted(text_of(**sections), site(tmp_path))
    greeting()(site_policy, tmp_path)
    greeting(outputs=3)(site_policy, tmp_path)
    regression(2)(site_policy, tmp_path)


def test_a_site_charges_a_run_once_and_doctor_tells(tmp_path: Path) -> None:
    file = site(tmp_path, more='[privacy]\nunit = "row"\nmax-epsilon = 10.0\ndelta = 1e-5\nper = "data set"')
    run = site_policy.permitted(text_of(protocol=BUDGET, data="least-rows = 5"), file)
    for number in ("a", "a", "b", "b"):
        site_policy.charge(number * 32, run, file)
    assert sorted(site_policy.spent_by(file).values()) == [5.0, 5.0]
    assert checks.spent(file) == "2 runs may have spent 10 together; the limit of all runs is 10"
    with pytest.raises(PolicyError, match="2 earlier runs may have spent 10"):
        site_policy.charge("c" * 32, run, file)
    alone = file.model_copy(update={"privacy": file.privacy.model_copy(update={"per": "run"})})
    site_policy.charge("c" * 32, run, alone)
    silos = text_of(protocol='name = "fedavg"\ndp-noise = 1.0\ndp-clip = 1.0\ndp-epsilon = 9.0')
    site_policy.permitted(silos, file)  # a silo is more than a row, and needs no least-rows


# -- each line of the policy holds something ---------------------------------------------------------------------------

SOURCE = Path(site_policy.__file__).read_text()


def removable(tree: ast.Module) -> Iterator[tuple[str, ast.AST, str, int]]:
    """Yield what a mutant lacks: its line, and where it stands: a node, its field and the place in it.

    Each raise, each statement of a rule that calls a check, each entry of a list of rules, of floors, of lengths.
    """
    rules = {rule.__name__ for rule in site_policy.RULES}
    for node in ast.walk(tree):
        for field in ("body", "elts", "keys"):
            parts = getattr(node, field, None)
            for place, part in enumerate(parts if isinstance(parts, list) and not isinstance(node, ast.Module) else ()):
                match field, part:
                    case "body", ast.Raise() | ast.Expr(value=ast.Call()):
                        yield ast.unparse(part)[:80], node, field, place
                    case "elts", ast.Tuple(elts=[ast.Constant(value=str(name)), *_]):
                        yield f"length {name}", node, field, place
                    case "elts", ast.Name(id=name) if name in rules:
                        yield f"rule {name}", node, field, place
                    case "keys", ast.Constant(value=str(name)):
                        yield f"entry {name}", node, field, place


MUTANTS = [f"{number}: {line}" for number, (line, *_) in enumerate(removable(ast.parse(SOURCE)))]


def mutant(number: int) -> ModuleType:
    tree = ast.parse(SOURCE)
    _, node, field, place = list(removable(tree))[number]
    if field == "body":
        getattr(node, field)[place] = ast.Pass()
    else:
        del getattr(node, field)[place]
        if field == "keys":
            del node.values[place]  # type: ignore[attr-defined]
    module = ModuleType("moretta.deployment.site_policy_mutant")
    sys.modules[module.__name__] = module  # where dataclasses look
    exec(compile(ast.fix_missing_locations(tree), "mutant", "exec"), module.__dict__)  # noqa: S102
    return module


def gets_through(policy: ModuleType, attack: Callable[[ModuleType, Path], None], folder: Path) -> bool:
    folder.mkdir()
    try:
        attack(policy, folder)
    except PolicyError:
        return False
    except (MorettaError, AssertionError, AttributeError, KeyError, NameError):
        return True  # refused later, by what is no sentence for the server, or not noted
    return True


@pytest.mark.parametrize("number", range(len(MUTANTS)), ids=MUTANTS)
def test_without_a_line_of_the_policy_a_named_attack_gets_through(number: int, tmp_path: Path) -> None:
    policy = mutant(number)
    through = [
        name
        for place, (name, (attack, _)) in enumerate(ATTACKS.items())
        if gets_through(policy, attack, tmp_path / str(place))
    ]
    assert through, f"no attack needs the line {MUTANTS[number]}"


def test_nothing_else_at_a_site_refuses_what_a_server_sets() -> None:
    """Rooms of a site raise nothing by themselves but for what is wrong with the site's own files and its state."""
    own = {"startup kit", "has no state of this run", "expected a released model"}
    for name in ("site", "executor"):
        source = Path(site_policy.__file__).with_name(f"{name}.py").read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Raise) and node.exc is not None:
                said = ast.unparse(node.exc)
                assert any(words in said for words in own) or "silo.toml" in said, f"{name}.py: {said}"


# -- pinned settings ---------------------------------------------------------------------------------------------------


def test_what_is_not_listed_as_free_is_pinned(tmp_path: Path) -> None:
    """A key that comes later is pinned by itself. Each free key exists, so that the list tells the truth."""
    run = site_policy.permitted(text_of(), site(tmp_path))
    everything = run_files.as_sections(run)
    pinned = pinned_settings(run)
    for name, section in everything.items():
        left = {} if name == "model" else pinned[name]
        assert set(section) - set(left) <= (set(section) if name == "model" else MOVES.get(name, frozenset()))
    known = {
        "run": run_files._KNOWN["run"], "data": run_files._KNOWN["data"], "engine": run_files._KNOWN["engine"],
        "secure-aggregation": run_files._KNOWN["secure-aggregation"],
        "protocol": [key for name in run_files.PROTOCOLS for key in run_files._KNOWN[name]],
    }  # fmt: skip
    for name, keys in MOVES.items():
        assert keys <= set(known[name]), name


@pytest.mark.parametrize(
    "sections",
    [
        {"run": "seed = 5"}, {"protocol": f"{FEDSGD}\nlearning-rate = 0.5"}, {"model": 'source = "mlp"\nhidden = [9]'},
        {"protocol": f"{FEDSGD}\nlr-schedule = 'cosine'"},
    ],
)  # fmt: skip
def test_what_touches_no_row_moves_from_run_to_run(sections: dict[str, str], tmp_path: Path) -> None:
    file = site(tmp_path)
    site_policy.admit(text_of(), file)
    site_policy.admit(text_of(**sections), file)


def bisect(ask: Callable[[int], bool], low: int, high: int) -> tuple[int, int]:
    """Return what a server finds by asking whether a site has at least so many rows, and in how many jobs."""
    jobs = 0
    while high - low > 1:
        jobs, middle = jobs + 1, (low + high) // 2
        low, high = (middle, high) if ask(middle) else (low, middle)
    return low, jobs


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("first", [True, False])
def test_a_sites_number_of_rows_is_not_found_by_jobs(first: bool, tmp_path: Path) -> None:
    """By `least-rows` a server found it in 12 jobs. first: whether a run that fits was played before."""
    file, replies = site(tmp_path, rows=777), []

    def ready(least: int) -> bool:
        try:
            text = text_of(data=f"least-rows = {least}")
            Site(file, text, "silo-1").enter(hello_of(text))
        except MorettaError as error:
            replies.append(type(error))
            return False
        return True

    if first:
        assert ready(1)
    found, jobs = bisect(ready, 1, 4096)
    assert jobs >= 11
    assert found == 1  # as with any other number of rows
    assert set(replies[first is False :]) == {PolicyError}  # by the text alone; before it, at most one bit


def hello_of(text: str) -> Hello:
    run = run_files.loads(text, Path("run.toml"))
    model = shared_settings.model_digest(shared_settings.server_side(run, Path("out")), run)
    given: dict[str, Any] = {"job": digest_of(text), "model": model, "versions": record.versions(), "outputs": 3}
    return Hello(run="0123abcd", round=0, session=0, torch=(), **given)


def finding(folder: Path) -> CheckResult:
    (found,) = (one for one in examine(kit=None, silo=folder / "silo.toml", run=None) if one.what == "agreed")
    return found


@pytest.mark.usefixtures("one_process")
def test_a_refusal_that_depends_on_rows_closes_new_settings_until_the_operator_acts(tmp_path: Path) -> None:
    text = text_of().replace("classes = 3", "classes = 2")
    with pytest.raises(ParameterError, match="label 2 does not fit 2 outputs"):
        Site(site(tmp_path), text, "silo-1")
    file = site(tmp_path, classes=2)  # corrected, and yet the next try would tell the server something
    with pytest.raises(ParameterError, match="did not fit these settings, last at"):
        Site(file, text, "silo-1")
    assert not finding(tmp_path).passes
    assert "moretta accept" in finding(tmp_path).sentence
    accept(tmp_path, "--yes")
    Site(file, text, "silo-1")


@pytest.mark.usefixtures("one_process")
def test_under_proved_settings_a_refusal_closes_nothing(tmp_path: Path) -> None:
    Site(site(tmp_path), text_of(), "silo-1").enter(hello_of(text_of()))
    with pytest.raises(ParameterError, match="label 3 does not fit"):
        Site(site(tmp_path, classes=4), text_of(), "silo-1")
    Site(site(tmp_path), text_of(), "silo-1").enter(hello_of(text_of()))


@pytest.mark.usefixtures("one_process")
def test_a_columns_maximum_is_not_found_by_refused_rounds(tmp_path: Path) -> None:
    """A server that sets the weights had it to six digits by 25 rounds, as a loss overflows only beyond a threshold."""
    file = site(tmp_path)
    text = text_of(run="dtype = 'float32'", data="batch-size = 0", model='source = "mlp"\nhidden = [1]', more=PLAIN)
    one = Site(file, text, "silo-1")
    client, _ = one.enter(hello_of(text))
    run = run_files.loads(text, Path("run.toml"))
    start = modules.arrays(shared_settings._model(run, 0))
    asks, low, high, closed = 0, -8.0, 8.0, False
    while high - low > 1e-6 and not closed:
        asks, middle = asks + 1, (low + high) / 2
        weights = {name: np.zeros_like(value) for name, value in start.items()}
        first, second = (name for name, value in start.items() if value.ndim == 2)
        bias = next(name for name, value in start.items() if value.shape == (1,))
        weights[first][0, 0], weights[bias][0], weights[second][:, 0] = 1e30, -1e30 * middle, (1e30, -1e30, 0.0)
        try:
            client.answer(TrainOn(stamp=Stamp("0123abcd", asks, 0), parameters=weights, encoding={}))
            high = middle
        except MorettaError as error:
            low, closed = middle, one.refused(error)
    assert closed
    assert high - low > 0.1
    with pytest.raises(ParameterError, match="last at"):
        one.enter(hello_of(text))
    accept(tmp_path, "--yes")
    one.enter(hello_of(text))


def test_only_refusals_that_follow_from_rows_are_counted(tmp_path: Path) -> None:
    file = site(tmp_path)
    one = Site(file, text_of(), "silo-1")
    for error in (ParameterError("a setting"), MemoryError(), OSError("a disk"), RunFailed("a disk")) * MOST:
        assert not one.refused(error)
    assert [one.refused(RangeError("a value")) for _ in range(MOST)] == [False] * (MOST - 1) + [True]


def test_a_file_that_cannot_be_read_just_now_closes_nothing(tmp_path: Path) -> None:
    file = site(tmp_path)
    (tmp_path / "rows.npz").rename(tmp_path / "away.npz")
    with pytest.raises(ParameterError, match=r"rows\.npz"):
        Site(file, text_of(), "silo-1")
    (tmp_path / "away.npz").rename(tmp_path / "rows.npz")
    Site(file, text_of(), "silo-1")


# -- the operator ------------------------------------------------------------------------------------------------------


def accept(folder: Path, *options: str) -> dict[str, Any]:
    called = call("accept", "--silo", folder / "silo.toml", "--json", *options)
    assert called.code == 0, called.err
    found: dict[str, Any] = json.loads(called.out)
    return found


def test_the_operator_sees_the_difference_in_words_and_accepts_it(tmp_path: Path) -> None:
    file = site(tmp_path)
    assert accept(tmp_path)["waiting"] == []
    site_policy.admit(text_of(), file)
    other = text_of(data="batch-size = 8")
    with pytest.raises(PolicyError, match=r"\[data\] batch-size: 32 -> 8"):
        site_policy.admit(other, file)
    assert finding(tmp_path).warns
    assert "batch-size: 32 -> 8" in finding(tmp_path).sentence
    assert call("accept", "--silo", tmp_path / "silo.toml").code == 2  # nobody is there to be asked
    with pytest.raises(PolicyError):
        site_policy.admit(other, file)
    assert accept(tmp_path, "--yes") | {"format": 1} == {
        "format": 1, "waiting": ["[data] batch-size: 32 -> 8"], "accepted": True, "agreed": 2,
    }  # fmt: skip
    for text in (other, text_of()):
        site_policy.admit(text, file)


def test_what_the_operator_saw_is_what_is_accepted(tmp_path: Path) -> None:
    """A server may send other settings while the operator reads."""
    file = site(tmp_path)
    site_policy.admit(text_of(), file)
    agreement = SiteAgreement(file.out)
    for size in (8, 16):
        with pytest.raises(PolicyError):
            site_policy.admit(text_of(data=f"batch-size = {size}"), file)
        if size == 8:
            shown = agreement.waiting()
    agreement.accept(shown)
    site_policy.admit(text_of(data="batch-size = 8"), file)
    with pytest.raises(PolicyError):
        site_policy.admit(text_of(data="batch-size = 16"), file)


def test_processes_change_what_is_agreed_one_after_the_other(tmp_path: Path) -> None:
    """Else a running site and `moretta accept` could undo each other's change."""
    file = site(tmp_path)
    settings = pinned_settings(site_policy.admit(text_of(), file))
    said = list[bool]()

    def refuse() -> None:
        for _ in range(10):
            said.append(SiteAgreement(file.out).count(settings))

    threads = [threading.Thread(target=refuse) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (found,) = SiteAgreement(file.out).agreed()
    assert found.refusals == 40
    assert said.count(False) == MOST - 1  # each is about its own change


def test_differences_name_columns_and_their_order(tmp_path: Path) -> None:
    columns = '[columns.age]\nkind = "number"\n[columns.ward]\nkind = "category"\ncategories = ["A", "B"]\n'
    target = '[columns.outcome]\nkind = "target"\nclasses = ["no", "yes"]\n'
    plain = text_of(more=columns + target).replace("inputs = [4]\nclasses = 3\n", "")
    changed = plain.replace('categories = ["A", "B"]', 'categories = ["A", "C"]')
    age = '[columns.age]\nkind = "number"\n'
    turned = plain.replace(age, "").replace("[columns.outcome]", f"{age}[columns.outcome]")
    ours, other, order = (
        pinned_settings(site_policy.permitted(text, site(tmp_path))) for text in (plain, changed, turned)
    )
    (sentence,) = differences(ours, other)
    assert sentence.startswith("[columns.ward]: ")
    assert '["A", "B"]' in sentence
    assert '["A", "C"]' in sentence
    assert list(differences(ours, order)) == [
        '[schema] order: ["age", "ward", "outcome"] -> ["ward", "age", "outcome"]'
    ]


def test_a_grid_pins_the_order_of_its_sites(tmp_path: Path) -> None:
    """By another order a site would read other columns, beside another site's rows, or hold the labels."""
    file, names = site(tmp_path), '["silo-1", "silo-2", "silo-3"'
    cut = text_of(data='partition = "grid"\ngrid = [2, 2]', protocol='name = "cgd"\nloss = "mse"').replace(
        names, f'{names}, "silo-4"'
    )
    plain = cut.replace("classes = 3", "classes = 2")
    site_policy.admit(plain, file)
    for order in ('["silo-2", "silo-1", "silo-3"', '["silo-1", "silo-3", "silo-2"'):
        with pytest.raises(PolicyError, match=r"\[engine\] sites: .*silo-4.* -> "):
            site_policy.admit(plain.replace(names, order), file)
    site_policy.admit(plain.replace("rounds = 3", "rounds = 4"), file)


def test_a_name_in_a_servers_text_begins_no_line_of_a_report(tmp_path: Path) -> None:
    columns = '[columns.age]\nkind = "number"\n[columns.outcome]\nkind = "target"\nclasses = ["no", "yes"]\n'
    plain = text_of(more=columns).replace("inputs = [4]\nclasses = 3\n", "")
    file, forged = site(tmp_path), plain.replace("[columns.age]", '[columns."age\\nok   agreed: all is well"]')
    site_policy.admit(plain, file)
    with pytest.raises(PolicyError, match="all is well"):
        site_policy.admit(forged, file)
    report = call("doctor", "--silo", tmp_path / "silo.toml").out
    assert "all is well" in report
    assert not any(line.startswith("ok   agreed") for line in report.splitlines())


@pytest.mark.parametrize("broken", ["", "{}", "[]", '{"format": 2, "agreed": [], "waiting": null}', '{"format": 1}'])
def test_a_damaged_record_is_a_sentence(broken: str, tmp_path: Path) -> None:
    file = site(tmp_path)
    file.out.mkdir()
    (file.out / "agreed.json").write_text(broken)
    with pytest.raises(ParameterError, match=r"agreed\.json is damaged .*restore a copy, or move it away"):
        site_policy.admit(text_of(), file)


@pytest.mark.usefixtures("one_process")
def test_one_run_id_has_one_set_of_settings(tmp_path: Path) -> None:
    """A resumed run of another seed drew other rows for the same take, and the two sums could be subtracted."""
    Site(site(tmp_path), text_of(), "silo-1").enter(hello_of(text_of()))
    for run, protocol in (("seed = 7", FEDSGD), ("", f"{FEDSGD}\nlearning-rate = 0.5")):
        text = text_of(run=run, protocol=protocol)
        with pytest.raises(PolicyError, match="expected the settings that this site began run 0123abcd with"):
            Site(site(tmp_path), text, "silo-1").enter(hello_of(text))
    more = text_of().replace("rounds = 3", "rounds = 9")  # which may change on the way
    Site(site(tmp_path), more, "silo-1").enter(hello_of(more))


@pytest.mark.usefixtures("one_process")
def test_a_run_that_is_refused_for_its_settings_spends_no_epsilon(tmp_path: Path) -> None:
    more = '[privacy]\nunit = "row"\nmax-epsilon = 10.0\ndelta = 1e-5\nper = "data set"'
    first, other = (text_of(protocol=BUDGET, data=f"least-rows = {least}") for least in (5, 6))
    Site(site(tmp_path, more=more), first, "silo-1").enter(hello_of(first))
    file = site(tmp_path, more=more)
    with pytest.raises(PolicyError, match="differ from those that this site has agreed to"):
        Site(file, other, "silo-1")
    accept(tmp_path, "--yes")
    with pytest.raises(PolicyError, match="expected the settings that this site began run"):
        Site(file, other, "silo-1").enter(hello_of(other))
    assert list(site_policy.spent_by(file).values()) == [5.0]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"run": 'out = "away"\nmetrics = ["sklearn.metrics:f1_score"]\nevaluate-every = 2\ndtype = "float32"'},
        {"protocol": 'name = "pbpfl"\nwarm-start = "begun.safetensors"\nlr-schedule = "cosine"'},
        {"protocol": PRIVATE, "data": "least-rows = 9", "more": "[secure-aggregation]\nlimit = 8.0"},
        {"protocol": BAFFLE, "more": "[secure-aggregation]\nring-bits = 32"},
    ],
    ids=str,
)
def test_a_server_and_its_sites_have_one_digest_of_what_they_share(settings: dict[str, str]) -> None:
    of_server = run_files.loads(text_of(**settings), Path("run.toml"))
    of_site = run_files.loads(shared_settings.shared_text(of_server), Path("elsewhere/run.toml"))
    assert run_files.digest(run_files.shared(of_server)) == run_files.digest(of_site)


def test_a_sites_log_is_its_owners_alone(tmp_path: Path) -> None:
    """Also in a folder that others may read; sentences of errors may quote cells."""
    tmp_path.chmod(0o755)
    logger = logging.getLogger("moretta")
    before, level = logger.handlers[:], logger.level
    log_to(tmp_path / "log.txt")
    (handler,) = [each for each in logger.handlers if each not in before]
    logger.removeHandler(handler)
    handler.close()
    logger.setLevel(level)
    logger.propagate = True
    assert (tmp_path / "log.txt").stat().st_mode & 0o777 == 0o600
