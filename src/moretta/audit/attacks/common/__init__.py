"""Attacks that fit several protocols; what each protocol shows them stands in its own folder."""
