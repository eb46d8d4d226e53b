"""From a decoded frame to pictures: upright, square pixels, the size asked for, RGB.

8-bit 4:2:0 is scaled on the decoder's own planes before colour conversion (the fast path). Every other pixel format,
and a picture that keeps its size, is converted to RGB at full size by swscale and scaled after. Scaling goes by halves
that all consumers of a frame share, then one step for the rest. Colour follows the tags; untagged is BT.601 as in
FFmpeg.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import av
import cv2
import numpy as np
from av.video.reformatter import VideoReformatter

from videoflow.timeline import round_half_up

FAST_FORMATS = frozenset({"yuv420p", "yuvj420p"})
_FULL_RANGE = 2  # AVCOL_RANGE_JPEG
UNSPECIFIED = 2  # AVCOL_SPC_UNSPECIFIED
#: (Kr, Kb) by AVColorSpace; source: ITU-T H.273, table 4. Everything else is read as BT.601.
_KR_KB = {1: (0.2126, 0.0722), 4: (0.30, 0.11), 7: (0.212, 0.087), 9: (0.2627, 0.0593), 10: (0.2627, 0.0593)}
_BT601 = (0.299, 0.114)
#: Luma 16…235 to 0…255, clipped, rounded half up in integers.
_LIMITED_TO_FULL = np.array([min(255, max(0, ((y - 16) * 510 + 219) // 438)) for y in range(256)], np.uint8)
#: Chroma 16…240 to 0…255 around 128, clipped, rounded half up in integers.
_LIMITED_TO_FULL_CHROMA = np.array(
    [min(255, max(0, 128 + ((c - 128) * 510 + 224) // 448)) for c in range(256)], np.uint8
)
_SWS_COLORSPACE = {1: 1, 4: 4, 7: 7, 9: 9, 10: 9}


@dataclass(frozen=True)
class Orientation:
    """What makes a stored picture upright: transpose first, then flip along x, then along y."""

    transpose: bool = False
    flip_x: bool = False
    flip_y: bool = False

    @property
    def mirrored(self) -> bool:
        return (int(self.transpose) + int(self.flip_x) + int(self.flip_y)) % 2 == 1

    @property
    def degrees(self) -> int:
        """Clockwise turn (0, 90, 180, 270), after the mirroring if there is one."""
        if self.transpose:
            return 90 if self.flip_x else 270
        return 180 if self.flip_y else 0

    def apply(self, picture: np.ndarray) -> np.ndarray:
        """Picture (h, w, …) turned upright; a contiguous copy if anything changes."""
        if not (self.transpose or self.flip_x or self.flip_y):
            return picture
        if self.transpose:
            picture = picture.swapaxes(0, 1)
        if self.flip_x:
            picture = picture[:, ::-1]
        if self.flip_y:
            picture = picture[::-1]
        return np.ascontiguousarray(picture)


def orientation_of(frame: av.VideoFrame) -> Orientation:
    """Orientation from the frame's display matrix (FFmpeg copies the container's to every frame)."""
    for data in frame.side_data:
        kind: Any = data
        if kind.type.name == "DISPLAYMATRIX":
            a, b, _, c, d = struct.unpack("<5i", bytes(kind)[:20])
            # A stored (p, q) is shown at (a·p + c·q, b·p + d·q).
            if abs(a) >= abs(b):
                return Orientation(False, a < 0, d < 0)
            return Orientation(True, c < 0, b < 0)
    return Orientation()


def orientation_from(degrees: int, mirrored: bool) -> Orientation:
    """The orientation with these `Orientation.degrees` and `Orientation.mirrored`."""
    transpose = degrees in (90, 270)
    if transpose:
        flip_x = degrees == 90
        return Orientation(True, flip_x, mirrored == flip_x)
    flip_y = degrees == 180
    return Orientation(False, mirrored != flip_y, flip_y)


@dataclass(frozen=True)
class Geometry:
    """How stored pictures of a stream become shown ones.

    Attributes:
        width, height: as stored. sar: sample aspect ratio. orientation: what turns it upright.
    """

    width: int
    height: int
    sar: Fraction
    orientation: Orientation

    def upright(self) -> tuple[Fraction, Fraction]:
        """Exact (width, height) with square pixels (the longer-sampled axis shrunk), upright."""
        w, h = Fraction(self.width), Fraction(self.height)
        if self.sar > 1:
            h /= self.sar
        else:
            w *= self.sar
        return (h, w) if self.orientation.transpose else (w, h)

    def fit_short_side(self, short_side: int) -> tuple[int, int]:
        """(width, height) with the short side at most ``short_side``, rounded half up from the exact ratio, never
        enlarged.
        """
        w, h = self.upright()
        scale = min(Fraction(1), short_side / min(w, h))
        return max(1, round_half_up(w * scale)), max(1, round_half_up(h * scale))


def geometry_of(frame: av.VideoFrame, stream: Any) -> Geometry:
    """Geometry of a decoded frame; the aspect ratio is the container's, else the codec's, else square."""
    for ratio in (stream.sample_aspect_ratio, stream.codec_context.sample_aspect_ratio):
        if ratio and ratio > 0:
            return Geometry(frame.width, frame.height, Fraction(ratio), orientation_of(frame))
    return Geometry(frame.width, frame.height, Fraction(1), orientation_of(frame))


def plane_array(plane: Any, width: int, height: int) -> np.ndarray:
    """A uint8 plane as a view (height, width), whatever its padding."""
    return np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)[:height, :width]


def halve(plane: np.ndarray) -> np.ndarray:
    """Means of 2 × 2 pixels, rounded half up, of a plane (h, w) or picture (h, w, c) uint8.

    An odd last row or column is left out.
    """
    h, w = plane.shape[0] // 2, plane.shape[1] // 2
    even = plane[: 2 * h, : 2 * w]
    return np.asarray(cv2.resize(even, (w, h), interpolation=cv2.INTER_AREA))


def resize(plane: np.ndarray, width: int, height: int) -> np.ndarray:
    """A plane (h, w) or picture (h, w, c) uint8 at (height, width), close to area scaling and several times faster.

    Linear while no side shrinks to 2/3 or less; to no less than a half, linear at twice the size asked for, then
    halved; by area below that.
    """
    h, w = plane.shape[:2]
    if (w, h) == (width, height):
        return plane
    if 2 * w < 3 * width and 2 * h < 3 * height:
        return np.asarray(cv2.resize(plane, (width, height), interpolation=cv2.INTER_LINEAR))
    if w <= 2 * width and h <= 2 * height:
        return halve(resize(plane, 2 * width, 2 * height))
    return np.asarray(cv2.resize(plane, (width, height), interpolation=cv2.INTER_AREA))


class Pyramid:
    """A plane or picture and its halves, each made when it is first asked for."""

    def __init__(self, plane: np.ndarray) -> None:
        self._levels = [plane]

    def scaled(self, width: int, height: int) -> np.ndarray:
        """At (height, width): halved while it has even sides and at least twice this size, the rest by `resize`."""
        return resize(self._smallest(width, height), width, height)

    def scaled_by(self, x: float, y: float) -> np.ndarray | None:
        """By factors whose result is no whole number of pixels: its last row and column then lie half outside. None
        where too much is left to shrink after halving for linear scaling to be near area scaling.
        """
        h, w = self._levels[0].shape[:2]
        level = self._smallest(max(1, round(w * x)), max(1, round(h * y)))
        fx, fy = x * w / level.shape[1], y * h / level.shape[0]
        if min(fx, fy) <= 2 / 3:
            return None
        more = 1 + 1e-9  # so that halves are rounded up
        return np.asarray(cv2.resize(level, None, fx=fx * more, fy=fy * more, interpolation=cv2.INTER_LINEAR))

    def sampled(self, width: int, height: int) -> np.ndarray:
        """At (height, width), each pixel the mean of four evenly spread samples where the plane is four times as large.

        A sample is bilinear, of four neighbours; most of the plane is never read, which costs more than adding it up.
        """
        plane = self._levels[0]
        if min(plane.shape[1] // width, plane.shape[0] // height) < 4:
            return self.scaled(width, height)
        return halve(cv2.resize(plane, (2 * width, 2 * height), interpolation=cv2.INTER_LINEAR))

    def _smallest(self, width: int, height: int) -> np.ndarray:
        """The smallest level reached over even sides that is at least this size."""
        level = 0
        while True:
            h, w = self._levels[level].shape[:2]
            if w < 2 * width or h < 2 * height or w % 2 or h % 2:
                return self._levels[level]
            level += 1
            if level == len(self._levels):
                self._levels.append(halve(self._levels[-1]))


@lru_cache(maxsize=32)
def yuv_to_rgb_matrix(colorspace: int, full_range: bool) -> np.ndarray:
    """3×4 float32 matrix from (Y, Cb, Cr) in 0…255 to RGB in 0…255. Source: ITU-T H.273, equations 38–40."""
    kr, kb = _KR_KB.get(colorspace, _BT601)
    kg = 1 - kr - kb
    ys, cs, y0 = (1.0, 1.0, 0.0) if full_range else (255 / 219, 255 / 224, 16.0)
    r_v, b_u = 2 * (1 - kr) * cs, 2 * (1 - kb) * cs
    g_u, g_v = -2 * (1 - kb) * kb / kg * cs, -2 * (1 - kr) * kr / kg * cs
    rows = np.array([[ys, 0, r_v], [ys, g_u, g_v], [ys, b_u, 0]])
    offset = -rows @ np.array([y0, 128.0, 128.0])
    return np.hstack([rows, offset[:, None]]).astype(np.float32)


_KEPT = threading.local()


def _reformatter() -> VideoReformatter:
    """This thread's swscale context: making one costs several times what converting a small picture does."""
    if not hasattr(_KEPT, "reformatter"):
        _KEPT.reformatter = VideoReformatter()
    found: VideoReformatter = _KEPT.reformatter
    return found


