"""Models: from a run file's `[model]` section to a torch module with seeded weights.

The built-in models are the papers' architectures: `mlp`, `resnet`, `densenet`, and BAFFLE's `lenet`, `wrn`,
`mobilenet`. Each is small, traceable by torch.fx, and ends in an `nn.Linear` whose result is the output.
`module:function` names any other. Importing this package needs no torch; building a model does.
"""
