"""Sound identity: what this machine's decoders, resampler and FLAC coder make of small clips, as a key. It enters the
fingerprint of stage audio, as `workers.canary` does for pictures; float decoders may differ in the last bit between kinds
of processors, and then their results are kept apart.

The clips lie in workers/canaries: 0.4 s of two sweeps and noise. They are data; encoding them again gives other bytes.
Made with FFmpeg 5.1 by

    ffmpeg -f lavfi -i "aevalsrc='0.4*sin(2*PI*(200+1500*t)*t)+0.2*random(0)-0.1|0.4*sin(2*PI*(900-600*t)*t)':s=44100:d=0.4" \\
        OPTIONS -map_metadata -1 -fflags +bitexact -flags:a +bitexact NAME

with OPTIONS by NAME

    aac_44k_stereo.m4a     -c:a aac -b:a 96k
    mp3_44k_stereo.mp3     -c:a libmp3lame -b:a 96k
    opus_48k_stereo.mka    -c:a libopus -b:a 48k
    vorbis_44k_stereo.mka  -c:a libvorbis -q:a 2
    ac3_48k_51.mka         -ac 6 -ar 48000 -c:a ac3 -b:a 192k
    flac_44k_24bit.mka     -ac 1 -c:a flac -sample_fmt s32 -bits_per_raw_sample 24
"""  # noqa: E501 (a command line)

from __future__ import annotations

import functools
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
from blake3 import blake3

from videoflow.errors import MediaError, SystemFailure
from videoflow.keys import KEY_CHARS, digest
from videoflow.media.container import open_media
from videoflow.media.listener import Listener, choose_audio
from videoflow.media.sound import as_int16, encode_flac
from workers.canary import FOLDER
from workers.sound_line import Piece, SoundLine

SUFFIXES = frozenset({".m4a", ".mp3", ".mka"})
#: Rates and channels the clips are asked for at.
WANTED = ((16_000, 1), (48_000, 2))


@functools.cache
def sound_identity() -> str:
    """Key of the FLAC bytes made of all clips; computed once a process. A clip that this machine cannot decode counts
    as such.

    Raises:
        SystemFailure: there are no clips, the installation is broken.
    """
    paths = sorted(p for p in FOLDER.glob("*.*") if p.suffix in SUFFIXES)
    if not paths:
        raise SystemFailure("workers/canaries holds no sound: the installation is incomplete, install videoflow again")
    return digest("sound", [[path.stem, _digest_of(path)] for path in paths])


def _digest_of(path: Path) -> str:
    seen = blake3()
    try:
        for rate, channels in WANTED:
            pieces = list(line_of(path, rate=rate, channels=channels))
            seen.update(repr([(p.first, p.samples.shape[1]) for p in pieces[:1]]).encode())
            seen.update(encode_flac(as_int16(np.concatenate([p.samples for p in pieces], axis=1)), rate))
    except MediaError as e:
        return e.code
    return seen.hexdigest()[:KEY_CHARS]


def line_of(path: str | Path, *, rate: int, channels: int, start: Fraction = Fraction(0)) -> Iterator[Piece]:
    """The first audio stream of a file as `SoundLine` places it; ``start``: its time zero in seconds of stream time.

    Raises:
        MediaError: it cannot be opened.
    """
    line = SoundLine(start=start, rate=rate, channels=channels)
    with open_media(path) as container:
        stream = choose_audio(container)
        if stream is None:
            return
        listener = Listener(stream)
        for packet in container.demux(stream):
            for sound in listener.decode(packet):
                yield from line.add(sound)
    yield from line.end()
