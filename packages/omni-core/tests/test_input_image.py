"""Input images travel on requests; who takes none says so. Decoding needs Pillow: omni-trainer tests it."""

from __future__ import annotations

import attrs
import pytest

from omni_core.choices import StepKind
from omni_core.input_image import InputImage
from omni_core.request_check import check_image
from omni_core.testing import requests_for
from omni_core.trajectory import RolloutRequest, SamplingSpec

SPEC = SamplingSpec(
    sigmas=(1.0, 0.5, 0.0),
    guidance_scale=1.0,
    height=8,
    width=8,
    max_sequence_length=8,
    kind=StepKind.SDE,
    noise_level=0.7,
)
IMAGE = InputImage(path="a.png")


def edit() -> RolloutRequest:
    (request,) = requests_for(SPEC, ["make it red"], samples_per_prompt=3)
    return attrs.evolve(request, image=IMAGE)


def test_an_image_is_a_path_or_bytes() -> None:
    for values in ({}, {"path": "a.png", "data": b"x"}):
        with pytest.raises(ValueError, match="a path or the bytes of a file, one of them"):
            InputImage(**values)
    assert "x" * 8 not in repr(InputImage(data=b"x" * 8))  # a picture fills no log


def test_parts_of_a_request_edit_its_image() -> None:
    parts = [*edit().expand(), *edit().split(2)]
    assert {part.image for part in parts} == {IMAGE}


def test_an_image_is_refused_where_nothing_would_look_at_it_and_asked_for_where_it_is_edited() -> (
    None
):
    check_image(edit(), ("text", "image"))
    check_image(attrs.evolve(edit(), image=None), ("text",))
    with pytest.raises(ValueError, match=r"samples from text alone; leave data\.image_column out"):
        check_image(edit(), ("text",))
    with pytest.raises(ValueError, match=r"edits images, and no input image .* data\.image_column"):
        check_image(attrs.evolve(edit(), image=None), ("text", "image"))
