"""Sound in a version: where the samples of every clip lie in the audio cache, as columns of their own.

Samples of a video are numbered from its first shown pts on, at the audio cache's rate; a clip's row holds the runs that
share a sample with it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import pyarrow as pa

from videoflow.store import schemas
from videoflow.store.layout import Root
from videoflow.store.reader import PART, ROW_ID, rows_of

#: Videos whose runs are looked up at once.
VIDEOS_AT_ONCE = 500
SOUND_SCORES = ("loudness", "silence", "speech")
#: Steps of stage sound a second, and how many of them a window of momentary loudness is long.
STEPS, WINDOW_STEPS = 10, 4
GATE_LUFS, GATE_LU = -70.0, 10.0
FULL_SCALE = 32768
#: A step is silent whose peak is at most this: ``noise`` = -60 dB of FFmpeg's silencedetect.
SILENCE_DB = -60.0
#: The voice detector's windows, and from which probability on it says speech (silero-vad's own default).
SPEECH_WINDOW, SPEECH_THRESHOLD = Fraction(512, 16_000), 0.5
_ROW_COLUMNS = ("item_key", "video_key", "first_samples", "counts", "offsets")
_CLIP_COLUMNS = ("video_key", "t0_pts", "t1_pts", "tb_num", "tb_den", "start_pts")


def sample_span(clip: Mapping[str, Any], rate: int) -> tuple[int, int]:
    """Numbers of the samples, [first, last), that a clip's row may need: none before t0 is left out, none begins at t1.

    Args:
        clip: its ``t0_pts``, ``t1_pts``, ``tb_num``, ``tb_den`` and ``start_pts``.
    """
    per_pts = Fraction(clip["tb_num"], clip["tb_den"]) * rate
    first, last = ((clip[name] - clip["start_pts"]) * per_pts for name in ("t0_pts", "t1_pts"))
    return math.floor(first), math.ceil(last)


def with_audio(
    table: pa.Table, root: Root, parts: Sequence[str], item_keys: Mapping[str, str], *, rate: int, channels: int
) -> pa.Table:
    """A version's rows with the columns ``audio``, ``audio_rate`` and ``audio_channels``.

    Args:
        parts: of the audio table. item_keys: a video's item in it, by video key.
    """
    clips = table.select(_CLIP_COLUMNS).to_pylist()
    found: list[list[dict[str, int]]] = []
    for first, stop in _turns([clip["video_key"] for clip in clips]):
        some = clips[first:stop]
        wanted = [item_keys[key] for key in dict.fromkeys(clip["video_key"] for clip in some) if key in item_keys]
        runs = _runs_of(root, parts, wanted)
        found += [_refs(runs.get(clip["video_key"], []), *sample_span(clip, rate)) for clip in some]
    columns = {
        "audio": pa.array(found, pa.list_(schemas.SOUND_REF)),
        "audio_rate": pa.array([rate] * len(table), pa.int32()),
        "audio_channels": pa.array([channels] * len(table), pa.int32()),
    }
    for name in schemas.VERSION_AUDIO:
        table = table.append_column(name, columns[name.name])
    return table


def sound_scores(
    clips: pa.Table, root: Root, parts: Sequence[str], item_keys: Mapping[str, str]
) -> dict[str, dict[str, float | None]]:
    """What stage sound measured, pooled onto clips: ``loudness``, ``silence`` and ``speech``, by clip key.

    Args:
        clips: with their keys and pts, by video. parts: of the sound table. item_keys: a video's item in it, by video
            key. Clips of videos without sound have no scores.
    """
    scores: dict[str, dict[str, float | None]] = {name: {} for name in SOUND_SCORES}
    rows = clips.select(["clip_key", *_CLIP_COLUMNS]).to_pylist()
    for first, stop in _turns([clip["video_key"] for clip in rows]):
        wanted = {item_keys[c["video_key"]] for c in rows[first:stop] if c["video_key"] in item_keys}
        found = {row["video_key"]: row for row in rows_of(root, parts, wanted).to_pylist()}
        for clip in (c for c in rows[first:stop] if c["video_key"] in found):
            for name, value in pooled(clip, found[clip["video_key"]]).items():
                scores[name][clip["clip_key"]] = value
    return scores


def pooled(clip: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, float | None]:
    """A clip's scores from its video's row of the sound table."""
    time_base = Fraction(clip["tb_num"], clip["tb_den"])
    t0, t1 = ((clip[name] - clip["start_pts"]) * time_base for name in ("t0_pts", "t1_pts"))
    values = (_loudness(row, t0, t1), _silence(row, t0, t1), _speech(row, t0, t1))
    return dict(zip(SOUND_SCORES, values, strict=True))


def _loudness(row: Mapping[str, Any], t0: Fraction, t1: Fraction) -> float | None:
    """Integrated loudness in LUFS of [t0, t1): the 400 ms windows that lie inside, gated at -70 LUFS and then at 10 LU
    below the mean of what is left. None where nothing passes. Source: ITU-R BS.1770-4, annex 1.
    """
    first, stop = math.ceil(t0 * STEPS) + WINDOW_STEPS - 1, math.floor(t1 * STEPS)
    kept = [m for m in row["loudness"][first:stop] if m > GATE_LUFS]
    if kept:
        gate = _mean_loudness(kept) - GATE_LU
        kept = [m for m in kept if m > gate]
    return _mean_loudness(kept) if kept else None


def _mean_loudness(values: Sequence[float]) -> float:
    return 10 * math.log10(math.fsum(10 ** (m / 10) for m in values) / len(values))


def _silence(row: Mapping[str, Any], t0: Fraction, t1: Fraction) -> float | None:
    """Share of the steps of [t0, t1) that are silent, holes and what lies behind the sound's end included."""
    first, stop = math.ceil(t0 * STEPS), math.floor(t1 * STEPS)
    if stop <= first:
        return None
    loud = FULL_SCALE * 10 ** (SILENCE_DB / 20)
    return 1 - sum(peak > loud for peak in row["peak"][first:stop]) / (stop - first)


