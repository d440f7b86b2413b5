"""The attacks: one a file, with its paper or derivation; a folder for each protocol, and `common`."""
