"""Checkpoints: one folder a step, complete or absent.

    checkpoints/00000400/params/      the parameters by name
    checkpoints/00000400/training/    step, optimiser state and random key by name
    checkpoints/00000400/_CHECKPOINT_METADATA    format version and data position

A save copies the arrays, then writes in the background into a temporary folder that is renamed when it is whole. A process
killed at any moment, or a full disk, leaves the earlier checkpoints as they were.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from flax import nnx

from msa_jax.model.groups import parameter_group, path_names
from msa_jax.train.state import TrainState

FORMAT_VERSION = 1
CHECKPOINTS = "checkpoints"  # in the run folder
PARAMS, TRAINING = "params", "training"
LEFTOVER = re.compile(r"\d+\.(orbax-checkpoint-tmp.*|deleted)")
MOST_DIFFERENCES = 8  # listed in an error


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, or does not fit; the message names it, what differs and the remedy."""


class Checkpoints:
    """The checkpoints of one run. Leaving the context waits for a save under way."""

    def __init__(self, directory: str | Path, keep: int = 1) -> None:
        self.directory, self._keep = Path(directory).absolute(), keep
        self._saving: tuple[int, ocp.AsyncResponse] | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.wait()

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        return sorted(int(path.name) for path in self.directory.glob("*") if path.name.isdigit())

    def path(self, step: int) -> Path:
        return self.directory / f"{step:08d}"

    def save(self, state: TrainState, data_state: bytes) -> None:
        """Starts to save `state` under its step; returns when its arrays are copied, so that they may be donated.

        `data_state` is the data iterator's position, text in UTF-8. A step that has its checkpoint is left alone.
        Raises CheckpointError if this save cannot start or the one before it failed.
        """
        self.wait()
        step = int(jax.device_get(state.step))
        if step in self.steps():
            return
        self._remove_leftovers()
        trees = {PARAMS: named_arrays(state.params), TRAINING: named_arrays(_training(state))}
        metadata = {"format_version": FORMAT_VERSION, "data": data_state.decode()}
        # folders are made before returning: a failure to make them in the background would only be seen as a time-out
        context = ocp.Context()
        context.asynchronous.create_directories_asynchronously = False
        with self._explained(step), context:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._saving = step, ocp.save_checkpointables_async(self.path(step), trees, custom_metadata=metadata)

    def wait(self) -> None:
        """Returns when no save is under way; drops checkpoints beyond `keep`. Raises CheckpointError if the save failed."""
        if self._saving is None:
            return
        (step, response), self._saving = self._saving, None
        with self._explained(step):
            response.result()
        for old in self.steps()[: -self._keep]:
            self._delete(self.path(old))

    def restore(self, abstract: TrainState, step: int | None = None) -> tuple[TrainState, bytes]:
        """(state, data position) of `step`, or of the latest. `abstract` gives structure, shapes and dtypes.

        Raises CheckpointError for a missing step, another format version, or arrays that differ from `abstract`.
        """
        path, metadata = self._open(step)
        abstract_training = jax.eval_shape(_training, abstract)
        trees = self._load(path, metadata, {PARAMS: abstract.params, TRAINING: abstract_training})
        return _train_state(trees), metadata.custom_metadata["data"].encode()

    def restore_params(self, abstract_params: nnx.State, step: int | None = None) -> nnx.State:
        """Only the parameters, as evaluation and generation need them. Raises as `restore`."""
        path, metadata = self._open(step)
        return self._load(path, metadata, {PARAMS: abstract_params})[PARAMS]

    def restore_groups(self, state: TrainState) -> TrainState:
        """`state` with all that the latest checkpoint holds, step included.

        A parameter group that the checkpoint lacks altogether, as a text model lacks a vision tower, stays as it is in `state`,
        and so does its part of the optimiser's state. Raises as `restore` for any other difference.
        """
        path, metadata = self._open(None)
        groups = {parameter_group(name.split(".")) for name in named_arrays(state.params)}
        absent = groups - {parameter_group(name.split(".")) for name in metadata.metadata[PARAMS]}
        trees = self._load(path, metadata, {PARAMS: state.params, TRAINING: _training(state)}, absent)
        return _train_state(trees)

    def _open(self, step: int | None) -> tuple[Path, ocp.CheckpointMetadata]:
        steps = self.steps()
        if step is None and steps:
            step = steps[-1]
        if step not in steps:
            wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise CheckpointError(f"{wanted} in {self.directory}; complete ones: {steps or 'none'}")
        path = self.path(step)
        metadata = ocp.checkpointables_metadata(path)
        version = (metadata.custom_metadata or {}).get("format_version")
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"checkpoint {path} has format version {version}, this code reads version {FORMAT_VERSION}; "
                "use the commit that wrote it (config.json of the run names it) or train anew"
            )
        return path, metadata

    def _load(self, path: Path, metadata: ocp.CheckpointMetadata, trees: dict[str, Any], absent: Set[str] = frozenset()) -> dict[str, Any]:
        """The saved arrays in the structure of `trees`, on the default device whatever device saved them.

        Leaves of the parameter groups `absent` are those of `trees`.
        """
        damaged = [part for part in trees if not (metadata.metadata or {}).get(part)]
        if damaged:
            others = [step for step in self.steps() if self.path(step) != path]
            raise CheckpointError(
                f"checkpoint {path} is damaged: {', '.join(damaged)} cannot be read; move that folder away and run the same command to "
                f"continue from {f'step {others[-1]}' if others else 'the start, since there is no other'}"
            )
        sharding = default_sharding()
        leaves = {part: named_arrays(tree) for part, tree in trees.items()}
        expected = {
            part: {
                name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
                for name, leaf in named.items()
                if not absent.intersection(name.split("."))
            }
            for part, named in leaves.items()
        }
        differences = [line for part in trees for line in _differences(metadata.metadata[part], expected[part], part)]
        if differences:
            more = f"\n  and {len(differences) - MOST_DIFFERENCES} more" if len(differences) > MOST_DIFFERENCES else ""
            lines = "".join(f"\n  {line}" for line in differences[:MOST_DIFFERENCES])
            raise CheckpointError(f"checkpoint {path} does not fit this model and optimiser:{lines}{more}")
        loaded = ocp.load_checkpointables(path, expected)
        return {
            part: jax.tree.unflatten(jax.tree.structure(tree), [(leaves[part] | loaded[part])[name] for name in leaves[part]])
            for part, tree in trees.items()
        }

    @contextlib.contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        """Failures to write, in words. Orbax reports the operating system's errors as ValueError."""
        try:
            yield
        except (OSError, ValueError) as error:
            self._remove_leftovers()
            code = re.search(r"os_error_code='(\d+)'|\[Errno (\d+)\]", str(error))
            reason = os.strerror(int(code[1] or code[2])) if code else str(error).splitlines()[0]
            complete = self.steps()
            kept = f"the checkpoint of step {complete[-1]} is complete" if complete else "there is no earlier checkpoint"
            raise CheckpointError(
                f"cannot save step {step} to {self.directory}: {reason}; {kept}. "
                "Make room or mend the folder, then run the same command to continue"
            ) from error

    def _remove_leftovers(self) -> None:
        """Temporary and half-deleted folders of a save or a clean-up that was cut short. What a user put there stays."""
        for path in self.directory.glob("*"):
            if LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path)

    def _delete(self, path: Path) -> None:
        """Renamed first: a kill in the middle must not leave a folder that looks complete."""
        shutil.rmtree(path.rename(path.with_suffix(".deleted")))


