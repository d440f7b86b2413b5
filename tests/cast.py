"""The roles of runs in this process, as tests see and change them before they play."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

from moretta import Federation
from moretta.protocols.common.roles import Roles
from moretta.protocols.common.setting import Setting
from moretta.protocols.registry import build
from moretta.run import federation

Wrap = Callable[[Roles], None]


@contextlib.contextmanager
def casting(wrap: Wrap | None = None) -> Iterator[list[Roles]]:
    """Keep what is cast; `wrap` may change the roles before they play."""
    players: list[Roles] = []

    def keep(setting: Setting) -> Roles:
        players.append(build(setting))
        if wrap is not None:
            wrap(players[-1])
        return players[-1]

    with mock.patch.object(federation, "build", keep):
        yield players


def cast_only(made: Federation, rounds: int = 3, seed: int = 2) -> Roles:
    """The roles that a run of this federation would have."""

    class Enough(Exception):
        pass

    def stop(players: Roles) -> None:
        raise Enough

    with casting(stop) as players, contextlib.suppress(Enough):
        made.train(rounds, seed)
    return players[0]
