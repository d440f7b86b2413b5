"""Moretta's secure sum in Flower: `secure_sum` is a ClientApp's mod, `SecureFedAvg` a ServerApp's strategy.

`record_views` is a mod that keeps a client's view of any run, for an audit.
"""

from moretta.errors import MissingExtra

try:
    from moretta.deployment.flower.recording import record_views
    from moretta.deployment.flower.server import SecureFedAvg
    from moretta.deployment.flower.site import secure_sum
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "flwr":
        raise
    raise MissingExtra("moretta.flower needs Flower; run: pip install 'moretta[flower]'") from None

__all__ = ["SecureFedAvg", "record_views", "secure_sum"]
