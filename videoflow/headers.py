"""What an earlier pass learned of a video, for a pass that only hears it: its stream, time base and first shown pts."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from videoflow.plan import Plan, VideoSource
from videoflow.recipe import PROBE
from videoflow.stage import PassConsumer, VideoHeader
from videoflow.store.reader import rows_of
from videoflow.unit import StageWork

_COLUMNS = ("video_key", "stream", "tb_num", "tb_den", "start_pts")


def known_headers(plan: Plan, works: Sequence[StageWork], videos: Sequence[VideoSource]) -> dict[str, VideoHeader]:
    """Headers by video key; none where one of the stages must see pictures, or no earlier pass has ended."""
    probe = plan.named(PROBE)
    if probe is None or not videos or any(not isinstance(w.stage, PassConsumer) or w.stage.sees for w in works):
        return {}
    keys = [plan.pass_key(probe, v.video_key) for v in videos]
    rows = rows_of(plan.root, plan.parts(probe), keys, columns=_COLUMNS).to_pylist()
    return {
        r["video_key"]: VideoHeader(r["video_key"], r["stream"], Fraction(r["tb_num"], r["tb_den"]), r["start_pts"])
        for r in rows
    }
