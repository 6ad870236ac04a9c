"""The PyTorch code that `export --with-code` copies beside weights, and that we compare with."""
