"""A column of images: paths from the file's folder, or pictures stored in a row; broken ones are bad rows."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image

from omni_core.input_image import InputImage
from omni_core.reward import RewardInput
from omni_trainer import cli
from omni_trainer.data import (
    BadRowPolicy,
    Columns,
    PromptFileError,
    PromptSampler,
    Tail,
    load_prompts,
)
from omni_trainer.rewards.pictures import input_images
from omni_trainer.samples import reward_input

EDITS = Columns(image="image")


def picture(path, size=(6, 4), color=(200, 10, 10), **options):
    path.parent.mkdir(exist_ok=True)
    Image.new("RGB", size, color).save(path, **options)
    return path


def rows(path, *images):
    lines = [json.dumps({"prompt": f"edit {i}", "image": each}) for i, each in enumerate(images)]
    path.write_text("\n".join(lines))
    return path


def load(path, **options):
    options = {"reward": None, "on_bad_row": BadRowPolicy.RAISE, "columns": EDITS, **options}
    return load_prompts(path, **options)


def sampler(path):
    return PromptSampler(load(path).rows, batch_size=1, seed=0, tail=Tail.CARRY)


def test_paths_start_from_the_files_own_folder_and_the_column_is_no_metadata(tmp_path):
    one, two = picture(tmp_path / "in" / "one.png"), picture(tmp_path / "two.png")
    file = rows(tmp_path / "p.jsonl", "in/one.png", str(two))
    found = load(file).rows
    assert [row.image for row in found] == [InputImage(path=str(p)) for p in (one, two)]
    assert [dict(row.metadata) for row in found] == [{}, {}]
    assert reward_input(found[0]).image == found[0].image


def test_pictures_that_a_dataset_stores_are_taken_as_they_are(tmp_path):
    import datasets

    path = picture(tmp_path / "one.png")
    stored = {"bytes": path.read_bytes(), "path": None}
    held = datasets.Dataset.from_list([{"prompt": "p", "image": stored}])
    held.cast_column("image", datasets.Image()).to_parquet(str(tmp_path / "p.parquet"))
    (row,) = load(tmp_path / "p.parquet").rows
    assert row.image.data == path.read_bytes()


def test_rows_without_a_picture_that_can_be_read_are_named_by_line(tmp_path):
    picture(tmp_path / "good.png")
    (tmp_path / "text.png").write_text("no picture")
    file = rows(tmp_path / "p.jsonl", "good.png", None, "gone.png", "text.png", 7)
    with pytest.raises(PromptFileError) as caught:
        load(file)
    said = [line.partition(": ")[2] for line in caught.value.mistakes]
    assert said[0] == "image column 'image' is missing; a path or a stored picture is expected"
    assert said[1] == f"image column 'image': there is no file '{tmp_path / 'gone.png'}'"
    assert said[2].startswith(f"image column 'image': {tmp_path / 'text.png'} holds no picture")
    assert said[3].startswith("image column 'image' is int;")
    assert [line.partition(":")[2][0] for line in caught.value.mistakes] == list("2345")
    left = load(file, on_bad_row=BadRowPolicy.SKIP)
    assert (len(left.rows), len(left.skipped)) == (1, 4)


def test_a_text_file_has_no_column_of_images(tmp_path):
    (tmp_path / "p.txt").write_text("one\n")
    with pytest.raises(PromptFileError, match="no columns, so no column 'image'"):
        load(tmp_path / "p.txt")


def test_a_picture_is_decoded_upright_and_without_its_alpha(tmp_path):
    turned = Image.new("RGB", (2, 1), (255, 0, 0))
    turned.putpixel((1, 0), (0, 0, 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned
    turned.save(tmp_path / "turned.png", exif=exif)
    image = InputImage(path=str(tmp_path / "turned.png"))
    assert image.size() == (1, 2)
    assert image.pixels().tolist() == [[[255, 0, 0]], [[0, 0, 255]]]
    Image.new("RGBA", (1, 1), (9, 8, 7, 3)).save(tmp_path / "alpha.png")
    assert InputImage(path=str(tmp_path / "alpha.png")).pixels().tolist() == [[[9, 8, 7]]]


def test_pixels_become_a_file_and_come_back(tmp_path):
    pixels = torch.randint(0, 256, (3, 5, 3), generator=torch.Generator().manual_seed(0))
    assert torch.equal(InputImage.of(pixels.to(torch.uint8)).pixels(), pixels.to(torch.uint8))


def test_a_resume_with_other_pictures_is_refused(tmp_path):
    picture(tmp_path / "a" / "one.png")
    picture(tmp_path / "a" / "two.png")
    state = sampler(rows(tmp_path / "a" / "p.jsonl", "one.png")).state()
    (tmp_path / "a").rename(tmp_path / "moved")
    sampler(rows(tmp_path / "moved" / "p.jsonl", "one.png")).load_state(state)
    with pytest.raises(ValueError, match="not those of the checkpoint"):
        sampler(rows(tmp_path / "moved" / "p.jsonl", "two.png")).load_state(state)


def test_a_reward_gets_each_image_decoded_once(tmp_path):
    image = InputImage(path=str(picture(tmp_path / "one.png")))
    inputs = [RewardInput(prompt="p", image=each) for each in (image, None, image)]
    first, none, again = input_images(inputs)
    assert first.getpixel((0, 0)) == (200, 10, 10)
    assert none is None
    assert again is first


def test_the_check_decodes_every_picture_and_tells_those_that_are_stretched(
    tmp_path, toys, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    picture(tmp_path / "wide.png", size=(64, 32))
    picture(tmp_path / "square.png", size=(30, 30))
    broken = picture(tmp_path / "broken.png", size=(64, 64)).read_bytes()
    (tmp_path / "broken.png").write_bytes(broken[:-30])
    rows(tmp_path / "p.jsonl", "wide.png", "square.png", "broken.png", "wide.png")

    def check(*arguments):
        code = cli.main(["data", "check", *arguments])
        return code, capsys.readouterr().out

    code, said = check("p.jsonl", "data.image_column=image")
    assert code == 1
    assert "p.jsonl:3: image column 'image': " in said
    assert ["images", "3"] in [line.split() for line in said.splitlines()]
    (tmp_path / "run.yaml").write_text(
        "model: {path: toy, pipeline: {width: 16, height: 16}}\nalgorithm: {name: flow_grpo}\n"
        "engine: {name: toy}\nrollout: {name: toy}\nreward: {name: toy}\n"
        "data: {train: p.jsonl, image_column: image, on_bad_row: skip, prompts_per_step: 2}\n"
    )
    code, said = check("run.yaml")
    assert code == 0
    assert "warning: 2 images are stretched" in said
    assert "p.jsonl:1: 64x32 is stretched to the proportions of 16x16" in said
