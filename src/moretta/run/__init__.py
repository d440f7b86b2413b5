"""One run: the federation, the loop of its rounds, evaluation, its record and its folder, and what comes after."""
