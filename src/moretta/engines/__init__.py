"""Engines deliver a server's messages to its clients and bring back the answers; protocols make all decisions."""
