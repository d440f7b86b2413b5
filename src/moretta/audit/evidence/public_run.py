"""What everybody in a run knows of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from moretta.data.layout import SampleLayout

if TYPE_CHECKING:
    from moretta.protocols.common.training import Training


@dataclass(frozen=True)
class PublicRun:
    """What is public of a run; it travels to an attacker as JSON.

    id: of the run. settings: of the run file, [protocol], [secure-aggregation] and what silos must know of [data],
    nothing secret and no path. shape: of one row of inputs. dtype: "float32" or "float64". recorded: the rounds of
    which there are views. rows: how many each silo has; others' sizes are taken to be known (they show in the lengths
    of messages under cross-entropy, and in how long an epoch is). rounds: how many were played. head, head_bias: the
    names of the last linear layer's parameters, empty where none is of [outputs, ..]. arrays: of a sample of several,
    as `moretta.data.layout.SampleLayout.dump` has them; none of a sample of one.
    """

    id: str
    protocol: str
    task: str
    settings: Mapping[str, Mapping[str, Any]]
    silos: tuple[str, ...]
    rows: Mapping[str, int]
    shape: tuple[int, ...]
    outputs: int
    dtype: str
    scheme: str
    ring_bits: int | None
    rounds: int
    recorded: tuple[int, ...]
    head: str = ""
    head_bias: str = ""
    arrays: Mapping[str, Any] = field(default_factory=dict)

    def setting(self, key: str, section: str = "protocol") -> Any:
        """Return one setting, None where the run has none of that name."""
        return self.settings.get(section, {}).get(key)

    @property
    def layout(self) -> SampleLayout | None:
        """How a sample of several arrays is packed; None where it is one array."""
        return SampleLayout.load(self.arrays) if self.arrays else None

    @property
    def has_tokens(self) -> bool:
        """Whether token ids lie beside numbers in a packed row."""
        return self.layout is not None and self.layout.has_integers

    @property
    def masked(self) -> bool:
        """Whether uploads went through a secure sum."""
        return self.scheme != "none"

    @property
    def training(self) -> tuple[int, ...]:
        """The recorded rounds of training, without the release after the last."""
        return tuple(number for number in self.recorded if 1 <= number <= self.rounds)

    @property
    def augmented(self) -> bool:
        """Whether silos vary their rows anew in each round."""
        return self.setting("augment", "data") not in (None, "none")

    @property
    def schedule(self) -> Training:
        """The rate of each round, of a protocol without a schedule of its own, and the betas of its Adam."""
        from moretta.protocols.common.training import Training

        names = ["learning-rate", "lr-schedule", "milestones", "milestone-factor", "first-rate", "epoch-rounds"]
        names += ["optimizer", "betas"] if self.setting("optimizer") == "adam" else []
        told = {name: self.setting(name) for name in names}
        return Training.model_validate({name: value for name, value in told.items() if value is not None})

    @property
    def loss(self) -> str:
        """The loss, "mse" or "cross-entropy"."""
        return str(self.setting("loss"))

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON content."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> PublicRun:
        """Return what `to_json` gave."""
        lists = {name: tuple(content[name]) for name in ("silos", "shape", "recorded")}
        return cls(**{**content, **lists})
