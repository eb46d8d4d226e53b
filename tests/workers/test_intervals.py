"""Intervals decoded once more, at every offset, against one straight pass: hard files, and files made to be hard to seek."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import read_tsv
from videoflow.errors import MediaError
from videoflow.keys import digest_bytes
from videoflow.media.decoder import is_damaged, open_decoder
from videoflow.media.picture import plane_array
from videoflow.testing import make_barcode_video, read_barcode
from workers.decode import run_pass
from workers.intervals import IntervalReader, VideoFacts, is_clean, merged, nal_heads
from workers.probe import Probe, videos_row

FILES = [r["file"] for r in read_tsv("GRID.tsv")]
#: Files of the corpus whose every interval can be found from a keyframe, and some where nothing can be proved.
SEEKABLE = frozenset(
    {
        *(
            "cuts_bikes.mp4",
            "cuts_vfr_bikes.mp4",
            "rotate_180_phone_vfr.mp4",
            "start_at_10s_sar.mp4",
            "vp8_vorbis.webm",
        ),
        *("audio_starts_before_zero.mkv", "hdr_pq_hevc_10bit.mp4", "prores_422_10bit.mov", "open_gop_hevc.ts"),
        *("bug_inputs/keyframe_every_50.mp4", "alpha_vp9.webm", "no_duration.webm", "interlaced_tff_mpeg2.ts"),
    }
)
UNPROVED = frozenset({"mpeg4_mp3.avi", "mjpeg_pcm.avi", "theora_vorbis.ogv", "gif_30_frames.gif"})
MAX_OFFSETS = None if os.environ.get("VIDEOFLOW_LONG") else 24


def facts_of(path: Path) -> VideoFacts:
    result = run_pass(path, video_key="k", consumers=[Probe()], sink=lambda name, row: None)
    row, _ = videos_row(result.facts, result.summary)
    return VideoFacts.of({**row, "stream": result.facts.stream})


def content(frame: object) -> str:
    """Digest of a decoded frame's own planes, without their padding."""
    planes = frame.planes  # type: ignore[attr-defined]
    depth = 2 if "10" in frame.format.name else 1  # type: ignore[attr-defined]
    try:
        return digest_bytes(b"".join(plane_array(p, p.width * depth, p.height).tobytes() for p in planes))
    except ValueError:
        return digest_bytes(b"".join(bytes(p) for p in planes))


def straight(path: Path, stream: int) -> list[tuple[int, str]]:
    with open_decoder(path, stream) as decoder:
        return [(f.pts, content(f)) for f in decoder.frames()]


