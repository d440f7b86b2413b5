"""The audit of a run folder, for the command line.

It also audits a run of another framework whose sites recorded their views (`run_folder_of`). Each site's mod or filter
records its silo's view as messages of the secure sum. A model in the clear is a received `PlainUpload` before an
`AskSum`. The site's result is a sent `PlainUpload`, or the messages of a sum. The first two become the protocol's own
question, and the messages of all silos together make the server's view. The true models are those that silos received;
the given federation has the rows.
"""

import copy
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from moretta.audit.auditor import Audit, Progress, all_attacks, audit, opened
from moretta.audit.evidence.case import Heard
from moretta.audit.evidence.truth import public_run
from moretta.audit.evidence.uploads import PREFIX, from_heard
from moretta.config import run_files
from moretta.contract.codec import Codec
from moretta.contract.messages import Array, Message
from moretta.contract.roles import Outcome, over, under
from moretta.contract.wording import nearest
from moretta.data.images.sets import read_npz
from moretta.data.layout import SampleLayout, gather
from moretta.data.references import OWN_CODE, beside, cause, resolve
from moretta.data.tables.preparation import Preparation
from moretta.engines import views
from moretta.engines.checkpoint import CheckpointId
from moretta.engines.folder_lock import held
from moretta.engines.run_folder import HISTORY, RunFolder, read_json
from moretta.errors import MorettaError, ParameterError
from moretta.protocols.common import modules
from moretta.protocols.registry import entry_of
from moretta.run import consent
from moretta.run.assembly import federation_of
from moretta.run.federation import Federation
from moretta.run.persistence import inputs_of, save_truth
from moretta.run.record import PlayedRun, bytes_of, record_of, versions
from moretta.run.trained_model import MADE
from moretta.secure_aggregation.pairwise import MaskedUpload
from moretta.secure_aggregation.plain import PlainUpload
from moretta.secure_aggregation.secure_sum import CODEC, AskSum
from moretta.secure_aggregation.sums import as_summed


def audit_folder(
    folder: Path,
    *,
    thorough: bool = False,
    background: Path | None = None,
    progress: Progress | None = None,
    needed: Iterable[str] = (),
    allow_code: bool = False,
    federation: str | None = None,
    views: bool = False,
) -> Audit:
    """Audit a finished run, with its rows and architecture rebuilt from its own run file.

    Args:
        folder: The run folder.
        thorough, progress, needed: As in `moretta.audit.auditor.audit`.
        background: A file of `read_background`.
        allow_code: Import the code of model and rows that the folder names (`moretta.run.consent`).
        federation: For a run made from Python, the "module:function" beside the working directory that returns its
            federation with the rows, because these are not in the folder.
        views: The folder has views that sites of another framework recorded (`run_folder_of`).

    Raises:
        ParameterError: As `audit` does; without a finished run; for a run made from Python without `federation`.
    """
    if views:
        played, rounds, seed = _recorded_elsewhere(folder, federation)
    else:
        played, rounds, seed = _played(folder, allow_code, federation)
    rows = None if background is None else read_background(background, played.layout)
    return audit(
        folder,
        played,
        rounds,
        seed,
        thorough=thorough,
        background=rows,
        background_name="" if background is None else background.name,
        progress=progress,
        needed=needed,
    )


def check_folder(folder: Path, allow_code: bool = False) -> None:
    """Raise what `audit_folder` raises for a folder that cannot be audited."""
    opened(folder, *_played(folder, allow_code))


