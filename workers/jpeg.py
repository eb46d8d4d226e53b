"""The encoder of cached frames. Its bytes are part of the decoder identity (workers/canary.py)."""

from __future__ import annotations

import cv2
import numpy as np
import simplejpeg

from videoflow.media.picture import Picture


def encode_jpeg(rgb: np.ndarray, quality: int) -> bytes:
    """Baseline JPEG, 4:2:0, of an RGB picture uint8 (h, w, 3)."""
    return bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(rgb), quality=quality, colorsubsampling="420"))


def encode_picture(picture: Picture, size: tuple[int, int], quality: int) -> bytes:
    """Baseline JPEG, 4:2:0, of a decoded frame at (width, height): of its own planes where they are what JPEG stores,
    else through RGB.
    """
    planes = picture.jpeg_planes(*size)
    if planes is None:
        return encode_jpeg(picture.rgb(*size), quality)
    y, cb, cr = planes
    return bytes(simplejpeg.encode_jpeg_yuv_planes(_even(y), cb, cr, quality=quality))


def _even(plane: np.ndarray) -> np.ndarray:
    """The same plane, lying in memory of even height and width: libjpeg-turbo reads luma up to there."""
    h, w = plane.shape
    if h % 2 == w % 2 == 0:
        return plane
    return np.asarray(cv2.copyMakeBorder(plane, 0, h % 2, 0, w % 2, cv2.BORDER_REPLICATE))[:h, :w]
