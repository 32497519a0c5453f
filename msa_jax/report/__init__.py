"""Tables and figures of finished or running experiments, read from their run folders alone (no jax)."""

from msa_jax.report.publish import write

__all__ = ["write"]
