"""Keywords that a function of the public names does not have: refused with the nearest one that it has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

from moretta.contract.wording import unknown_word
from moretta.errors import ParameterError

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
        def refusing(*args: Any, **given: Any) -> Any:
            for name in given:
                if name not in known:
                    told = (elsewhere or {}).get(name)
                    raise ParameterError(f"{owner}: {f'{name} is {told}' if told else unknown_word(name, known)}")
            return function(*args, **given)

        if not isinstance(called, type):
            return refusing  # type: ignore[return-value]
        setattr(called, "__init__", refusing)  # noqa: B010  # mypy takes an assignment for a mistake
        return called

    return decorate
