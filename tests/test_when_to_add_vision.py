"""The arms of configs/ablations/when_to_add_vision.py differ in when pictures come, and in nothing that would confound it."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from msa_jax.config import Experiment, difference, load, load_module, override, smoke
from msa_jax.data.mixture import Mixture, rows_before
from msa_jax.data.pack import Pack
from msa_jax.train.schedule import learning_rates
from msa_jax.train.state import build, init_state

FILE = Path(__file__).resolve().parents[1] / "configs" / "ablations" / "when_to_add_vision.py"
STUDY = load_module(FILE)
ARMS = tuple(STUDY.variants())
ENTRIES = {"native": 0, "pre_decay_50": 550, "pre_decay_80": 880, "pre_decay_80_low": 880, "post_decay": 880}


def arm(name: str) -> Experiment:
    return load(FILE, name)


def rates(name: str, group: str) -> np.ndarray:
    experiment = arm(name)
    return np.asarray(jax.vmap(learning_rates(experiment.optim, experiment.train.steps)[group])(np.arange(experiment.train.steps)))


def test_there_are_seven_arms_and_each_has_its_control() -> None:
    assert (*ENTRIES, "text_only", "text_only_post_decay") == ARMS
    assert set(STUDY.controls()) == set(ARMS) - {"text_only"}
    assert all(set(controls) < set(ARMS) for controls in STUDY.controls().values())


@pytest.mark.parametrize("name", ARMS)
def test_only_what_the_question_is_about_differs(name: str) -> None:
    allowed = ("name", "data.streams.1.", "optim.vision.start_step", "optim.rewarms", "model.vision")
    assert all(path.startswith(allowed) for path in difference(arm(name), load(FILE)))


@pytest.mark.parametrize("name", ARMS)
def test_text_and_pictures_are_counted_in_full_rows(name: str) -> None:
    experiment = arm(name)
    text, *captions = experiment.data.streams
    length, steps = experiment.data.sequence_length, experiment.train.steps
    assert rows_before(text, steps) * length == 40_550_400
    rows = {"pre_decay_80_low": 1760, "text_only": 0, "text_only_post_decay": 0}.get(name, 8800)
    assert [rows_before(stream, steps) for stream in captions] == ([rows] if captions else [])
    assert experiment.train.loss_rows == text.rows_at(0) == 72
    assert all(stream.loss_weight == 1.0 for stream in experiment.data.streams)


@pytest.mark.parametrize(("name", "entry"), ENTRIES.items())
def test_pictures_and_the_rate_of_their_modules_start_at_the_same_step(name: str, entry: int) -> None:
    captions, vision = arm(name).data.streams[1], rates(name, "vision")
    given = np.array([captions.rows_at(step) for step in range(len(vision))]) > 0
    assert given.argmax() == entry
    assert given[entry:].all()
    np.testing.assert_array_equal(vision > 0, given)
    np.testing.assert_allclose(vision[entry : entry + 51], 5e-3 * np.minimum(np.arange(1, 52) / 51, 1), rtol=1e-5)
    assert vision.max() == rates("native", "trunk").max(), "every arm reaches the same peak"
    assert vision[-1] < 0.11 * vision.max(), "and has decayed at the end"


@pytest.mark.parametrize("name", ENTRIES)
def test_the_first_control_has_its_arms_learning_rates(name: str) -> None:
    for group in ("trunk", "index"):
        np.testing.assert_array_equal(rates(name, group), rates(STUDY.controls()[name][0], group))


def test_what_warming_up_again_costs_is_a_pair_of_its_own() -> None:
    assert STUDY.controls()["text_only_post_decay"] == ("text_only",)
    paths = set(difference(arm("text_only_post_decay"), arm("text_only")))
    assert all(path == "name" or path.startswith("optim.rewarms") for path in paths)


def test_learning_rates_turn_where_the_table_says() -> None:
    peak = 5e-3
    native, again = rates("native", "trunk"), rates("post_decay", "trunk")
    np.testing.assert_allclose(native[[49, 50, 880, 881]], peak * np.array([50 / 51, 1, 1, 1 - 0.9 / 220]), rtol=1e-5)
    np.testing.assert_allclose(native[-1], peak * (0.1 + 0.9 / 220), rtol=1e-4)
    np.testing.assert_allclose(again[[704, 705, 879]], peak * np.array([1, 1 - 0.9 / 176, 0.1 + 0.9 / 176]), rtol=1e-4)
    np.testing.assert_allclose(again[880:900], peak * (0.1 + 0.2 * np.arange(1, 21) / 21), rtol=1e-4)
    np.testing.assert_allclose(again[900:], peak * (0.3 - 0.2 * np.arange(200) / 200), rtol=1e-4)


@pytest.fixture(scope="module")
def pack() -> Pack:
    return Pack.synthetic(0)


def text_rows(mixture: Mixture, step: int, rows: int) -> list[np.ndarray]:
    batch, _ = mixture.batch(step)
    assert (batch.visual_index_BT[:rows] < 0).all()
    return [value[:rows] for name, value in batch._asdict().items() if name != "vision"]


def assert_text_agrees(experiments: dict[str, Experiment], steps: list[int], pack: Pack) -> None:
    expected: dict[int, list[np.ndarray]] = {}
    for name, experiment in experiments.items():
        mixture = Mixture(experiment.data, experiment.model, pack, seed=0)
        for step in steps:
            found = text_rows(mixture, step, experiment.data.streams[0].rows_at(step))
            for ours, theirs in zip(found, expected.setdefault(step, found), strict=True):
                np.testing.assert_array_equal(ours, theirs, err_msg=f"{name}, step {step}")
    assert any((expected[steps[0]][0] != expected[step][0]).any() for step in steps[1:])


def test_text_agrees_token_by_token_in_all_arms(pack: Pack) -> None:
    """At full size, before and behind every step at which an arm changes; and over the whole of the smoke runs."""
    full = {name: override(arm(name), {"data.pack": "synthetic"}) for name in ARMS}
    assert_text_agrees(full, [0, 549, 550, 879, 880, 1099], pack)
    assert_text_agrees({name: smoke(arm(name)) for name in ARMS}, list(range(40)), pack)


@pytest.fixture(scope="module")
def initial_params() -> dict[str, Any]:
    """Of every arm in smoke size."""

    def make(experiment: Experiment) -> Any:
        start = jax.jit(lambda: init_state(experiment, build(experiment)[1]).params, compiler_options={"xla_backend_optimization_level": 0})
        return jax.device_get(start())

    native = make(smoke(arm("native")))
    alike = {name: native for name in ENTRIES if smoke(arm(name)).model == smoke(arm("native")).model}
    return alike | {"text_only": make(smoke(arm("text_only")))}


def test_all_arms_start_from_the_same_weights(initial_params: dict[str, Any]) -> None:
    """Arms with pictures have one model; the weights that the text-only model has are the same bits."""
    assert set(initial_params) == {*ENTRIES, "text_only"}
    assert arm("text_only").model == arm("text_only_post_decay").model
    native = dict(jax.tree_util.tree_flatten_with_path(initial_params["native"])[0])
    blind = dict(jax.tree_util.tree_flatten_with_path(initial_params["text_only"])[0])
    assert {str(path[0].key) for path in set(native) - set(blind)} == {"vision"}
    for path, leaf in blind.items():
        np.testing.assert_array_equal(leaf, native[path])
