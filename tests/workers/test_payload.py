"""The payload stage's parameters, grid and encoder, on frames made here."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import av
import numpy as np
import pytest
from pydantic import ValidationError

from videoflow.media.picture import Geometry, Orientation, Picture, orientation_from
from videoflow.stage import ShownFrame, SourceClip
from videoflow.store.blobs import iter_records
from workers.h264 import H264Encoder
from workers.intervals import nal_heads
from workers.payload import Payload, PayloadParams


def clip(pts: tuple[int, ...], t1: int) -> SourceClip:
    return SourceClip("c" * 32, "v" * 32, 0, Fraction(1, 1000), 0, pts[0], t1, pts)


def picture(t: int, size: tuple[int, int]) -> Picture:
    w, h = size
    x, y = np.meshgrid(np.arange(w), np.arange(h))
    rgb = np.stack([(x * 3 + 10 * t) % 200, (y * 5) % 220, (x + y + t) % 180], axis=2).astype(np.uint8)
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(rgb), format="rgb24")
    return Picture(frame, Geometry(w, h, Fraction(1), Orientation()))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"fps": "often"}, "fps"),
        ({"fps": 0}, "above 0"),
        ({"codec": "jpeg", "crf": 20}, "crf does not go with codec jpeg"),
        ({"quality": 80}, "quality does not go with codec h264"),
        ({"preset": "placebo"}, "preset"),
        ({"count": 0}, "count"),
        ({"bitrate": 5}, "bitrate"),
    ],
)
def test_parameters_that_cannot_be(params: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PayloadParams.model_validate(params)


def test_defaults_are_those_of_the_codec_and_the_choice_is_no_part_of_it() -> None:
    h264, jpeg = (
        Payload(PayloadParams.model_validate({"codec": c, "where": "x > 1"})).params for c in ("h264", "jpeg")
    )
    assert (h264.crf, h264.preset, h264.quality) == (18, "veryfast", None)
    assert (jpeg.crf, jpeg.preset, jpeg.quality) == (None, None, 90)
    assert "where" not in h264.model_dump() and h264.where == "x > 1"


def test_frames_are_those_of_the_grid_once_each() -> None:
    shown = clip((100, 140, 180, 300, 310, 320), t1=400)
    assert Payload().wanted(shown) == (100, 140, 180, 300, 310, 320)
    at_10 = Payload(PayloadParams.model_validate({"fps": 10}))
    assert at_10.wanted(shown) == [100, 180, 300]  # at 100, 200 and 300 ms
    at_25 = Payload(PayloadParams.model_validate({"fps": 25}))  # at 120, 160, 200, 240, 280, 320, 360 ms
    assert at_25.wanted(shown) == [100, 140, 180, 320]
    assert at_25.wanted(clip((125,), t1=150)) == []


@pytest.mark.parametrize("size", [(64, 48), (33, 17), (2, 2)])
def test_groups_are_closed_of_fixed_length_and_the_same_every_time(size: tuple[int, int]) -> None:
    made = []
    for _ in range(2):
        encoder = H264Encoder(size, rate=Fraction(30), crf=18, preset="veryfast", gop=5)
        packets = [p for t in range(13) for p in encoder.encode(picture(t, size))] + encoder.flush()
        made.append(packets)
    assert made[0] == made[1] and len(made[0]) == 13
    kinds = [{unit & 0x1F for unit in nal_heads(p, b"", is_hevc=False)} for p in made[0]]
    assert [7 in k and 8 in k and 5 in k for k in kinds] == [t % 5 == 0 for t in range(13)]
    assert all(1 in k and 5 not in k for t, k in enumerate(kinds) if t % 5)
    decoder = av.CodecContext.create("h264", "r")
    frames = [f for p in made[0][10:] for f in decoder.decode(av.Packet(p))] + decoder.decode(None)
    assert len(frames) == 3
    w, h = size
    for t, frame in zip((10, 11, 12), frames, strict=True):
        assert (frame.width, frame.height) == (w + w % 2, h + h % 2)
        gray = frame.to_ndarray(format="gray")[:h, :w].astype(int)
        want = (
            av.VideoFrame.from_ndarray(picture(t, size).rgb(w, h), format="rgb24").to_ndarray(format="gray").astype(int)
        )
        assert np.abs(gray - want).mean() < 16 + 4  # limited against full range, and the codec's own loss


@pytest.mark.parametrize("codec", ["h264", "jpeg"])
def test_a_clips_row_explains_itself(codec: str) -> None:
    stage = Payload(PayloadParams.model_validate({"codec": codec, "gop": 4, "short_side": 32, "fps": 10}))
    source = clip(tuple(range(0, 1000, 50)), t1=1000)
    maker, wanted = stage.open(source), stage.wanted(source)
    for pts in wanted:
        maker.see(ShownFrame(pts // 50, pts, pts + 50, picture(pts // 50, (64, 48))))
    product_ = maker.finish()
    (row,) = product_.rows
    assert (row["n"], row["width"], row["height"], row["codec"], row["gop"]) == (10, 43, 32, codec, 4)
    assert (row["fps_num"], row["fps_den"], row["first_grid"], row["grid_count"]) == (10, 1, 0, 10)
    assert [r.pts for r in iter_records(row["data"])] == row["pts"] == list(wanted) == list(range(0, 1000, 100))
    assert len(row["offsets"]) == 11 and row["offsets"][-1] == len(row["data"])


def test_orientations_come_back_from_the_videos_row() -> None:
    for turn in (Orientation(*flags) for flags in product((False, True), repeat=3)):
        assert orientation_from(turn.degrees, turn.mirrored) == turn