def _speech(row: Mapping[str, Any], t0: Fraction, t1: Fraction) -> float | None:
    """Share of the detector's windows in [t0, t1) that it takes for speech."""
    first, stop = math.ceil(t0 / SPEECH_WINDOW), math.floor(t1 / SPEECH_WINDOW)
    if row["speech"] is None or stop <= first:
        return None
    return sum(p >= SPEECH_THRESHOLD for p in row["speech"][first:stop]) / (stop - first)


def _turns(videos: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Ranges of rows that hold at most VIDEOS_AT_ONCE videos each; a video's rows lie side by side."""
    first, seen = 0, set[str]()
    for i, key in enumerate(videos):
        if key not in seen and len(seen) == VIDEOS_AT_ONCE:
            yield first, i
            first, seen = i, set()
        seen.add(key)
    if len(videos) > first:
        yield first, len(videos)


def _runs_of(root: Root, parts: Sequence[str], item_keys: Sequence[str]) -> dict[str, list[dict[str, int]]]:
    """Every run of some videos as a reference, by video key, in order."""
    table = rows_of(root, parts, item_keys, columns=_ROW_COLUMNS, with_row_ids=True)
    found: dict[str, list[dict[str, int]]] = {}
    for row in table.to_pylist():
        offsets = row["offsets"]
        for i, (first, count) in enumerate(zip(row["first_samples"], row["counts"], strict=True)):
            place = {"part": row[PART], "row_id": row[ROW_ID], "offset": offsets[i]}
            run = {**place, "length": offsets[i + 1] - offsets[i], "first": first, "count": count}
            found.setdefault(row["video_key"], []).append(run)
    for runs in found.values():
        runs.sort(key=lambda run: run["first"])
    return found


def _refs(runs: Sequence[dict[str, int]], first: int, last: int) -> list[dict[str, int]]:
    """The runs that share a sample with [first, last); they do not overlap each other."""
    at = max(0, bisect_right(runs, first, key=lambda run: run["first"]) - 1)
    near = runs[at : bisect_right(runs, last - 1, key=lambda run: run["first"])]
    return [run for run in near if run["first"] < last and run["first"] + run["count"] > first]
