"""The shell's commands: each reads options and calls a package below."""
