"""The arrows of CGD's figures. A message's run id begins with its group: ``columns-2/<run>``.

The group is in every keystream's label with the run, so that a participant's groups have no mask in common.
"""

from collections.abc import Mapping
from typing import Annotated

from moretta.contract.messages import Array, Message, Octets, Tensors, length, message, shaped, within
from moretta.data.alignment.exchange import MESSAGES as ALIGNMENT
from moretta.secure_aggregation.encoding import Ring

LAST = 2**31 - 1  # the last possible round; 0 is before the first
LARGEST_Z = 2.0**20  # of a part of z; the ring then keeps 30 or more fraction bits
ROW_RING = Ring(64)


def bits_of_z(holders: int) -> int:
    """Return the fraction bits of z in a row of so many holders, so that each part of z may be up to `LARGEST_Z`."""
    return ROW_RING.fraction_bits("z", LARGEST_Z, holders, holders)


@message("cgd/where")
class Where(Message):
    """Report how many rounds' sums you have stepped by, by group."""


@message("cgd/here")
class Here(Message):
    """The last round whose sum the participant stepped by, for each group of its layers; 0 before the first."""

    steps: Annotated[Mapping[str, int], within(0, LAST)]


@message("cgd/draw-key")
class DrawKey(Message):
    """Draw a fresh key for this group, and seal it for these members."""

    members: tuple[str, ...]


@message("cgd/group-key")
class GroupKey(Message):
    """The group's key, sealed for each member."""

    sealed: Mapping[str, bytes]


@message("cgd/take-key")
class TakeKey(Message):
    """The group's key as `maker` sealed it for you."""

    maker: str
    sealed: bytes


@message("cgd/key-taken")
class KeyTaken(Message):
    """Whether the participant now has the group's key; it cannot open one that was not sealed for it."""

    opened: bool


@message("cgd/use-alignment")
class UseAlignment(Message):
    """Report the alignment that orders your rows. found: whether to use the last one."""

    found: bool


@message("cgd/alignment-used")
class AlignmentUsed(Message):
    """HMAC-SHA256 of the alignment's digest under the row's key; empty without an alignment."""

    digest: Annotated[bytes, length(0, 32)]


@message("cgd/describe-rows")
class DescribeRows(Message):
    """Report the number of your rows, and a digest of their ids under the row's key."""


@message("cgd/rows")
class RowsDescribed(Message):
    """The number of rows, and HMAC-SHA256 of their ids in order under the row's key; empty without ids."""

    rows: Annotated[int, within(1)]
    digest: Annotated[bytes, length(0, 32)]


@message("cgd/forward")
class Forward(Message):
    """Send your part of z, X_ij W1_ij, masked for the head of your row. fraction_bits: of the ring's fixed point."""

    fraction_bits: int


@message("cgd/partial")
class Partial(Message):
    """One holder's part of z, uint64[rows, H1], under the masks that it shares with each other of its row."""

    words: Annotated[Array, shaped(2, "uint64")]


@message("cgd/join")
class Join(Message):
    """The sum of the others' parts of z, still under their masks with you; no rows if you are alone."""

    words: Annotated[Array, shaped(2, "uint64")]
    fraction_bits: int


@message("cgd/deltas")
class Deltas(Message):
    """Delta = d(sum of the row's losses)/dz, float32 or float64[rows, H1] as bytes, sealed under the row's key."""

    sealed: Octets


@message("cgd/backward")
class Backward(Message):
    """The row's Delta as its head sealed it; take your gradient from it."""

    sealed: Octets


@message("cgd/done")
class Done(Message):
    """The participant has done the task."""


@message("cgd/contribute")
class Contribute(Message):
    """Upload n_l g_l of the layers that this group shares; the answer is an upload of the secure sum."""

    encoding: Mapping[str, int]


@message("cgd/descend")
class Descend(Message):
    """Step by this sum.

    Args:
        tensors, weight: As in `moretta.secure_aggregation.sums.Relayed`.
        silos: The silos in it, sorted.
        encoding: That of the uploads, whose stamp is this one.
    """

    tensors: Tensors
    weight: Array
    silos: tuple[str, ...]
    encoding: Mapping[str, int]


@message("cgd/scored")
class Scored(Message):
    """The sum of the scores of the group's models on its members' held-out rows. Fields: see `Descend`."""

    tensors: Tensors
    weight: Array
    silos: tuple[str, ...]
    encoding: Mapping[str, int]


@message("cgd/step-alone")
class StepAlone(Message):
    """Step by your own gradient of this group's layers, which you share with no one."""


@message("cgd/show-displacement")
class ShowDisplacement(Message):
    """Seal D of this group's layers for members that missed steps."""


@message("cgd/displacement")
class Displacement(Message):
    """D of the group's layers after the rounds `steps`, and the norms of its sums for clipping, under its key."""

    sealed: Octets
    steps: Annotated[int, within(0, LAST)]


@message("cgd/catch-up")
class CatchUp(Message):
    """Replace your D of the group's layers, and the norms of its sums, by those that another member sealed."""

    maker: str
    sealed: Octets
    steps: Annotated[int, within(0, LAST)]


KEYS = (DrawKey, GroupKey, TakeKey, KeyTaken)
SET_UP = (
    Where,
    Here,
    UseAlignment,
    AlignmentUsed,
    *ALIGNMENT,
    DescribeRows,
    RowsDescribed,
    ShowDisplacement,
    Displacement,
    CatchUp,
)
MESSAGES = (
    *KEYS,
    *SET_UP,
    Forward,
    Partial,
    Join,
    Deltas,
    Backward,
    Done,
    Contribute,
    Descend,
    Scored,
    StepAlone,
)
