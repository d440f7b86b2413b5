"""News for a page that follows a run: the changes in its folder since the last check.

It follows three files: `history.jsonl` and `log.txt`, which grow, and `result.json`, which comes last; `run.toml` has
the plan. Nothing else of the folder is read, and nothing is written. A resumed run rewrites its history, because the
rounds after the checkpoint are repeated; its page then begins again.
"""

import json
import math
import re
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moretta.engines.files import open_file, read_file, read_text
from moretta.engines.journal import GrowingFile, Rewritten, last_lines
from moretta.errors import ParameterError

FORMAT = 1  # of the run folder
FOLLOWED = ("history.jsonl", "log.txt", "result.json", "run.toml")
LONGEST = 500  # characters of a sentence
MOST_LINES = 200  # the most lines of the log in one event, the last ones
MOST_FIGURES = 24  # of one round
NO_NUMBERS = (None, "unbounded")  # NaN or infinity, and an epsilon without noise

_FIGURE = re.compile(r"(?!.{81})(loss|scaled_loss|epsilon|(test_|validation_).*)", re.DOTALL)  # keys of a history's
_PRIVACY = re.compile(r"delta\Z|epsilon")
_LOGGED = re.compile(r"(\S+ \S+) (WARNING|ERROR|CRITICAL) (.*)")
_FAILED = re.compile(r"\S+ \S+ ERROR the run failed: (.*)")  # the last line of a log, by `engines.run_folder`


@dataclass(frozen=True)
class News:
    """News for a page.

    Attributes:
        data: JSON content.
        id: The place from which a reader continues.
    """

    kind: str
    data: Mapping[str, Any]
    id: str


@dataclass(frozen=True)
class Status:
    """The status by the run's command: its last sentence, and why it failed; empty without one.

    Attributes:
        has_command: Whether the run has a command, so that a run without news does not count as dead.
    """

    note: str = ""
    failed: str = ""
    has_command: bool = False


def check_run_folder(folder: Path) -> None:
    """Raise `moretta.errors.ParameterError` unless a folder is a run's, in this format."""
    if not folder.is_dir():
        raise ParameterError(f"{folder} is not a run folder: there is no such directory")
    if not any((folder / name).exists() for name in ("run.toml", "history.jsonl", "result.json")):
        raise ParameterError(
            f"{folder} is not a run folder: it has no run.toml, history.jsonl or result.json; name a folder of "
            "moretta train --out"
        )
    for name in FOLLOWED:
        with suppress(FileNotFoundError):
            open_file(folder, name).close()  # raises for a link or a pipe
    form = _json(folder / "result.json").get("format", FORMAT)
    if form != FORMAT:
        raise ParameterError(f"{folder / 'result.json'} is of format {form!s:.20}, and this version reads {FORMAT}")


class Follower:
    """Reads news of a run folder, which may not exist yet. after: the last event's id; any other text begins again."""

    def __init__(self, folder: Path, after: str = "") -> None:
        history, _, log = after.partition("_")
        self._folder = folder
        self._history = GrowingFile(folder / "history.jsonl", history)
        self._log = GrowingFile(folder / "log.txt", log)
        self._begun = after == self._place
        self._sent = dict[str, Any]()
        self._seen: Any = None

    def news(self, status: Status) -> Iterator[News]:
        """Yield the news, oldest first.

        `begin` asks a page to forget all rounds and lines of the log; then follow `plan`, `rounds`, `log`, `result`,
        and `state` last.

        Args:
            status: The status by the run's command.
        """
        seen = status, *(_signature(self._folder / name) for name in FOLLOWED)
        if seen == self._seen:
            return
        try:
            if not self._begun:
                self._begun, self._sent = True, {}
                for file in (self._history, self._log):
                    file.restart()
                yield News("begin", {}, self._place)
            yield from self._new(status)
        except Rewritten:
            self._begun = False  # so that the next call begins again
            return
        self._seen = seen

    def _new(self, status: Status) -> Iterator[News]:
        yield from self._changed("plan", plan_of(self._folder))
        for lines in self._history.read():
            yield News("rounds", rounds_of(lines), self._place)
        for lines in self._log.read():
            if (logged := logged_of(lines))["lines"]:
                yield News("log", logged, self._place)
        yield from self._changed("result", result_of(self._folder))
        for event in self._changed("state", state_of(self._folder, status)):
            yield News("state", {**event.data, "age": _age(self._folder)}, event.id)

    @property
    def _place(self) -> str:
        return f"{self._history.mark}_{self._log.mark}"

    def _changed(self, kind: str, data: Mapping[str, Any]) -> Iterator[News]:
        if self._sent.get(kind) != data:
            self._sent[kind] = data
            yield News(kind, data, self._place)


def rounds_of(lines: list[bytes]) -> dict[str, Any]:
    """Return the rounds in lines of a history, and the number of other lines."""
    rounds = [round_of(line) for line in lines if line.strip()]
    return {"rounds": [entry for entry in rounds if entry is not None], "malformed": rounds.count(None)}


