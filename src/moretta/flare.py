"""Moretta's secure sum in NVIDIA FLARE's own jobs: `SecureFedAvgRecipe` stands where a `FedAvgRecipe` did.

`RecordViews` is a filter that keeps a site's view of a run of FLARE's own recipe, for an audit.
"""

from moretta.deployment.recipe.server import SecureFedAvgRecipe
from moretta.deployment.recipe.site import RecordViews

__all__ = ["RecordViews", "SecureFedAvgRecipe"]
