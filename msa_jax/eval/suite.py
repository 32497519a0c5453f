"""Which evaluators an experiment gets: those that its data, its layers and its lengths give a meaning.

An evaluator has a `name` and `run(state) -> iterable of (name, value)`. Value names are paths, "text/bits_per_byte/plays"; the
last part is the source, the split or the layer. Evaluators are pure with respect to the state: it stays as it is, and two
runs on it give the same values. Everything is compiled in the first run and never again.
"""

from pathlib import Path

from flax import nnx

from msa_jax.config import Experiment
from msa_jax.data.pack import Pack
from msa_jax.eval.attention_maps import AttentionMaps
from msa_jax.eval.forward import Forward
from msa_jax.eval.long_documents import has_pictures, long_documents
from msa_jax.eval.perplexity import TextPerplexity
from msa_jax.eval.recall import IndexQuality
from msa_jax.eval.selection_map import SelectionMap
from msa_jax.eval.vision import CaptionLoss
from msa_jax.model.block import KINDS

Evaluator = TextPerplexity | CaptionLoss | IndexQuality | AttentionMaps | SelectionMap


def build(experiment: Experiment, pack: Pack, graphdef: nnx.GraphDef, workdir: str | Path) -> list[Evaluator]:
    """Evaluators of models of this structure; arrays for figures go to `workdir/arrays`.

    Raises ConfigError here, before any training, where the pack holds too little to evaluate on.
    """
    workdir, model, data = Path(workdir), experiment.model, experiment.data
    rows = max(1, data.rows_at(0) // experiment.train.microbatches)
    has_text = any(stream.kind == "text" for stream in data.streams)
    has_index = any(KINDS[kind].has_index for kind in model.layer_kinds)
    must_choose = data.sequence_length > model.attention.num_blocks * model.attention.block_size
    forward = Forward(graphdef)
    evaluators: list[Evaluator] = []
    if has_text:
        evaluators.append(TextPerplexity(experiment, pack, forward, rows))
    if has_pictures(experiment):
        evaluators.append(CaptionLoss(experiment, pack, forward, rows))
    if has_text and has_index:
        evaluators.append(IndexQuality(experiment, pack, forward, rows))
    long = long_documents(experiment, pack, rows)
    if has_pictures(experiment):
        evaluators.append(AttentionMaps(experiment, pack, forward, long, workdir))
    if has_index and must_choose:
        evaluators.append(SelectionMap(experiment, forward, long, workdir))
    return evaluators
