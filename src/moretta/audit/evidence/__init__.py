"""What attacks and the scorer stand on: what an attack is and is given, the truth, and arithmetic that they share."""