def offsets(num_frames: int) -> list[int]:
    step = 1 if MAX_OFFSETS is None else max(1, num_frames // MAX_OFFSETS)
    return sorted({*range(0, num_frames, step), num_frames - 1})


@pytest.mark.parametrize("name", FILES)
def test_every_offset_gives_the_frames_of_one_pass(corpus: Path, name: str) -> None:
    path = corpus / name
    facts = facts_of(path)
    golden = straight(path, facts.stream)
    from_start = seen = 0
    for first in offsets(len(golden)):
        reader = IntervalReader(path, facts)
        stop = min(first + 3, len(golden))
        if any(is_damaged(golden[i][0], facts.damage) for i in range(first, stop)):
            continue
        got = [(s.index, s.pts, content(s.picture._frame)) for s in reader.frames([(first, stop)])]
        assert got == [(i, *golden[i]) for i in range(first, stop)], first
        assert reader.intervals == 1
        from_start += reader.from_start
        seen += 1
    assert seen
    if name in SEEKABLE:
        assert from_start == 0
    if name in UNPROVED:
        assert from_start == seen - 1


def test_several_intervals_of_one_file_are_read_in_one_go(corpus: Path) -> None:
    path = corpus / "bug_inputs/keyframe_every_50.mp4"
    facts, spans = facts_of(path), [(3, 5), (40, 44), (60, 62), (190, 195), (249, 250)]
    golden = straight(path, facts.stream)
    reader = IntervalReader(path, facts)
    got = [(s.index, s.pts, content(s.picture._frame)) for s in reader.frames(spans)]
    assert got == [(i, *golden[i]) for a, b in spans for i in range(a, b)]
    assert (reader.intervals, reader.from_start) == (5, 0)
    # Keyframes at 0, 50, 100, 150 and 200: 0…61 in one run, then from 150 on, then from 200 on (and what B-frames need).
    assert reader.frames_decoded <= 62 + 45 + 50 + 12


X264 = ("-c:v", "libx264", "-preset", "veryfast", "-g", "15", "-bf", "3")
MADE: dict[str, tuple[str, tuple[str, ...], bool | None]] = {
    # name: (suffix, encoder options, whether a keyframe is found for every offset, or for none)
    "closed": (".mp4", X264, True),
    "open_gop": (".mp4", (*X264, "-x264-params", "open-gop=1"), None),
    "open_gop_mkv": (".mkv", (*X264, "-x264-params", "open-gop=1"), None),
    "ts": (".ts", X264, True),
    "flv": (".flv", X264, True),
    "fragments": (".mp4", (*X264, "-movflags", "frag_keyframe+empty_moov"), True),
    "late_start": (".mp4", (*X264, "-output_ts_offset", "7.3"), True),
    "mpeg2_open": (".ts", ("-c:v", "mpeg2video", "-g", "12", "-bf", "2", "-q:v", "2"), True),
    "mpeg4": (".mp4", ("-c:v", "mpeg4", "-g", "12", "-bf", "2", "-q:v", "2"), True),
    "hevc_open": (".mkv", ("-c:v", "libx265", "-x265-params", "keyint=20:open-gop=1:log-level=none"), True),
    "avi": (".avi", ("-c:v", "mpeg4", "-g", "12", "-q:v", "2"), False),
}


@pytest.mark.parametrize("name", MADE)
def test_made_files_show_their_numbers_at_every_offset(tmp_path: Path, name: str) -> None:
    suffix, codec, is_seekable = MADE[name]
    path = make_barcode_video(tmp_path / f"{name}{suffix}", num_frames=80, codec=codec)
    check_numbers(path, 80, lambda n: is_seekable is None or (n == 0) == is_seekable)


@pytest.mark.parametrize("name", ["no_cues.mkv", "no_index.avi", "cut_off.ts"])
def test_files_without_an_index(tmp_path: Path, name: str) -> None:
    whole = make_barcode_video(tmp_path / f"whole{Path(name).suffix}", num_frames=80, codec=("-bf", "0", *X264[:-2]))
    path = tmp_path / name
    if name == "no_cues.mkv":  # what cannot seek back writes no cues and no duration
        command = ["ffmpeg", "-v", "error", "-i", str(whole), "-c", "copy", "-f", "matroska", "pipe:1"]
        path.write_bytes(subprocess.run(command, capture_output=True, check=True).stdout)
    else:
        data = whole.read_bytes()
        end = data.rindex(b"idx1") if name == "no_index.avi" else len(data) - 188 * 3 - 77
        path.write_bytes(data[:end])
    check_numbers(path, 70, lambda n: True)


def check_numbers(path: Path, least: int, counts: Callable[[int], bool]) -> None:
    facts = facts_of(path)
    assert len(facts.pts) >= least
    from_start = 0
    for first in range(0, least):
        reader, stop = IntervalReader(path, facts), min(first + 2, len(facts.pts))
        shown = [(s.index, s.pts, read_barcode(s.picture.rgb(128, 64))) for s in reader.frames([(first, stop)])]
        assert shown == [(i, facts.pts[i], i) for i in range(first, stop)]
        from_start += reader.from_start
    assert counts(from_start)


def test_another_file_in_the_same_place_is_told(tmp_path: Path) -> None:
    facts = facts_of(make_barcode_video(tmp_path / "a.mp4", num_frames=80, codec=X264))
    other = make_barcode_video(tmp_path / "b.mp4", num_frames=80, codec=(*X264, "-video_track_timescale", "1000"))
    with pytest.raises(MediaError, match="is it the same file"):
        list(IntervalReader(other, facts).frames([(20, 30)]))


def test_merged_ranges() -> None:
    assert merged([(5, 9), (0, 3), (3, 5), (12, 14), (13, 20)]) == [(0, 9), (12, 20)]
    assert merged([]) == []


def test_units_behind_lengths_and_start_codes() -> None:
    avcc = bytes([1, 100, 0, 10, 0xFF])  # lengths of four bytes
    data = b"\0\0\0\2\x06\x99" + b"\0\0\0\3\x65\1\2"
    assert list(nal_heads(data, avcc, is_hevc=False)) == [0x06, 0x65]
    assert list(nal_heads(b"\0\0\0\1\x09\xf0\0\0\1\x41\7", b"", is_hevc=False)) == [0x09, 0x41]
    context = type("Context", (), {"name": "h264", "extradata": avcc})
    assert is_clean(data, context) and not is_clean(b"\0\0\0\2\x41\x99", context)
    assert not is_clean(b"\0\0\0\2\x06\x05", context)  # a message, no picture
