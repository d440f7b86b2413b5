"""What attacks and the scorer share: the definition of an attack and its input, the truth, and arithmetic."""
