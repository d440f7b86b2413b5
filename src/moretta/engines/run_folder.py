"""A run's folder while it is being written; ``docs/run-folder.md`` lists its files.

`moretta.report.folder` reads a finished one. Other modules write its checkpoints (`engines.checkpoint`), views
(`engines.views`), lock (`engines.folder_lock`) and sums that a silo has helped to open (`secure_aggregation.one_sum`).
"""

import errno
import hashlib
import json
import logging
import math
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from moretta.contract.messages import Array, Tensors
from moretta.engines.files import check_plain, check_unused, read_present, read_text, write_atomically
from moretta.engines.folder_lock import LOCK, held, refuse_held
from moretta.engines.journal import HelpedFile, Journal
from moretta.errors import MorettaError, ParameterError, RunFailed

FORMAT = 1
HISTORY = "history.jsonl"
ROWS = "rows.sha256"  # in truth/
ROWS_BY_SILO = "rows.json"
CODE = "the code"  # in rows.json; a silo's name has no blank
FAILED = "the run failed: "  # the beginning of a log's last line
PRIVACY = "privacy.json"  # at a site
_USED = "; go on with that run by --resume, or name another folder by --out"
SIMULATION = """This run was a simulation: one machine played all participants, so confined models lie side by side.
Between real participants each of these folders is on its owner's machine, and nobody else ever has it.
"""


class RunFolder:
    """Writes one run's folder; every file in it is whole at any time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._helped = dict[str, HelpedFile]()
        self.models = dict[str, str]()  # SHA-256 of each written model, in hex, by its file's name
        self._hold = ExitStack()

    def hold(self) -> None:
        """Prevent other processes from writing here until `release`; raises as `held` and `check_plain` do."""
        check_plain(self.path)
        self._hold.enter_context(held(self.path))

    def release(self) -> None:
        """Let others write here; without a hold this does nothing."""
        self._hold.close()

    def begin(self, run_file: str | None) -> None:
        """Make the folder and hold it. Raises `moretta.errors.ParameterError` if it holds a run."""
        refuse_held(self.path)
        check_unused(self.path, _USED, LOCK)
        try:
            self.hold()
        except OSError as error:  # such as below a file, or without permission
            raise ParameterError(
                f"{self.path} cannot be made: {error.strerror}; expected a folder that may be written to; name another "
                "by --out"
            ) from error
        check_unused(self.path, _USED, LOCK)  # a run may have come and gone meanwhile
        if run_file is not None:
            write_atomically(self.path / "run.toml", run_file.encode())

    def helped(self, silo: str) -> HelpedFile:
        """Return the file of sums that a silo of a run in one process has helped to open; no checkpoint resets it."""
        if silo not in self._helped:
            self._helped[silo] = HelpedFile(str(self.path.absolute() / "helped" / f"{silo}.jsonl"))
        return self._helped[silo]

    def begin_helped(self, *, begun: bool) -> None:
        """Make the files of all silos of `helped`, unless they should exist: `HelpedFile.begin`."""
        for file in self._helped.values():
            file.begin(begun=begun)

    def discard(self) -> None:
        """Remove a folder that `begin` made, if its run failed before the first round."""
        shutil.rmtree(self.path)

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Send Moretta's warnings and notes to ``log.txt`` during the run.

        Its last line names a failure, so that readers of the folder know why; it also notes a resume.
        """
        path = self.path / "log.txt"
        resumed = path.exists() and path.stat().st_size > 0
        logger, handler = logging.getLogger("moretta"), _Log(path, encoding="utf-8", errors="replace")
        level, before = logger.level, logger.getEffectiveLevel()
        others = [*logger.handlers, *logging.getLogger().handlers]

        def for_terminal(record: logging.LogRecord) -> bool:
            """Return whether other handlers would have this record without the file, which lowers the level."""
            return record.name != logger.name or record.levelno >= before

        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        if resumed:
            _note(handler, logging.INFO, "the run goes on")
        logger.addHandler(handler)
        logger.setLevel(min(before, logging.INFO))
        for other in others:
            other.addFilter(for_terminal)
        try:
            yield
        except BaseException as error:
            _note(handler, logging.ERROR, f"{FAILED}{why(error)}")
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                remedy = "have the disk writable again" if error.errno == errno.EROFS else "make room there"
                raise RunFailed(f"{self.path}: {error.strerror}; {remedy}") from error
            raise
        finally:
            logger.removeHandler(handler)
            for other in others:
                other.removeFilter(for_terminal)
            logger.setLevel(level)
            handler.close()

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a round to the history."""
        history = Journal(self.path / HISTORY, forces=False, mode=0o644)  # opened each time: it may have been moved
        history.append(json.dumps(as_json(line), allow_nan=False))

    def history(self, up_to: int) -> list[dict[str, Any]]:
        """Return the rounds up to a number, and remove later ones, which a killed run had begun."""
        exists = (self.path / HISTORY).exists()
        lines = read_text(self.path, HISTORY).splitlines() if exists else []
        kept = [line for line in lines if (number := _round(line)) is not None and number <= up_to]
        write_atomically(self.path / HISTORY, "".join(f"{line}\n" for line in kept).encode())
        return [json.loads(line) for line in kept]

    def write_json(self, name: str, content: Mapping[str, Any]) -> str:
        """Write one JSON file, with the format's version; return its SHA-256, in hex."""
        written = (json.dumps({"format": FORMAT, **as_json(content)}, indent=2, allow_nan=False) + "\n").encode()
        write_atomically(self.path / name, written)
        return hashlib.sha256(written).hexdigest()

    def hold_rows(self, digests: Mapping[str, str]) -> None:
        """Save digests of rows, or compare them with the saved ones as `check_rows` does."""
        if (self.path / ROWS_BY_SILO).exists():
            self.check_rows(digests)
        else:
            write_atomically(self.path / ROWS_BY_SILO, json.dumps(dict(digests), sort_keys=True).encode(), 0o600)

    def check_rows(self, digests: Mapping[str, str]) -> None:
        """Compare digests of rows with the saved ones; runs of earlier versions saved fewer.

        Raises:
            ParameterError: Rows have changed since the run began; the sentence names silos and parts.
        """
        held = json.loads(read_text(self.path, ROWS_BY_SILO))
        if changed := [name for name, digest in digests.items() if held.get(name, digest) != digest]:
            raise ParameterError(
                f"the rows of {', '.join(changed):.200} have changed since the run in {self.path.name} began; bring "
                "the same rows back, or begin another run"
            )

    def hold_code(self, digest: str, last: int) -> list[int]:
        """Save a digest of the run's own code beside those of its rows; return the rounds after which it changed.

        Args:
            digest: Empty without code.
            last: The round after which a session begins.
        """
        held = json.loads(read_text(self.path, ROWS_BY_SILO))
        codes = held.setdefault(CODE, {})
        if digest and digest not in list(codes.values())[-1:]:
            codes[str(last)] = digest
            write_atomically(self.path / ROWS_BY_SILO, json.dumps(held).encode(), 0o600)
        return list(map(int, codes))[1:]

    def write_model(self, name: str, tensors: Tensors, mode: int = 0o600) -> None:
        """Write one model as safetensors. mode: only files to pass on are readable by others."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays = {key: np.ascontiguousarray(value).reshape(value.shape) for key, value in tensors.items()}
        content = save(arrays, {"format": str(FORMAT)})
        self.models[name] = hashlib.sha256(content).hexdigest()
        write_atomically(path, content, mode)

    def write_confined(self, displacement: Tensors, models: Mapping[str, Tensors], most: int) -> None:
        """Write D and at most `most` confined models; each is its participant's secret."""
        self.write_model("model.safetensors", displacement)
        (self.path / "participants").mkdir(exist_ok=True)
        kept = "" if len(models) <= most else f"Of these {len(models)} none is kept: there are more than {most}.\n"
        write_atomically(self.path / "participants" / "SIMULATION.txt", (SIMULATION + kept).encode())
        for name, tensors in models.items() if not kept else ():
            self.write_model(f"participants/{name}/confined.safetensors", tensors)


