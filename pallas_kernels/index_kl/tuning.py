"""Launch parameters of the index_kl kernels, measured on an H200 (LOG.md has the numbers); none changes what is computed."""

# Entries a work item; a multiple of the 64 entries of a tile.
PER = 1024
LSE_RING = 4
LSE_WARPGROUPS = 2
GRADIENT_RING = 3
TEACHER_ROWS = 128  # (query, head) pairs of a tile
TEACHER_RING = 3
# Consumers, producer; with two consumers 2 * 232 + 40 = 504 is all that three warpgroups get.
TEACHER_REGISTERS = (232, 40)
# Full prefix: key blocks in flight (log-sum-exp), tiles of queries in flight and bytes of a chunk's ds (difference).
PREFIX_RING = 4
DIFFERENCE_RING = 2
DIFFERENCE_BYTES = 2 * 2**30
DIFFERENCE_REGISTERS = (232, 40)
