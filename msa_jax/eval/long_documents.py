"""Documents of text and pictures longer than R blocks, so that the index must choose: one document a row of T tokens.

    <bos> text text text <vision_start> <image> ... <image> <vision_end> red fox text text text <vision_start> ...

Training shows one picture a document, which is shorter than R blocks; these rows exist for evaluation only.
"""

import itertools
from collections.abc import Iterator

import numpy as np

from msa_jax.config import Experiment
from msa_jax.data.batch import Batch, check_batch
from msa_jax.data.captions import CaptionDocuments, fill_placeholders
from msa_jax.data.mixture import to_batch
from msa_jax.data.pack import Pack
from msa_jax.data.packing import Rows
from msa_jax.data.picture_evaluation import PictureEvaluation
from msa_jax.data.text_evaluation import TextEvaluation
from msa_jax.data.tokenizer import Tokenizer
from msa_jax.data.vision import VisionPacker, patchify

PASSAGES_A_ROW = 8


def has_pictures(experiment: Experiment) -> bool:
    """Whether the training data show pictures."""
    return any(stream.kind == "captions" for stream in experiment.data.streams)


def held_out_pictures(experiment: Experiment, pack: Pack) -> np.ndarray:
    """Indices of pictures of held-out concepts, which come from every group; of training where the pack holds out none."""
    pictures = PictureEvaluation(experiment.data, experiment.model, pack).pictures
    return next(ids for ids in map(pictures, ("concept", "comp", "train")) if len(ids))


def long_documents(experiment: Experiment, pack: Pack, rows: int) -> Batch:
    """`rows` documents of held-out passages of T / 8 tokens and held-out pictures with their captions, in turn.

    Where the training data hold text or pictures only, so do the documents. Both repeat where the pack holds too little. A
    document ends where the next picture does not fit. Shapes are those of batches of as many rows of captioned pictures.
    """
    length, vision = experiment.data.sequence_length, experiment.model.vision
    text = TextEvaluation(experiment.data, experiment.model, pack, experiment.eval.text_rows)
    passages = _passages(text, length // PASSAGES_A_ROW)
    pictures = itertools.cycle(held_out_pictures(experiment, pack)) if has_pictures(experiment) else itertools.repeat(None)
    units = zip(passages, pictures, strict=False)  # both endless
    filled = Rows(rows, length, pad=text.tokenizer.pad)
    documents = CaptionDocuments(pack, text.tokenizer, experiment.data, vision) if has_pictures(experiment) else None
    packer = VisionPacker(documents.sequences(rows) if documents else 1, vision) if vision else None
    for row in range(rows):
        tokens, placed = np.array([text.tokenizer.bos]), []
        for passage, picture in units:
            tokens = np.concatenate([tokens, passage])[:length]
            if picture is not None:
                example = _captioned(text.tokenizer, documents.visual_tokens, pack.captions[picture])
                if len(tokens) + len(example) > length or len(placed) == documents.most_a_row:
                    break
                placed.append(packer.add(patchify(pack.pictures[picture], vision)))
                tokens = np.concatenate([tokens, example])
            if len(tokens) == length:
                break
        visual_index = fill_placeholders(tokens, placed, text.tokenizer, f"long document {row}")
        filled.add(row, tokens, np.zeros(len(tokens), np.float32), -1, visual_index)
    batch = to_batch(filled, packer)
    check_batch(batch, vision)
    return batch


def _passages(text: TextEvaluation, tokens: int) -> Iterator[np.ndarray]:
    """Endless passages, one of each source in turn; empty ones where nothing is trained on text."""
    if not text.sources:
        yield from itertools.repeat(np.zeros(0, np.int32))
    by_source = [[piece[i : i + tokens] for piece in text.pieces[source] for i in range(1, len(piece), tokens)] for source in text.sources]
    for number in itertools.count():
        for passages in by_source:
            yield passages[number % len(passages)]


def _captioned(tokenizer: Tokenizer, visual: int, caption: str) -> np.ndarray:
    return np.concatenate([[tokenizer.vision_start], np.full(visual, tokenizer.image), [tokenizer.vision_end], tokenizer.encode(caption)])
