"""Arguments of the public names in errors: unknown keywords, what is no path, keywords in the place of options."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from moretta.contract.wording import kind_of, unknown_word
from moretta.errors import MorettaError, ParameterError

Called = TypeVar("Called", bound=Callable[..., Any])


def names_keywords(elsewhere: Mapping[str, str] | None = None) -> Callable[[Called], Called]:
    """Return a decorator: a function, or a class, refuses an unknown keyword with the nearest known one.

    elsewhere: keywords that belong somewhere else, and where. Python's own TypeError says neither.
    """

    def decorate(called: Called) -> Called:
        function: Callable[..., Any] = vars(called)["__init__"] if isinstance(called, type) else called
        known = [name for name in inspect.signature(function).parameters if name != "self"]
        owner = called.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def refusing(*args: Any, **arguments: Any) -> Any:
            for name in arguments:
                if name not in known:
                    others = elsewhere or {}
                    words = (word for word in others if name in (word, "".join(part[0] for part in word.split("_"))))
                    meant = next(words, None)
                    meaning = unknown_word(name, known) if meant is None else f"{meant} is {others[meant]}"
                    raise ParameterError(f"{owner}: {meaning}")
            return function(*args, **arguments)

        if not isinstance(called, type):
            return refusing  # type: ignore[return-value]
        setattr(called, "__init__", refusing)  # noqa: B010  # mypy takes an assignment for a mistake
        return called

    return decorate


_OF_OPTIONS = {
    "--resume": "resume=True",
    "--out": "out=..",
    "--silo": "silo=..",
    "--model module:function": 'model="module:function"',
    "--model": "model=..",
    "--background FILE": "background=(x, y)",
}


@contextmanager
def says_keywords() -> Iterator[None]:
    """Name Python's keywords where an error names the shell's options: anyone who raises it serves both."""
    try:
        yield
    except MorettaError as error:
        options = "|".join(sorted(_OF_OPTIONS, reverse=True))  # the longest first
        sentence = re.sub(rf"(?<!\S)({options})(?![\w-])", lambda option: _OF_OPTIONS[option[0]], str(error))
        error.args = (sentence,)
        raise


def path_of(value: object, expected: str) -> Path:
    """Return a path. expected: begins the sentence of the `moretta.errors.ParameterError` for anything else."""
    if not isinstance(value, str | os.PathLike):
        raise ParameterError(f"{expected}; got {kind_of(value)}")
    return Path(value)