class Picture:
    """One decoded frame, asked for pictures of it. What is computed once is kept for the other consumers."""

    def __init__(self, frame: av.VideoFrame, geometry: Geometry) -> None:
        self._frame = frame
        self._geometry = geometry
        self._pyramids: tuple[Pyramid, ...] | None = None
        self._small: dict[tuple[str, int, int], np.ndarray] = {}

    @property
    def stored_size(self) -> tuple[int, int]:
        """(width, height) as stored."""
        return self._frame.width, self._frame.height

    @property
    def geometry(self) -> Geometry:
        """Geometry of the stream's first frame: all frames are scaled to what it gives."""
        return self._geometry

    @property
    def is_fast(self) -> bool:
        return self._frame.format.name in FAST_FORMATS

    @property
    def _is_full_range(self) -> bool:
        return int(self._frame.color_range) == _FULL_RANGE or self._frame.format.name.startswith("yuvj")

    def rgb(self, width: int, height: int) -> np.ndarray:
        """Upright RGB picture, uint8 (height, width, 3)."""
        turn = self._geometry.orientation
        w, h = (height, width) if turn.transpose else (width, height)
        return turn.apply(self._stored_rgb(w, h))

    def jpeg_planes(self, width: int, height: int) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Upright Y, Cb and Cr as JPEG stores them (BT.601, full range, 4:2:0), uint8: Y (height, width), Cb and Cr
        half of it rounded up. None where only the way through `rgb` is right: other matrices, other formats, turned
        pictures, pictures that keep their size, odd sizes that halving does not come near.
        """
        stored_w, stored_h = self.stored_size
        is_direct = (
            self.is_fast
            and int(self._frame.colorspace) not in _KR_KB
            and self._geometry.orientation == Orientation()
            and width < stored_w
            and height < stored_h
        )
        if not is_direct:
            return None
        y, u, v = self._planes()
        if any(side % 2 for side in (stored_w, stored_h, width, height)):
            cb, cr = (chroma.scaled_by(width / stored_w, height / stored_h) for chroma in (u, v))
        else:
            cb, cr = (chroma.scaled(width // 2, height // 2) for chroma in (u, v))
        if cb is None or cr is None:
            return None
        luma = y.scaled(width, height)
        if not self._is_full_range:
            luma = cv2.LUT(luma, _LIMITED_TO_FULL)
            cb, cr = (cv2.LUT(chroma, _LIMITED_TO_FULL_CHROMA) for chroma in (cb, cr))
        return luma, cb, cr

    def video_planes(self, width: int, height: int) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Upright Y, Cb and Cr of 4:2:0 video, uint8: Y (height, width), Cb and Cr half of it, in the frame's own
        matrix and range (`colour`). None where only the way through `rgb` is right: other formats, odd sides.
        """
        stored_w, stored_h = self.stored_size
        if not self.is_fast or any(side % 2 for side in (stored_w, stored_h, width, height)):
            return None
        turn = self._geometry.orientation
        w, h = (height, width) if turn.transpose else (width, height)
        y, u, v = self._planes()
        sizes = ((y, w, h), (u, w // 2, h // 2), (v, w // 2, h // 2))
        luma, cb, cr = (turn.apply(plane.scaled(*size)) for plane, *size in sizes)
        return luma, cb, cr

    @property
    def colour(self) -> tuple[int, bool]:
        """(AVColorSpace, full range?) of its planes; 2 (unspecified) is read as BT.601."""
        space = int(self._frame.colorspace)
        return (space if space in _KR_KB else UNSPECIFIED), self._is_full_range

    def small_rgb(self, width: int, height: int) -> np.ndarray:
        """Stretched small RGB picture in stored orientation, uint8 (height, width, 3), made from samples of large
        ones: for detectors, which look at every frame.
        """
        key = ("rgb", width, height)
        if key not in self._small:
            self._small[key] = self._to_rgb([p.sampled(width, height) for p in self._planes()])
        return self._small[key]

    def luma(self, width: int, height: int) -> np.ndarray:
        """Stretched luma picture in stored orientation, uint8 (height, width), 0 black … 255 white whatever the
        range.
        """
        key = ("luma", width, height)
        if key not in self._small:
            if self.is_fast:
                luma = self._planes()[0].scaled(width, height)
                if not self._is_full_range:
                    luma = cv2.LUT(luma, _LIMITED_TO_FULL)
                self._small[key] = luma
            else:
                self._small[key] = cv2.cvtColor(self._stored_rgb(width, height), cv2.COLOR_RGB2GRAY)
        return self._small[key]

    def _planes(self) -> tuple[Pyramid, ...]:
        """Pyramids of Y, Cb and Cr where the format is fast, else one of the RGB picture."""
        if self._pyramids is None:
            if self.is_fast:
                w, h = self.stored_size
                y, u, v = self._frame.planes
                cw, ch = (w + 1) // 2, (h + 1) // 2
                sizes = ((y, w, h), (u, cw, ch), (v, cw, ch))
                self._pyramids = tuple(Pyramid(plane_array(*plane)) for plane in sizes)
            else:
                self._pyramids = (Pyramid(self._full_rgb()),)
        return self._pyramids

    def _stored_rgb(self, width: int, height: int) -> np.ndarray:
        if self.is_fast and (width, height) == self.stored_size:
            return self._full_rgb()
        return self._to_rgb([p.scaled(width, height) for p in self._planes()])

    def _to_rgb(self, planes: list[np.ndarray]) -> np.ndarray:
        """RGB of scaled planes of one size; what is RGB already stays as it is."""
        if not self.is_fast:
            return planes[0]
        matrix = yuv_to_rgb_matrix(int(self._frame.colorspace), self._is_full_range)
        return np.asarray(cv2.transform(cv2.merge(planes), matrix))

    def _full_rgb(self) -> np.ndarray:
        """RGB at stored size through swscale, uint8 (h, w, 3); alpha dropped."""
        colorspace = _SWS_COLORSPACE.get(int(self._frame.colorspace))
        frame = _reformatter().reformat(self._frame, format="rgb24", src_colorspace=colorspace)
        w, h = self.stored_size
        return plane_array(frame.planes[0], w * 3, h).reshape(h, w, 3)
