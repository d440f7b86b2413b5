"""The computations and messages of a BAFFLE silo. No module here needs PyTorch."""
