"""The protocols, one small package each; each opens with its theory, its threat model and its source."""