def why(error: BaseException) -> str:
    """Return why a run ended early, in one line: the sentence of one of our errors, or the class of another."""
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted; --resume goes on from its last checkpoint"
    sentence = str(error) if isinstance(error, MorettaError) else getattr(error, "strerror", None)
    return " ".join((sentence or type(error).__name__).split())


class _Log(logging.FileHandler):
    """A log file that silently loses lines on a full disk; the run's own writes fail with an error."""

    def handleError(self, record: logging.LogRecord) -> None:  # the name is logging's
        """Ignore an error of the disk; any other is our mistake."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        """Close the file, whose last lines a full disk may lack."""
        with suppress(OSError):
            super().close()


def _note(handler: logging.Handler, level: int, text: str) -> None:
    """Write a line to the file alone, because a terminal has it already."""
    handler.handle(logging.LogRecord("moretta", level, __file__, 0, "%s", (text,), None))


def as_json(value: Any) -> Any:
    """Return JSON content with null for NaN and infinity, which a diverged run has and JSON lacks."""
    if isinstance(value, Mapping):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _round(line: str) -> int | None:
    try:
        return int(json.loads(line)["round"])
    except (ValueError, KeyError, TypeError):
        return None  # a crash cut the line short


def read_model(folder: Path, name: str) -> dict[str, Array]:
    """Return the arrays of a model in a run folder, by its file's name. Raises ParameterError if missing or changed."""
    digests = _result(folder).get("models", {})
    if not isinstance(digests, dict):
        raise ParameterError(f"{folder / 'result.json'}: expected the models' SHA-256 by file; restore it")
    path = folder / name
    content = read_present(folder, name, "a model of a finished run")
    try:
        arrays: dict[str, Array] = dict(sorted(load(content).items()))  # sorted, because the order of `load` varies
    except SafetensorError as error:
        raise ParameterError(f"{path}: expected a model of a finished run; {error}") from None
    except KeyError as error:
        raise ParameterError(f"{path}: expected a model of a finished run; NumPy has no {error.args[0]}") from None
    _check_digest(path, content, digests.get(name), "other weights")
    return arrays


def read_inputs(folder: Path) -> dict[str, Any]:
    """Return the meaning of a run's inputs and outputs. Raises ParameterError for a missing or changed file."""
    path = folder / "inputs.json"
    written = read_present(folder, path.name, "a file of a finished run")
    content = _parsed(path, written)
    _check_digest(path, written, _result(folder).get("inputs"), "another")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON file of a run folder. Raises `moretta.errors.ParameterError` if it is missing or damaged."""
    return _parsed(path, read_present(path.parent, path.name, "a file of a finished run"))


def _parsed(path: Path, written: bytes) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(written)
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"{path}: expected a file of a finished run; {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ParameterError(f"{path}: expected run-folder format {FORMAT}; was it written by another version?")
    return content


def _result(folder: Path) -> dict[str, Any]:
    """Return the result of a run; empty for a folder that only holds saved models."""
    return read_json(folder / "result.json") if (folder / "result.json").exists() else {}


def _check_digest(path: Path, content: bytes, digest: str | None, other: str) -> None:
    if digest is not None and digest != hashlib.sha256(content).hexdigest():
        raise ParameterError(
            f"{path} is not what the run wrote, whose SHA-256 is in result.json; restore it, or copy the folder "
            f"without result.json to use {other}"
        )
