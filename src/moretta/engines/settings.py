"""Settings of a run: how long and how exact it is, where silos live, and the faults to inject."""

import re
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt, field_validator

from moretta.contract.settings import (
    SERVER,
    Device,
    Fraction,
    Positive,
    Section,
    Seed,
    SettingRule,
    Spelled,
    Unit,
    Words,
)
from moretta.contract.wording import shown

ROUNDS = Unit("rounds")


EVALUATIONS = 50  # the approximate number of evaluations in a run, by default


class Run(Section):
    """Set how long and how exact a run is, and where its results go.

    Args:
        name: the name of the run; left out, it is the file's name without its ending.
        rounds: the number of rounds; the model steps once in each.
        seed: seeds what is random in training and not secret: initial weights, splits, batches.
        out: the run folder; left out, the shell takes that of --out, or runs/NAME.
        dtype: the dtype in which the model and the silos compute.
        device: where the model is trained and evaluated.
        checkpoint_every: the number of rounds from one checkpoint to the next.
        evaluate_every: the number of rounds from one evaluation on the test rows to the next, and with early stopping
            on the validation rows too. The last round is always evaluated, unless a callback stopped the run. None:
            about 50 evaluations in a run.
        metrics: functions of the model's outputs and the targets, as "module:function". Their figures on test rows
            stand beside the built-in ones under the functions' names (`moretta.run.metrics`).
        trackers: receivers of each line of the history, at the server: "tensorboard", "mlflow" or a "module:function"
            (`moretta.run.trackers`); None: no tracker.
        record_views: keep what each role saw: never, always, or in these rounds (the first is 1).
        early_stopping: the number of rounds without a lower validation loss after which the run stops and returns to
            its best round; None: never. Rounds are judged only at evaluations. After a resume with more rounds the
            former last round is judged too, so the run may differ from an uninterrupted one.
        participation: the fraction of the silos that takes part in a round, drawn from the seed.
        insecure_secret_seed: for tests only: every secret of the run follows from it.
    """

    name: Annotated[str, Spelled("text of 1 to 100 characters without slashes")] = "run"
    rounds: PositiveInt
    seed: Seed = 0
    out: Annotated[Path | None, SERVER] = None
    dtype: Literal["float32", "float64"] = "float32"
    device: Device = "cpu"
    checkpoint_every: Annotated[PositiveInt, ROUNDS] = 10
    evaluate_every: Annotated[PositiveInt | None, SERVER, ROUNDS] = None
    metrics: Annotated[tuple[Words, ...], SERVER] = ()
    trackers: Annotated[tuple[Words, ...] | None, SERVER] = None
    record_views: Annotated[bool | tuple[int, ...], SERVER, Spelled("true, false or list of rounds")] = False
    early_stopping: Annotated[PositiveInt | None, ROUNDS] = None
    participation: Annotated[float, Field(gt=0, le=1)] = 1.0
    insecure_secret_seed: Annotated[Seed | None, Field(repr=False), SERVER] = None

    def evaluates(self, number: int) -> bool:
        """Return whether the model is evaluated after this round."""
        every = self.evaluate_every or max(1, self.rounds // EVALUATIONS)
        return not number % every or number == self.rounds

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, name: str) -> str:
        if not re.fullmatch(r"[^/\\\x00-\x1f\x7f]{1,100}", name) or name in (".", ".."):
            raise ValueError("a name of 1 to 100 characters without slashes")  # the name may be a folder's
        return name

    @field_validator("record_views", mode="before")
    @classmethod
    def _are_rounds(cls, value: object) -> bool | tuple[int, ...]:
        if isinstance(value, bool):
            return value
        if isinstance(value, list | tuple) and all(type(number) is int and number >= 1 for number in value):
            return tuple(sorted(set(value)))
        raise ValueError("true, false or a list of round numbers from 1 on")


FaultPhase = Literal["set-up", "upload", "unmasking"]


class Fault(Section):
    """Inject one silo's fault into one round.

    Args:
        round: counted from 1; the release after the last round is one more.
        silo: its name.
        phase: "set-up", where keys and common statistics are agreed on; "upload", the silo's answers of the round
            itself; "unmasking", after its upload, when the secure sum of the uploads is completed.
    """

    round: PositiveInt
    silo: Words
    phase: FaultPhase = "upload"


class Delay(Fault):
    """Delay a silo's answers of one phase.

    Args:
        seconds: they count towards the deadline, but cost no time; without a deadline they are only logged.
    """

    seconds: Annotated[Positive, Unit("seconds")]


class Faults(Section):
    """Inject faults, to show that a federation survives them.

    Args:
        drop: the silo is unreachable from that phase to the end of that round. In "upload" it vanishes before it
            uploads, in "unmasking" after. "set-up" also takes effect in a round without a set-up; a round whose sum is
            not masked has no unmasking.
        drop_probability: the probability, for each silo and round, to vanish in the upload or, where the round has one,
            in the unmasking, with equal chance.
        delay: answers that come later.
        corrupt: answers that arrive without their last byte, as when a connection breaks.
        seed: seeds the faults that are drawn. They depend on seed, round and silo alone, so a resumed run meets the
            same ones.
    """

    drop: tuple[Fault, ...] = ()
    drop_probability: Fraction = 0.0
    delay: tuple[Delay, ...] = ()
    corrupt: tuple[Fault, ...] = ()
    seed: Seed = 0


