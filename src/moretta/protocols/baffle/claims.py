"""Who learns what under BAFFLE (`moretta.protocols.common.claims`)."""

from moretta.protocols.common import claims as shared
from moretta.protocols.common.claims import Condition, equals, is_on, server, setting, silo, under

BATCH, OWN, EPOCH, LAYERS = "loss-difference vector", "gradient estimate", "weight change", "linear-layer gradient"

sums_weight_changes = is_on("protocol", "local-epochs", "`local-epochs` is set")
draws_own = equals("protocol", "directions", "own")
shares_directions = Condition(
    "directions follow from a seed that all roles share (the default)", lambda run: not draws_own(run)
)
sums_loss_differences = Condition(
    "a round is one batch of each silo along shared directions (the default)",
    lambda run: not sums_weight_changes(run) and not draws_own(run),
)
sums_estimates = Condition(
    'a round is one batch of each silo along its own directions (`directions = "own"`)',
    lambda run: not sums_weight_changes(run) and draws_own(run),
)
moves_blocks = equals("protocol", "perturb", "blocks")
moves_all = Condition("all parameters move at once (the default)", lambda run: not moves_blocks(run))
sums_layers = Condition(
    'a round is one batch of each silo, whose linear layers move unit by unit (`linear = "activations"`)',
    lambda run: (
        moves_blocks(run) and setting(run, "protocol", "linear") == "activations" and not sums_weight_changes(run)
    ),
)
sums_statistics = is_on("protocol", "batch-statistics", "BatchNorm's statistics are summed (`batch-statistics`)")


def _sums(upload: str, clear: tuple[str, ...], masked: str) -> tuple[shared.Claim, ...]:
    """Return the claims about an upload of silos. clear, masked: the attacks on it, and on its masked words."""
    return shared.in_the_clear(upload, clear), shared.sum_only(upload, (masked,)), shared.with_all_but_one(upload)


OF_LAYERS = (
    shared.in_the_clear(LAYERS, ("own-estimate", "labels-from-head", "gradient-inversion")),
    *under((shared.sum_only(LAYERS),), place="full"),
    shared.with_all_but_one(LAYERS),
    shared.FROM_THE_SUM,
    server("sum", attacks=("own-estimate", "labels-from-head", "gradient-inversion-of-sum"), place="brief").says(
        "learns from the sum the silos’ gradient of each linear layer, as under FedSGD: it has no noise of directions, "
        "only the error of finite differences"
    ),
)

CLAIMS = (
    *under(_sums(BATCH, shared.OF_LOSS_DIFFERENCES, "loss-differences"), sums_loss_differences),
    *under(_sums(OWN, ("own-estimate",), "server-and-silos"), sums_estimates, place="full"),
    *under(_sums(EPOCH, shared.OF_LOSS_DIFFERENCES, "server-and-silos"), sums_weight_changes, place="full"),
    *shared.AROUND_SUMS,
    *under(OF_LAYERS, sums_layers),
    server("sum", (sums_estimates,), ("own-estimate",)).says(
        "learns from the sum an estimate of the silos’ gradient, as long as the model, with at most the error of all "
        "silos’ directions together"
    ),
    server("model", (draws_own,), kind="not given").says(
        "is not given the directions, which each silo draws from its own secret; over rounds that hides nothing of the "
        "gradient",
        rests_on="the tests of runs (`tests/protocols/baffle/test_baffle_trains.py`)",
    ),
    server("sum", (sums_loss_differences, moves_all), shared.OF_LOSS_DIFFERENCES, place="front").says(
        "learns from the sum the silos’ gradient along the directions, which it knows: K numbers a round"
    ),
    server("sum", (sums_loss_differences, moves_blocks), shared.OF_LOSS_DIFFERENCES).says(
        "learns from the sum the silos’ gradient of each block of layers along its moves, which it knows: one number "
        "a move"
    ),
    server("sum", (sums_loss_differences,), ("loss-differences",), silent=True, place="brief").says(
        "can distinguish loss differences of training rows from those of random noise: their likeness protects nothing"
    ),
    server("model", (shares_directions,), ("seed-choosing-server",), kind="not given", silent=True).says(
        "is not given the choice of the directions: each role commits to its part before it sees another’s"
    ),
    server("statistics", (sums_statistics,)).says(
        "learns the mean and variance of each BatchNorm’s inputs, of all silos’ batches together"
    ),
    server("statistics", (shared.is_in_the_clear, sums_statistics)).says(
        "learns the mean and variance of each BatchNorm’s inputs, of each silo’s batch by itself"
    ),
    server("statistics", (shared.is_without_noise,), silent=True).says("learns the silos’ mean loss"),
    shared.HOLDS_THE_MODEL,
    *under((shared.NOISE,), sums_loss_differences),
    *under((shared.NOISE_OF_SILOS,), sums_weight_changes),
    shared.ROWS_OF_A_ROUND,
    shared.DIFFERENCES_OF_TOTALS,
    silo("model", (shares_directions,), ("membership-inference",), place="front").says(
        "receives the model itself in every round|, runs it forward only, and knows all directions"
    ),
    silo("model", (draws_own,), ("membership-inference",)).says(
        "receives the model itself in every round|, runs it forward only, and knows its own directions alone"
    ),
    shared.LABELS_OF_OTHERS,
    *shared.SILO_STATISTICS,
    *under((shared.of_two(BATCH),), sums_loss_differences),
    *under((shared.of_two(OWN),), sums_estimates),
    *under((shared.of_two(LAYERS),), sums_layers),
    *under((shared.of_two(EPOCH),), sums_weight_changes),
    shared.COLUMNS_OF_THE_OTHER,
    shared.SCORES,
    shared.VALIDATION,
    *shared.TABLES,
    *shared.OF_ALL_RUNS,
)
