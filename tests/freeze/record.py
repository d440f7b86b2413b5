"""What may not move while the package is rebuilt: ``python tests/freeze/record.py`` writes it to record.json.

Whoever moves a module adapts the one block of imports below, and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import io
import json
import pkgutil
import platform
import re
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import typer
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent / "deployment")]

# -- All that depends on where modules stand ---------------------------------------------------------------------------
import moretta  # noqa: E402
from moretta.audit.auditor import all_attacks  # noqa: E402
from moretta.audit.evidence.truth import Truth  # noqa: E402
from moretta.config import run_files  # noqa: E402
from moretta.config.run_files import RunFile  # noqa: E402
from moretta.config.silo_file import SiloFile  # noqa: E402
from moretta.contract import codec  # noqa: E402
from moretta.contract.messages import Message  # noqa: E402
from moretta.contract.roles import Reason  # noqa: E402
from moretta.deployment import agreed_settings  # noqa: E402
from moretta.engines import checkpoint, run_folder, views  # noqa: E402
from moretta.engines.flare import delivery, envelope, liveness, site_worker  # noqa: E402
from moretta.errors import MissingExtra  # noqa: E402
from moretta.models import graph  # noqa: E402
from moretta.protocols.baffle.edge import metadata  # noqa: E402
from moretta.report import folder as report_folder  # noqa: E402
from moretta.report.dossier import page as dossier_page  # noqa: E402
from moretta.run.assembly import federation_of  # noqa: E402
from moretta.secure_aggregation import keystream  # noqa: E402
from moretta.secure_aggregation.identity import Identity, public_line  # noqa: E402

ENTRY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["moretta"]
APP = "app"  # the name of the typer application beside the entry point
SERVED = ("moretta.deployment.controller:Controller", "moretta.deployment.executor:Executor",
          "moretta.engines.flare.launcher:Launcher", "moretta.edge")  # fmt: skip  # named by kits and jobs
FORMATS: Mapping[str, Callable[[], Any]] = {
    "codec": lambda: codec.FORMAT,
    "checkpoint": lambda: checkpoint.FORMAT,
    "envelope": lambda: envelope.FORMAT,
    "edge model": lambda: metadata.FORMAT,
    "views": lambda: views.FORMAT,
    "views, first bytes": lambda: views.MAGIC.decode(),
    "views, index": lambda: views.INDEX,
    "run folder": lambda: run_folder.FORMAT,
    "report folder": lambda: report_folder.FORMAT,
    "dossier": lambda: dossier_page.FORMAT,
    "saved graph": lambda: graph.FORMAT,
    "agreed settings": lambda: agreed_settings.FORMAT,
    "keystream": lambda: keystream.VERSION.decode(),
    "reasons": lambda: sorted(Reason),
    "envelope's header": lambda: envelope.HEADER_LIMIT,
}
# -- End of all that depends on where modules stand --------------------------------------------------------------------

from cases import AUDITED, EDGE, HOLDING_BACK, LOOPBACK, RUNS, STARTED  # noqa: E402

Record = dict[str, Any]
ARCHIVE = HERE / "started.zip"  # run folders of the commit that was recorded
# Keys of result.json and history.jsonl whose values follow from the machine, the clock or the folder.
VOLATILE = re.compile(r"second|time|peak|_mib|version|platform|machine|started|ended|cpu|thread|python|torch|rss")


def entry() -> Callable[[], None]:
    module, _, name = ENTRY.partition(":")
    found: Callable[[], None] = getattr(importlib.import_module(module), name)
    return found


def call(*words: str) -> tuple[int, str]:
    """Run a command in this process. Returns its exit code and what it printed."""
    out = io.StringIO()
    with mock.patch.object(sys, "argv", ["moretta", *words]), contextlib.redirect_stdout(out):
        try:
            entry()()
        except SystemExit as ended:
            return int(ended.code or 0), out.getvalue()
    return 0, out.getvalue()


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_rows(path: Path) -> None:
    """Write rows of three classes that can be learnt, float64, with a test part."""
    generator = np.random.default_rng(0)
    y = generator.integers(0, 3, 75)
    x = np.round(np.eye(3, 4)[y] * 2 + generator.normal(0, 1, (75, 4)), 6)
    np.savez(path, x_train=x[15:], y_train=y[15:], x_test=x[:15], y_test=y[:15])


def write_images(path: Path) -> None:
    """Write rows of three classes, float64[.., 1, 16, 16], with a test part."""
    generator = np.random.default_rng(1)
    y = generator.integers(0, 3, 40)
    x = np.round(y[:, None, None, None] / 2 + generator.normal(0, 1, (40, 1, 16, 16)), 6)
    np.savez(path, x_train=x[10:], y_train=y[10:], x_test=x[:10], y_test=y[:10])


def write_identities(folder: Path) -> None:
    """Write keys/<silo> and roster.toml, the same each time."""
    entries = []
    for name in ("silo-1", "silo-2", "silo-3"):
        identity = Identity(f"{name}'s key, for tests only".encode().ljust(32))
        identity.save(folder / "keys" / name)
        entries.append(f'[[silo]]\nname = "{name}"\nkey = "{public_line(identity.public_key)}"\n')
    (folder / "roster.toml").write_text("\n".join(entries))


def tree(value: Any) -> Any:
    """Return the keys of JSON content and none of its values; of a list those of all entries together."""
    if isinstance(value, dict):
        return {key: tree(one) for key, one in sorted(value.items())}
    if isinstance(value, list):
        merged: Record = {}
        for one in map(tree, value):
            if isinstance(one, dict):
                merged |= one
        return [merged] if merged else []
    return None


def steady(value: Any) -> Any:
    """Return JSON content without what follows from the machine, the clock or the folder."""
    if isinstance(value, dict):
        return {
            key: steady(one) for key, one in sorted(value.items()) if key != "base" and not VOLATILE.search(key.lower())
        }
    return [steady(one) for one in value] if isinstance(value, list) else value


def weights_in(folder: Path) -> Record:
    """Return the digests of all models that a run left, by file and as bytes."""
    kept = {"checkpoint", "truth"}
    found = sorted(path for path in folder.rglob("*.safetensors") if not kept & set(path.relative_to(folder).parts))
    return {str(path.relative_to(folder)): sha(path.read_bytes()) for path in found}


def heard_in(folder: Path) -> Record:
    """Return the digest of the messages of each role and round, in their order."""
    found = sorted((folder / "views").glob("*/*.bin"))
    return {str(path.relative_to(folder / "views")): sha(path.read_bytes()) for path in found}


def left_in(folder: Path) -> Record:
    """Return all that is frozen of a run folder."""
    result = json.loads((folder / "result.json").read_text())
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    settings = tomllib.loads((folder / "run.toml").read_text())
    settings["run"].pop("base", None)
    inputs = folder / "inputs.json"
    return {
        "weights": weights_in(folder),
        "messages": heard_in(folder),
        "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()),
        "result keys": tree({key: value for key, value in result.items() if key != "settings"}),
        "result": steady(result),
        "history keys": tree(lines),
        "history": steady(lines),
        "inputs": json.loads(inputs.read_text()) if inputs.exists() else None,
        "run.toml": settings,
    }


def trained(text: str, folder: Path, *more: str) -> Path:
    """Train a run file's text by the command, in a folder of its own. more: options. Returns the run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "rows.npz")
    write_images(folder / "images.npz")
    write_identities(folder)
    (folder / "run.toml").write_text(text)
    code, said = call("train", str(folder / "run.toml"), "--out", str(folder / "out"), "--json", *more)
    if code:
        raise RuntimeError(f"{folder.name}: moretta train ended with {code}: {said}")
    return folder / "out"


