"""All evaluators on an untrained model: every value is there, finite and where chance puts it; the report prints all of them."""

import dataclasses
import io
import json
import logging
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from msa_jax.config import Experiment
from msa_jax.data.pack import Pack
from msa_jax.eval.forward import Forward
from msa_jax.eval.suite import Evaluator, build
from msa_jax.report import write
from msa_jax.train.state import TrainState

SPLITS = ("train", "concept", "comp")


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def evaluators(
    experiment: Experiment, pack: Pack, model: tuple[nnx.GraphDef, TrainState], forward: Forward, workdir: Path
) -> list[Evaluator]:
    """Around the forward pass that the other tests have compiled already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("msa_jax.eval.suite.Forward", lambda graphdef: forward)
        return build(experiment, pack, model[0], workdir)


@pytest.fixture(scope="module")
def values(evaluators: list[Evaluator], state: TrainState) -> dict[str, float]:
    pairs = [pair for evaluator in evaluators for pair in evaluator.run(state)]
    json.dumps(pairs)  # plain numbers, as the run's log needs them
    assert len({name for name, _ in pairs}) == len(pairs), "a name is given twice"
    return dict(pairs)


def test_every_value_has_a_name_and_is_finite(values: dict[str, float], experiment: Experiment, pack: Pack) -> None:
    expected = {
        f"text/{name}/{source}"
        for name in ("nats_per_token", "bits_per_byte", "unigram_bits_per_byte", "bigram_bits_per_byte", "bytes")
        for source in pack.text_sources
    }
    for split in SPLITS:
        expected |= {f"caption/{name}/{split}" for name in ("right", "wrong", "image_gain")}
        expected |= {f"retrieval/{name}/{split}" for name in ("accuracy", "chance", "captions")}
    for measure in ("block_recall", "captured_mass", "relative_mass"):
        expected |= {f"index/{measure}{local}{random}/layer_1" for local in ("", "_without_local") for random in ("", "_random")}
    expected |= {"index/kl_selected/layer_1", "index/kl_full_prefix/layer_1", "index/queries"}
    expected |= {f"attention/{name}/layer_{i}" for name in ("lift", "lift_long", "separation") for i in (0, 1)}
    expected |= {f"attention/visual_{name}/layer_1" for name in ("visible", "index", "selected", "attention")}
    assert set(values) == expected
    assert np.isfinite(list(values.values())).all()


def test_an_untrained_model_is_at_chance(values: dict[str, float], experiment: Experiment) -> None:
    chance = 1 / experiment.eval.candidates
    for split in SPLITS:
        n = int(values[f"retrieval/captions/{split}"])
        low, high = np.quantile(np.random.default_rng(0).binomial(n, chance, 100_000) / n, [0.0005, 0.9995])
        assert abs(values[f"caption/image_gain/{split}"]) < 0.05
        assert values[f"retrieval/chance/{split}"] == chance
        assert low <= values[f"retrieval/accuracy/{split}"] <= high
        assert 0.7 * np.log(4096) < values[f"caption/right/{split}"] < 1.5 * np.log(4096)
    for measure in ("block_recall", "captured_mass", "relative_mass"):
        for local in ("", "_without_local"):
            assert values[f"index/{measure}{local}/layer_1"] == pytest.approx(values[f"index/{measure}{local}_random/layer_1"], abs=0.08)
    assert 0.5 < values["attention/lift/layer_0"] < 2


def test_a_second_run_gives_the_same_values_and_compiles_nothing(
    values: dict[str, float], evaluators: list[Evaluator], state: TrainState, caplog: pytest.LogCaptureFixture
) -> None:
    before = jax.tree.map(np.asarray, state.params)
    with jax.log_compiles(), caplog.at_level(logging.DEBUG, logger="jax"):
        again = dict(pair for evaluator in evaluators for pair in evaluator.run(state))
        assert not [record for record in caplog.records if "Compiling" in record.getMessage()]
        jax.jit(lambda x: x + 1)(np.zeros(3))
        assert [record for record in caplog.records if "Compiling" in record.getMessage()], "the log would have told"
    assert again == values
    jax.tree.map(np.testing.assert_array_equal, before, state.params)


def test_every_evaluator_is_named(evaluators: list[Evaluator]) -> None:
    assert [evaluator.name for evaluator in evaluators] == ["text", "captions", "index", "attention", "selection"]


def test_the_report_prints_every_value_and_draws_every_array(values: dict[str, float], workdir: Path, experiment: Experiment) -> None:
    config = {"format": 1, "hash": "0" * 12, "commit": "c0ffee", "device": "cpu", "implementations": {"block_select": "xla"}}
    (workdir / "config.json").write_text(json.dumps({**config, "experiment": dataclasses.asdict(experiment)}))
    lines = [json.dumps({"step": 0, "name": name, "value": value}) for name, value in values.items()]
    (workdir / "evaluation.jsonl").write_text("\n".join(lines) + "\n")
    stream = io.StringIO()
    files = write(workdir, console=Console(file=stream, width=100))
    assert {file.name for file in files} == {"selection_map.png", "lift.png"}
    printed = stream.getvalue().replace(",", "")
    assert "metrics.jsonl is missing" in printed
    for name, value in values.items():
        shown = [f"{value:.2f}", f"{value:.3f}", f"{value:.0f}"]
        rarely_read = name == "index/queries" or ("_without_local" in name and "recall" not in name)
        assert rarely_read or any(form in printed for form in shown), f"{name} = {value} is not in the report"


@pytest.mark.parametrize(
    ("pattern", "streams", "names"),
    [
        ("DD", "text captions", ["text", "captions", "attention"]),
        ("MM", "text", ["text", "index", "selection"]),
        ("MM", "captions", ["captions", "attention", "selection"]),
    ],
)
def test_the_suite_fits_the_experiment(
    pattern: str, streams: str, names: list[str], experiment: Experiment, pack: Pack, model: tuple[nnx.GraphDef, TrainState], tmp_path: Path
) -> None:
    kept = tuple(stream for stream in experiment.data.streams if stream.name in streams.split())
    vision = experiment.model.vision if "captions" in streams else None
    other = dataclasses.replace(
        experiment,
        model=dataclasses.replace(experiment.model, pattern=pattern, vision=vision),
        data=dataclasses.replace(experiment.data, streams=kept),
    )
    assert [evaluator.name for evaluator in build(other, pack, model[0], tmp_path)] == names


def test_no_selection_map_where_every_query_keeps_all_it_sees(
    experiment: Experiment, pack: Pack, model: tuple[nnx.GraphDef, TrainState], tmp_path: Path
) -> None:
    attention = dataclasses.replace(experiment.model.attention, num_blocks=16)
    other = dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, attention=attention))
    assert "selection" not in [evaluator.name for evaluator in build(other, pack, model[0], tmp_path)]
