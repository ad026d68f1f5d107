"""A sample that moves or sounds, as a person looks at it: some frames of it, and a file that plays.

A file holds H.264 video with AAC sound (mp4, by imageio-ffmpeg, an extra), or 16-bit sound alone (wav).
Axes: K frames shown, F frames, H W pixels, C sound channels, S sound samples.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import math
import tempfile
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import structlog
from numpy.typing import NDArray

from omni_core.trajectory import Media
from omni_trainer.reporting.grid import LEAST_SIDE, Pictures

SHOWN_FRAMES = 6
FRAME_RATE = 24.0
"""Of a video that does not say."""
EXTRA = 'pip install "omni-trainer[video]"'

log = structlog.get_logger()


@attrs.frozen(kw_only=True, eq=False)
class Clip:
    """One sample."""

    frames: Pictures | None = None
    """uint8 [K, H, W, 3], evenly spaced from the first to the last; None where nothing is seen."""
    file: bytes | None = None
    """Of the form that `suffix` names; None where it cannot be written here."""
    suffix: str = ""


def clip_of(media: Media, row: int) -> Clip:
    """Show one row of media of videos, sounds or both.

    Raises:
        ValueError: they hold neither.
    """
    sound = None
    if media.audio is not None:
        sound = _wav(media.audio[row].numpy(), media.audio_rate or 0)
    if media.video is not None:
        video: Pictures = media.video[row].numpy()
        shown = np.linspace(0, len(video) - 1, min(len(video), SHOWN_FRAMES)).round().astype(int)
        file = _mp4(video, media.frame_rate or FRAME_RATE, sound)
        return Clip(frames=video[shown].copy(), file=file, suffix=".mp4")
    if sound is not None:
        return Clip(file=sound, suffix=".wav")
    msg = "the media hold neither video nor sound"
    raise ValueError(msg)


def write_clips(directory: Path, stem: str, clips: Sequence[Clip]) -> list[Path]:
    """Write the files that play as `STEM-NUMBER.SUFFIX`, and return those written."""
    written = []
    for number, clip in enumerate(clips):
        if clip.file is not None:
            path = directory / f"{stem}-{number:02d}{clip.suffix}"
            path.write_bytes(clip.file)
            written.append(path)
    return written


def _wav(sound: NDArray[np.float32], rate: int) -> bytes:
    """Write float [C, S], -1 to 1, as 16-bit samples."""
    if rate < 1:
        msg = f"sound has a rate of at least 1 sample a second, got {rate} (Media.audio_rate)"
        raise ValueError(msg)
    samples = (np.clip(sound, -1.0, 1.0) * 32767.0).round().astype("<i2")
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(len(sound))
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.T.tobytes())
    return buffer.getvalue()


def _mp4(video: Pictures, frame_rate: float, sound: bytes | None) -> bytes | None:
    """Write uint8 [F, H, W, 3]; small ones are enlarged by a whole factor, as in grids."""
    if importlib.util.find_spec("imageio_ffmpeg") is None:
        log.warning("clips.no_mp4", missing="imageio-ffmpeg", fix=EXTRA)
        return None
    ffmpeg: Any = importlib.import_module("imageio_ffmpeg")
    factor = max(1, math.ceil(LEAST_SIDE / video.shape[2]))
    frames = video.repeat(factor, axis=1).repeat(factor, axis=2)
    height, width = frames.shape[1] // 2 * 2, frames.shape[2] // 2 * 2  # what H.264 takes
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        more: dict[str, Any] = {}
        if sound is not None:
            heard = Path(folder) / "sound.wav"
            heard.write_bytes(sound)
            more = {"audio_path": str(heard), "audio_codec": "aac"}
        writer = ffmpeg.write_frames(
            str(path), (width, height), fps=frame_rate, macro_block_size=2, **more
        )
        writer.send(None)
        for frame in frames[:, :height, :width]:
            writer.send(np.ascontiguousarray(frame))
        writer.close()
        return path.read_bytes()