def default_sharding() -> jax.sharding.Sharding:
    """Where arrays go that are placed nowhere in particular."""
    return jnp.zeros(()).sharding


def named_arrays(tree: Any) -> dict[str, Any]:
    """Leaves by name, as `layers.0.0.mlp.up.kernel` or `opt_state.inner_states.trunk...`, in the order of jax.tree.leaves."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {".".join(path_names(path)): leaf for path, leaf in leaves}
    assert len(named) == len(leaves), "two leaves share a name"
    return named


def _training(state: TrainState) -> dict[str, Any]:
    return {"step": state.step, "opt_state": state.opt_state, "key": jax.random.key_data(state.key)}


def _train_state(trees: dict[str, Any]) -> TrainState:
    training = trees[TRAINING]
    return TrainState(training["step"], trees[PARAMS], training["opt_state"], jax.random.wrap_key_data(training["key"]))


def _differences(saved: dict[str, Any], expected: dict[str, Any], part: str) -> list[str]:
    lines = [f"{part} {name}: not in the checkpoint" for name in expected if name not in saved]
    lines += [f"{part} {name}: only in the checkpoint" for name in saved if name not in expected]
    for name in sorted(set(expected) & set(saved)):
        ours, theirs = (f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}" for leaf in (expected[name], saved[name]))
        if ours != theirs:
            lines.append(f"{part} {name}: {theirs} in the checkpoint, {ours} expected")
    return lines
