"""Attacks on PBPFL, and its exposure to attacks that fit several protocols."""