def runs(folder: Path) -> Record:
    """Every protocol in one process, all messages through the codec."""
    return {name: left_in(trained(text, folder / "runs" / name)) for name, text in RUNS.items()}


def edge(folder: Path) -> Record:
    """BAFFLE with a silo in a process without PyTorch."""
    return {name: left_in(trained(text, folder / "edge" / name)) for name, text in EDGE.items()}


def archive() -> None:
    """Write started.zip: folders of runs that stopped after two rounds."""
    with tempfile.TemporaryDirectory() as place, zipfile.ZipFile(ARCHIVE, "w", zipfile.ZIP_DEFLATED) as file:
        for name, text in STARTED.items():
            out = trained(text, Path(place) / name)
            for path in sorted(one for one in out.rglob("*") if one.is_file()):
                file.write(path, f"{name}/out/{path.relative_to(out)}")


def resumed(folder: Path) -> Record:
    """Runs that the recorded commit began and that go on for two rounds more."""
    with zipfile.ZipFile(ARCHIVE) as file:
        file.extractall(folder / "resumed")
    more = ("--resume", "--set", "run.rounds=4")
    return {name: left_in(trained(text, folder / "resumed" / name, *more)) for name, text in STARTED.items()}


def loopback(folder: Path) -> Record:
    """The same with silos on machines of their own: what the server and each site saw and hold at the end."""
    from loopback import Machines

    found = {}
    for name, (given, settings) in LOOPBACK.items():
        place = folder / "loopback" / name
        place.mkdir(parents=True)
        many = Machines(place, *given, **settings)
        if name == HOLDING_BACK:
            for path in place.glob("*/silo.toml"):
                path.write_text(path.read_text().replace("[data]\n", "[data]\ntest-fraction = 0.25\n"))
        with one_process():
            many.start()
            many.serve(place / "out")
            many.stop()
        at_sites = {site: many.kept(site) for site in many.names}
        found[name] = {
            "told": sha(many.text.encode()),
            "server": {"weights": weights_in(place / "out"), "messages": heard_in(place / "out")},
            "sites": {
                site: {
                    "weights": weights_in(kept),
                    "messages": heard_in(kept),
                    "files": sorted(str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_file()),
                }
                for site, kept in at_sites.items()
            },
        }
    return found


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Let all sites live in this process, and lose no time."""
    with (
        mock.patch.object(site_worker, "AT_ONCE", 20.0),
        mock.patch.object(liveness, "AGAIN", 0.0),
        mock.patch.object(delivery, "BACK", 5.0),
    ):
        yield


def attacks(folder: Path) -> Record:
    """Every attack's name, role and protocols, and by recorded run what it is handed: roles' views and arrays."""
    listed: Record = {
        attack.name: {"role": attack.role, "protocols": sorted(attack.protocols), "slow": attack.slow, "given": {}}
        for attack in all_attacks()
    }
    for name in RUNS:
        out = folder / "runs" / name / "out"
        if not (out / "truth").exists():
            continue
        truth = truth_of(out)
        for attack in all_attacks():
            if truth.run.protocol in attack.protocols and not attack.fits(truth.run):
                listed[attack.name]["given"][name] = handed(attack, truth)
    return listed


def audits(folder: Path) -> Record:
    """Scores of all quick attacks on recorded runs."""
    found = {}
    for name in AUDITED:
        out = folder / "runs" / name / "out"
        code, _ = call("audit", str(out), "--json")
        heard = json.loads((out / "audit.json").read_text())["attacks"]
        found[name] = {"exit code": code, **{one["attack"]: rounded(steady(one)) for one in heard}}
    return found


def rounded(value: Any) -> Any:
    """Return JSON content with numbers of five digits."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def truth_of(out: Path) -> Truth:
    run_file = run_files.load(out / "run.toml")
    return Truth(out, federation_of(run_file, out), run_file.run.rounds, run_file.run.seed, None)


