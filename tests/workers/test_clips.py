"""Clips: tiling, lengths and exact pts as properties; damage, windows and a manifest's intervals by example."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from videoflow.errors import RecipeError
from videoflow.stage import Item
from videoflow.store import schemas
from workers.clips import Clips, ClipsParams

KEY = "5" * 32
TB = Fraction(1, 1000)


def probe(
    pts: list[int], end: int, *, time_base: Fraction = TB, damage: tuple[tuple[int, int], ...] = ()
) -> dict[str, Any]:
    return {
        "stream": 0,
        "tb_num": time_base.numerator,
        "tb_den": time_base.denominator,
        "start_pts": pts[0] if pts else 0,
        "end_pts": end,
        "pts": pts,
        "damage": [{"t0_pts": a, "t1_pts": b} for a, b in damage],
    }


def item(
    probe_row: dict[str, Any], *, cuts: list[int] | None = None, scores: list[int] | None = None, **more: Any
) -> Item:
    rows: dict[str, Any] = {"probe": [probe_row]}
    if cuts is not None:
        rows["shots"] = [{"cuts": cuts, "scores": scores or [0] * len(probe_row["pts"])}]
    if "quality" in more:
        rows["quality"] = [more.pop("quality")]
    return Item(KEY, rows, **more)


def cut(work: Item, **params: Any) -> list[dict[str, Any]]:
    return [dict(row) for row in Clips(ClipsParams(**params)).process(work).rows]


def spans(rows: list[dict[str, Any]], state: str = "done") -> list[tuple[int, int]]:
    return [(r["t0_pts"], r["t1_pts"]) for r in rows if r["state"] == state]


def steady(count: int, step: int = 40, start: int = 0) -> tuple[list[int], int]:
    return [start + i * step for i in range(count)], start + count * step


@st.composite
def tracks(draw: st.DrawFn) -> tuple[list[int], int, list[int]]:
    """pts of a stream with any steps, its end, and cuts."""
    steps = draw(st.lists(st.integers(1, 2000), min_size=1, max_size=60))
    start = draw(st.integers(-5000, 5000))
    edges = [start]
    for step in steps:
        edges.append(edges[-1] + step)
    cuts = draw(st.lists(st.integers(1, len(steps)), unique=True, max_size=8)) if len(steps) > 1 else []
    return edges[:-1], edges[-1], sorted(c for c in cuts if c < len(steps))


@st.composite
def damage_of(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    edges = sorted(draw(st.lists(st.integers(-5000, 60_000), unique=True, max_size=6)))
    return tuple(pairwise(edges))[::2]


# ── shots ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(tracks(), st.sampled_from([0.3, 1.0, 2.5, 10.0]))
def test_clips_tile_the_shots_and_none_is_too_long(track: tuple[list[int], int, list[int]], max_seconds: float) -> None:
    pts, end, cuts = track
    rows = cut(item(probe(pts, end), cuts=cuts), min_seconds=0.1, max_seconds=max_seconds)
    edges = [*pts, end]
    assert [f for r in rows for f in range(r["first_frame"], r["last_frame"] + 1)] == list(range(len(pts)))
    for row in rows:
        assert row["t0_pts"] == edges[row["first_frame"]]
        assert row["t1_pts"] == edges[row["last_frame"] + 1]
        assert row["num_frames"] == row["last_frame"] - row["first_frame"] + 1
        length = (row["t1_pts"] - row["t0_pts"]) * TB
        assert length <= Fraction(str(max_seconds)) or row["num_frames"] == 1
        assert (row["state"] == "filtered") == (length < Fraction("0.1"))
        assert row["reason"] == ("too_short" if row["state"] == "filtered" else None)
        inside = [c for c in cuts if row["first_frame"] < c <= row["last_frame"]]
        assert inside == []
        assert row["shot"] == sum(c <= row["first_frame"] for c in cuts)


@given(tracks(), damage_of(), st.sampled_from(["shots", "windows", "sliding"]))
def test_no_clip_touches_damage_and_no_clean_frame_is_lost(
    track: tuple[list[int], int, list[int]], damage: tuple[tuple[int, int], ...], by: str
) -> None:
    pts, end, cuts = track
    stride = {"stride_seconds": 1.0} if by == "sliding" else {}
    rows = cut(item(probe(pts, end, damage=damage), cuts=cuts), by=by, min_seconds=0, window_seconds=2.0, **stride)
    for row in rows:
        assert not any(row["t0_pts"] < b and a < row["t1_pts"] for a, b in damage)
    covered = {f for r in rows for f in range(r["first_frame"], r["last_frame"] + 1)}
    assert covered == {i for i, p in enumerate(pts) if not any(a <= p < b for a, b in damage)}
    assert len({r["clip_key"] for r in rows}) == len(rows)


def test_long_shots_are_cut_into_near_equal_parts() -> None:
    """21 s at 25 fps with max 10 s: three parts of 7 s."""
    pts, end = steady(525)
    assert spans(cut(item(probe(pts, end), cuts=[]))) == [(0, 7000), (7000, 14_000), (14_000, 21_000)]


def test_one_part_more_where_frames_do_not_fit_the_limit() -> None:
    """20.02 s at 23.976 fps in halves of 10.01 s would be too long for 10: three parts."""
    time_base = Fraction(1, 24_000)
    pts = [1001 * i for i in range(480)]
    rows = cut(item(probe(pts, 480 * 1001, time_base=time_base), cuts=[]))
    assert [r["num_frames"] for r in rows] == [160, 160, 160]


def test_a_frame_longer_than_the_limit_stays_whole() -> None:
    assert spans(cut(item(probe([0, 40, 5040], 5080), cuts=[]), min_seconds=0, max_seconds=1.0)) == [
        (0, 40),
        (40, 5040),
        (5040, 5080),
    ]


def test_seconds_are_read_as_decimals() -> None:
    """0.3 s is 300 ms, not 299.99…: a shot of 300 ms is long enough."""
    assert spans(cut(item(probe([0, 100, 200], 300), cuts=[]), min_seconds=0.3)) == [(0, 300)]
    assert spans(cut(item(probe([0, 100, 199], 299), cuts=[]), min_seconds=0.3)) == []


def test_another_threshold_needs_no_pictures() -> None:
    pts, end = steady(50)
    scores = [0] * 50
    scores[20], scores[35] = 300, 700
    work = item(probe(pts, end), cuts=[35], scores=scores)
    assert spans(cut(work)) == [(0, 1400), (1400, 2000)]
    assert spans(cut(work, threshold=200)) == [(0, 800), (800, 1400), (1400, 2000)]


def test_a_clip_ends_where_damage_begins() -> None:
    """BUGS H02: packets 125…130 lost, 131…149 unsafe, at 30 fps; frame 124 is not shown until frame 150 comes."""
    pts = [i for i in range(300) if not 125 <= i < 131]
    rows = cut(item(probe(pts, 300, time_base=Fraction(1, 30), damage=((125, 150),)), cuts=[]))
    assert [(r["t0_pts"], r["t1_pts"], r["first_frame"], r["last_frame"]) for r in rows] == [
        (0, 125, 0, 124),
        (150, 300, 144, 293),
    ]


def test_damage_between_two_clean_frames_still_parts_them() -> None:
    rows = cut(item(probe([0, 40, 200, 240], 280, damage=((80, 200),)), cuts=[]), min_seconds=0)
    assert spans(rows) == [(0, 80), (200, 280)]


def test_without_the_shots_stage_the_message_says_what_to_do() -> None:
    with pytest.raises(RecipeError, match="add it to the recipe, or use by: windows"):
        cut(item(probe(*steady(5))))


# ── windows ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_windows_start_with_the_video_and_the_rest_may_be_too_short() -> None:
    rows = cut(item(probe(*steady(110, start=500))), by="windows", window_seconds=2.0)
    assert spans(rows) == [(500, 2500), (2500, 4500)]
    assert spans(rows, "filtered") == [(4500, 4900)]
    assert [r["shot"] for r in rows] == [0, 1, 2]


def test_sliding_windows_end_with_the_first_that_reaches_the_end() -> None:
    rows = cut(item(probe(*steady(100))), by="sliding", window_seconds=2.0, stride_seconds=1.0)
    assert spans(rows) == [(0, 2000), (1000, 3000), (2000, 4000)]


@pytest.mark.parametrize(
    "params",
    [
        {"min_seconds": 11},
        {"by": "windows", "min_seconds": 5},
        {"by": "sliding"},
        {"stride_seconds": 1},
        {"by": "windows", "threshold": 3},
        {"max_seconds": 0},
        {"by": "scenes"},
        {"length": 3},
    ],
)
def test_parameters_that_do_not_fit_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ClipsParams(**params)


def test_required_inputs() -> None:
    assert Clips().required_inputs() == ("probe", "shots")
    assert Clips(ClipsParams(by="windows")).required_inputs() == ("probe",)


# ── intervals of a manifest ──────────────────────────────────────────────────────────────────────────────────────────


def asked(probe_row: dict[str, Any], *intervals: tuple[str, str]) -> list[dict[str, Any]]:
    exact = tuple((Fraction(a), Fraction(b)) for a, b in intervals)
    return cut(item(probe_row, intervals=exact))


def test_intervals_take_the_place_of_shots() -> None:
    rows = asked(probe(*steady(100, start=10_000)), ("10", "10.4"), ("12.0004", "13"), ("10.1", "10.25"))
    assert spans(rows) == [(10_000, 10_400), (12_000, 13_000), (10_080, 10_240)]
    assert [r["segment"] for r in rows] == [0, 1, 2]
    assert [(r["first_frame"], r["last_frame"]) for r in rows] == [(0, 9), (50, 74), (2, 5)]


def test_an_interval_over_the_edge_is_what_lies_inside() -> None:
    assert spans(asked(probe(*steady(25, start=1000)), ("0", "1.2"), ("1.8", "99"))) == [(1000, 1200), (1800, 2000)]


def test_intervals_without_frames() -> None:
    rows = asked(probe(*steady(25, start=1000)), ("0", "0.9"), ("2", "3"), ("1.21", "1.22"), ("1.4", "1.2"), ("0", "1"))
    assert [r["reason"] for r in rows] == [
        "outside_video",
        "outside_video",
        "empty_interval",
        "empty_interval",
        "outside_video",
    ]
    assert {(r["state"], r["num_frames"], r["first_frame"], r["last_frame"]) for r in rows} == {("filtered", 0, -1, -1)}
    assert (rows[1]["t0_pts"], rows[1]["t1_pts"]) == (2000, 3000)


def test_intervals_with_damage_or_asked_twice_are_filtered() -> None:
    rows = asked(probe(*steady(100), damage=((1000, 1400),)), ("0", "1"), ("0.5", "1.04"), ("1.4", "2"), ("0", "1"))
    assert [r["reason"] for r in rows] == [None, "damaged", None, "duplicate_interval"]


def test_episodes_in_one_file_keep_their_frames() -> None:
    """BUGS H06: 40 episodes of 37 frames at 30000/1001, their seconds rounded to ms."""
    time_base = Fraction(1, 30_000)
    pts = [1001 * i for i in range(1480)]
    seconds = [str(round(37 * e * 1001 / 30_000, 3)) for e in range(41)]
    rows = asked(probe(pts, 1480 * 1001, time_base=time_base), *pairwise(seconds))
    assert [(r["first_frame"], r["last_frame"]) for r in rows] == [(37 * e, 37 * e + 36) for e in range(40)]


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_row_holds_what_the_schema_says() -> None:
    quality = {
        "pts": [0, 120, 240, 1000],
        "motion": [0.0, 0.5, 0.25, 1.0],
        "sharpness": [1.0, 2.0, 6.0, 9.0],
        "luma": [0.5, 0.5, 0.2, 1.0],
        "black": [0.0, 0.0, 0.0, 1.0],
    }
    rows = cut(item(probe(*steady(50)), cuts=[25], quality=quality))
    body = pa.schema([f for f in schemas.CLIPS if f.name not in {h.name for h in schemas.ARTIFACT_HEAD}])
    assert [list(r) for r in rows] == [body.names] * 2
    assert pa.Table.from_pylist(rows, schema=body).num_rows == 2
    assert rows[0]["motion"] == 0.375  # the first one was compared with a frame outside
    assert rows[0]["sharpness"] == 3.0
    assert rows[0]["luma"] == pytest.approx(0.4)
    assert rows[1]["motion"] is None
    assert rows[1]["black"] == 1.0
    assert (rows[1]["t0_us"], rows[1]["t1_us"]) == (1_000_000, 2_000_000)


def test_microseconds_are_the_floor() -> None:
    rows = cut(item(probe([0, 1001, 2002], 3003, time_base=Fraction(1, 30_000)), cuts=[1]), min_seconds=0)
    assert [(r["t0_us"], r["t1_us"]) for r in rows] == [(0, 33_366), (33_366, 100_100)]


def test_clip_key_is_that_of_content_and_interval_only() -> None:
    rows = cut(item(probe(*steady(25, start=80)), cuts=[]))
    text = json.dumps([KEY, 0, 80, 1080], separators=(",", ":"))
    assert rows[0]["clip_key"] == blake3(text.encode()).hexdigest()[:32]
    assert cut(item(probe(*steady(25, start=80))), by="windows")[0]["clip_key"] == rows[0]["clip_key"]


def test_the_digest_follows_the_cuts_and_not_the_scores() -> None:
    track = probe(*steady(100))
    stage = Clips()
    quality = {"pts": [0, 40], "motion": [0.0, 0.1], "sharpness": [1.0, 1.0], "luma": [0.1, 0.1], "black": [0.0, 0.0]}
    plain = stage.process(item(track, cuts=[50])).digest
    assert stage.process(item(track, cuts=[50], quality=quality)).digest == plain
    assert stage.process(item(track, cuts=[51])).digest != plain


def test_a_video_without_frames_gives_no_clips() -> None:
    assert cut(item(probe([], 0), cuts=[])) == []
