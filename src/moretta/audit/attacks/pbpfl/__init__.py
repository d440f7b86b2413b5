"""Attacks on PBPFL, and what it shows to those that fit several protocols."""
