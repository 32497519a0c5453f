"""How the xla forms walk a sequence: one chunk of queries after the other, each with a view of the keys that it may need.

`Dense` shows all S keys to every query of the chunk and masks: cheapest where S is a few times R * C.
`Gathered` shows each query only the R * C keys of its blocks: cost and memory do not grow with S.

Both offer the three products that attention and its gradients are made of, so an op is written once:

    dot     q . k      [B,K,Z,G,H] x keys [B,K,S,H]   -> [B,K,Z,G,U]
    mix     p v        [B,K,Z,G,U] x keys [B,K,S,H]   -> [B,K,Z,G,H]
    spread  p^T q      [B,K,Z,G,U] x [B,K,Z,G,H]      -> added to [B,K,S,H]

U counts the keys a view shows; `keep_BKZ1U` says which of them a query keeps. A product must not multiply the zero of a key
that is not kept by NaN: `finite` takes what is not finite out of the operands and puts it back as a term of the logits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import Reach, in_reach
from pallas_kernels.numerics import einsum

CHUNK_ELEMENTS = 1 << 20  # in the largest array of a chunk; fits a CPU's cache
DENSE_RATIO = 4  # Dense up to S = DENSE_RATIO * R * C


class Dense(NamedTuple):
    """View of all keys; U = S."""

    keep_BKZ1U: jax.Array

    def take(self, x_BKS: jax.Array) -> jax.Array:
        return x_BKS[:, :, None, None]

    def dot(self, q_BKZGH: jax.Array, k_BKSH: jax.Array) -> jax.Array:
        return einsum("bkzgh,bksh->bkzgs", q_BKZGH, k_BKSH)

    def mix(self, p_BKZGS: jax.Array, v_BKSH: jax.Array) -> jax.Array:
        return einsum("bkzgs,bksh->bkzgh", p_BKZGS, v_BKSH)

    def spread(self, p_BKZGS: jax.Array, q_BKZGH: jax.Array, total_BKSH: jax.Array) -> jax.Array:
        # As q^T p: on the CPU several times faster than p^T q, into which the compiler would turn it but for the barrier.
        rows = (*q_BKZGH.shape[:2], -1)
        q_BKTH, p_BKTS = q_BKZGH.reshape(*rows, q_BKZGH.shape[-1]), p_BKZGS.reshape(*rows, p_BKZGS.shape[-1])
        product_BKHS = jax.lax.optimization_barrier(einsum("bkth,bkts->bkhs", q_BKTH, p_BKTS))
        return total_BKSH + product_BKHS.swapaxes(2, 3)


class Gathered(NamedTuple):
    """View of one window of C neighbouring keys for each id; U = R * C."""

    keep_BKZ1U: jax.Array
    start_BKZR: jax.Array  # first key of each window

    def take(self, x_BKS: jax.Array) -> jax.Array:
        return self._windows(x_BKS[..., None])[:, :, :, None, :, 0]

    def dot(self, q_BKZGH: jax.Array, k_BKSH: jax.Array) -> jax.Array:
        return einsum("bkzgh,bkzuh->bkzgu", q_BKZGH, self._windows(k_BKSH))

    def mix(self, p_BKZGU: jax.Array, v_BKSH: jax.Array) -> jax.Array:
        return einsum("bkzgu,bkzuh->bkzgh", p_BKZGU, self._windows(v_BKSH))

    def spread(self, p_BKZGU: jax.Array, q_BKZGH: jax.Array, total_BKSH: jax.Array) -> jax.Array:
        numbers = jax.lax.ScatterDimensionNumbers((1, 2), (), (0,))
        batch, heads, _, _ = self.start_BKZR.shape
        width = total_BKSH.shape[-1]
        update = einsum("bkzgu,bkzgh->bkzuh", p_BKZGU, q_BKZGH).reshape(batch, heads, -1, self._window, width)

        def add(total_SH: jax.Array, start: jax.Array, update: jax.Array) -> jax.Array:
            return jax.lax.scatter_add(total_SH, start, update, numbers, mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS)

        return jax.vmap(jax.vmap(add))(total_BKSH, self.start_BKZR.reshape(batch, heads, -1, 1), update.astype(total_BKSH.dtype))

    @property
    def _window(self) -> int:
        return self.keep_BKZ1U.shape[-1] // self.start_BKZR.shape[-1]

    def _windows(self, x_BKSH: jax.Array) -> jax.Array:
        numbers = jax.lax.GatherDimensionNumbers((1, 2), (), (0,))
        batch, heads, queries, _ = self.start_BKZR.shape
        width = x_BKSH.shape[-1]

        def gather(x_SH: jax.Array, start: jax.Array) -> jax.Array:
            shape = (self._window, width)
            return jax.lax.gather(x_SH, start, numbers, shape, mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS)

        windows = jax.vmap(jax.vmap(gather))(x_BKSH, self.start_BKZR.reshape(batch, heads, -1, 1))
        return windows.reshape(batch, heads, queries, -1, width)


def shows_all(ids_BKTR: jax.Array | None, num_keys: int, block_size: int) -> bool:
    """Whether the view is Dense. Keys without ids are the whole prefix of a query."""
    return ids_BKTR is None or num_keys <= DENSE_RATIO * ids_BKTR.shape[-1] * block_size


def key_view(ids_BKZR: jax.Array | None, reach: Reach, num_keys: int, block_size: int) -> Dense | Gathered:
    """The view for a chunk of queries: of what their ids cover, or of all visible keys where `ids_BKZR` is None.

    `block_size` is at most `num_keys`.
    """
    index_B1Z1, count_B1Z1, origin_B1Z1 = (x_BZ[:, None, :, None] for x_BZ in reach)
    if ids_BKZR is None:
        seen_B1ZS = in_reach(jnp.arange(num_keys), index_B1Z1, count_B1Z1)
        return Dense(seen_B1ZS[:, :, :, None])
    own_B1Z1 = (index_B1Z1 - origin_B1Z1) // block_size
    ids_BKZR = jnp.where((ids_BKZR >= 0) & (ids_BKZR <= own_B1Z1), ids_BKZR, -1).astype(jnp.int32)
    if shows_all(ids_BKZR, num_keys, block_size):
        covered_BKZS = _covered(ids_BKZR, origin_B1Z1, num_keys, block_size)
        return Dense((covered_BKZS & in_reach(jnp.arange(num_keys), index_B1Z1, count_B1Z1))[:, :, :, None])
    return _gathered(ids_BKZR, (index_B1Z1, count_B1Z1, origin_B1Z1), num_keys, block_size)


def _covered(ids_BKZR: jax.Array, origin_B1Z1: jax.Array, num_keys: int, block_size: int) -> jax.Array:
    """[B, K, Z, S] bool: the key lies in one of the blocks.

    A block of a document that starts `shift` keys after a multiple of C ends in the next frame of C keys, so that key c of
    frame m belongs to the block that starts in frame m where c >= shift, and to the one that starts in frame m - 1 elsewhere.
    """
    base_B1Z1, shift_B1Z1 = origin_B1Z1 // block_size, origin_B1Z1 % block_size
    frames = -(-num_keys // block_size)
    starts_BKZR = jnp.where(ids_BKZR >= 0, ids_BKZR + base_B1Z1, -2)
    chosen_BKZY = (starts_BKZR[..., None] == jnp.arange(-1, frames)).any(axis=3)
    after_B1Z1C = jnp.arange(block_size) >= shift_B1Z1[..., None]
    covered_BKZJC = jnp.where(after_B1Z1C, chosen_BKZY[..., 1:, None], chosen_BKZY[..., :-1, None])
    return covered_BKZJC.reshape(*covered_BKZJC.shape[:3], -1)[..., :num_keys]


def _gathered(ids_BKZR: jax.Array, bounds_B1Z1: tuple[jax.Array, ...], num_keys: int, block_size: int) -> Gathered:
    """A window that would pass an end of the keys is moved inside, and its keys outside the block are masked."""
    index_B1Z11, count_B1Z11, origin_B1Z11 = (x_B1Z1[..., None] for x_B1Z1 in bounds_B1Z1)
    block_BKZR1 = origin_B1Z11 + ids_BKZR[..., None] * block_size
    start_BKZR = jnp.clip(block_BKZR1[..., 0], 0, num_keys - block_size)
    key_BKZRC = start_BKZR[..., None] + jnp.arange(block_size)
    earlier_RR = jnp.tri(ids_BKZR.shape[-1], k=-1, dtype=bool)
    repeated_BKZR = ((ids_BKZR[..., :, None] == ids_BKZR[..., None, :]) & earlier_RR).any(axis=-1)
    keep_BKZRC = ((ids_BKZR >= 0) & ~repeated_BKZR)[..., None] & in_reach(key_BKZRC, index_B1Z11, count_B1Z11)
    keep_BKZRC &= (key_BKZRC >= block_BKZR1) & (key_BKZRC < block_BKZR1 + block_size)
    return Gathered(keep_BKZRC.reshape(*ids_BKZR.shape[:3], 1, -1), start_BKZR)


class Finite(NamedTuple):
    """Vectors (the last axis) with zeros in place of those that are not finite, and NaN in `fault` where that happened, else 0."""

    values: jax.Array
    fault: jax.Array


def finite(x: jax.Array) -> Finite:
    good = jnp.isfinite(x).all(axis=-1)
    return Finite(jnp.where(good[..., None], x, 0), jnp.where(good, 0.0, jnp.nan).astype(x.dtype))


def for_heads(ik_BSI: jax.Array, num_kv_heads: int) -> Finite:
    """The one index key head, as [B, K, S, I]."""
    batch, num_keys, width = ik_BSI.shape
    values_BSI, fault_BS = finite(ik_BSI)
    shape = (batch, num_kv_heads, num_keys)
    return Finite(jnp.broadcast_to(values_BSI[:, None], (*shape, width)), jnp.broadcast_to(fault_BS[:, None], shape))


def logits(view: Dense | Gathered, q_BKZGH: Finite, k_BKSH: Finite, scale: float) -> jax.Array:
    """Scaled q . k, [B, K, Z, G, U]; NaN where either is not finite, which only matters where the view keeps the key."""
    return view.dot(q_BKZGH.values, k_BKSH.values) * scale + q_BKZGH.fault[..., None] + view.take(k_BKSH.fault)


def row_elements(ids_BKTR: jax.Array | None, k_BKSH: Finite, num_heads: int, width: int, block_size: int) -> int:
    """`elements` of scan_queries where `body` multiplies the view of `num_heads` queries with keys of at most this width."""
    batch, num_kv_heads, num_keys, _ = k_BKSH.values.shape
    if shows_all(ids_BKTR, num_keys, block_size):
        return batch * num_heads * num_keys
    return batch * max(num_heads, num_kv_heads * width) * ids_BKTR.shape[-1] * block_size


def scan_queries(body: Callable, carry: Any, elements: int, queries: Any) -> tuple[Any, Any]:
    """Runs `body(carry, chunk) -> (carry, outputs)` over chunks along axis 1 of the arrays in `queries`; joins the outputs there.

    `elements` is the size, for one query of each batch row, of the largest array that `body` makes. A last chunk that is not
    full is filled with zeros, which as a Reach see nothing.

    A while loop, not lax.scan: where a model scans over its layers, the gradient of that scan would move every mask and every
    constant out of an inner scan and keep it in memory, an array of a chunk's full size each.
    """
    num_queries = jax.tree.leaves(queries)[0].shape[1]
    size = -(-num_queries // -(-num_queries // max(1, CHUNK_ELEMENTS // elements)))
    num_chunks = -(-num_queries // size)
    queries = jax.tree.map(lambda x: _pad_queries(x, num_chunks * size - num_queries), queries)

    def chunk(i: jax.Array | int) -> Any:
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i * size, size, axis=1), queries)

    def step(state: tuple) -> tuple:
        i, carry, joined = state
        carry, outputs = body(carry, chunk(i))
        joined = jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, i * size, axis=1), joined, outputs)
        return i + 1, carry, joined

    like = jax.tree.leaves(queries)[0]
    shapes = jax.eval_shape(body, carry, chunk(0))[1]
    joined = jax.tree.map(lambda x: jnp.zeros_like(like, x.dtype, (x.shape[0], num_chunks * size, *x.shape[2:])), shapes)
    _, carry, joined = jax.lax.while_loop(lambda state: state[0] < num_chunks, step, (0, carry, joined))
    return carry, jax.tree.map(lambda x: x[:, :num_queries], joined)


def _pad_queries(x: jax.Array, amount: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, amount)) + ((0, 0),) * (x.ndim - 2))


def by_group(x_BZN: jax.Array, num_kv_heads: int) -> jax.Array:
    """[B, Z, N, ...] -> [B, K, Z, G, ...]."""
    batch, size, num_heads, *rest = x_BZN.shape
    return x_BZN.reshape(batch, size, num_kv_heads, num_heads // num_kv_heads, *rest).swapaxes(1, 2)


def by_head(x_BKZG: jax.Array) -> jax.Array:
    """[B, K, Z, G, ...] -> [B, Z, N, ...]."""
    batch, num_kv_heads, size, group, *rest = x_BKZG.shape
    return x_BKZG.swapaxes(1, 2).reshape(batch, size, num_kv_heads * group, *rest)
