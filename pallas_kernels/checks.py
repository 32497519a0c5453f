"""Checks of the arguments that the ops share. Every message names the op, the value and the remedy."""

import numbers

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import Layout, make_layout


def require(condition: bool, message: str) -> None:
    """Raises ValueError with `message` unless `condition`: the caller's fault."""
    if not condition:
        raise ValueError(message)


def require_block_size(op: str, num_keys: int, block_size: int) -> None:
    require(_is_count(block_size), f"{op}: S={num_keys} with block_size={block_size}; block_size must be >= 1")


def require_count(op: str, name: str, value: int) -> None:
    require(_is_count(value), f"{op}: {name}={value}; {name} must be an integer >= 1")


def _is_count(value: int) -> bool:
    return isinstance(value, numbers.Integral) and value >= 1


def require_float(op: str, **arrays: jax.Array) -> None:
    for name, array in arrays.items():
        require(jnp.issubdtype(array.dtype, jnp.floating), f"{op}: {name} has dtype {array.dtype}; it must be a floating type")


def require_rank(op: str, **arrays: jax.Array) -> None:
    """The letters after the last underscore of a name are its axes: `q_BTNH` must have 4."""
    for name, array in arrays.items():
        letters = name.rpartition("_")[2]
        require(array.ndim == len(letters), f"{op}: {name} has shape {array.shape}; it must be [{', '.join(letters)}]")


def require_sizes(op: str, **arrays: jax.Array) -> dict[str, int]:
    """The sizes of the letters in the names; an axis letter must have one size throughout."""
    require_rank(op, **arrays)
    sizes: dict[str, tuple[int, str]] = {}
    for name, array in arrays.items():
        for letter, size in zip(name.rpartition("_")[2], array.shape, strict=True):
            require(size >= 1, f"{op}: {letter}=0 in {name} of shape {array.shape}; every axis needs at least one entry")
            known, where = sizes.setdefault(letter, (size, name))
            require(known == size, f"{op}: {letter}={known} in {where} but {letter}={size} in {name}; they must be equal")
    return {letter: size for letter, (size, _) in sizes.items()}


def require_ids(op: str, **arrays: jax.Array) -> None:
    for name, array in arrays.items():
        require(
            jnp.issubdtype(array.dtype, jnp.integer),
            f"{op}: {name} has dtype {array.dtype}; block ids are integers, as block_select returns them",
        )


def require_groups(op: str, num_heads: int, num_kv_heads: int) -> None:
    require(
        num_kv_heads >= 1 and num_heads % num_kv_heads == 0,
        f"{op}: N={num_heads} query heads with K={num_kv_heads} KV heads; N must be a multiple of K",
    )


def checked_layout(
    op: str,
    sizes: dict[str, int],
    segments_BS: jax.Array | None,
    positions_BS: jax.Array | None,
    q_offset: jax.Array | int | None,
) -> Layout:
    """The Layout of a call, after checking its shapes.

    Raises ValueError where T is not in 1..S, a shape is wrong, positions come without segments, or q_offset, given as a Python
    int, lies outside 0..S-T. A q_offset in an array cannot be checked: a query that it puts outside the keys is padding.
    """
    batch, num_queries, num_keys = sizes["B"], sizes["T"], sizes["S"]
    require(1 <= num_queries <= num_keys, f"{op}: T={num_queries} queries with S={num_keys} keys; T must lie in 1..S")
    require(
        positions_BS is None or segments_BS is not None,
        f"{op}: positions without segments; pass segments too (0 = padding, documents 1..)",
    )
    for name, array in (("segments", segments_BS), ("positions", positions_BS)):
        if array is not None:
            require(
                jnp.shape(array) == (batch, num_keys) and jnp.issubdtype(jnp.result_type(array), jnp.integer),
                f"{op}: {name} has shape {jnp.shape(array)} and dtype {jnp.result_type(array)}; "
                f"it must be integers [B, S] = {(batch, num_keys)}",
            )
    if isinstance(q_offset, numbers.Integral):
        require(
            0 <= q_offset <= num_keys - num_queries,
            f"{op}: q_offset={q_offset} with T={num_queries}, S={num_keys}; it must lie in 0..S-T={num_keys - num_queries}",
        )
    elif q_offset is not None:
        require(
            jnp.shape(q_offset) in ((), (batch,)) and jnp.issubdtype(jnp.result_type(q_offset), jnp.integer),
            f"{op}: q_offset has shape {jnp.shape(q_offset)}; it must be an integer or integers [B] = {(batch,)}",
        )
    return make_layout(num_queries, num_keys, batch, segments_BS, positions_BS, q_offset)
