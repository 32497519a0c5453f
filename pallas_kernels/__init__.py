"""MSA operators: one folder per op with its API, reference, portable XLA form and GPU kernels."""