def _played(folder: Path, allow_code: bool, federation: str | None = None) -> tuple[Federation, int, int]:
    """Return the federation, rounds and seed of a run folder, by its run file or by the named function."""
    if not folder.is_dir():
        raise ParameterError(f"{folder}: expected a run folder; there is no such directory")
    if not (folder / "result.json").exists():
        raise ParameterError(f"{folder}: expected a finished run; it has no result.json, so go on with it by --resume")
    if not (folder / "run.toml").exists():
        if federation is None:
            raise ParameterError(
                f"{folder}: expected a run of `moretta train`; one made from Python has its rows there, so call "
                "Result.audit() of what train() returned, or name a function that returns its Federation by "
                "--federation module:function"
            )
        settings = read_json(folder / MADE)  # digests of rows and settings show a difference to the audit
        return _made_by(federation), int(settings["rounds"]), int(settings["seed"])
    if federation is not None:
        raise ParameterError(f"{folder} has a run file, which describes what was trained; leave out --federation")
    run_file = run_files.of_folder(folder)
    consent.check(folder, run_file, allow_code, data=True)
    return federation_of(run_file, folder), run_file.run.rounds, run_file.run.seed


def _recorded_elsewhere(folder: Path, federation: str | None) -> tuple[Federation, int, int]:
    if federation is None:
        raise ParameterError("--views needs --federation module:function: what returns the silos, their rows and steps")
    if (folder / "run.toml").exists() or (folder / MADE).exists() or not (folder / "views").is_dir():
        raise ParameterError(f"{folder}: expected the folder that was passed to a mod or filter; leave out --views")
    with held(folder):
        return *run_folder_of(folder, _made_by(federation)), 0


def _made_by(federation: str) -> Federation:
    """Return the result of a function. Raises `moretta.errors.ParameterError` unless it is a federation."""
    function = resolve(federation, Path(), OWN_CODE)
    try:
        with beside(Path()):
            made = function()
    except (Exception, SystemExit) as error:
        raise ParameterError(f'--federation "{federation}" failed with {cause(error)}; fix the function') from error
    if not isinstance(made, Federation):
        raise ParameterError(
            f'--federation "{federation}" must return the moretta.Federation of the run, got {type(made).__name__}'
        )
    return made


def read_background(path: Path, layout: SampleLayout | None = None) -> tuple[Array, Array]:
    """Return attackers' rows, x and y of a .npz file, in the silos' form.

    Args:
        layout: For samples of several arrays, each of which is x.NAME in the file and is packed.

    Raises:
        ParameterError: The file lacks x or y, or they have another form.
    """
    where, arrays = f"--background {path}", read_npz(path)
    named = arrays if layout is None else {"x": layout.pack(gather(arrays, "x"), where), "y": arrays.get("y")}
    x, y = (named.get(name) for name in "xy")
    if x is None or y is None:
        raise ParameterError(f"{where}: expected a .npz file with arrays x and y; got {', '.join(arrays) or 'none'}")
    if not x.ndim or not y.ndim or y.dtype.kind not in "iufb":
        raise ParameterError(
            f"{where}: expected a row of x and a number of y for each sample, got x {x.dtype}{list(x.shape)} and y "
            f"{y.dtype}{list(y.shape)}"
        )
    return x, y


def limits_of(texts: Sequence[str]) -> Mapping[str, float]:
    """Return the scores of ``--fail-above NAME=SCORE``, by attack. Raises ParameterError for another text or attack."""
    limits: dict[str, float] = {}
    known = [attack.name for attack in all_attacks()] if texts else []
    for text in texts:
        name, sign, number = text.rpartition("=")
        try:
            limits[name] = float(number)
        except ValueError:
            sign = ""
        if not sign or not name or np.isnan(limits[name]):
            raise ParameterError(f"--fail-above {text}: expected NAME=SCORE, for example gamma-least-squares=0.5")
        if name not in known:
            close = " or ".join(attack for attack in known if attack.startswith(name)) or nearest(name, known)
            hint = f"did you mean {close}?" if close else f"the attacks are {', '.join(known)}"
            raise ParameterError(f"--fail-above {text}: there is no attack {name}; {hint}")
    return limits


Traffic = Sequence[tuple[str, str, Message]]  # silo, direction from the silo's side, message
OTHER = {"sent": "received", "received": "sent"}  # the direction from the server's side
WARNING = (
    "another framework trained this run, and its sites recorded it: the audit takes the sites' own loops for the steps "
    "of the given federation, and knows of no message that a mod or filter does not see"
)


