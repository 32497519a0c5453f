"""What an evaluator is: something with a name that turns a training state into (name, value) pairs."""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from msa_jax.train.state import TrainState


@runtime_checkable
class Evaluator(Protocol):
    """Pure with respect to the state: two calls on one state give the same values, and the state stays as it is.

    Names are paths, "text/bits_per_byte/plays"; the last part is the source, the split or the layer. Everything is compiled
    on the first call and never again.
    """

    name: str

    def run(self, state: TrainState) -> Iterable[tuple[str, float]]:
        """The values of this state, for the run's log."""
        ...
