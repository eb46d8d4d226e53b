"""Every hard file that has audio: the cache holds what FFmpeg's own command line decodes, at the pts it tells."""

from __future__ import annotations

import re
import subprocess
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import read_tsv
from tests.workers.test_audio import ffmpeg_pcm, passed, runs_of
from videoflow.errors import MediaError
from videoflow.media.container import open_media
from videoflow.media.listener import choose_audio
from videoflow.media.sound import as_int16
from workers.audio import Audio, AudioParams

INDEX = read_tsv("INDEX.tsv")
NO_VIDEO = {"audio_only.mp4"}


def showinfo(path: Path, stream: int) -> list[tuple[int, int]]:
    """(pts, samples) of every audio frame, as FFmpeg's command line decodes it."""
    command = ["ffmpeg", "-v", "info", "-nostats", "-nostdin", "-threads", "1", "-copyts", "-i", str(path)]
    out = ["-map", f"0:{stream}", "-af", "ashowinfo", "-f", "null", "-"]
    told = subprocess.run([*command, *out], capture_output=True, check=True).stderr.decode("utf-8", "replace")
    return [(int(m[0]), int(m[1])) for m in re.findall(r"\bpts:(-?\d+) .*?nb_samples:(\d+)", told)]


@pytest.mark.parametrize("row", INDEX, ids=lambda r: r["file"])
def test_samples_and_places_are_those_of_ffmpeg(corpus: Path, row: dict[str, str]) -> None:
    path = corpus / row["file"]
    try:
        with open_media(path) as container:
            stream = choose_audio(container)
            if stream is None or path.name in NO_VIDEO:
                pytest.skip("no audio, or no video to go with it")
            index, rate = stream.index, int(stream.codec_context.sample_rate)
    except MediaError:
        pytest.skip("cannot be opened")
    rows, result = passed(path, Audio(AudioParams(rate=rate)))
    assert not result.failures
    decoder = result.facts.decoder
    start = decoder.tally.pts[0] * decoder.time_base
    frames, samples = showinfo(path, index), ffmpeg_pcm(path, rate=rate, channels=1, stream=f"0:{index}")[0]
    assert frames and sum(n for _, n in frames) == len(samples)
    length = max(first + got.shape[1] for first, got in runs_of(rows["audio"])) + rate
    # FFmpeg's frames, each at its own pts: what a piece's own time says may differ from where the one before ended by
    # a tick of the stream's clock, or by a millisecond of jitter; then it follows.
    with open_media(path) as container:
        tick = Fraction(container.streams[index].time_base)
    wanted, heard = np.zeros(length, np.int32), np.zeros(length, bool)
    end, at = None, 0
    for pts, count in frames:
        exact = (Fraction(pts, rate) - start) * rate
        jitter = max(tick * rate + 1, Fraction(rate, 1000))
        begin = end if end is not None and abs(exact - end) <= jitter else round(exact)
        cut = max(0, (end if end is not None else begin) - begin, -begin)
        if cut < count:
            low = begin + cut
            wanted[low : begin + count], heard[low : begin + count] = samples[at + cut : at + count], True
        end, at = max(begin + count, end or begin), at + count
    got, got_heard = np.zeros(length, np.int32), np.zeros(length, bool)
    for first, run in runs_of(rows["audio"]):
        got[first : first + run.shape[1]], got_heard[first : first + run.shape[1]] = as_int16(run)[0], True
    assert int(got_heard.sum()) == int(heard.sum())
    assert np.array_equal(got_heard, heard)
    assert np.abs(got - wanted).max() <= 4  # two ways to mix down and to round; float decoders of two FFmpegs
