"""How the kernels of a backend become a torch operator: autograd, torch.func, vmap and torch.compile."""
