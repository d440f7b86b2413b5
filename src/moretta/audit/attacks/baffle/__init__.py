"""Attacks on BAFFLE, and what it shows to those that fit several protocols."""
