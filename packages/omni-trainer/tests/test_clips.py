"""Videos with sound are scored, shown as sheets of frames, and played from files in the run directory."""

from __future__ import annotations

import io
import json
import re
import subprocess
import wave

import imageio_ffmpeg
import numpy as np
import pytest
import torch
from PIL import Image

from omni_core.trajectory import Media
from omni_trainer.reporting import clips
from omni_trainer.reporting.clips import clip_of, write_clips
from omni_trainer.reporting.grid import write_contact_sheet

CLIPS = (
    "model.family=toy_clips",
    "model.pipeline.num_frames=9",
    "model.pipeline.frame_rate=8.0",
    "trainer.grid_every=1",
)


def media(rows: int = 2, frames: int = 9) -> Media:
    shade = torch.arange(frames, dtype=torch.uint8).reshape(1, frames, 1, 1, 1) * 20
    return Media(
        video=shade.expand(rows, frames, 16, 20, 3).contiguous(),
        frame_rate=8.0,
        audio=torch.linspace(-1.0, 1.0, 9000).reshape(1, 1, -1).expand(rows, 2, -1).contiguous(),
        audio_rate=8000,
    )


def test_a_run_of_videos_leaves_sheets_and_files_that_play(train, metrics):
    run = train(*CLIPS).run_dir
    for stem in ("train-step-000001", "heldout-step-000002"):
        assert (run / f"grids/{stem}.png").is_file()
        assert [path.name for path in sorted(run.glob(f"grids/{stem}-*.mp4"))] == [
            f"{stem}-{number:02d}.mp4" for number in range(3)
        ]
    said = played(run / "grids/heldout-step-000002-00.mp4")
    assert re.search(r"Video: h264.* 128x128.* 8 fps", said)
    assert "Audio: aac" in said
    posters = np.load(run / "evaluations/step-000002.npy", allow_pickle=False)
    assert (posters.shape, posters.dtype) == ((3, 16, 16, 3), np.uint8)
    assert "reward/loudness" in metrics(run)[1]
    assert (run / "grids/before_after.png").is_file()
    evaluated = json.loads((run / "evaluations/step-000002.json").read_text())
    assert {*evaluated["prompts"][0]["details"]} == {"brightness", "loudness"}


def played(path):
    """What ffmpeg says of a file."""
    tool = imageio_ffmpeg.get_ffmpeg_exe()
    found = subprocess.run([tool, "-i", str(path)], capture_output=True, text=True, check=False)
    return found.stderr


def test_a_clip_shows_evenly_spaced_frames_and_plays(tmp_path):
    found = clip_of(media(), 1)
    assert found.frames.shape == (6, 16, 20, 3)
    assert found.frames[:, 0, 0, 0].tolist() == [0, 40, 60, 100, 120, 160]
    (path,) = write_clips(tmp_path, "a", [found])
    assert path.name == "a-00.mp4"
    said = played(path)
    assert re.search(r"Duration: 00:00:01\.1.*Video: h264.* 140x112.* 8 fps", said, re.DOTALL)


def test_sound_alone_is_a_wav_of_its_rate(tmp_path):
    both = media(1)
    found = clip_of(Media(audio=both.audio, audio_rate=both.audio_rate), 0)
    assert (found.frames, found.suffix) == (None, ".wav")
    with wave.open(io.BytesIO(found.file)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getnframes()) == (8000, 2, 9000)
        samples = np.frombuffer(file.readframes(9000), dtype="<i2").reshape(-1, 2)
    assert (samples[0].tolist(), samples[-1].tolist()) == ([-32767] * 2, [32767] * 2)


def test_without_the_extra_frames_are_shown_and_nothing_plays(tmp_path, monkeypatch):
    monkeypatch.setattr(clips.importlib.util, "find_spec", lambda name: None)
    found = clip_of(media(), 0)
    assert found.frames is not None
    assert write_clips(tmp_path, "a", [found]) == []


def test_media_of_pictures_are_no_clip():
    with pytest.raises(ValueError, match="neither video nor sound"):
        clip_of(Media(image=torch.zeros(1, 2, 2, 3, dtype=torch.uint8)), 0)
    with pytest.raises(ValueError, match="audio_rate"):
        clip_of(Media(audio=torch.zeros(1, 1, 4)), 0)


def test_a_contact_sheet_holds_every_frame(tmp_path):
    frames = [clip_of(media(), row).frames for row in range(2)]
    write_contact_sheet(tmp_path / "sheet.png", frames, ["one", "two"])
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.width == 8 + 2 * (6 * 140 + 5 * 2 + 8)
    with pytest.raises(ValueError, match="1 titles"):
        write_contact_sheet(tmp_path / "sheet.png", frames, ["one"])
