"""What an attack is: which role, what it is given, what it does with that, and how its claim is scored."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from moretta.audit.evidence.case import Case, PublicRun
from moretta.audit.evidence.truth import Truth
from moretta.contract.messages import Array, Tensors
from moretta.protocols.common.severity import Severity

Role = Literal["server", "silo", "silos together", "server and silos", "outsider"]

Claim = Tensors
"""What an attacker says it found: named arrays."""


@dataclass(frozen=True)
class Given:
    """What one attack is to be given.

    views: by role, the rounds of its view. arrays: background knowledge, and the role's own secrets. view: in words,
    what it has seen. knowledge: in words, what it knows besides, "nothing" for nothing.
    """

    views: Mapping[str, Sequence[int]]
    arrays: Mapping[str, Array]
    view: str
    knowledge: str


@dataclass(frozen=True)
class Reconstruction:
    """Reconstructed images and the true ones, float [images, channels, height, width] in the same units."""

    caption: str
    true: Array
    found: Array


@dataclass(frozen=True)
class AttackResult:
    """The result of one attack.

    A higher `score` means that more was learned; `measure` says in a few words of what. `chance` is what guessing
    scores. `interval` is that of 95 % of the score. `sentence` says plainly what the role learned, with its figure,
    without a full stop. `figures` are further ones, by name. `constant` is what naming the most frequent value always
    scores, and None where a score is of numbers and no value is the most frequent.
    """

    measure: str
    score: float
    chance: float
    interval: tuple[float, float]
    sentence: str
    figures: Mapping[str, float] = field(default_factory=dict)
    pictures: Sequence[Reconstruction] = ()
    constant: float | None = None

    @property
    def succeeded(self) -> bool:
        """Whether more was learned than by guessing: the whole interval lies above chance."""
        return self.interval[0] > self.chance


@dataclass(frozen=True)
class Attack:
    """One attack.

    `name` has dashes, and is the same in `audit.json` and on the command line. `title` says what the role does, for
    people who know no machine learning, with a verb first and no full stop. `severity` is what it does to the people in
    the rows, if it succeeds. `source` is the paper or derivation. `fits` says why it cannot be tried on a run, empty
    where it can. `given` says what it is given; this may read the truth, as it says what a role knows. `attack` runs in
    a process of its own, on that alone. `score` compares the claim with the truth. A `slow` attack is left out unless a
    thorough audit is asked for.
    """

    name: str
    title: str
    severity: Severity
    role: Role
    source: str
    protocols: frozenset[str]
    fits: Callable[[PublicRun], str]
    given: Callable[[Truth], Given]
    attack: Callable[[Case], Claim]
    score: Callable[[Claim, Truth], AttackResult]
    slow: bool = False

    @property
    def module(self) -> str:
        """The module that `attack` stands in, from which the child process takes it by its name."""
        return self.attack.__module__


def always(run: PublicRun) -> str:
    """Return that an attack can be tried on any run of its protocols."""
    return ""


def no_training(run: PublicRun) -> str:
    """Say why an attack on rounds of training cannot be tried."""
    return "" if run.training else "no round of training was recorded"


def no_head(run: PublicRun) -> str:
    """Say why an attack on the last linear layer cannot be tried."""
    return "" if run.head else "the model has no linear layer with an output each"


def augmented(run: PublicRun) -> str:
    """Say why an attack on rows that are the same in each round cannot be tried."""
    return "rows are augmented anew in every round, and there is no record of what to compare with" * run.augmented


def first_of(*reasons: Callable[[PublicRun], str]) -> Callable[[PublicRun], str]:
    """Return what says the first of these reasons that a run gives."""
    return lambda run: next(filter(None, (reason(run) for reason in reasons)), "")


def rounds_of(count: int) -> str:
    """Return so many rounds in words: "1 round", "2 rounds"."""
    return "1 round" if count == 1 else f"{count} rounds"
