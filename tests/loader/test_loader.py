"""The loader as a whole: the right frames in a batch that can be made again, on any number of ranks, after any stop."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from videoflow.errors import BadSample, LoaderError, StateMismatch

torch = pytest.importorskip("torch")

from videoflow.loader import Loader, VersionSource  # noqa: E402

Made = Callable[..., Any]


@pytest.fixture
def make_loader(version: VersionSource) -> Iterator[Made]:
    loaders: list[Loader] = []

    def make(source: VersionSource = version, **options: Any) -> Loader:
        defaults = {"batch_size": 4, "frames": 4, "fps": 4, "seed": 3, "epochs": 2}
        loaders.append(Loader(source, **{**defaults, **options}))
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close()


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]) if isinstance(value, torch.Tensor) else value == b[name], name


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The batches of all ranks as one."""
    together = {}
    for name, value in parts[0].items():
        values = [p[name] for p in parts]
        together[name] = torch.cat(values) if isinstance(value, torch.Tensor) else [x for v in values for x in v]
    return together


# ── what is in a batch ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("engine", ["cpu", "dali"])
def test_every_frame_is_the_right_one(version: Any, make_loader: Made, read_picture: Made, engine: str) -> None:
    if engine == "dali":
        pytest.importorskip("nvidia.dali")
    for batch in make_loader(engine=engine, frames=6, fps=2):
        assert batch["video"].shape == (4, 6, 3, 64, 128)
        assert batch["video"].dtype == torch.uint8
        assert batch["pts_seconds"].dtype == torch.float64
        for i, position in enumerate(batch["position"].tolist()):
            assert batch["clip_key"][i] == f"{position + 1:032x}"
            _, first, count = version.clips[position]
            for t in range(6):
                last = (count - 1) // 4
                video, frame, seconds = version.expected(position, first + 4 * min(t, last))
                assert read_picture(batch["video"][i, t].permute(1, 2, 0).numpy()) == (video, frame)
                assert batch["pts_seconds"][i, t].item() == seconds
                assert batch["frame_valid"][i, t].item() == (t <= last)


def test_engines_make_identical_batches(make_version: Made, make_loader: Made) -> None:
    pytest.importorskip("nvidia.dali")
    version = make_version(num_videos=2, noise=True)
    for options in ({}, {"size": 64}, {"size": 64, "fit": "stretch"}):
        pairs = [make_loader(version, engine=e, epochs=1, **options) for e in ("cpu", "dali")]
        for a, b in zip(*pairs, strict=True):
            assert_same(a, b)


def test_columns(make_loader: Made) -> None:
    for batch in make_loader(columns=("embedding", "motion", "caption", "likes"), tail="pad", epochs=1):
        positions = batch["position"]
        valid = batch["valid"]
        assert batch["embedding"].dtype == torch.float32
        assert batch["embedding"][valid, 0].tolist() == positions[valid].tolist()
        assert (batch["embedding"][~valid] == 0).all()
        assert batch["motion"][valid].tolist() == [p / 2 for p in positions[valid].tolist()]
        assert batch["caption"] == [f"clip {p}" if p >= 0 else "" for p in positions.tolist()]
        for p, likes in zip(positions[valid].tolist(), batch["likes"][valid].tolist(), strict=True):
            assert np.isnan(likes) if p == 3 else likes == p


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("nothing", "no single-valued column 'nothing'.*motion"),
        ("frames", "no single-valued column 'frames'"),
        ("position", "in every batch already"),
    ],
)
def test_columns_that_a_batch_cannot_carry(make_loader: Made, column: str, message: str) -> None:
    with pytest.raises(LoaderError, match=message):
        make_loader(columns=(column,))


def test_clips_without_embedding_are_told_of(make_version: Made, make_loader: Made) -> None:
    version = make_version(num_videos=2, without_embedding=(1, 5))
    with pytest.raises(LoaderError, match=r"2 of 8 clips have no embedding.*filter='embedding IS NOT NULL'"):
        make_loader(version, columns=("embedding",))
    loader = make_loader(version, columns=("embedding",), filter="embedding IS NOT NULL", batch_size=6, epochs=1)
    assert sorted(next(loader)["position"].tolist()) == [0, 2, 3, 4, 6, 7]
    without = dataclasses.replace(version, tables={"frames": version.tables["frames"]})
    with pytest.raises(LoaderError, match="has no embeddings"):
        make_loader(without, columns=("embedding",))


def test_devices_that_are_not_there(make_loader: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "cuda:3", "abacus"):
        with pytest.raises(LoaderError, match=f"device='{device}'"):
            make_loader(device=device)
    assert next(make_loader(device="cpu"))["video"].device.type == "cpu"


