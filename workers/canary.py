"""Decoder identity: what this decode path makes of small clips, as a key. It enters every pass stage's fingerprint.

Not a version string: an upgrade that changes no pixel recomputes nothing, and laptop and cluster share results as long
as their pixels agree. The clips lie in workers/canaries: six frames of FFmpeg's test picture at 64 × 48, codec × pixel
format × range. They are data; encoding them again gives other bytes. Made with FFmpeg 5.1 (x264 core 164, x265, libvpx,
libaom) by

    ffmpeg -f lavfi -i testsrc2=size=64x48:rate=8:duration=0.75 OPTIONS -map_metadata -1 -fflags +bitexact \\
        -flags:v +bitexact -an NAME

with X264 = ``-c:v libx264 -preset veryslow -crf 24 -g 6 -bf 2`` and X265 = ``-c:v libx265 -preset slow -crf 24
-tag:v hvc1 -x265-params log-level=error:keyint=6:info=0`` and OPTIONS by NAME

    h264_8bit_limited    X264 -pix_fmt yuv420p -color_range tv -colorspace smpte170m
    h264_8bit_full       -vf scale=out_range=full X264 -pix_fmt yuvj420p -color_range pc -colorspace bt709
    h264_10bit_limited   X264 -pix_fmt yuv420p10le -color_range tv -colorspace bt709
    hevc_8bit_limited    X265 -pix_fmt yuv420p -color_range tv -colorspace bt709
    hevc_8bit_full       -vf scale=out_range=full X265:range=full -pix_fmt yuv420p -color_range pc -colorspace bt709
    hevc_10bit_limited   X265 -pix_fmt yuv420p10le -color_range tv -colorspace bt2020nc
    h264_8bit_422, _444  X264 -pix_fmt yuv422p (yuv444p) -color_range tv -colorspace bt709
    vp9_8bit_limited     -c:v libvpx-vp9 -crf 30 -b:v 0 -g 6 -pix_fmt yuv420p -color_range tv -colorspace bt709
    vp9_10bit_limited    the same with -profile:v 2 -pix_fmt yuv420p10le
    av1_8bit_limited     -c:v libaom-av1 -crf 30 -b:v 0 -g 6 -cpu-used 6 -pix_fmt yuv420p -color_range tv
                         -colorspace bt709
    av1_10bit_limited    the same with -pix_fmt yuv420p10le
    vp8_8bit_limited     -c:v libvpx -crf 10 -b:v 400k -g 6 -pix_fmt yuv420p
    mpeg2_8bit_limited   -c:v mpeg2video -q:v 4 -g 6 -bf 2 -pix_fmt yuv420p
    mpeg4_8bit_limited   -c:v mpeg4 -q:v 4 -g 6 -bf 2 -pix_fmt yuv420p
    mjpeg_8bit_422_full  -c:v mjpeg -q:v 5 -pix_fmt yuvj422p
    prores_10bit_422     -c:v prores_ks -profile:v 2 -q:v 20 -pix_fmt yuv422p10le
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
SUFFIXES = frozenset({".mp4", ".mov", ".mkv", ".webm"})
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
    paths = sorted(p for p in FOLDER.glob("*.*") if p.suffix in SUFFIXES)
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
