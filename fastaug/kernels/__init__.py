"""Loss kernels: the objective, the registry, the autograd wrapper, and one file per backend."""
