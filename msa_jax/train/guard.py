"""Stops a run at the first number that is not finite, and says where it came from."""

import math
from collections.abc import Mapping, Sequence


class NonFiniteError(RuntimeError):
    """Training produced NaN or infinity; the message names the step, what came first, the groups and the remedy."""


def check_finite(
    step: int, scalars: Mapping[str, float], finite: Sequence[bool], parameters: Sequence[str], *, kept: Sequence[int], run: str = ""
) -> None:
    """Raises NonFiniteError if the loss, a gradient norm or a parameter norm of step `step` is not finite.

    `finite` says so for the gradient of each of `parameters`; `kept` are the steps with a checkpoint; `run` names the run where
    several are trained together. Once the loss is lost
    every gradient is, so what is named first follows the order in which a step computes: the first layer whose index loss
    is not finite, the loss, gradients, parameters.
    """
    order = ("loss/kl/", "loss/lm", "loss", "gradient_norm/", "parameter_norm/")
    bad = [name for prefix in order for name in scalars if _matches(name, prefix) and not math.isfinite(scalars[name])]
    if not bad:
        return
    groups = [name.split("/")[1] for name in bad if name.startswith("gradient_norm/")]
    lost = [name for name, fine in zip(parameters, finite, strict=True) if not fine]
    where = f", first at {lost[0]} ({len(lost)} of {len(parameters)} parameters)" if lost else ""
    found = f"gradients of {', '.join(groups)} are not finite{where}" if groups else f"gradients are finite, {bad[0]} is not"
    raise NonFiniteError(
        f"{run}step {step}: {bad[0]} is {scalars[bad[0]]}; {found}. "
        f"Stopped; checkpoints kept: {', '.join(map(str, kept)) or 'none'}. Lower optim.learning_rate or clip the group harder"
    )


def _matches(name: str, prefix: str) -> bool:
    return name.startswith(prefix) if prefix.endswith("/") else name == prefix
