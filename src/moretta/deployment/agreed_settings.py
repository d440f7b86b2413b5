"""A site's agreement: the schema and the settings that touch its rows, pinned by its first run.

A server writes each run's text, and sites join every job. If settings could differ from run to run, each "ready" or
"refused" would be one bit about a site's rows: seven runs revealed the oldest patient of a site. So the settings of the
first run are pinned before a row is read. Other settings wait for the site's operator (`moretta accept`).

    <out>/agreed.json    {"format": 1, "agreed": [{"settings", "ready", "closed", "refusals"}], "waiting": {..}}

ready: the site's rows fitted the settings once. Before that, a refusal that depends on rows closes them until the
operator acts, so a server learns one bit. Later, such a refusal costs a round, and `MOST` of them close the settings
too. A server that chooses the model learned a value of one site in 20 rounds, half of them refused. With at most three
refusals it needs some 300. closed: the time of closing, as in the site's log; empty: open. refusals: their number since
the operator acted.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from moretta.config import run_files
from moretta.config.run_files import RunFile
from moretta.engines.files import write_atomically
from moretta.engines.folder_lock import alone
from moretta.errors import ParameterError, PolicyError

FORMAT = 1
MOST = 3  # refusals of a round: each tells a server one bit about one site's rows
FILE = "agreed.json"
CLOSED = "this site's rows did not fit these settings"
Settings = Mapping[str, Mapping[str, Any]]
"""Of pinned settings: by section, by key, as a run file has them; `columns` is the schema, and `schema` its order."""

MOVES: Mapping[str, frozenset[str]] = {
    "run": frozenset({"name", "rounds", "seed", "checkpoint-every", "device"}),
    "protocol": frozenset(
        {"learning-rate", "lr-schedule", "milestones", "milestone-factor", "first-rate", "epoch-rounds"}
        | {"optimizer", "momentum", "betas", "weight-decay", "clip-norm", "local-epochs"}
        | {"checkpoint-minutes"}
        | {"partitions", "rho", "mu", "schedule", "k", "k-last", "sigma", "form", "direction", "seed-pool", "ema"}
        | {"ema-each", "orthogonal"}
    ),
    "engine": frozenset({"torch-versions", "deadline", "message-mib", "workers", "micro-batch", "recompute"}),
}
"""Keys that may differ from run to run without the operator: no row is read, refused or omitted by them, and no sum
hides less.

