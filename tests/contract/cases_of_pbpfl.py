"""PBPFL, whose key decides how the true weights are rounded."""

from protocol_case import Case

from moretta import PBPFL

CASES = (
    Case(PBPFL(learning_rate=0.05, momentum=0.5, partitions=2), secrets_move="in rounding", root="secret_root"),
    Case(
        PBPFL(loss="cross-entropy", variant="paper", exchange="ratios", learning_rate=0.05, partitions=2),
        "pbpfl by ratios",
        tells_loss=False,
        secrets_move="in rounding",
        root="secret_root",
    ),
)
