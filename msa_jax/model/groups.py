"""Which parameter belongs to which learning-rate group, and which ones decay; read from the parameter's path."""

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