def run_folder_of(folder: Path, made: Federation) -> tuple[Federation, int]:
    """Turn a folder with all silos' views into a finished run's; return the federation as it summed, and its rounds.

    Args:
        made: Silos with their rows and names, the model, and a protocol with the same steps as the sites' own loops.

    Raises:
        ParameterError: Views and federation contradict each other.
    """
    ask, before = _question(made), list[tuple[str, str, Message]]()
    by_round, models = dict[int, Traffic](), dict[int, dict[str, Array]]()
    for _, traffic in sorted(_recorded(folder / "views", made).items()):
        before += _as_questions(traffic, made)
        if sent := [message.parameters for *_, message in before if isinstance(message, ask)]:
            number = len(models) + 1  # only rounds of training count
            models[number], by_round[number] = _model_of(number, sent, made), before
            before = []  # traffic of an evaluation, which may agree on keys, stays for the next round's view
    if not models:
        raise ParameterError(f"{folder / 'views'}: no view has a model that a site was sent to train")
    made, rounds = _as_summed(made, by_round), max(models)
    run = by_round[min(models)][0][2].stamp.run
    history = _write_views(folder / "views", run, by_round, len(made.silos))
    names, scheme = [silo.name for silo in made.silos], made.spec.secure_aggregation.scheme
    index, size = views.digest(folder / "views"), modules.size(made.model)
    about = (made.spec, rounds, names, size, scheme, False, (), run, 1, history, Outcome({}))
    record = record_of(PlayedRun(*about, (), {}, False, None, index, [WARNING]), versions())
    final = _final(public_run(record, made, tuple(models)), by_round, models[rounds])
    kept = RunFolder(folder)
    (folder / HISTORY).unlink(missing_ok=True)
    for line in history:
        kept.append(line)
    digest = made.digest(0, rounds)
    shutil.rmtree(folder / "truth", ignore_errors=True)  # of an earlier audit
    for number, model in ((number - 1, model) for number, model in models.items()):
        state = {"server": over("model/", model)}
        save_truth(folder / "truth", CheckpointId(run, number, 0, digest), state, made.silos)
    kept.write_model("released.safetensors", final, mode=0o644)
    inputs = kept.write_json("inputs.json", inputs_of(made, Preparation.nothing()))
    kept.write_json("result.json", record | {"inputs": inputs, "models": dict(kept.models)})
    return made, rounds


def _recorded(folder: Path, made: Federation) -> dict[int, list[tuple[str, str, Message]]]:
    """Return by round the messages that silos sent and received, silo by silo and attempt by attempt."""
    by_round = dict[int, list[tuple[str, str, Message]]]()
    names = sorted(silo.name for silo in made.silos)
    roles = sorted(path.name for path in folder.glob("*") if path.is_dir() and path.name != "server")
    if roles != names:
        raise ParameterError(f"{folder} has the views of {roles!r:.200}; expected those of the silos {names!r:.200}")
    for name in names:
        for number, path in views.noted(folder, name):
            by_round.setdefault(number, []).extend(
                (name, seen.direction, _decoded(seen.data, path)) for seen in views.read(path)
            )
    for number, traffic in by_round.items():
        if number == 0:
            raise ParameterError(
                f"{folder}: round 0 was recorded; the strategy sends no `server-round` to distinguish rounds by"
            )
        if len({message.stamp.run for *_, message in traffic}) > 1:
            raise ParameterError(f"{folder}: round {number} is of several runs; record each into a folder of its own")
        traffic.sort(key=lambda seen: (seen[2].stamp.attempt, seen[2].stamp.take))
    return by_round


def _decoded(data: bytes, path: Path) -> Message:
    try:
        return CODEC.decode(data)
    except MorettaError as error:
        raise ParameterError(f"{path}: expected a view that a site recorded: {error}") from None


def _question(made: Federation) -> type[Any]:
    """Return the protocol's message that sends a model and the encoding of the answer."""
    for kind in entry_of(made.spec.protocol).own_messages():
        if {field.name for field in fields(kind)} == {"stamp", "parameters", "encoding"}:
            return kind
    raise ParameterError("views of others' runs are audited as federated averaging; return a Federation with FedAvg()")


