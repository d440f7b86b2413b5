"""Run every attack that fits a run, Moretta's own and installed ones, score the claims, write ``audit.json``."""

import importlib
import os
import pkgutil
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from moretta.audit import attacks
from moretta.audit.attacker import AttackFailed, AttackOrigin, claim_of
from moretta.audit.evidence.attack import Attack, AttackResult, Claim, Given, Reconstruction
from moretta.audit.evidence.case import PublicRun
from moretta.audit.evidence.truth import Trained, Truth
from moretta.contract.messages import Array
from moretta.engines import views
from moretta.engines.confinement import landlock
from moretta.engines.files import check_plain, write_atomically
from moretta.engines.folder_lock import held
from moretta.engines.run_folder import RunFolder
from moretta.errors import MorettaError, ParameterError
from moretta.protocols.common.entry import ATTACKS, added
from moretta.protocols.common.severity import is_whole
from moretta.protocols.registry import ENTRIES

ORDER = ("server", "silo", "silos together", "server and silos", "outsider")


def all_attacks() -> Sequence[Attack]:
    """Return all attacks by role and name, from `moretta.audit.attacks` and entry points ``moretta.attacks``."""
    names = [info.name for info in pkgutil.walk_packages(attacks.__path__, f"{attacks.__name__}.") if not info.ispkg]
    defined = [var for name in names for var in vars(importlib.import_module(name)).values() if isinstance(var, Attack)]
    by_name = added(ATTACKS, {attack.name: attack for attack in defined}, Attack)
    return sorted(by_name.values(), key=lambda attack: (ORDER.index(attack.role), attack.name))


def why_not(attack: Attack, run: PublicRun) -> str:
    """Return why an attack cannot be tried on a run; empty if it can."""
    if run.setting("fit"):
        return "silos trained by a loop of their own (fit), and attacks know our steps alone"
    if run.setting("own-loss"):
        return "the run minimised a loss of its own (own-loss), and attacks know the built-in ones"
    return attack.fits(run)


def switched_off(run: PublicRun) -> dict[str, list[str]]:
    """Return by key the attacks, off by default, that could be tried on a run without that setting."""
    fields = ENTRIES[run.protocol].settings_class().model_fields.items()
    off = {field.alias or name for name, field in fields if not field.is_required() and not field.get_default()}
    missed = [attack for attack in all_attacks() if run.protocol in attack.protocols and why_not(attack, run)]
    missed_by_key = dict[str, list[str]]()
    for section in ("protocol", "data"):
        kept = run.settings.get(section, {})
        for key in (key for key, value in kept.items() if value and key in (*off, "augment")):
            without = replace(run, settings={**run.settings, section: {**kept, key: None}})
            if names := [attack.name for attack in missed if not why_not(attack, without)]:
                missed_by_key[key] = names
    return missed_by_key


SECONDS = 120.0  # the most for one attack
SECONDS_THOROUGH = 3600.0
PICTURES = 8  # the most for one attack
SLOW = "it is slow; ask for it by --thorough"

Progress = Callable[[int, int, str], None]
"""Called after each attack with the number that have ended, of how many, and its name."""

Done = tuple[dict[str, Any], Sequence[Reconstruction]]
"""An attack's line in ``audit.json``, and its pictures."""


@dataclass(frozen=True)
class Audit:
    """The results of an audit; `record` is the content of ``audit.json``."""

    record: Mapping[str, Any]

    @property
    def attacks(self) -> Sequence[Mapping[str, Any]]:
        """The result of each attack, in the order of `all_attacks`."""
        return self.record["attacks"]  # type: ignore[no-any-return]

    def above(self, limits: Mapping[str, float]) -> Mapping[str, str]:
        """Return in words, by attack, the limits that are not kept: the score is above, or is missing.

        Raises:
            ParameterError: A name is not an attack on this run's protocol.
        """
        scores = {line["attack"]: float(line["score"]) for line in self.attacks}
        missed = {line["attack"]: line["because"] for line in self.record["not_run"]}
        exceeded = {}
        for name, limit in limits.items():
            if name in missed:
                exceeded[name] = f"{name} has no score: {missed[name]}"
            elif name not in scores:
                raise _not_tried(name, scores, ())
            elif scores[name] > limit:
                exceeded[name] = f"{name} scores {scores[name]:.4g}, above {limit:g}"
        return exceeded


