"""Attacks that fit several protocols; each protocol's own folder has its exposure to them."""