def _as_questions(traffic: Traffic, made: Federation) -> Traffic:
    """Replace a model in the clear and the ask that follows it by the protocol's question."""
    ask, result, sent = _question(made), list[tuple[str, str, Message]](), dict[str, dict[str, Array]]()
    for silo, direction, message in traffic:
        if isinstance(message, PlainUpload) and direction == "received":
            sent[silo] = {name.partition("/")[2]: value for name, value in message.tensors.items()}
        elif not isinstance(message, AskSum):
            result.append((silo, direction, message))
        elif silo in sent:  # otherwise the sum is not of a model
            question = ask(stamp=message.stamp, parameters=sent.pop(silo), encoding=message.encoding)
            result.append((silo, direction, question))
    return result


def _model_of(number: int, sent: Sequence[Mapping[str, Array]], made: Federation) -> dict[str, Array]:
    """Return the model that all silos received in a round, in the order of its tensors."""
    own, first = modules.arrays(made.model), sent[0]
    if {name: value.shape for name, value in own.items()} != {name: value.shape for name, value in first.items()}:
        raise ParameterError(
            f"round {number} sent {sorted(first)!r:.200}; expected the tensors of the federation's model, "
            f"{sorted(own)!r:.200}, of its shapes"
        )
    if any(not np.array_equal(first[name], other[name]) for other in sent for name in own):
        raise ParameterError(f"round {number} sent silos different models, which no server of an honest run does")
    return {name: np.asarray(first[name]) for name in own}


def _as_summed(made: Federation, by_round: Mapping[int, Traffic]) -> Federation:
    """Return the federation with the secure sums that the views show, whatever its own settings."""
    messages = [message for traffic in by_round.values() for *_, message in traffic]
    plain = any(isinstance(message, PlainUpload) for message in messages)
    words = [message.weight.itemsize for message in messages if isinstance(message, MaskedUpload)]
    sums: dict[str, object] = {"scheme": "none" if plain or not words else "pairwise", "roster": None, "identity": None}
    changed = made.spec.secure_aggregation.model_copy(update=sums | ({"ring_bits": 8 * words[0]} if words else {}))
    federation = copy.copy(made)
    federation.spec = replace(made.spec, secure_aggregation=changed)
    return federation


def _write_views(folder: Path, run: str, by_round: Mapping[int, Traffic], silos: int) -> list[dict[str, Any]]:
    """Write the silos' views as the protocol's messages and the server's beside them; return a line for each round."""
    (folder / views.INDEX).unlink(missing_ok=True)
    recorder, lines = views.Recorder(folder, True, 1, run), []
    codec = Codec(dict.fromkeys(type(message) for traffic in by_round.values() for *_, message in traffic))
    for number, traffic in sorted(by_round.items()):
        recorder.wants(number)
        sizes = Counter[tuple[str, str]]()
        for silo, direction, message in traffic:
            data = codec.encode(message)
            recorder.saw(silo, direction, "server", data)
            recorder.saw("server", OTHER[direction], silo, data)
            sizes["up" if direction == "sent" else "down", message.TAG] += len(data)
        recorder.flush()
        about = {"round": number, "attempt": 0, "seconds": {}, "dropped": [], "seconds_total": 0.0}
        lines.append({**about, "bytes": bytes_of(sizes, silos)})
    return lines


def _final(run: Any, by_round: Mapping[int, Traffic], last: Mapping[str, Array]) -> dict[str, Array]:
    """Return the model after the last round: the sent one, less the mean of the changes."""
    seen = [
        Heard(OTHER[direction], silo, message, number)
        for number, traffic in sorted(by_round.items())
        for silo, direction, message in traffic
    ]
    changes = under(PREFIX, from_heard(run, seen, run.training[-1]).total().means)
    return {name: as_summed(value - changes.get(name, 0), value.dtype) for name, value in last.items()}
