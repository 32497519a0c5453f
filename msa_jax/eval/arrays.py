"""The one writer of `runs/x/arrays/*.npz`: plain arrays that the report draws."""

import io
from pathlib import Path

import numpy as np
from jax.typing import ArrayLike

from msa_jax.data.pack import write_atomically


def write_arrays(workdir: Path, name: str, **arrays: ArrayLike) -> Path:
    """Writes `workdir/arrays/<name>.npz`, whole or not at all. Raises TypeError for arrays that would need pickle."""
    values = {key: np.asarray(value) for key, value in arrays.items()}
    for key, value in values.items():
        if value.dtype.hasobject:
            raise TypeError(f"write_arrays: {name}.{key} holds Python objects; give numbers, booleans or fixed-width text")
    buffer = io.BytesIO()
    np.savez(buffer, **values)
    path = workdir / "arrays" / f"{name}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, buffer.getvalue())
    return path
