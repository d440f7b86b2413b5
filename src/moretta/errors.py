"""Every error Moretta raises on purpose, split by who is at fault.

    MorettaError
    ├── ParameterError          the user: a run file, data or model that cannot work (exit code 2)
    │   ├── UnsupportedModel    a model that a protocol cannot train, by the name of its layer
    │   ├── MissingExtra        an optional dependency is not installed
    │   └── RowsError           a silo's own rows do not fit the run; the sentence stays at the silo
    │       ├── RangeError      a value that the ring of the secure sum cannot hold, by the name of its tensor
    │       └── UnreadableRow   a row that was there before cannot be read again
    ├── PeerError               the other side: it sent what the protocol does not allow
    │   ├── PolicyError         a server asked what a site's policy does not allow; told to the server in full
    │   ├── CodecError          the bytes are no message; the only error of `moretta.contract.codec.Codec.decode`
    │   └── Disconnected        its process or connection ended before it had answered
    ├── SumSpent                nobody: this silo has helped to open another sum of the round, and names the next take
    ├── MisuseError             the caller of this library: a call in the wrong order
    └── RunFailed               nobody in particular: the run cannot go on; its checkpoint is complete (exit code 1)

A message says what was expected, what came and what to do, in one sentence. It never holds a key, and what it says of a
value's size stands in its notes, which stay on the machine (`with_notes`). A silo that raises costs the round only
itself; see `moretta.engines.driver`.
"""

import logging

PRIVATE = "this site cannot take part in this sum; its own log says why"  # whatever its rows or files are


class MorettaError(Exception):
    """The root of the tree drawn above."""


class ParameterError(MorettaError):
    """A run file, data or a model that cannot work as given."""


class UnsupportedModel(ParameterError):
    """A model that the protocol cannot train; the message names the layer and a way out."""


class MissingExtra(ParameterError):
    """An optional dependency is needed; the message names the extra to install."""


class RowsError(ParameterError):
    """A silo's own rows do not fit the request; the sentence reveals something of them, and so does the error itself.

    An engine that carries it to another machine sends one sentence in its place, the same for every cause. Errors that
    follow from a run's settings or from a message alone are of another class.
    """


class RangeError(RowsError):
    """A value is not finite, or too large for the fixed-point ring; the message names the tensor and the range."""


class UnreadableRow(RowsError):
    """A silo's own row cannot be read again, or is another now."""


class PeerError(MorettaError):
    """A peer sent what the protocol does not allow here."""


class PolicyError(PeerError):
    """A server asked what this site does not allow; the sentence follows from what it sent and from no row."""


class CodecError(PeerError):
    """Bytes that are not a message of the schema."""


class Disconnected(PeerError):
    """A peer is gone, or no longer speaks the protocol; its question stays unanswered."""


class SumSpent(MorettaError):
    """A silo has helped to open a sum of this round, and is now asked for another one.

    Attributes:
        next_take, survivors, whole: As in `moretta.contract.messages.Spent`, into which an engine turns it.
    """

    def __init__(self, next_take: int, survivors: tuple[str, ...], whole: bool) -> None:
        super().__init__(f"a sum of this round was opened before; expected that very one, or take {next_take}")
        self.next_take, self.survivors, self.whole = next_take, survivors, whole


class MisuseError(MorettaError):
    """A call that this object does not allow in its present state."""


class RunFailed(MorettaError):
    """The run cannot go on; its last checkpoint has its progress."""


def with_notes(error: BaseException) -> str:
    """Return an error's sentence with its notes, such as a magnitude: for its own machine, and for no message."""
    return "; ".join([str(error), *getattr(error, "__notes__", ())])


def disclosed(error: MorettaError, log: logging.Logger) -> str:
    """Log an error with its notes. Return what a server receives of it: its sentence if that follows from no row."""
    log.error("Moretta: %s", with_notes(error))
    return str(error) if isinstance(error, PeerError | MisuseError) else PRIVATE
