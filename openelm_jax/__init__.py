"""OpenELM in JAX: layer-wise scaled language models, trained from raw text, exact to the bit."""
