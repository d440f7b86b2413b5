"""Attacks on Confined Gradient Descent, and what it shows to those that fit several protocols."""