def _not_tried(name: str, tried: Iterable[str], missed: Iterable[Mapping[str, str]]) -> ParameterError:
    reason = next((entry["because"] for entry in missed if entry["attack"] == name), None)
    others = f"the attacks on this run are {', '.join(tried)}" if tried else "no attack is"
    why = f"it is not: {reason}" if reason else others
    return ParameterError(f"{name} is given a limit: expected an attack that is tried on this run; {why}")


def audit(
    folder: Path,
    federation: Trained,
    rounds: int,
    seed: int,
    *,
    thorough: bool = False,
    background: tuple[Array, Array] | None = None,
    background_name: str = "rows given from Python",
    progress: Progress | None = None,
    chosen: Iterable[Attack] | None = None,
    needed: Iterable[str] = (),
) -> Audit:
    """Attack what a run recorded, and write ``audit.json`` into its folder, whole or not at all.

    Args:
        federation, rounds, seed: As in the run.
        thorough: Add slow attacks, and let each attack take more time.
        background: Rows x and y that attackers may have; None takes the first half of the test rows.
        background_name: The name of these rows in the audit.
        chosen: The attacks to try; None tries all that fit.
        needed: Names of attacks that must be among them, such as those with a limit.

    Raises:
        ParameterError: The run has no views, or its views differ from the recorded ones. A needed attack is not tried
            on this run. Another process writes to the folder. Nothing is written.
    """
    truth = opened(folder, federation, rounds, seed, background)
    if background is not None:
        _check_background(background, truth)
    with held(folder):
        known = all_attacks() if chosen is None else chosen
        tried = [attack for attack in known if truth.run.protocol in attack.protocols]
        missed = {
            attack: why
            for attack in tried
            if (why := why_not(attack, truth.run) or SLOW * (attack.slow and not thorough))
        }
        ready, done = [attack for attack in tried if attack not in missed], dict[Attack, Done]()
        names = [attack.name for attack in ready]
        for name in needed:
            if name not in names:
                raise _not_tried(name, names, _not_run(missed))
        if ready:
            _ = truth.architecture  # once, and here: the threads below would each export the model
        for attack, outcome in _attacked(ready, truth, thorough, progress):
            if isinstance(outcome, str):
                missed[attack] = outcome
            else:
                done[attack] = outcome
        in_order = [done[attack] for attack in ready if attack in done]
        record = {
            "run": truth.run.id,
            "index": views.digest(folder / "views"),
            "protocol": truth.run.protocol,
            "thorough": thorough,
            "background": "test rows" if background is None else background_name,
            "confined_by": "kernel" if landlock() else "python",
            "views": truth.views.rounds,
            "attacks": [line for line, _ in in_order],
            "not_run": _not_run({attack: missed[attack] for attack in tried if attack in missed}),
            "switched_off": switched_off(truth.run),
        }
        _write(folder, record, in_order)
        return Audit(record)


def _not_run(missed: Mapping[Attack, str]) -> list[dict[str, str]]:
    return [{**_named(attack), "because": why} for attack, why in missed.items()]


def opened(
    folder: Path, federation: Trained, rounds: int, seed: int, background: tuple[Array, Array] | None = None
) -> Truth:
    """Return the truth of a run that can be audited. Raises `moretta.errors.ParameterError` for any other."""
    check_plain(folder)  # pictures of an earlier audit are removed
    truth = Truth(folder, federation, rounds, seed, background)
    if not os.access(folder, os.W_OK):
        raise ParameterError(f"{folder}: expected a folder that can be written, for audit.json; copy the run elsewhere")
    return truth


def _attacked(
    ready: Sequence[Attack], truth: Truth, thorough: bool, progress: Progress | None
) -> Iterable[tuple[Attack, Done | str]]:
    """Yield each attack as it ends, with its line and pictures, or why it has none; the others continue."""
    # One attack per core: each is a process of one thread.
    pool = ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1)))
    origin = AttackOrigin()
    try:
        pending: dict[Future[tuple[Claim, float]], tuple[Attack, Given]] = {}
        for attack in ready:
            try:
                inputs = attack.given(truth)
            except Exception as error:  # noqa: BLE001
                yield attack, _reason(error)
            else:
                pending[pool.submit(_run, attack, inputs, truth, thorough, origin)] = (attack, inputs)
        before = len(ready) - len(pending)
        for ended, future in enumerate(as_completed(pending), before + 1):
            attack, inputs = pending[future]
            try:
                claim, seconds = future.result()
                finding = attack.score(claim, truth)
                if not np.isfinite([finding.score, finding.chance, *finding.interval]).all():  # limits compare them
                    raise AttackFailed("it has no finite score")
                outcome: Done | str = (_line(attack, inputs, finding, seconds), finding.pictures)
            except Exception as error:  # noqa: BLE001
                outcome = _reason(error)
            yield attack, outcome
            if progress is not None:
                progress(ended, len(ready), attack.name)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # if the audit is interrupted, no other attack begins
        origin.close()


