"""Decoder identity: what this decode path makes of small clips, as a key. It enters every pass stage's fingerprint.

Not a version string: an upgrade that changes no pixel recomputes nothing, and laptop and cluster share results as long
as their pixels agree. The clips lie in workers/canaries: six frames of FFmpeg's test picture at 64 × 48, codec × bit
depth × range. They are data; encoding them again gives other bytes. Made with FFmpeg 5.1 (x264 core 164, x265) by

    ffmpeg -f lavfi -i testsrc2=size=64x48:rate=8:duration=0.75 OPTIONS -map_metadata -1 -fflags +bitexact \\
        -flags:v +bitexact -an NAME.mp4

with X264 = ``-c:v libx264 -preset veryslow -crf 24 -g 6 -bf 2`` and X265 = ``-c:v libx265 -preset slow -crf 24
-tag:v hvc1 -x265-params log-level=error:keyint=6:info=0`` and OPTIONS by NAME

    h264_8bit_limited    X264 -pix_fmt yuv420p -color_range tv -colorspace smpte170m
    h264_8bit_full       -vf scale=out_range=full X264 -pix_fmt yuvj420p -color_range pc -colorspace bt709
    h264_10bit_limited   X264 -pix_fmt yuv420p10le -color_range tv -colorspace bt709
    hevc_8bit_limited    X265 -pix_fmt yuv420p -color_range tv -colorspace bt709
    hevc_8bit_full       -vf scale=out_range=full X265:range=full -pix_fmt yuv420p -color_range pc -colorspace bt709
    hevc_10bit_limited   X265 -pix_fmt yuv420p10le -color_range tv -colorspace bt2020nc
"""

from __future__ import annotations

import functools
from pathlib import Path

from blake3 import blake3

from videoflow.errors import MediaError, SystemFailure
from videoflow.keys import KEY_CHARS, digest
from workers.decode import cached_pictures
from workers.jpeg import encode_picture

FOLDER = Path(__file__).parent / "canaries"
#: Short sides the pictures are asked for at: as stored, by a fraction, by a half. Each is scaled in another way.
SHORT_SIDES = (256, 36, 24)
#: Quality the JPEG encoder is tried at: the frame cache's default.
JPEG_QUALITY = 90
#: Sizes of small pictures, (width, height): sampled from a plane, scaled.
SMALL_SIZES = ((12, 9), (48, 27))


def canary_paths() -> list[Path]:
    """The clips, in order of name.

    Raises:
        SystemFailure: there are none, the installation is broken.
    """
    paths = sorted(FOLDER.glob("*.mp4"))
    if not paths:
        raise SystemFailure("workers/canaries holds no clips: the installation is incomplete, install videoflow again")
    return paths


@functools.cache
def decoder_identity() -> str:
    """Key of the pts, pixels (of every kind of picture a consumer may ask for) and JPEG bytes made of all canary clips;
    computed once a process.

    A clip this machine cannot decode counts as such, so that it never shares results with one that can.
    """
    return digest("decoder", [[path.stem, _digest_of(path)] for path in canary_paths()])


def _digest_of(path: Path) -> str:
    seen = blake3()
    try:
        for short_side in SHORT_SIDES:
            for pts, picture, size in cached_pictures(path, short_side=short_side):
                seen.update(f"{pts} {size}".encode())
                seen.update(picture.rgb(*size).tobytes())
                seen.update(encode_picture(picture, size, JPEG_QUALITY))
                for small in SMALL_SIZES:
                    seen.update(picture.small_rgb(*small).tobytes())
                    seen.update(picture.luma(*small).tobytes())
    except MediaError as e:
        return e.code
    return seen.hexdigest()[:KEY_CHARS]
