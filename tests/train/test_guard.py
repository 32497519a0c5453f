"""The guard names what came first."""

import math

import pytest

from msa_jax.train.guard import NonFiniteError, check_finite

GOOD = {
    "loss": 2.0, "loss/lm": 1.5, "loss/kl": 0.5, "loss/kl/layer_0": 0.4, "loss/kl/layer_2": 0.6, "loss/source/code": 1.0,
    "gradient_norm/trunk": 1.0, "gradient_norm/vision": 1.0, "parameter_norm/trunk": 5.0, "parameter_norm/vision": 5.0,
}  # fmt: skip
NAMES = ["embedding", "vision.up.kernel", "vision.down.kernel"]


def failure(changes: dict[str, float], finite: list[bool]) -> str:
    with pytest.raises(NonFiniteError) as error:
        check_finite(7, GOOD | changes, finite, NAMES, kept=[2, 4])
    return str(error.value)


def test_finite_steps_pass() -> None:
    check_finite(7, GOOD, [True] * 3, NAMES, kept=[])
    check_finite(7, GOOD | {"loss/source/code": math.nan}, [True] * 3, NAMES, kept=[])


def test_the_first_layer_is_named_before_everything_that_follows_from_it() -> None:
    lost = {name: math.nan for name in GOOD if name not in ("loss/kl/layer_0", "loss/source/code")}
    message = failure(lost, [False] * 3)
    assert message.startswith("step 7: loss/kl/layer_2 is nan; gradients of trunk, vision are not finite, first at embedding (3 of 3")
    assert "checkpoints kept: 2, 4. Lower optim.learning_rate" in message


def test_a_gradient_that_overflows_names_its_group_and_parameter() -> None:
    message = failure({"gradient_norm/vision": math.inf}, [True, True, False])
    assert "gradient_norm/vision is inf; gradients of vision are not finite, first at vision.down.kernel (1 of 3 parameters)" in message


def test_an_update_that_overflows_is_found_before_it_can_be_saved() -> None:
    message = failure({"parameter_norm/trunk": math.inf}, [True] * 3)
    assert "parameter_norm/trunk is inf; gradients are finite, parameter_norm/trunk is not" in message


def test_nothing_kept_is_said() -> None:
    with pytest.raises(NonFiniteError, match=r"loss/lm is nan.*checkpoints kept: none"):
        check_finite(1, GOOD | {"loss/lm": math.nan, "loss": math.nan}, [True] * 3, NAMES, kept=[])
