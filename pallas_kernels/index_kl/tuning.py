"""Launch parameters of the index_kl kernels, measured on an H200; none changes what is computed."""

# Entries a work item, a multiple of the 64 entries of a tile; 512 costs 3% more.
PER = 1024
# Registers of consumers and producer where consumers hold sums: 2 * 232 + 40 = 504, all that three warpgroups get.
REGISTERS = (232, 40)

# Kept blocks: tiles in flight.
LSE_RING = 4
LSE_WARPGROUPS = 2
GRADIENT_RING = 3
TEACHER_ROWS = 128  # (query, head) pairs of a tile
TEACHER_RING = 3

# Full prefix: key blocks in flight (log-sum-exp), tiles of queries in flight and bytes of a chunk's ds (difference).
PREFIX_RING = 4
DIFFERENCE_RING = 2
DIFFERENCE_BYTES = 2**30
