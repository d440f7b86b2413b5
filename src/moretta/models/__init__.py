"""Models: from a run file's `[model]` section to a torch module with seeded weights.

Built-in are the architectures of the papers: `mlp`, `resnet`, `densenet`, and BAFFLE's `lenet`, `wrn`, `mobilenet`,
each small, traceable by torch.fx, and ending in an `nn.Linear` whose result is the output. `module:function` gives any
other. Importing this package needs no torch; building a model does.
"""
