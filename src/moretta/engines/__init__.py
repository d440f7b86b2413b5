"""Engines: what delivers a server's asks to its clients. One adapter each; they translate and decide nothing."""
