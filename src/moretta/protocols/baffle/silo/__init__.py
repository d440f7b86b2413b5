"""What a silo of BAFFLE computes and sends. No module here needs PyTorch."""
