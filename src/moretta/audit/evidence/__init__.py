"""What attacks and the scorer share: what an attack is and is given, the truth, and arithmetic."""
