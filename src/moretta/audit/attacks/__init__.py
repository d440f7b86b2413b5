"""The attacks, one a file, each with the paper or the derivation it comes from; a folder a protocol, and `common`."""