def handed(attack: Any, truth: Truth) -> Record | str:
    try:
        given = attack.given(truth)
    except Exception as error:  # noqa: BLE001  # as an audit notes it
        return f"nothing: {type(error).__name__}"
    views = {role: list(rounds) for role, rounds in given.views.items()}
    return {"views": views, "arrays": sorted(given.arrays)}


def plain(text: object) -> str:
    """Return a type or value as text, without the modules that it stands in and where it lies in memory."""
    said = re.sub(r"\b(?:[a-z_0-9]+\.)+(?=[A-Za-z_])", "", str(text))
    return re.sub(r" at 0x[0-9a-f]+", "", said)


def signature(of: Any) -> str:
    try:
        return plain(inspect.signature(of))
    except (TypeError, ValueError):
        return ""


def public_names() -> Record:
    """What `from moretta import` gives, how it is called, and what the three that users hold have."""
    found: Record = {"all": sorted(moretta.__all__), "version": moretta.__version__}
    for name in moretta.__all__:
        one = getattr(moretta, name)
        found[name] = signature(one)
    for one in (moretta.Federation, moretta.Result, moretta.Silo):
        own = {name: value for name, value in inspect.getmembers(one) if not name.startswith("_")}
        found[f"members of {one.__name__}"] = {
            name: signature(value) if callable(value) else type(value).__name__ for name, value in own.items()
        }
    return found


