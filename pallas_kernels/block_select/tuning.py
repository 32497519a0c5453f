"""Launch parameters of the block_select kernel, measured on an H200; none changes what is computed."""

# Tiles of 64 rows that share each key block fetched from L2, and how many of them one scoring warpgroup takes.
TILES = 4
TILES_A_WARPGROUP = 2
# Key blocks in flight.
STAGES = 4
# Up to this many ranked blocks a scoring warpgroup keeps one of its tiles of queries in registers; longer lists need them for ranking.
HOLD_LIMIT = 16
# Then, registers of scoring and ranking threads: 2 * 200 + 104 = 504, all that three warpgroups get.
REGISTERS = (200, 104)
