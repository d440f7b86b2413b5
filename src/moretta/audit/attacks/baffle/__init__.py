"""Attacks on BAFFLE, and its exposure to attacks that fit several protocols."""