def _run(attack: Attack, inputs: Given, truth: Truth, thorough: bool, origin: AttackOrigin) -> tuple[Claim, float]:
    case = truth.case(inputs.views, inputs.arrays, thorough=thorough)
    began = time.perf_counter()
    claim = claim_of(attack, case, SECONDS_THOROUGH if thorough else SECONDS, origin)
    return claim, time.perf_counter() - began


def _reason(error: Exception) -> str:
    """Return why an attack failed to run: one of our errors unchanged, any other with its class."""
    if isinstance(error, AttackFailed | MorettaError):
        return str(error)
    text = str(error).partition("\n")[0]
    return f"it ended with {type(error).__name__}{f': {text:.300}' if text else ''}"


def _check_background(background: tuple[Array, Array], truth: Truth) -> None:
    """Refuse rows of another kind than the silos', before any attack runs."""
    x, y = background
    if x.shape[1:] != truth.run.shape:
        raise ParameterError(f"background: expected rows of shape {truth.run.shape}, as the silos', got {x.shape[1:]}")
    if x.dtype.kind not in "fiu" or not np.isfinite(x).all():
        what = f"some that are not ({x.dtype})" if x.dtype.kind == "f" else str(x.dtype)
        raise ParameterError(f"background: expected x of finite numbers, got {what}")
    if len(x) != len(y) or len(x) < 2:
        raise ParameterError(f"background: expected at least two rows, as many of x as of y, got {len(x)} and {len(y)}")
    try:
        _ = truth.background  # its y is checked like a silo's
    except ParameterError as error:
        raise ParameterError(str(error).replace("silo `background`", "background", 1)) from None


def _named(attack: Attack) -> dict[str, str]:
    return {"attack": attack.name, "title": attack.title, "severity": attack.severity, "role": attack.role}


def _line(attack: Attack, inputs: Given, finding: AttackResult, seconds: float) -> dict[str, Any]:
    ended = "this is no evidence" if is_whole(*finding.interval) else "this attack failed"
    sentence = finding.sentence if finding.succeeded else f"{finding.sentence}: {ended}"
    return {
        **_named(attack),
        "view": inputs.view,
        "knowledge": inputs.knowledge,
        "measure": finding.measure,
        "score": finding.score,
        "chance": finding.chance,
        **({} if finding.constant is None else {"constant": finding.constant}),
        "interval": list(finding.interval),
        "succeeded": finding.succeeded,
        "seconds": seconds,
        "sentence": f"{plainly(sentence)}.",
        "figures": dict(finding.figures),
        "source": attack.source,
    }


def plainly(text: str) -> str:
    """Return a sentence with its numbers as people write them: 0.025 for 2.5e-02, 1.6e-4 for 1.6e-04."""

    def written(match: re.Match[str]) -> str:
        value, exponent = float(match[0]), int(match[2])
        return f"{value:.{len(match[1])}g}" if -3 <= exponent <= 4 else f"{match[1]}e{exponent}"

    return re.sub(r"\b(\d(?:\.\d+)?)e([+-]\d+)\b", written, text)


def _write(folder: Path, record: Mapping[str, Any], done: Iterable[Done]) -> None:
    """Write audit.json and pictures, whose names are new; earlier ones go last, so it never names missing ones."""
    token = secrets.token_hex(4)
    named = [name for line, some in done if some for name in _write_pictures(folder, line, some, token)]
    RunFolder(folder).write_json("audit.json", record)
    for file in (folder / "audit").glob("*"):
        if file.name not in named:
            file.unlink()


def _write_pictures(
    folder: Path, line: dict[str, Any], pictures: Sequence[Reconstruction], token: str
) -> Sequence[str]:
    """Write an attack's pictures for the folder's owner alone; return their names, which contain the audit's token."""
    (folder / "audit").mkdir(mode=0o700, exist_ok=True)
    line["pictures"], names = [], []
    for number, picture in enumerate(pictures):
        name = f"{line['attack']}-{number}-{token}.safetensors"
        shown = {"true": picture.true[:PICTURES], "found": picture.claimed[:PICTURES]}
        data = save({key: np.ascontiguousarray(value, dtype=np.float32) for key, value in shown.items()})
        write_atomically(folder / "audit" / name, data, mode=0o600)
        line["pictures"].append({"file": f"audit/{name}", "caption": picture.caption})
        names.append(name)
    return names
