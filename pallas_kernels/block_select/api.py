"""block_select: which key blocks each query keeps (MSA paper, arXiv 2606.13392, section on the index branch)."""

from typing import NamedTuple

import jax

from pallas_kernels import dispatch
from pallas_kernels.block_select import mosaic_gpu, reference, xla
from pallas_kernels.checks import checked_layout, require, require_block_size, require_count, require_float, require_sizes

OP = "block_select"
REGISTERED = {
    "reference": dispatch.Implementation(reference.block_select),
    "xla": dispatch.Implementation(xla.block_select),
    "mosaic_gpu": dispatch.Implementation(mosaic_gpu.block_select, mosaic_gpu.refuse),
}


class BlockSelection(NamedTuple):
    """`ids` int32 [B, K, T, R] and `lse` float32 [B, K, T], as `block_select` describes them."""

    ids: jax.Array
    lse: jax.Array


def block_select(
    iq_BTKI: jax.Array,
    ik_BSI: jax.Array,
    *,
    block_size: int,
    num_blocks: int,
    local_blocks: int = 1,
    init_blocks: int = 0,
    scale: float | None = None,
    segments: jax.Array | None = None,
    positions: jax.Array | None = None,
    q_offset: jax.Array | int | None = None,
    implementation: str = "auto",
) -> BlockSelection:
    """Keeps, for every query and KV head, the `num_blocks` blocks of its document with the highest index scores.

        s[t, j, k] = scale * <iq[t, k], ik[j]>         for keys j <= t of the same document
        M[t, b, k] = max of s over those keys with floor(position / block_size) = b

    The query's own block and the `local_blocks` - 1 before it are always kept, as are the first `init_blocks`; the other slots
    go to the highest M, and among equal M to the lower block. A NaN score counts as -inf in M. Heads choose independently.

    Args:
      iq_BTKI: index queries, one head per KV head.
      ik_BSI: index keys, one head for all.
      block_size: keys a block (C).
      num_blocks: blocks kept (R).
      local_blocks, init_blocks: always kept at the query's end and at the document's start. With local_blocks=0 the query's own
        block competes like every other.
      scale: default I ** -0.5.
      segments: int [B, S], 0 = padding, documents 1..; None = one document.
      positions: int [B, S], position inside the document; None = counted from each segment's start.
      q_offset: key index of the first query, an int or int [B]; default S - T. Query i stands at key q_offset + i.
      implementation: see pallas_kernels.dispatch.

    Returns:
      BlockSelection. ids: int32 [B, K, T, R], counted from the start of each document; valid ids first, the query's own block
      (if kept) last of them, then -1. A padding query has only -1. lse: float32 [B, K, T], natural log-sum-exp of s over the visible keys
      of the kept blocks; -inf for a padding query. Both have zero gradient.

    Raises:
      ValueError: shapes or numbers that contradict each other. Unsupported: see pallas_kernels.dispatch.
    """
    sizes = require_sizes(OP, iq_BTKI=iq_BTKI, ik_BSI=ik_BSI)
    require_float(OP, iq_BTKI=iq_BTKI, ik_BSI=ik_BSI)
    require_block_size(OP, sizes["S"], block_size)
    require_count(OP, "num_blocks", num_blocks)
    require(
        min(local_blocks, init_blocks) >= 0 and local_blocks + init_blocks <= num_blocks,
        f"{OP}: local_blocks={local_blocks} + init_blocks={init_blocks} with num_blocks={num_blocks}; "
        "both must be >= 0 and their sum at most num_blocks",
    )
    layout = checked_layout(OP, sizes, segments, positions, q_offset)
    with jax.named_scope(OP):
        ids_BKTR, lse_BKT = dispatch.run(
            OP,
            implementation,
            REGISTERED,
            jax.lax.stop_gradient(iq_BTKI),
            jax.lax.stop_gradient(ik_BSI),
            layout,
            block_size=int(block_size),
            num_blocks=int(num_blocks),
            local_blocks=int(local_blocks),
            init_blocks=int(init_blocks),
            scale=sizes["I"] ** -0.5 if scale is None else float(scale),
        )
    return BlockSelection(ids_BKTR, lse_BKT)
