"""Checks of the arguments that a run file gives to a built-in model."""

import math
from collections.abc import Sequence

from moretta.contract.wording import did_you_mean
from moretta.errors import ParameterError


def at_least(least: int, value: object, name: str) -> int:
    """`value` if it is an integer from `least` on, else ParameterError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ParameterError(f"model: {name} must be an integer of {least} or more, got {value!r}")
    return value


def positive(value: object, name: str) -> int:
    """`value` if it is an integer above 0, else ParameterError."""
    return at_least(1, value, name)


def above_zero(value: object, name: str) -> float:
    """`value` if it is a finite number above 0, else ParameterError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ParameterError(f"model: {name} must be a number above 0, got {value!r}")
    return float(value)


def flag(value: object, name: str) -> bool:
    """`value` if it is a boolean, else ParameterError."""
    if not isinstance(value, bool):
        raise ParameterError(f"model: {name} must be true or false, got {value!r}")
    return value


def one_of(value: object, name: str, choices: Sequence[str]) -> str:
    """`value` if it is one of the choices, else ParameterError naming the nearest."""
    if value not in choices:
        raise ParameterError(f"model: {name} = {value!r} is unknown; {did_you_mean(str(value), choices)}")
    return str(value)


def image(inputs: tuple[int, ...], model: str) -> int:
    """The channels of samples [channels, height, width], else ParameterError."""
    if len(inputs) != 3:
        raise ParameterError(
            f'model "{model}" takes images of shape (channels, height, width), but a sample has shape {inputs}; '
            "use an image source or the mlp"
        )
    return inputs[0]
