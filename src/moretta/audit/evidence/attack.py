"""What an attack is: its role, its input, its computation, and the scoring of its claim."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from moretta.audit.evidence.case import Case, PublicRun
from moretta.audit.evidence.truth import Truth
from moretta.contract.messages import Array, Tensors
from moretta.protocols.common.severity import Severity

Role = Literal["server", "silo", "silos together", "server and silos", "outsider"]

Claim = Tensors
"""An attacker's claim: named arrays."""


@dataclass(frozen=True)
class Given:
    """The input of one attack.

    Attributes:
        views: The rounds of a role's view, by role.
        arrays: Background knowledge, and the role's own secrets.
        view: The role's view, in words.
        knowledge: The role's other knowledge, in words; "nothing" without any.
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
    claimed: Array


@dataclass(frozen=True)
class AttackResult:
    """The result of one attack.

    Attributes:
        measure: The name of the score's quantity, in a few words.
        score: A higher score means that more was learned.
        chance: The score of guessing.
        interval: The 95 % interval of the score.
        sentence: What the role learned, with its figure, without a full stop.
        figures: Further figures, by name.
        constant: The score of always naming the most frequent value; None if the attack names numbers without one.
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

    Attributes:
        name: Its words are joined by dashes, in `audit.json` and on the command line.
        title: The role's action, for people who know no machine learning: a verb first, no full stop.
        severity: The harm of a success to the people in the rows.
        source: The paper or derivation.
        fits: Returns why the attack cannot be tried on a run, empty if it can.
        given: Returns the attack's input. It may read the truth, because it models a role's knowledge.
        attack: Runs in a process of its own, on that input alone.
        score: Compares the claim with the truth.
        slow: Whether only a thorough audit runs the attack.
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
        """The module of `attack`, from which the child process imports it by name."""
        return self.attack.__module__


def always(run: PublicRun) -> str:
    """Return the empty reason: an attack can be tried on any run of its protocols."""
    return ""


def no_training(run: PublicRun) -> str:
    """Return why an attack on rounds of training cannot be tried."""
    return "" if run.training else "no round of training was recorded"


def no_head(run: PublicRun) -> str:
    """Return why an attack on the last linear layer cannot be tried."""
    return "" if run.head else "the model has no linear layer with an output each"


def augmented(run: PublicRun) -> str:
    """Return why an attack on rows that are the same in each round cannot be tried."""
    return "rows are augmented anew in every round, and there is no record of what to compare with" * run.augmented


def first_of(*reasons: Callable[[PublicRun], str]) -> Callable[[PublicRun], str]:
    """Return a function to the first of these reasons that applies to a run."""
    return lambda run: next(filter(None, (reason(run) for reason in reasons)), "")


def rounds_of(count: int) -> str:
    """Return `count` rounds in words: "1 round", "2 rounds"."""
    return "1 round" if count == 1 else f"{count} rounds"
