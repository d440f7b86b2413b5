"""BAFFLE's inference-only client: ONNX Runtime and numpy, never torch, so that a process of it stays small."""