`[model]` may differ too: its size has its own limit, and its code a list. All other keys are pinned, also `[engine]
sites`: a sum's members decide what it hides, and a site's place in a grid decides which columns it reads.
"""


def pinned_settings(run: RunFile) -> Settings:
    """Return the settings of a run that a site pins."""
    sections = run_files.as_sections(run)
    pinned = {
        name: {key: value for key, value in section.items() if key not in MOVES.get(name, ())}
        for name, section in sections.items()
        if name != "model"
    }
    if run.protocol.privacy is not None:
        pinned["protocol"]["dp-unit"] = run.protocol.privacy.unit  # which `local-epochs` may change, and with it q
    if run.table is not None:
        pinned["schema"] = {"order": list(sections["columns"])}
    return pinned


@dataclass(frozen=True)
class AgreedSettings:
    """Settings that the site has agreed to. ready, closed, refusals: see the module."""

    settings: Settings
    ready: bool = False
    closed: str = ""
    refusals: int = 0


@dataclass(frozen=True)
class RefusedRun:
    """The run that the site refused last.

    Attributes:
        sentence: The reason.
        settings: The run's settings, if accepting them helps; else empty.
    """

    sentence: str
    settings: Settings = field(default_factory=dict)


class SiteAgreement:
    """The file of a site's agreed settings, in `out` of its silo.toml.

    A lock keeps a running site and its operator (`moretta accept`) from changing it at once.

    Raises:
        ParameterError: The file is damaged.
    """

    def __init__(self, out: Path) -> None:
        self._path = out / FILE

    def agreed(self) -> Sequence[AgreedSettings]:
        """Return the settings that the site has agreed to; empty before the first run."""
        return self._read()[0]

    def waiting(self) -> RefusedRun | None:
        """Return the run that was refused last."""
        return self._read()[1]

    def check(self, settings: Settings) -> None:
        """Pin a first run's settings, and refuse others by PolicyError until the operator accepts them."""
        with alone(self._path):
            agreed, waiting = self._read()
            if not agreed:
                self._write([AgreedSettings(settings)], None)
            elif not any(entry.settings == settings for entry in agreed):
                changes = "; ".join(differences(agreed[-1].settings, settings))
                sentence = (
                    "the run's schema or its settings that touch rows differ from those that this site has agreed to "
                    f"({changes:.600}); its operator decides by moretta accept"
                )
                self._write(agreed, RefusedRun(sentence, settings))
                raise PolicyError(sentence)
            elif waiting is not None and not waiting.settings:
                self._write(agreed, None)  # drops a refusal that followed from the text alone

    def refuse(self, sentence: str) -> None:
        """Record why a run was refused for another reason, for `moretta doctor`."""
        with alone(self._path):
            agreed, waiting = self._read()
            if waiting is None or not waiting.settings:
                self._write(agreed, RefusedRun(sentence))

    def open(self, settings: Settings) -> None:
        """Check that settings are open, before a row is read. Raises ParameterError if a refusal closed them."""
        for entry in self._read()[0]:
            if entry.settings == settings and entry.closed:
                raise ParameterError(
                    f"{CLOSED}, last at {entry.closed} (its log says why), and each "
                    "try reveals something about them to the server; correct the rows or silo.toml, then run moretta "
                    "accept"
                )

    def close(self, settings: Settings) -> bool:
        """Close settings that rows did not fit, and under which no run was ready. Return whether they were open."""
        before, now = self._change(
            settings, lambda entry: entry if entry.ready or entry.closed else replace(entry, closed=_now())
        )
        return before != now

    def count(self, settings: Settings) -> bool:
        """Count a refusal of a round that depended on rows. Return whether it closed the settings."""

        def counted(entry: AgreedSettings) -> AgreedSettings:
            closed = _now() if entry.refusals + 1 >= MOST else ""
            return replace(entry, refusals=entry.refusals + 1, closed=entry.closed or closed)

        _, now = self._change(settings, counted)
        return any(entry.settings == settings and entry.closed for entry in now)

    def proved(self, settings: Settings) -> None:
        """Record that the site's rows fit."""
        self._change(settings, lambda entry: replace(entry, ready=True))

    def accept(self, shown: RefusedRun | None) -> None:
        """Agree to the settings that the operator was shown; without waiting ones, open closed ones."""
        with alone(self._path):
            agreed, waiting = self._read()
            if shown is None or not shown.settings:
                agreed = [replace(entry, closed="", refusals=0) for entry in agreed]
            elif all(entry.settings != shown.settings for entry in agreed):
                agreed.append(AgreedSettings(shown.settings))
            self._write(agreed, waiting if waiting != shown else None)

    def _change(
        self, settings: Settings, change: Callable[[AgreedSettings], AgreedSettings]
    ) -> tuple[Sequence[AgreedSettings], Sequence[AgreedSettings]]:
        """Change the entry of some settings; return all entries before and after it."""
        with alone(self._path):
            agreed, waiting = self._read()
            changed = [change(entry) if entry.settings == settings else entry for entry in agreed]
            if changed != agreed:
                self._write(changed, waiting)
        return agreed, changed

    def _read(self) -> tuple[list[AgreedSettings], RefusedRun | None]:
        try:
            content = json.loads(self._path.read_text())
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']!r:.40}")
            waiting = content["waiting"]
            return [AgreedSettings(**entry) for entry in content["agreed"]], None if waiting is None else RefusedRun(
                **waiting
            )
        except (FileNotFoundError, NotADirectoryError):
            return [], None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ParameterError(
                f"{self._path} is damaged ({error}); expected the settings that this site has agreed to: restore a "
                "copy, or move it away to pin those of the next run"
            ) from None

    def _write(self, agreed: Sequence[AgreedSettings], waiting: RefusedRun | None) -> None:
        content = {
            "format": FORMAT,
            "agreed": [asdict(entry) for entry in agreed],
            "waiting": None if waiting is None else asdict(waiting),
        }
        write_atomically(self._path, (json.dumps(content, indent=1) + "\n").encode(), mode=0o600)


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def differences(agreed: Settings, asked: Settings) -> Iterator[str]:
    """Yield the differences between settings in words: a key with both values, a column with both meanings."""
    for section in dict.fromkeys((*agreed, *asked)):
        ours, theirs = agreed.get(section, {}), asked.get(section, {})
        for key in dict.fromkeys((*ours, *theirs)):
            if ours.get(key) != theirs.get(key):
                place = f"[columns.{key}]" if section == "columns" else f"[{section}] {key}"
                yield f"{place}: {_value(ours.get(key))} -> {_value(theirs.get(key))}"


def _value(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_value(part)}" for key, part in value.items())
    return "not set" if value is None else json.dumps(value, ensure_ascii=False)
