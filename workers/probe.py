"""The videos row: what a video is, as measured by the decode pass, not as its header claims.

`Probe` is a consumer that looks at no picture; the pass hands it its own facts when it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, ClassVar

import av
import pyarrow as pa

from videoflow.keys import digest
from videoflow.media.decoder import is_damaged
from videoflow.stage import Margin, PassConsumer, Product, ShownFrame, VideoHeader, VideoSummary
from videoflow.store import schemas
from videoflow.timeline import is_vfr, lower_median, pts_to_us, round_half_up, steps_of
from workers.canary import decoder_identity
from workers.decode import PassFacts

#: Names of AVColorRange, AVColorSpace, AVColorTransferCharacteristic, AVColorPrimaries as ITU-T H.273 numbers them.
_RANGE = {1: "limited", 2: "full"}
_SPACE = {
    0: "rgb",
    1: "bt709",
    4: "fcc",
    5: "bt470bg",
    6: "smpte170m",
    7: "smpte240m",
    8: "ycgco",
    9: "bt2020nc",
    10: "bt2020c",
}
_TRANSFER = {
    1: "bt709",
    4: "gamma22",
    5: "gamma28",
    6: "smpte170m",
    8: "linear",
    13: "srgb",
    14: "bt2020-10",
    16: "pq",
    18: "hlg",
}
_PRIMARIES = {1: "bt709", 4: "bt470m", 5: "bt470bg", 6: "smpte170m", 9: "bt2020", 12: "p3"}
HDR_TRANSFERS = frozenset({"pq", "hlg"})


class Probe(PassConsumer):
    """Facts of the video; every pass of a recipe begins with it."""

    name: ClassVar[str] = "probe"
    version: ClassVar[int] = 1
    table: ClassVar[str] = "videos"

    def schema(self) -> pa.Schema:
        return schemas.VIDEOS

    def identity(self) -> dict[str, str]:
        return {"decoder": decoder_identity()}

    def begin(self, video: VideoHeader) -> None:
        self._video = video

    def see(self, frame: ShownFrame) -> None:
        return None

    def finish(self, summary: VideoSummary) -> Product:
        return Product()  # the row is made by `videos_row` from the pass's facts

    def margin(self) -> Margin:
        """Its row is joined by `workers.parts`, from what the passes over the windows learned."""
        return Margin()

    def join(self, parts: Sequence[Product]) -> Product:
        """As in `finish`."""
        return Product()


def videos_row(facts: PassFacts, summary: VideoSummary) -> tuple[dict[str, Any], str]:
    """The videos row without head columns, and its digest (pts, damage and geometry: integers only)."""
    assert facts.decoder is not None
    tally = facts.decoder.tally
    counts = {
        "num_packets": tally.num_packets,
        "dropped_frames": tally.dropped_frames,
        "size_changes": facts.size_changes,
    }
    return measured_row({**header_columns(facts), **counts}, facts.stream, tally.pts, summary)


def header_columns(facts: PassFacts) -> dict[str, Any]:
    """What the container and the first frame say."""
    assert facts.decoder is not None and facts.geometry is not None
    decoder, geometry = facts.decoder, facts.geometry
    upright = [round_half_up(x) for x in geometry.upright()]
    first = facts.first
    return {
        "container": facts.container,
        **facts.codec,
        "width": geometry.width,
        "height": geometry.height,
        "sar_num": geometry.sar.numerator,
        "sar_den": geometry.sar.denominator,
        "rotation": geometry.orientation.degrees,
        "mirrored": geometry.orientation.mirrored,
        "upright_width": upright[0],
        "upright_height": upright[1],
        "color_range": "full" if facts.codec["pix_fmt"].startswith("yuvj") else _RANGE.get(first["range"]),
        "color_space": _SPACE.get(first["space"]),
        "color_transfer": _TRANSFER.get(first["transfer"]),
        "color_primaries": _PRIMARIES.get(first["primaries"]),
        "hdr": _TRANSFER.get(first["transfer"]) in HDR_TRANSFERS,
        "interlaced": first["interlaced"],
        "tb_num": decoder.time_base.numerator,
        "tb_den": decoder.time_base.denominator,
        "header_frames": decoder.header_frames,
        "audio_streams": facts.audio,
    }


def measured_row(
    columns: dict[str, Any], stream: int, pts: list[int], summary: VideoSummary
) -> tuple[dict[str, Any], str]:
    """The whole row and its digest: the given columns, and what follows from the pts of all shown frames."""
    tb = Fraction(columns["tb_num"], columns["tb_den"])
    steps = steps_of(pts)
    row = {
        **columns,
        "start_pts": pts[0],
        "last_pts": pts[-1],
        "end_pts": summary.end_pts,
        "duration_us": pts_to_us(summary.end_pts, tb) - pts_to_us(pts[0], tb),
        "fps": float(1 / (lower_median(steps) * tb)) if steps else None,
        "vfr": is_vfr(pts, tb),
        "num_frames": len(pts),
        "num_clean_frames": sum(not is_damaged(p, summary.damage) for p in pts),
        "damage": [{"t0_pts": a, "t1_pts": b} for a, b in summary.damage],
        "pts": pts,
    }
    key = digest(
        "videos", stream, tb.numerator, tb.denominator, summary.end_pts, pts, [list(d) for d in summary.damage]
    )
    return row, key


def software() -> dict[str, str]:
    """Versions of what decodes, recorded beside each unit (they are no part of a fingerprint)."""
    return {"pyav": av.__version__, **{k: ".".join(map(str, v)) for k, v in av.library_versions.items()}}
