"""Sizes that were measured on an H200 (bf16, H = C = 128, G = 16, R = 16); none changes what is computed."""

ROWS = 64  # rows of a wgmma tile: ROWS / G queries with the G heads of one group
SMS = 132  # multiprocessors; a kernel with one thread block on each takes tile after tile
NEIGHBOURS = 128  # rows of a Q-tile: NEIGHBOURS / G neighbouring queries

# KV-outer forward: entries a work item; 512 is 3% slower.
FORWARD_PER = 1024
FORWARD_WARPGROUPS = 3
FORWARD_SLOTS = 3  # ring slots a warpgroup
FORWARD_REGISTERS = (160, 32)  # consumers, producer: 3 * 160 + 32 = 512, all that four warpgroups get

# Backward: more ring slots are slower, they leave less L1 for the few spills.
BACKWARD_PER = 1024
BACKWARD_RING = 2
BACKWARD_SENDS = 2  # buffers of dQ on their way out
BACKWARD_REGISTERS = {2: (240, 24), 1: (256, 24)}  # by consumers; 2 * 240 + 24 = 504, all that three warpgroups get

# Partial results of a chunk of queries may take this much memory.
BUDGET_BYTES = 9 * 2**30

# Q-tile forward: a block is common when this share of the neighbouring queries chose it (4/8 to 6/8 measure alike).
COMMON_SHARE = 5 / 8
Q_TILE_RING = 2
Q_TILE_REGISTERS = (232, 40)  # 2 * 232 + 40 = 504, all that three warpgroups get
