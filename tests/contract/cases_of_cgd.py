"""CGD, blind and open, and on grids: three rows of data have another silo for two of their four columns each."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import numpy as np
from protocol_case import Case

from moretta import CGD, Silo


def divided(silos: Iterable[Silo], *, joint: bool) -> list[Silo]:
    """Divide each silo by columns. joint: only the first part has the labels."""
    made = list[Silo]()
    for whole in silos:
        for number, columns in enumerate([(0, 3), (1, 2)]):
            labels = whole.y[:0] if joint and number else whole.y
            part = f"{whole.name}-{number}"
            made.append(
                Silo(part, whole.x[:, columns], labels, whole.name, columns, np.arange(len(whole.x)).astype(str))
            )
    return made


BLIND = Case(CGD(learning_rate=0.3, delta=0.3), blind=True, secrets_move="yes", sets_up_again=True, own_root="root")
CASES = (
    BLIND,
    replace(
        BLIND,
        name="cgd-open",
        protocol=BLIND.protocol.model_copy(update={"blind": False}),
        only_with_sums=True,
        blind=False,
    ),
    replace(BLIND, name="cgd-joint", protocol=CGD(learning_rate=1.0, delta=0.3), silos=partial(divided, joint=True)),
    replace(
        BLIND,
        name="cgd-independent",
        protocol=CGD(learning_rate=1.0, delta=0.3, vertical="independent"),
        silos=partial(divided, joint=False),
    ),
)
