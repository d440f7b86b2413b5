"""CGD's entry in the registry of protocols."""

from moretta.protocols.common.entry import Entry

HERE = "moretta.protocols.cgd"

ENTRIES = (
    Entry(
        "cgd",
        "CGD",
        f"{HERE}.params:CGD",
        f"{HERE}.roles:build",
        messages=f"{HERE}.messages",
        claims=f"{HERE}.claims",
        leaves=f"{HERE}.roles:left",
        grids=True,
        simulations=("fused", "exact-ring"),
        takes_all=True,
        seeded_start=True,
        judged_by="worst",
        common_model=False,
    ),
)
