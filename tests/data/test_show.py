"""The overview of a pack: numbers, samples, sheets."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from msa_jax.data import show
from msa_jax.data.pack import Pack


def test_overview_of_the_synthetic_pack(tmp_path: Path, capsys: pytest.CaptureFixture[str], pack: Pack) -> None:
    assert show.main(["--pack", "synthetic", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for source, counts in pack.counts()["text"].items():
        assert f"{counts['train_bytes']:,}" in said
        assert f"{source}, heldout" in said
    assert pack.document(int(pack.documents("heldout", ["sums"])[0])).splitlines()[0] in said
    for split in ("train", "concept", "comp"):
        with Image.open(tmp_path / f"{split}.png") as image:
            assert image.size[0] == (16 * 34 + 2) * 3


def test_sheets_hold_the_pictures(pack: Pack) -> None:
    sheet = np.asarray(show.contact_sheet(pack, "concept"))
    np.testing.assert_array_equal(sheet[6 : 6 + 96 : 3, 6 : 6 + 96 : 3], pack.pictures[pack.picture_ids("concept")[0]])


def test_a_missing_pack_is_an_error_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show.main(["--pack", str(tmp_path / "none")]) == 1
    assert "python -m msa_jax.data.build small" in capsys.readouterr().out
