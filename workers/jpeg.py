"""The encoder of cached frames. Its bytes are part of the decoder identity (workers/canary.py)."""

from __future__ import annotations

import numpy as np
import simplejpeg


def encode_jpeg(rgb: np.ndarray, quality: int) -> bytes:
    """Baseline JPEG, 4:2:0, of an RGB picture uint8 (h, w, 3)."""
    return bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(rgb), quality=quality, colorsubsampling="420"))
