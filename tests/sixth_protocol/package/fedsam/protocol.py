"""What FedSAM says of itself."""

from moretta.protocols.common.entry import Entry

HERE = "fedsam"

ENTRIES = (
    Entry(
        "fedsam",
        "FedSAM",
        f"{HERE}.params:FedSAM",
        f"{HERE}.roles:build",
        messages=f"{HERE}.messages",
        claims=f"{HERE}.claims",
    ),
)
