"""jax.jit for tests that compile many small programs: the same XLA passes, half the time in LLVM."""

import functools

import jax

quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})
