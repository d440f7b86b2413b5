"""PBPFL's entry in the registry of protocols."""

from moretta.protocols.common.entry import Entry

HERE = "moretta.protocols.pbpfl"

ENTRIES = (
    Entry(
        "pbpfl",
        "PBPFL",
        f"{HERE}.params:PBPFL",
        f"{HERE}.roles:build",
        messages=f"{HERE}.messages",
        claims=f"{HERE}.claims",
        commands=f"{HERE}.command:add_to",
        ring_bits=64,
    ),
)
