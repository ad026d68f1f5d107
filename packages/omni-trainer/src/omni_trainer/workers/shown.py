"""What a person is shown of a trajectory."""

from __future__ import annotations

from torch import Tensor

from omni_core.trajectory import Media, Trajectory


def media_of(trajectory: Trajectory) -> Media:
    """Return what was decoded.

    Raises:
        ValueError: nothing was.
    """
    if trajectory.media is None:
        msg = f"group {trajectory.records[0].group_id!r} was not decoded"
        raise ValueError(msg)
    return trajectory.media


def picture_of(trajectory: Trajectory, row: int) -> Tensor:
    """Return the picture of a row, uint8 [H, W, 3]; a video gives its middle frame.

    Raises:
        ValueError: media without pictures.
    """
    media = media_of(trajectory)
    if media.image is not None:
        return media.image[row]
    if media.video is not None:
        return media.video[row, media.video.shape[1] // 2]
    msg = f"group {trajectory.records[0].group_id!r} has no picture"
    raise ValueError(msg)
