"""Checkpoints: whole or absent, exact to the bit, and refused in words where they do not fit."""

import dataclasses
import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from msa_jax.train import checkpoint
from msa_jax.train.checkpoint import CheckpointError, Checkpoints, named_arrays
from msa_jax.train.state import TrainState

POSITION = '{"step": 7, "seed": 1267650600228229401496703205376, "name": "é"}'.encode()


def make_state(step: int = 3, width: int = 4, layers: int = 2) -> TrainState:
    keys = jax.random.split(jax.random.key(0), layers)
    params = {f"layer_{i}": {"kernel": jax.random.normal(keys[i], (width, width))} for i in range(layers)} | {"w": jnp.ones(width)}
    tx = optax.partition({"a": optax.adam(0.1), "b": optax.identity()}, {name: "b" if name == "w" else "a" for name in params})
    return TrainState(jnp.asarray(step, jnp.int32), params, tx.init(params), jax.random.key(5))


def abstract(state: TrainState) -> TrainState:
    return jax.eval_shape(lambda: state)


def values(tree: Any) -> list[np.ndarray]:
    """Copies, so that memory which is reused afterwards cannot change them."""
    return [
        np.array(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf) for leaf in jax.tree.leaves(tree)
    ]


def assert_equal(ours: Any, theirs: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(values(ours), values(theirs), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype


@pytest.fixture
def small_files() -> Iterator[None]:
    """The system refuses to write beyond 64 KB a file, as a full disk would, until the limit is lifted."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_state_comes_back_to_the_bit_with_its_data_position(tmp_path: Path) -> None:
    state = make_state()
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(state, POSITION)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        restored, position = checkpoints.restore(abstract(state))
    assert_equal(restored, state)
    assert position == POSITION
    assert jnp.issubdtype(restored.key.dtype, jax.dtypes.prng_key)
    np.testing.assert_array_equal(jax.random.bits(restored.key), jax.random.bits(state.key))


def test_parameters_can_be_restored_alone(tmp_path: Path) -> None:
    state = make_state()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, b"")
        checkpoints.wait()
        assert_equal(checkpoints.restore_params(abstract(state).params), state.params)


def test_an_earlier_step_can_be_chosen_and_old_ones_go(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 10, 30):
            checkpoints.save(dataclasses.replace(make_state(step), params={"w": jnp.full(2, step)}, opt_state=()), b"%d" % step)
            checkpoints.wait()
        assert checkpoints.steps() == [10, 30]
        like = TrainState(jnp.int32(0), {"w": jnp.zeros(2, jnp.int32)}, (), jax.random.key(0))
        assert checkpoints.restore(abstract(like), step=10)[1] == b"10"
        assert int(checkpoints.restore(abstract(like))[0].params["w"][0]) == 30
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000010", "00000030"]


def test_the_last_checkpoint_stays_until_the_next_one_is_whole(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(make_state(1), b"")
        checkpoints.wait()
        checkpoints.save(make_state(2), b"")
        assert 1 in checkpoints.steps(), "still there while step 2 is being written"
    assert checkpoints.steps() == [2]


def test_a_step_that_is_saved_is_left_alone(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(make_state(1), b"1")
        checkpoints.wait()
        checkpoints.save(make_state(1), b"2")
        assert checkpoints.restore(abstract(make_state()))[1] == b"1"


def test_arrays_may_be_donated_while_they_are_being_saved(tmp_path: Path) -> None:
    """The memory of the saved state is handed to a step that overwrites it, twice, before the save is finished."""

    def overwrite(state: TrainState) -> TrainState:
        return dataclasses.replace(state, params=jax.tree.map(lambda leaf: leaf * 0 - 1, state.params))

    state, spare = make_state(1, width=700, layers=4), make_state(1, width=700, layers=4)
    expected, like = values(state.params), abstract(state)
    compiled = jax.jit(overwrite, donate_argnums=0).lower(state).compile()
    compiled(spare)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(spare.params)), "donation works here, else this test shows nothing"
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, b"")
        jax.block_until_ready(compiled(compiled(state)))
        checkpoints.wait()
        restored, _ = checkpoints.restore(like)
    for ours, theirs in zip(values(restored.params), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_full_disk_keeps_the_previous_checkpoint_and_says_so(tmp_path: Path, small_files: None) -> None:
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(make_state(1), b"1")
        checkpoints.wait()
        checkpoints.save(make_state(2, width=300), b"")
        with pytest.raises(
            CheckpointError,
            match=r"cannot save step 2 .*: File too large; the checkpoint of step 1 is complete\. Make room",
        ):
            checkpoints.wait()
        assert [path.name for path in tmp_path.iterdir()] == ["00000001"], "what was written of step 2 is gone, to make room"
        assert checkpoints.restore(abstract(make_state()))[1] == b"1"
        checkpoints.save(make_state(3), b"3")
    assert checkpoints.steps() == [3], "and with room again saving goes on"


def test_a_full_disk_at_the_first_save_says_that_there_is_none(tmp_path: Path, small_files: None) -> None:
    with pytest.raises(CheckpointError, match="there is no earlier checkpoint"), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(make_state(1, width=300), b"")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file is in the way")
    with pytest.raises(CheckpointError, match=r"cannot save step 3 .*: File exists"), Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(make_state(), b"")


def test_what_a_killed_save_left_is_ignored_and_cleared(tmp_path: Path) -> None:
    (tmp_path / "00000009.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
    (tmp_path / "00000002.deleted").mkdir()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == []
        checkpoints.save(make_state(10), b"")
    assert [path.name for path in tmp_path.iterdir()] == ["00000010"]


def test_what_a_user_put_beside_the_checkpoints_stays(tmp_path: Path) -> None:
    (tmp_path / "best" / "params").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("step 3 is the good one")
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(make_state(3), b"")
    assert checkpoints.steps() == [3]
    assert (tmp_path / "best" / "params").is_dir()
    assert (tmp_path / "notes.txt").exists()


def test_a_damaged_checkpoint_is_named_and_the_one_before_serves(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2):
            checkpoints.save(make_state(step), b"%d" % step)
    for file in (tmp_path / "00000002" / "params").glob("**/d/*"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"00000002 is damaged: params cannot be read; move .* to continue from step 1"):
        checkpoints.restore(abstract(make_state()))
    (tmp_path / "00000002").rename(tmp_path / "damaged")
    assert checkpoints.restore(abstract(make_state()))[1] == b"1"


def test_nothing_to_restore(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*complete ones: none"):
        Checkpoints(tmp_path / "none").restore(abstract(make_state()))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(make_state(3), b"")
        checkpoints.wait()
        with pytest.raises(CheckpointError, match=r"no checkpoint of step 4 in .*complete ones: \[3\]"):
            checkpoints.restore(abstract(make_state()), step=4)


def test_another_format_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, Checkpoints(tmp_path) as checkpoints:
        patch.setattr(checkpoint, "FORMAT_VERSION", 99)
        checkpoints.save(make_state(), b"")
    with pytest.raises(CheckpointError, match="format version 99, this code reads version 1; use the commit that wrote it"):
        checkpoints.restore(abstract(make_state()))
    metadata = tmp_path / "00000003" / "_CHECKPOINT_METADATA"
    content = json.loads(metadata.read_text())
    del content["custom_metadata"]["format_version"]
    metadata.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="format version None"):
        checkpoints.restore_params(abstract(make_state()).params)


def test_another_model_is_refused_with_what_differs(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(make_state(width=4, layers=2), b"")
    with pytest.raises(CheckpointError) as wider:
        checkpoints.restore(abstract(make_state(width=6, layers=2)))
    assert "does not fit this model and optimiser:" in str(wider.value)
    assert "params layer_0.kernel: float32[4, 4] in the checkpoint, float32[6, 6] expected" in str(wider.value)
    with pytest.raises(CheckpointError, match=r"params layer_2.kernel: not in the checkpoint"):
        checkpoints.restore(abstract(make_state(layers=3)))
    with pytest.raises(CheckpointError, match=r"params layer_1.kernel: only in the checkpoint"):
        checkpoints.restore_params(abstract(make_state(layers=1)).params)
    with pytest.raises(CheckpointError, match="and 22 more"):
        checkpoints.restore(abstract(make_state(layers=12)))


def test_names_are_those_of_the_tree_and_unique() -> None:
    assert list(named_arrays({"a": [jnp.ones(1), jnp.ones(2)], "b": {"c": jnp.ones(3)}})) == ["a.[0]", "a.[1]", "b.c"]
