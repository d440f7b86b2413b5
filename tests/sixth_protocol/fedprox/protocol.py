"""What FedProx says of itself."""

from moretta.protocols.common.entry import Entry

HERE = "moretta.protocols.fedprox"

ENTRIES = (
    Entry(
        "fedprox",
        "FedProx",
        f"{HERE}.params:FedProx",
        f"{HERE}.roles:build",
        messages=f"{HERE}.messages",
        claims=f"{HERE}.claims",
    ),
)
