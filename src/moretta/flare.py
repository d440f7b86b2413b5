"""Moretta's secure sum in NVIDIA FLARE's own jobs: `SecureFedAvgRecipe` stands where a `FedAvgRecipe` did."""

from moretta.deployment.recipe.server import SecureFedAvgRecipe

__all__ = ["SecureFedAvgRecipe"]
