"""Trainable MiniMax Sparse Attention (MSA) in JAX and Flax."""

__version__ = "0.1.0"