EngineName = Literal["in-process", "flare", "fused", "exact-ring"]
Precision = Literal["float32", "float16", "int8-activations"]


def _unfit_site(engine: "Engine") -> object:
    """Return the first name that no site can have, as a field of the sentence."""
    fit = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
    wrong = (site for site in engine.sites if not fit.fullmatch(site) or site in ("server", "admin"))
    return next(({"site": shown(site)} for site in wrong), None)


class Engine(Section):
    """Choose where the silos live.

    Args:
        name: "in-process": silos on this machine that pass messages. "fused" and "exact-ring" are for cgd alone, on an
            N-layer network: one process simulates all participants without messages, at the paper's scale
            (`moretta.protocols.cgd.simulation`). "flare": silos on machines of their own, over NVIDIA FLARE
            (`moretta.deployment`).
        sites: the silos' names, with "flare"; those of a grid row by row.
        torch_versions: versions of PyTorch that sites may run beside the server's own, with "flare", by their first two
            numbers, for example "2.12".
        workers: processes of this machine that run the silos, each on one thread; never more than silos, or stacks of
            silos that compute together (`moretta.engines.silos_here`). None: one a core, or 1 where the model is large
            enough for PyTorch's own threads, or the run too short to gain by it (`moretta.run.loop`). With a number,
            also 1, the whole run computes on one thread. Results are the same with any number.
        strict: pass every message through the codec, as a network would.
        deadline: the longest time that an answer may take. None waits, but at most 10 minutes for the process of an
            edge client and over "flare".
        message_mib: the largest message that the server takes from a site, in MiB, with "flare"; a longer one counts as
            malformed. A site's own limit is in its silo.toml.
        edge: the names of silos that take part as edge clients, under baffle: each is a process of its own with ONNX
            Runtime and without PyTorch (`moretta.edge`). The others run PyTorch in this process.
        edge_precision: the precision of edge clients; "float16" and "int8-activations" round as such hardware does
            (`moretta.protocols.baffle.onnx_export`).
        memory_limit_mib: the most resident memory of an edge client's process; None: no limit.
        micro_batch: how many rows of a batch a silo runs through the model at a time; the gradient is the whole
            batch's. None: all; an edge client as many as its limit allows, or without one 4.
        recompute: "blocks": recompute the activations within a model's blocks in the backward pass instead of keeping
            them, which takes less memory and more time (`moretta.protocols.common.passes`). None: keep all.
        faults: faults to inject; None: none. They happen to silos, so centralised training has none.
    """

    RULES: ClassVar[tuple[SettingRule, ...]] = (
        SettingRule(
            lambda e: e.name != "in-process" and e.workers is not None,
            '{workers} is for {name:="in-process"}, not "{name:v}"; remove it',
        ),
        *(
            SettingRule(
                partial(lambda key, e: e.name != "flare" and bool(e.changed(key)), key),
                f'{{{key}}} is for {{name:="flare"}}, not "{{name:v}}"; remove it',
            )
            for key in ("sites", "torch_versions", "message_mib")
        ),
        SettingRule(
            lambda e: e.name == "flare" and not e.sites,
            '{sites} is missing; {name:="flare"} needs the names of the silos, for example {sites:=["north", "south"]}',
        ),
        SettingRule(
            _unfit_site,
            "{sites}: {site} cannot be the name of a site; expected 1 to 63 letters, digits, dashes and underscores, "
            'and not "server" or "admin"',
        ),
        SettingRule(
            lambda e: len(set(e.sites)) < len(e.sites),
            "{sites} has a name twice; expected each name once: rename one site",
        ),
        SettingRule(
            lambda e: len({site.casefold() for site in e.sites}) < len(e.sites),
            "{sites}: two names differ by capitals alone; rename one site",
        ),
        SettingRule(
            lambda e: e.name == "flare" and e.faults is not None,
            '{faults} are injected in-process; with {name:="flare"} remove them',
        ),
        *(
            SettingRule(
                partial(lambda key, e: e.simulates and bool(e.changed(key)), key),
                f"{{{key}}}: {{name:=}} passes all participants' rows together, as its own blocks have them; remove it",
            )
            for key in ("micro_batch", "recompute")
        ),
        SettingRule(
            lambda e: e.name == "flare" and e.edge,
            '{edge}: with {name:="flare"} each site sets this itself, by moretta join --edge',
        ),
        *(
            SettingRule(
                partial(lambda key, e: not e.edge and bool(e.changed(key)), key),
                f'{{{key}}} needs edge clients; name some, for example {{edge:=["silo-1"]}}, or remove it',
            )
            for key in ("edge_precision", "memory_limit_mib")
        ),
    )

    name: EngineName = "in-process"
    sites: tuple[Words, ...] = ()
    torch_versions: tuple[Words, ...] = ()
    workers: PositiveInt | None = None
    strict: bool = False
    deadline: Annotated[Positive | None, Unit("seconds")] = None
    message_mib: Annotated[PositiveInt, Unit("MiB")] = 1024
    edge: tuple[Words, ...] = ()
    edge_precision: Precision = "float32"
    memory_limit_mib: Annotated[Positive | None, Unit("MiB")] = None
    micro_batch: Annotated[PositiveInt | None, Unit("rows")] = None
    recompute: Literal["blocks"] | None = None
    faults: Faults | None = None

    @property
    def simulates(self) -> bool:
        """Whether one process runs all silos without messages."""
        return self.name in ("fused", "exact-ring")
