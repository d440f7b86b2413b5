"""Attacks on Confined Gradient Descent, and its exposure to attacks that fit several protocols."""
