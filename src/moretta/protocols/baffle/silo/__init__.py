"""What a silo of BAFFLE computes and says, with PyTorch or without: no module here needs it."""
