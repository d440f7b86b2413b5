"""The process of a silo that only runs its model forward: ONNX Runtime and numpy, never PyTorch."""