def commands() -> Record:
    """All commands of the shell, with their arguments and options."""

    def walk(command: Any) -> Record:
        options = {
            one.metavar or one.name
            if (argument := one.param_type_name == "argument")
            else "/".join([*one.opts, *one.secondary_opts]): {
                "argument": argument,
                "flag": getattr(one, "is_flag", False),
                "required": one.required,
                "many": one.multiple or one.nargs != 1,
                "default": "made" if callable(one.default) else plain(one.default),
                "metavar": one.metavar,
                "hidden": one.hidden,
            }
            for one in command.params
        }
        inner = {name: walk(one) for name, one in sorted(getattr(command, "commands", {}).items())}
        return {"options": options, **({"commands": inner} if inner else {})}

    module = importlib.import_module(ENTRY.partition(":")[0])
    return walk(typer.main.get_command(getattr(module, APP)))


def exit_codes(folder: Path) -> Record:
    """Exit codes: 0 done, 1 failed, 2 bad usage or input."""
    bad = folder / "bad.toml"
    bad.write_text(RUNS["fedsgd, pairwise"].replace("rounds = 3", "rounds = -3"))
    words = {
        "version": ["--version"],
        "no such file": ["train", str(folder / "none.toml")],
        "a value out of range": ["train", str(bad)],
        "no such command": ["retrain"],
        "no such option": ["train", "--outt", "x"],
        "no such folder": ["audit", str(folder / "none")],
        "resume of nothing": ["train", str(folder / "runs" / "local" / "run.toml"), "--resume", "--out", str(folder)],
    }
    with contextlib.redirect_stderr(io.StringIO()):
        return {name: call(*said)[0] for name, said in words.items()}


class WithTypes(GenerateJsonSchema):
    """A JSON schema that names a type which JSON has no word for."""

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> Any:
        return {"kind": plain(error_info)}


def schema(kind: type[BaseModel]) -> Any:
    """Return the JSON schema of a section, without names of classes and what they say of themselves."""
    made = kind.model_json_schema(by_alias=True, schema_generator=WithTypes)
    inner = made.pop("$defs", {})

    def flat(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                value = {**inner[value["$ref"].rpartition("/")[2]], **{k: v for k, v in value.items() if k != "$ref"}}
            # `properties` holds keys of the file, which may be called title or description too.
            dropped = ("title", "description", "discriminator")
            return {
                key: {name: flat(one) for name, one in entry.items()} if key == "properties" else flat(entry)
                for key, entry in value.items()
                if key not in dropped
            }
        return [flat(one) for one in value] if isinstance(value, list) else value

    return flat(made)


def wire() -> Record:
    """Every message by its tag: its fields in order and their kinds."""
    for found in pkgutil.walk_packages(moretta.__path__, "moretta."):
        if not found.name.endswith("__main__"):
            try:
                importlib.import_module(found.name)
            except (ModuleNotFoundError, MissingExtra) as error:  # messages are in modules that need no framework
                if "flower" not in found.name or "flwr" not in f"{error} {error.__cause__} {error.__context__}":
                    raise
    tags: Record = {}
    waiting = [Message]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind.TAG and kind.__module__.startswith("moretta."):
            fields = [[name, plain(one)] for name, one in kind.KINDS.items()]
            tags[kind.TAG] = {"fields": fields, "shares": sorted(kind.SHARES), "own": sorted(kind.OWN)}
    return dict(sorted(tags.items()))


def headers() -> Record:
    """The headers of envelopes, by their kind."""
    own = (one for one in vars(envelope).values() if isinstance(one, type) and issubclass(one, BaseModel))
    return {one.model_fields["kind"].default: schema(one) for one in own if "kind" in one.model_fields}


def outputs(folder: Path) -> Record:
    """What commands print with --json, names only, their exit codes, and the files that they leave."""
    place = folder / "outputs"
    place.mkdir()
    np.savez(place / "x.npz", x=np.eye(4))
    fedsgd, local = (str(folder / "runs" / name / "out") for name in ("fedsgd, pairwise", "local"))
    words = {
        "check": ["check", "--model", "mlp", "--input", "4", "--classes", "3", "--loss", "mse"],
        "check of a lenet": ["check", "--model", "lenet", "--input", "1,16,16", "--classes", "3"],
        "predict": ["predict", fedsgd, "--data", str(place / "x.npz"), "--out", str(place / "predicted.npy")],
        "export": ["export", fedsgd, "--out", str(place / "exported.safetensors")],
        "report": ["report", fedsgd, "--out", str(place / "report.html")],
        "compare": ["compare", fedsgd, local, "--out", str(place / "compared")],
        "audit above a limit": ["audit", local, "--fail-above", "membership-of-local-models=-1"],
        "keys new": ["keys", "new", "--out", str(place / "key")],
        "keys show": ["keys", "show", str(place / "key")],
    }
    found: Record = {}
    for name, said in words.items():
        code, out = call(*said, "--json")
        found[name] = {"exit code": code, "keys": tree(json.loads(out)) if out.strip() else None}
    predicted = place / "predicted.npy"
    found["files"] = sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())
    found["predicted"], found["exported"] = (
        sha(path.read_bytes()) for path in (predicted, place / words["export"][-1])
    )
    found["audit.json"] = tree(json.loads((Path(local) / "audit.json").read_text()))
    return found


