"""The engine for many machines: NVIDIA FLARE carries the messages, and decides nothing."""
