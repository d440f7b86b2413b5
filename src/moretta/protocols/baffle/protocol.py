"""BAFFLE's entry in the registry of protocols."""

from moretta.protocols.common.entry import Entry

HERE = "moretta.protocols.baffle"

ENTRIES = (
    Entry(
        "baffle",
        "BAFFLE",
        f"{HERE}.params:BAFFLE",
        f"{HERE}.roles:build",
        messages=f"{HERE}.silo.messages",
        claims=f"{HERE}.claims",
        edge=f"{HERE}.edge_client",
        leaves=f"{HERE}.roles:left",
        forward_only=True,
        shows_model=True,
    ),
)
