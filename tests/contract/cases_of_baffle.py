"""BAFFLE by rounds, by epochs, and with noise: everybody knows the seed of a round, and nobody another's root."""

from dataclasses import replace

from protocol_case import Case

from moretta import BAFFLE

PLAIN = Case(
    BAFFLE(learning_rate=0.02, k=32),
    secrets_move="yes",
    last_bits_matter=True,
    least_up=8 * 33,  # 32 differences and the loss, however large the model
    root="seed/secret_root",
    own_root="seed/secret_root",
    set_up=("baffle/commit", "baffle/reveal", "baffle/agree"),
)
EPOCHS = BAFFLE(learning_rate=0.02, k=16, local_epochs=1, form="central", ema=0, seed_pool=64)  # by each silo's Adam
OWN = BAFFLE(learning_rate=0.02, k=32, directions="own")
PRIVATE = BAFFLE(learning_rate=0.02, k=16, dp_noise=0.5, dp_clip=5, orthogonal=True)
BLOCKS = BAFFLE(learning_rate=0.02, perturb="blocks", k=12)
UNITS = BAFFLE(learning_rate=0.02, perturb="blocks", linear="activations")
CASES = (
    PLAIN,
    replace(PLAIN, name="baffle-epochs", protocol=EPOCHS),
    replace(PLAIN, name="baffle-private", protocol=PRIVATE),
    replace(PLAIN, name="baffle-own", protocol=OWN, least_up=None),
)