def digests(folder: Path) -> Record:
    """The digests of run files, by which checkpoints are resumed."""
    found = {path.name: run_files.digest(run_files.load(path)) for path in sorted((ROOT / "examples").glob("*.toml"))}
    for name, text in {**RUNS, **{f"edge: {name}": text for name, text in EDGE.items()}}.items():
        path = folder / "digested.toml"
        path.write_text(text)
        found[name] = run_files.digest(run_files.load(path))
    return found


def served() -> Record:
    """What kits and jobs name by module and class."""
    found = {}
    for name in SERVED:
        module, _, kind = name.partition(":")
        spec = importlib.util.find_spec(module)
        found[name] = spec is not None and (not kind or hasattr(importlib.import_module(module), kind))
    return found


def surfaces(folder: Path) -> Record:
    """What users, files and peers name."""
    return {
        "public names": public_names(),
        "commands": commands(),
        "exit codes": exit_codes(folder),
        "run file": schema(RunFile),
        "silo file": schema(SiloFile),
        "formats": {name: value() for name, value in FORMATS.items()},
        "messages": wire(),
        "envelopes": headers(),
        "digests": digests(folder),
        "served": served(),
    }


SECTIONS: Mapping[str, Callable[[Path], Record]] = {
    "runs": runs,
    "resumed": resumed,
    "edge": edge,
    "loopback": loopback,
    "attacks": attacks,
    "audits": audits,
    "outputs": outputs,
    "surfaces": surfaces,
}


def made(name: str, folder: Path) -> Any:
    """Return one section as it comes back from a JSON file. Attacks and surfaces need the runs' folders."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return json.loads(json.dumps(SECTIONS[name](folder)))
    finally:
        torch.set_num_threads(before)


def rounding() -> str:
    """Return a digest of a few computations: processors of other instructions round their last bits otherwise."""
    drawn = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    image, wide = drawn.reshape(1, 1, 64, 64), drawn.double()
    computed = [drawn @ drawn, wide @ wide, drawn.exp(), drawn.tanh(), drawn.log_softmax(1), drawn.sum()]
    computed += [torch.nn.functional.conv2d(image, image[:, :, :5, :5]), torch.from_numpy(np.exp(wide.numpy()))]
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in computed)).hexdigest()


def machine() -> Record:
    return {
        "rounding": rounding(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def text_of(record: Record) -> str:
    """Return a record as JSON, one line a case."""
    lines = []
    for section, cases in record.items():
        inner = [f"{json.dumps(name)}: {json.dumps(case, sort_keys=True)}" for name, case in cases.items()]
        lines.append(f"{json.dumps(section)}: {{\n" + ",\n".join(inner) + "\n}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    archive()
    record = {"machine": machine()}
    with tempfile.TemporaryDirectory() as folder:
        for name in SECTIONS:
            record[name] = made(name, Path(folder))
            print(name, flush=True)
    (HERE / "record.json").write_text(text_of(record))


if __name__ == "__main__":
    main()