def test_split_and_filter(version: Any, make_loader: Made) -> None:
    loader = make_loader(split="val", filter="motion < 5 OR motion >= 9", batch_size=1, epochs=1)
    assert sorted(b["position"].item() for b in loader) == [4, 9, 19]
    with pytest.raises(LoaderError, match=r"split='test'.*its splits are train, val"):
        make_loader(split="test")
    with pytest.raises(LoaderError, match=r"filter='motion <'"):
        make_loader(filter="motion <")


def test_largest_count_that_fits(version: Any, make_loader: Made) -> None:
    for batch in make_loader(frames="1+8k", fps=8, epochs=1):
        counts = [1 + (version.clips[p][2] - 1) // 8 * 8 for p in batch["position"].tolist()]
        assert batch["video"].shape[1] == max(counts)
        assert batch["frame_valid"].sum(dim=1).tolist() == counts


def test_transform_comes_last(make_loader: Made) -> None:
    def half(batch: dict[str, Any]) -> dict[str, Any]:
        return {"half": batch["video"].float() / 2, "keys": batch["clip_key"]}

    assert next(make_loader(transform=half))["half"].shape == (4, 4, 3, 64, 128)


# ── sizes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_mixed_sizes_need_a_size(make_version: Made, make_loader: Made) -> None:
    version = make_version(num_videos=2, sizes=((64, 128), (96, 64)))
    with pytest.raises(LoaderError, match=r"64×128, 96×64.*size="):
        make_loader(version)
    assert next(make_loader(version, size=(32, 48)))["video"].shape == (4, 4, 3, 32, 48)
    shapes = {tuple(b["video"].shape[3:]) for b in make_loader(version, batch_size=1)}
    assert shapes == {(64, 128), (96, 64)}
    in_order = make_loader(version, shuffle=False, batch_size=5, filter="position < 5")
    assert next(in_order)["video"].shape == (5, 4, 3, 64, 128)


def test_fit_modes(version: Any, make_loader: Made, read_picture: Made) -> None:
    crop, pad, stretch = (next(make_loader(size=64, fit=f, shuffle=False))["video"] for f in ("crop", "pad", "stretch"))
    full = next(make_loader(shuffle=False))["video"]
    assert torch.equal(crop, full[..., 32:96])
    assert (pad[..., :16, :] == 0).all()
    assert (pad[..., 48:, :] == 0).all()
    assert pad[..., 16:48, :].float().mean() > 25
    for i in range(4):
        expected = version.expected(i, version.clips[i][1])[:2]
        assert read_picture(stretch[i, 0].permute(1, 2, 0).numpy()) == expected


def test_enlarging_is_counted(make_loader: Made) -> None:
    enlarged = make_loader(size=100)
    next(enlarged)
    assert enlarged.report().num_enlarged == 23
    assert "23 clips are enlarged" in str(enlarged.report())
    assert make_loader(size=64).report().num_enlarged == 0


# ── short clips and rates ────────────────────────────────────────────────────────────────────────────────────────────


def test_short_clips(version: Any, make_loader: Made) -> None:
    num_short = sum(count < 20 for _, _, count in version.clips)
    loader = make_loader(frames=20, fps=8, short="skip", batch_size=1, epochs=1)
    positions = [b["position"].item() for b in loader]
    assert sorted(positions) == [n for n, (_, _, count) in enumerate(version.clips) if count >= 20]
    assert loader.report().num_left_out == num_short
    padded = make_loader(frames=20, fps=8)
    assert len(padded) == 5
    assert padded.report().num_short == num_short
    with pytest.raises(LoaderError, match=f"{num_short} of 23 clips have fewer than 20 frames"):
        make_loader(frames=20, fps=8, short="error")
    with pytest.raises(LoaderError, match=r"0 clips .*23 were left out"):
        make_loader(frames=50, fps=8, short="skip")


def test_rates_must_divide_the_cache(version: Any, make_loader: Made, read_picture: Made) -> None:
    with pytest.raises(LoaderError, match=r"fps=6 does not divide"):
        make_loader(fps=6)
    batch = next(make_loader(fps=6, frames=8, allow_uneven=True))
    for i, p in enumerate(batch["position"].tolist()):
        got = [read_picture(f.permute(1, 2, 0).numpy()) for f in batch["video"][i]]
        assert got == [version.expected(p, version.clips[p][1] + k * 4 // 3)[:2] for k in range(8)]


# ── order, ranks, epochs ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tail", ["drop", "pad"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_together_make_the_same_global_batches(make_loader: Made, tail: str, world_size: int) -> None:
    options = {"tail": tail, "columns": ("embedding", "caption"), "frames": "1+2k"}
    whole = list(make_loader(**options))
    ranks = [list(make_loader(rank=r, world_size=world_size, **options)) for r in range(world_size)]
    assert {len(r) for r in ranks} == {len(whole)}
    for batch, *parts in zip(whole, *ranks, strict=True):
        assert_same(batch, joined(parts))


def test_each_epoch_holds_every_clip_once(make_loader: Made) -> None:
    loader = make_loader(tail="pad")
    batches = list(loader)
    assert len(batches) == 2 * len(loader) == 12
    epochs = [[p for b in e for p in b["position"][b["valid"]].tolist()] for e in (batches[:6], batches[6:])]
    assert [sorted(e) for e in epochs] == [list(range(23))] * 2
    assert epochs[0] != epochs[1]
    (padding,) = torch.nonzero(~batches[5]["valid"]).flatten().tolist()
    assert batches[5]["position"][padding] == -1
    assert batches[5]["clip_key"][padding] == ""
    assert not batches[5]["frame_valid"][padding].any()
    assert not batches[5]["video"][padding].any()


def test_a_dropped_tail_is_another_one_each_epoch(make_loader: Made) -> None:
    batches = list(make_loader())
    left_out = [set(range(23)) - {p for b in e for p in b["position"].tolist()} for e in (batches[:5], batches[5:])]
    assert [len(x) for x in left_out] == [3, 3]
    assert left_out[0] != left_out[1]


def test_a_rank_may_be_all_padding(make_loader: Made) -> None:
    options = {"filter": "position < 5", "batch_size": 4, "tail": "pad", "epochs": 1, "columns": ("embedding",)}
    last = list(make_loader(rank=3, world_size=4, **options))[-1]
    assert last["video"].shape == (1, 4, 3, 64, 128)
    assert last["embedding"].shape == (1, 4)
    assert not last["valid"].any()


def test_without_shuffling(make_loader: Made) -> None:
    loader = make_loader(shuffle=False, epochs=None)
    assert [next(loader)["position"].tolist() for _ in range(6)][::5] == [[0, 1, 2, 3], [0, 1, 2, 3]]


def test_options_that_are_refused(make_loader: Made) -> None:
    for message, options in {
        "batch_size=5 is global": {"batch_size": 5, "rank": 0, "world_size": 2},
        r"rank=2 must lie in": {"rank": 2, "world_size": 2},
        "give both": {"rank": 0},
        "shuffle='clumps'.*not there yet": {"shuffle": "clumps"},
        "frames='whole' is not there yet": {"frames": "whole"},
        "bad_samples='substitute' is not there yet": {"bad_samples": "substitute"},
        "0 clips|23 clips fill no batch of 64": {"batch_size": 64},
        "epochs=0": {"epochs": 0},
        "prefetch=0": {"prefetch": 0},
        "tail='keep'": {"tail": "keep"},
    }.items():
        with pytest.raises(LoaderError, match=message):
            make_loader(**options)


# ── stop and go on ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stop_after", [0, 1, 4, 5, 6, 9])
@pytest.mark.parametrize("world_size", [1, 2])
def test_resumed_on_other_ranks_the_rest_is_the_same(make_loader: Made, stop_after: int, world_size: int) -> None:
    undisturbed = list(make_loader())
    first = make_loader()
    for _ in range(stop_after):
        next(first)
    state = json.loads(json.dumps(first.state_dict()))
    first.close()
    ranks = [make_loader(rank=r, world_size=world_size, engine="cpu", prefetch=1) for r in range(world_size)]
    for loader in ranks:
        loader.load_state_dict(state)
    rest = [joined(list(parts)) for parts in zip(*ranks, strict=True)]
    assert len(rest) == len(undisturbed) - stop_after
    for a, b in zip(undisturbed[stop_after:], rest, strict=True):
        assert_same(a, b)


def test_a_loop_that_was_left_goes_on(make_loader: Made) -> None:
    loader = make_loader()
    seen = []
    for batch in loader:
        seen.append(batch["position"].tolist())
        if len(seen) in (2, 7):
            break
    seen += [b["position"].tolist() for b in loader]
    assert seen == [b["position"].tolist() for b in make_loader()]
    assert list(loader) == []
    assert (loader.epoch, loader.step) == (2, 0)


def test_a_state_can_be_loaded_while_running(make_loader: Made) -> None:
    loader = make_loader()
    state = loader.state_dict()
    batches = [next(loader) for _ in range(3)]
    loader.load_state_dict(state)
    for batch in batches:
        assert_same(batch, next(loader))


def test_a_state_that_does_not_fit_names_the_difference(version: Any, make_loader: Made) -> None:
    state = make_loader().state_dict()
    with pytest.raises(StateMismatch, match=r"batch_size: 4 → 2; seed: 3 → 4 \(old → new\)"):
        make_loader(batch_size=2, seed=4).load_state_dict(state)
    with pytest.raises(StateMismatch, match=r"version: synthetic@2 → synthetic@1"):
        make_loader().load_state_dict({**state, "version": "synthetic@2"})
    with pytest.raises(StateMismatch, match=r"content of version synthetic@1"):
        make_loader().load_state_dict({**state, "version_digest": "1" * 32})
    with pytest.raises(LoaderError, match=r"format 2"):
        make_loader().load_state_dict({**state, "format": 2})
    with pytest.raises(LoaderError, match=r"no loader state"):
        make_loader().load_state_dict({"step": 3})
    with pytest.raises(LoaderError, match=r"step 77"):
        make_loader().load_state_dict({**state, "step": 77})


def test_a_state_does_not_mind_engine_ranks_queues_and_spelling(make_loader: Made) -> None:
    state = make_loader().state_dict()
    make_loader(rank=1, world_size=2, threads=1, prefetch=5, fps=4.0, epochs=9).load_state_dict(state)


# ── faults, threads, processes ───────────────────────────────────────────────────────────────────────────────────────


def test_a_bad_sample_reaches_the_trainer_by_name(make_version: Made, make_loader: Made) -> None:
    def flip(video: int, chunk: int, data: bytes, offsets: list[int]) -> bytes:
        if (video, chunk) != (1, 0):
            return data
        return data[: offsets[5] - 3] + b"!!!" + data[offsets[5] :]

    version = make_version(num_videos=2, clips=[(0, 0, 16), (0, 8, 16), (1, 0, 16), (0, 4, 16)], corrupt=flip)
    loader = make_loader(version, batch_size=1, shuffle=False, epochs=1)
    assert [next(loader)["position"].item() for _ in range(2)] == [0, 1]
    for _ in range(2):  # the loader stands where it stood and says the same again
        with pytest.raises(BadSample, match=f"clip {3:032x}.*CRC"):
            next(loader)
    assert loader.step == 2


def test_an_error_of_the_transform_reaches_the_trainer(make_loader: Made) -> None:
    def broken(batch: dict[str, Any]) -> dict[str, Any]:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match=r"mine"):
        next(make_loader(transform=broken))


def own_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("videoflow-")]


def test_closing_ends_all_threads(make_loader: Made) -> None:
    with make_loader(epochs=None) as loader:
        assert not own_threads()
        next(loader)
        assert own_threads()
    assert not own_threads()
    with pytest.raises(LoaderError, match=r"closed"):
        next(loader)
    loader.close()


def test_a_forgotten_loader_ends_its_threads(version: Any) -> None:
    loader = Loader(version, batch_size=4, frames=4, fps=4)
    next(loader)
    del loader
    assert not own_threads()


def test_at_most_prefetch_batches_wait(make_loader: Made) -> None:
    made: list[int] = []
    loader = make_loader(prefetch=2, epochs=None, transform=lambda b: made.append(1) or b)
    next(loader)
    deadline = time.monotonic() + 30
    while len(made) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    assert len(made) == 4  # one delivered, two waiting, one that waits for a place among them


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_child_is_told_why(make_loader: Made) -> None:
    loader = make_loader()
    next(loader)
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            next(loader)
        except LoaderError as e:
            os.write(writes, str(e).encode())
        finally:
            os._exit(0)
    os.close(writes)
    message = os.read(reads, 4096).decode()
    os.close(reads)
    os.waitpid(child, 0)
    assert "fork" in message
    assert "spawn" in message


def test_rank_and_world_size_come_from_torch(make_loader: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    mine = next(make_loader())["position"].tolist()
    assert mine == next(make_loader(rank=0, world_size=1))["position"].tolist()[2:]


# ── report ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_slow_transform_is_blamed(make_loader: Made) -> None:
    def slow(batch: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.1)
        return batch

    loader = make_loader(transform=slow)
    assert len(list(loader)) == 10
    report = loader.report()
    stall = report.stall
    assert stall.num_batches == 10
    assert stall.main_cause == "transform"
    assert "transform is slower than the trainer" in str(report)
    for kind, parts in stall.waits.items():
        assert sum(parts.values()) == stall.wait_ns(kind)
    assert sum(stall.wait_ns(kind) for kind in stall.waits) <= stall.wall_ns
    assert json.loads(json.dumps(report.to_dict()))["stall"]["main_cause"] == "transform"


def test_a_slow_trainer_is_told_that_the_loader_keeps_up(make_loader: Made) -> None:
    loader = make_loader(epochs=1)
    for _ in loader:
        time.sleep(0.2)
    assert loader.report().stall.main_cause is None or "keeps up" in str(loader.report())


def test_repr_is_for_people(make_loader: Made) -> None:
    assert repr(make_loader()) == (
        "Loader(synthetic@1, 23 clips, batch_size=4, frames=4, engine='cpu', epoch=0, step=0)"
    )
