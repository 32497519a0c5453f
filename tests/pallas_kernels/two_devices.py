"""Run by test_transforms.py in a process with two CPU devices: shard_map gives what one device gives, in values and gradients."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from quick_jit import quick_jit
from test_transforms import inputs, loss

from pallas_kernels.testing import assert_close


def scaled_loss(arrays: dict[str, jax.Array], gain: jax.Array, implementation: str, axis: str | None = None) -> jax.Array:
    """`gain` stands for a parameter that every device holds while the rows are split."""
    total = loss({name: x * gain for name, x in arrays.items()}, implementation)
    return total if axis is None else jax.lax.psum(total, axis)


def main() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    arguments = (inputs(), jnp.float32(1))
    rows, everywhere = dict.fromkeys(inputs(), PartitionSpec("data")), PartitionSpec()
    for implementation in ("reference", "xla"):
        results = []
        for axis in (None, "data"):
            step = jax.value_and_grad(functools.partial(scaled_loss, implementation=implementation, axis=axis), argnums=(0, 1))
            if axis is not None:
                step = jax.shard_map(step, mesh=mesh, in_specs=(rows, everywhere), out_specs=(everywhere, (rows, everywhere)))
            value, (gradients, dgain) = quick_jit(step)(*arguments)
            results.append({"loss": value, "dgain": dgain} | gradients)
        assert_close(results[1], results[0], 2e-6)


if __name__ == "__main__":
    main()
