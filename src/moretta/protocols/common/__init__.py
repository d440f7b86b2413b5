"""What protocols share: the set-up with a cohort, a silo's rows and batches, training settings, losses, scoring."""