def round_of(text: bytes) -> dict[str, Any] | None:
    """Return a page's content for one line of a history; None for a line that is not a round."""
    line = _object(text)
    number = line.get("round")
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        return None
    shown = {key: value for key, value in line.items() if _FIGURE.fullmatch(key)}
    return {
        "round": number,
        "attempt": line["attempt"] if isinstance(line.get("attempt"), int) else 0,
        "figures": dict(list(_numbers(shown).items())[:MOST_FIGURES]),
        "no_numbers": [key for key, value in shown.items() if value in NO_NUMBERS][:MOST_FIGURES],
        "seconds": _numbers(line.get("seconds")),
        "total": _numbers(line).get("seconds_total"),
        "bytes": _numbers(line.get("bytes")),
        "missing": _missing(line.get("dropped")),
    }


def logged_of(lines: list[bytes]) -> dict[str, Any]:
    """Return the last warnings and failures in lines of a log, and the number of others."""
    matches = [_LOGGED.fullmatch(line.decode("utf-8", "replace")) for line in lines]
    entries = [{"at": match[1], "level": match[2], "text": match[3][:LONGEST]} for match in matches if match]
    return {"lines": entries[-MOST_LINES:], "more": max(0, len(entries) - MOST_LINES)}


def plan_of(folder: Path) -> dict[str, Any]:
    """Return name, protocol and number of rounds of the run file, if the folder has it."""
    tables: Mapping[str, Any] = {}
    with suppress(OSError, ValueError, RecursionError, ParameterError):
        tables = tomllib.loads(read_text(folder, "run.toml"))
    run, protocol = (table if isinstance(table := tables.get(name), dict) else {} for name in ("run", "protocol"))
    rounds = run.get("rounds")
    return {
        "name": _sentence(run.get("name", folder.absolute().name)),
        "folder": str(folder),
        "protocol": _sentence(protocol.get("name", "")),
        "rounds": rounds if isinstance(rounds, int) and rounds > 0 else None,
        "insecure": "insecure-secret-seed" in run,
    }


def result_of(folder: Path) -> dict[str, Any]:
    """Return a page's content for `result.json`; empty before the file exists."""
    record = _json(folder / "result.json")
    if not record or record.get("format") != FORMAT:
        return {}
    last = _numbers(record).get("rounds", 0)
    test = record.get("test") if isinstance(record.get("test"), dict) else {}
    metrics = test.get("metrics") if isinstance(test, dict) else {}
    warnings = record.get("warnings")
    return {
        "test": {**_numbers(test), **_numbers(metrics)},
        "facts": {key: value for key, value in _numbers(record.get("facts")).items() if _PRIVACY.match(key)},
        "unbounded": isinstance(facts := record.get("facts"), dict) and facts.get("epsilon", 0.0) in NO_NUMBERS,
        "best_round": _numbers(facts).get("best_round"),
        "rounds": _numbers(record).get("rounds"),
        "warnings": [_sentence(warning) for warning in warnings] if isinstance(warnings, list) else [],
        "missing": [gone for gone in _missing(record.get("dropped")) if gone["round"] > last],
    }


def state_of(folder: Path, status: Status) -> dict[str, Any]:
    """Return the state, waiting, running, ended or failed, and a sentence on it, which may be empty."""
    last = last_lines(folder / "log.txt")[-1:]
    failed = _FAILED.fullmatch(last[0].decode("utf-8", "replace")) if last else None
    rounds = map(round_of, reversed(last_lines(folder / "history.jsonl")))
    number = next((entry["round"] for entry in rounds if entry is not None), 0)
    record = _json(folder / "result.json")
    state, sentence = "running" if number else "waiting", status.note
    if status.failed or failed:
        state, sentence = "failed", status.failed or (failed[1] if failed else "")
    elif record and number >= _numbers(record).get("rounds", math.inf):  # otherwise it was resumed
        state, sentence = "ended", ""
    return {"state": state, "sentence": sentence[:LONGEST], "here": status.has_command}


def _age(folder: Path) -> float:
    """Return the seconds since the last news; 0 before the first."""
    times = [_signature(folder / name)[2] for name in FOLLOWED]
    return max(0.0, time.time() - max(times) / 1e9) if any(times) else 0.0


def _missing(entries: object) -> list[dict[str, Any]]:
    """Return the silos that missed a round, with the reasons."""
    return [
        {
            "round": entry["round"],
            "silo": _sentence(entry.get("silo", "")),
            "reason": _sentence(entry.get("reason", "")),
        }
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, dict) and isinstance(entry.get("round"), int)
    ]


def _numbers(values: object) -> dict[str, float]:
    """Return the finite numbers of a mapping; empty for any other value."""
    return {
        key: value
        for key, value in (values.items() if isinstance(values, dict) else ())
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    }


def _sentence(value: object) -> str:
    return str(value)[:LONGEST]


def _object(text: bytes) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):  # also for bytes that are not UTF-8
        value = json.loads(text)
        if isinstance(value, dict):
            return value
    return {}


def _json(path: Path) -> dict[str, Any]:
    with suppress(OSError, ParameterError):
        return _object(read_file(path.parent, path.name))
    return {}


def _signature(path: Path) -> tuple[int, int, int]:
    with suppress(OSError):
        status = path.lstat()
        return status.st_ino, status.st_size, status.st_mtime_ns
    return 0, 0, 0
