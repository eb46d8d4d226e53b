"""Loader options of every wrong kind: one line that names the option, before anything is read or started."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest

from videoflow.errors import LoaderError, StateMismatch

torch = pytest.importorskip("torch")

from videoflow.loader import Loader  # noqa: E402
from videoflow.loader.options import check_batch  # noqa: E402

GOOD: dict[str, Any] = {"batch_size": 4, "frames": 4, "fps": 4, "epochs": 1}
NO_NUMBERS = ["4", True, np.True_, 1.0, -1, 0, float("nan"), [4], b"4", np.array([4, 4])]

WRONG: list[tuple[str, object]] = [
    *[(name, value) for name in ("batch_size", "threads", "prefetch") for value in [*NO_NUMBERS, None]],
    *[("epochs", value) for value in NO_NUMBERS],
    *[("frames", value) for value in [*NO_NUMBERS, None, 10**9, 10**30, "1+k", "1+0k", "9" * 5000 + "+1k", "1000000000+8k"]],
    *[("seed", value) for value in ("a", None, True, 1.5, [1])],
    *[("fps", value) for value in ("x", True, 0, -1, float("nan"), float("inf"), [4], {}, "1/0", 1e-30, 1e30)],
    *[("size", value) for value in ((0, 0), (-1, 5), 0, True, "64", (64,), 64.0, (64, None), 10**9, (1, 10**12))],
    *[("fit", value) for value in ("cover", None, 1, ["crop"], np.array(["crop", "pad"]))],
    *[("short", value) for value in ("drop", None, True, ["pad"])],
    *[("tail", value) for value in ("keep", None, True, ["pad"])],
    *[("engine", value) for value in ("gpu", None, 1, ["cpu"])],
    *[(name, value) for name in ("shuffle", "allow_uneven") for value in (1, 0, "yes", None, "clumps", [])],
    *[(name, value) for name in ("split", "filter") for value in (1, True, ["train"], b"train")],
    *[("columns", value) for value in ("motion", 1, [1], None, [["motion"]], ["nothing"], ["motion", "Motion"])],
    *[("device", value) for value in ("abacus", [], True, 3.5, "meta", "cuda:99")],
    *[("transform", value) for value in (1, "x", [])],
    ("prefetch", 10**9),
    ("threads", 10**9),
    ("batch_size", 10**9),
    ("bad_samples", None),
    ("bad_samples", np.array(["error", "error"])),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda v: repr(v)[:24])
def test_a_wrong_option_is_named_in_one_line(version: Any, name: str, value: object) -> None:
    before = threading.active_count()
    with pytest.raises(LoaderError) as caught:
        Loader(version, **{**GOOD, "tail": "pad" if name != "tail" else "drop", name: value})
    told = str(caught.value)
    assert (name in told or "a batch of" in told) and "\n" not in told and len(told) < 600
    assert threading.active_count() == before


@pytest.mark.parametrize(
    "ranks",
    [(2, 2), (-1, 2), (0, 0), (0, 3), ("0", "2"), (0, 2.0), (True, 2), (0, None), (None, 2), (0, 10**12)],
)
def test_ranks_that_are_none(version: Any, ranks: tuple[Any, Any]) -> None:
    with pytest.raises(LoaderError, match=r"rank|world"):
        Loader(version, **GOOD, rank=ranks[0], world_size=ranks[1])


@pytest.mark.parametrize("version", [None, "x@1", 3, {}])
def test_what_is_no_version(version: Any) -> None:
    with pytest.raises(LoaderError, match="no dataset version"):
        Loader(version, **GOOD)


def test_numpy_numbers_are_numbers_and_the_state_is_json(version: Any) -> None:
    options = {"batch_size": np.int64(4), "frames": np.int32(4), "seed": np.uint64(7), "size": (np.int64(32), 48)}
    with Loader(version, fps=np.float64(4), epochs=np.int8(1), **options) as loader:
        assert next(loader)["video"].shape == (4, 4, 3, 32, 48)
        state = json.loads(json.dumps(loader.state_dict()))
    with Loader(version, batch_size=4, frames=4, seed=7, size=(32, 48), fps=4, epochs=1) as plain:
        plain.load_state_dict(state)
        assert plain.step == 1


def test_frames_beyond_every_clip_are_padded_up_to_a_bound(version: Any) -> None:
    with Loader(version, batch_size=1, frames=100, fps=8, size=8, epochs=1) as loader:
        batch = next(loader)
        assert batch["video"].shape[1] == 100 and int(batch["frame_valid"].sum()) <= 24
    with pytest.raises(LoaderError, match=r"the longest clip has 24 at this rate; allowed are up to 1024"):
        Loader(version, batch_size=1, frames=1025, fps=8, epochs=1)


def test_a_batch_that_no_memory_holds_is_told_in_bytes(version: Any) -> None:
    with pytest.raises(LoaderError, match=r"4 clips × 1024 frames × 16384×16384 pixels takes .*GiB.*above the limit"):
        Loader(version, batch_size=4, frames=1024, size=16384, epochs=1)
    check_batch(num_slots=64, num_frames=16, size=(256, 456))


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": "1"}, {"epoch": True}, {"epoch": -1}, {"epoch": None}, {"step": 1.5}, {"step": 10**30}, {"step": [1]},
        {"format": "1"}, {"format": None}, {"config": None}, {"config": []}, {"config_digest": 3}, {"version": None},
        {"version_digest": b"0"},
    ],
)  # fmt: skip
def test_a_state_with_a_garbage_value_is_refused(version: Any, change: dict[str, Any]) -> None:
    with Loader(version, **GOOD) as loader:
        state = loader.state_dict()
        with pytest.raises(LoaderError):
            loader.load_state_dict({**state, **change})
        assert loader.state_dict() == state
        assert len(next(loader)["clip_key"]) == 4  # and the loader still works


@pytest.mark.parametrize("state", [None, 3, "state", [], {}, {"epoch": 1}, {None: 1}])
def test_what_is_no_state_at_all(version: Any, state: Any) -> None:
    with Loader(version, **GOOD) as loader, pytest.raises(LoaderError, match="no loader state"):
        loader.load_state_dict(state)


def test_a_state_of_another_version_names_both(version: Any, make_version: Any) -> None:
    other = make_version(num_videos=2)
    other.id = "other@4"
    with Loader(version, **GOOD) as loader:
        state = loader.state_dict()
    with Loader(other, **GOOD) as wrong, pytest.raises(StateMismatch, match=r"version: synthetic@1 → other@4"):
        wrong.load_state_dict(state)
