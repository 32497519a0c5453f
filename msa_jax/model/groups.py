"""Which parameter belongs to which learning-rate group, which ones decay, which are matrices; read from the parameter's path."""

from collections.abc import Sequence
from typing import Any, Literal

ParameterGroup = Literal["trunk", "index", "vision"]
GROUPS: tuple[ParameterGroup, ...] = ("trunk", "index", "vision")


def path_names(path: Sequence[Any]) -> tuple[str, ...]:
    """The names along a path of jax.tree_util or of nnx: ("layers", "0", "0", "attention", "index", "q", "linear", "kernel")."""
    names = tuple(str(getattr(entry, "key", getattr(entry, "name", entry))) for entry in path)
    return names[:-1] if names[-1:] == ("value",) else names


def parameter_group(path: Sequence[Any]) -> ParameterGroup:
    """ "index": index projections and index norms of MSA layers; "vision": ViT and projector; "trunk": the rest."""
    names = path_names(path)
    if names[0] == "vision":
        return "vision"
    return "index" if "index" in names else "trunk"


def decays(path: Sequence[Any]) -> bool:
    """Weight decay acts on projections, and neither on norms nor on biases (whose stacked arrays look like matrices).

    Token embeddings do not decay either: a rare token has a gradient once in many steps and would fade in between.
    """
    return path_names(path)[-1] in ("kernel", "unembedding")


def matrix_axes(path: Sequence[Any]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(input axes, output axes), counted from the last, of a matrix inside the network; None for every other parameter.

    Axes before them hold independent matrices: layers, experts. The heads of a projection are one matrix together. What meets
    the data or a discrete choice is left out: embeddings, the patch embedding and the router.
    """
    names = path_names(path)
    if names[-1] != "kernel" or names[-2] in ("router", "patch_embedding"):
        return None
    if names[-2] == "out":  # [..., heads, head width, model]
        return (-3, -2), (-1,)
    if names[-2] == "linear" or names[-2] in "qkv":  # [..., model, heads, head width]
        return (-3,), (-2, -1)
    return (-2,), (-1,)
