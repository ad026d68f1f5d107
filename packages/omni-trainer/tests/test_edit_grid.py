"""Grids of edits show what was edited beside each edit."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from PIL import Image

from omni_core.input_image import InputImage
from omni_trainer.evaluation import Shown, pick_shown
from omni_trainer.observer import Observer


class Group:
    """Ranks that hold black edits of 4 x 6 pixels."""

    def call(self, rank, method, rows, *, refs):
        assert (rank, method, len(refs)) == (0, "pick_images", len(rows))
        return torch.zeros(len(rows), 4, 6, 3, dtype=torch.uint8)


def samples(*shades):
    """One sample of each group; a shade is its input image's, None is a group without one."""
    images = [
        None if s is None else InputImage.of(torch.full((8, 12, 3), s, dtype=torch.uint8))
        for s in shades
    ]
    requests = [SimpleNamespace(group_id=str(n), image=image) for n, image in enumerate(images)]
    info = [
        SimpleNamespace(
            records=[SimpleNamespace(group_id=str(n))], effective=SimpleNamespace(num_frames=1)
        )
        for n in range(len(shades))
    ]
    sources = [SimpleNamespace(info=one, ref=None) for one in info]
    return SimpleNamespace(plan=SimpleNamespace(requests=requests), sources=sources)


def test_inputs_are_shown_in_the_size_of_the_edits(tmp_path):
    shown = pick_shown(Group(), samples(250, 90), [(1, 0), (0, 0)])
    assert shown.edited.shape == shown.pictures.shape == (2, 4, 6, 3)
    assert [int(image.max()) for image in shown.edited] == [90, 250]
    observer = Observer.__new__(Observer)
    observer.run, observer.trackers = SimpleNamespace(grids=tmp_path / "grids"), {}
    observer._grid(3, "heldout-step-000003", shown, ["one", "two"])
    sheet = np.asarray(Image.open(tmp_path / "grids/heldout-step-000003.png").convert("L"))
    assert {0, 90, 250} <= set(np.unique(sheet).tolist())


def test_where_nothing_is_edited_pictures_stand_alone():
    assert pick_shown(Group(), samples(None, None), [(0, 0), (1, 0)]).edited is None
    pictures = np.zeros((1, 4, 6, 3), dtype=np.uint8)
    parts = [Shown(pictures=pictures), Shown(pictures=pictures, edited=pictures)]
    assert Shown.concat(parts).edited is None
