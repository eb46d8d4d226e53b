"""The payload through the loader: frame truth of all hard files and rates, what is chosen, damage, errors, resuming."""

from __future__ import annotations

import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import cv2
import lance
import numpy as np
import pytest

import videoflow
from tests.jobs import run_job
from videoflow.dataset.version import Version
from videoflow.errors import BadSample, LoaderError
from videoflow.loader import Loader
from videoflow.loader.fit import fit_into, place
from videoflow.media.decoder import is_damaged, open_decoder
from videoflow.media.picture import Picture, geometry_of
from videoflow.recipe import Recipe
from videoflow.testing import make_barcode_video, read_barcode

torch = pytest.importorskip("torch")
#: What the payload keeps of a clip's luma at least, dB, mean over its frames. Colours are kept at half the size, as in any
#: 4:2:0 video: for test pictures of saturated blocks that, not the codec, decides the PSNR of RGB.
MIN_PSNR = 36.0
#: Beyond this a frame and its neighbour are alike to the codec (slow fades), and no PSNR tells them apart.
ALIKE_PSNR = 40.0


def stages(payload: dict[str, Any], **more: dict[str, Any]) -> Recipe:
    clips = {"by": "windows", "window_seconds": 2, "min_seconds": 0}
    return Recipe(stages={"frames": {}, "clips": clips, "payload": payload, **more})


def publish(root: Path, sources: list[Path], name: str, payload: dict[str, Any]) -> Version:
    summary = run_job(stages(payload), sources, root, name=name)
    assert summary.version
    return videoflow.open(root).version(summary.version)


# -- all hard files --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hard(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Version:
    """All hard files, every shown frame of two-second windows, short side 144."""
    root = tmp_path_factory.mktemp("payload")
    return publish(root, [corpus], "native", {"short_side": 144, "gop": 8})


@pytest.fixture(scope="module")
def at_24(hard: Version, corpus: Path) -> Version:
    """The same at 24 frames a second: of 30 on most, of 24, 25, 40, 10 and variable rates on others."""
    return publish(Path(hard.root.url), [corpus], "at24", {"short_side": 144, "fps": 24})


class Truth:
    """One straight pass over a file: pts of all shown frames, and the pictures."""

    def __init__(self, path: str, stream: int) -> None:
        self.pts: list[int] = []
        self.frames: list[Picture] = []
        with open_decoder(path, stream) as decoder:
            geometry = None
            for frame in decoder.frames():
                geometry = geometry or geometry_of(frame, decoder.stream)
                self.pts.append(frame.pts)
                self.frames.append(Picture(frame, geometry))
            self.damage, self.time_base = decoder.tally.damage, decoder.time_base

    def at(self, t: Fraction) -> int:
        """The last frame shown at or before a time in seconds."""
        return max(i for i, p in enumerate(self.pts) if p * self.time_base <= t)


def grid_times(row: dict[str, Any], rate: Fraction, start: int) -> list[Fraction]:
    """Times start + k / rate inside the clip, by the rule and without the code under test."""
    tb = Fraction(row["tb_num"], row["tb_den"])
    times, k = [], 0
    while (t := start * tb + k / rate) < row["t1_pts"] * tb:
        if t >= row["t0_pts"] * tb:
            times.append(t)
        k += 1
    return times


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Of luma, dB."""
    a, b = (cv2.cvtColor(np.ascontiguousarray(p), cv2.COLOR_RGB2GRAY).astype(np.float64) for p in (a, b))
    error = float(((a - b) ** 2).mean())
    return 10 * np.log10(255**2 / max(error, 1e-3))


def check(version: Version, expected: Any, **options: Any) -> dict[str, int]:
    """Every clip of a version: pts, counts, and that pictures are those of their frames; clips by file."""
    truths: dict[str, Truth] = {}
    rows = {r["position"]: r for r in version.clips().to_pylist()}
    seen: dict[str, int] = {}
    with Loader(version, batch_size=1, epochs=1, shuffle=False, source="payload", **options) as loader:
        for batch in loader:
            row = rows[batch["position"].item()]
            if row["uri"] not in truths:
                truths.clear()  # clips come video by video
                truths[row["uri"]] = Truth(row["uri"], row["stream"])
            truth = truths[row["uri"]]
            frames = expected(row, truth)
            valid = batch["frame_valid"][0]
            assert valid.sum().item() == len(frames), (row["uri"], row["t0_us"])
            seconds = [float(truth.pts[i] * truth.time_base) for i in frames]
            assert batch["pts_seconds"][0][valid].tolist() == seconds, row["uri"]
            compare(batch["video"][0][valid].permute(0, 2, 3, 1).numpy(), truth, frames, row)
            seen[Path(row["uri"]).name] = seen.get(Path(row["uri"]).name, 0) + 1
    return seen


def compare(pictures: np.ndarray, truth: Truth, frames: list[int], row: dict[str, Any]) -> None:
    h, w = row["payload"]["height"], row["payload"]["width"]
    assert pictures.shape[1:] == (h, w, 3)
    own = []
    for picture, i in zip(pictures, frames, strict=True):
        assert not is_damaged(truth.pts[i], truth.damage)
        own.append(psnr(picture, truth.frames[i].rgb(w, h)))
    assert np.mean(own) >= MIN_PSNR, (row["uri"], np.mean(own))
    for picture, i, mine in list(zip(pictures, frames, own, strict=True))[::7]:  # and not those of their neighbours
        if mine >= ALIKE_PSNR:
            continue
        for j in (i - 1, i + 1):
            if 0 <= j < len(truth.frames):
                assert psnr(picture, truth.frames[j].rgb(w, h)) <= mine + 1.5, (row["uri"], i, j)


def largest(frames: list[int], base: int = 1, step: int = 8) -> list[int]:
    """The largest 1 + 8k of them."""
    return frames[: base + max(0, len(frames) - base) // step * step]


def test_native_rate_of_all_hard_files(hard: Version) -> None:
    def expected(row: dict[str, Any], truth: Truth) -> list[int]:
        return largest([i for i, p in enumerate(truth.pts) if row["t0_pts"] <= p < row["t1_pts"]])

    seen = check(hard, expected, frames="1+8k")
    assert len(seen) >= 40
    for name in ("cuts_vfr_bikes.mp4", "rotate_90.mov", "rotate_and_mirror.mp4", "start_at_10s_sar.mp4"):
        assert seen[name] >= 1  # VFR, rotation, mirroring, a late start


@pytest.mark.parametrize("fps", ["15", "24"])
def test_any_rate_of_a_payload_at_native_rate(hard: Version, fps: str) -> None:
    def expected(row: dict[str, Any], truth: Truth) -> list[int]:
        start, tb = row["t0_pts"], truth.time_base
        count = -((start - row["t1_pts"]) * tb * Fraction(fps) // 1)
        return largest([truth.at(start * tb + k / Fraction(fps)) for k in range(int(count))])

    assert len(check(hard, expected, frames="1+8k", fps=fps)) >= 40


@pytest.mark.parametrize("fps", [None, "12"])
def test_a_payload_at_24(at_24: Version, fps: str | None) -> None:
    def expected(row: dict[str, Any], truth: Truth) -> list[int]:
        times = grid_times(row, Fraction(24), row["start_pts"])
        return largest([truth.at(t) for t in times[:: 24 // int(fps or 24)]])

    assert len(check(at_24, expected, frames="1+8k", fps=fps)) >= 40


# -- barcodes --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    folder = tmp_path_factory.mktemp("numbered")
    codec = ("-c:v", "libx264", "-g", "20")
    files = [make_barcode_video(folder / f"v{i}.mp4", num_frames=120, offset=200 * i, codec=codec) for i in range(3)]
    return folder / "cat", files


def numbers(batch: dict[str, Any], i: int) -> list[int]:
    valid = batch["frame_valid"][i]
    return [read_barcode(p) for p in batch["video"][i][valid].permute(0, 2, 3, 1).numpy()]


def by_clip(loader: Loader) -> dict[str, list[int]]:
    found = {}
    with loader:
        for batch in loader:
            for i, key in enumerate(batch["clip_key"]):
                found[key] = numbers(batch, i)
    return found


@pytest.mark.parametrize("codec", ["h264", "jpeg"])
def test_15_and_24_of_30_show_their_numbers(numbered: tuple[Path, list[Path]], codec: str) -> None:
    root, files = numbered
    for rate in (None, 24, 15):
        payload = {"codec": codec} | ({"fps": rate} if rate else {})
        version = publish(root, files, f"{codec}{rate}", payload)
        read = by_clip(Loader(version, batch_size=2, frames=60, source="payload", epochs=1))
        rows = {r["clip_key"]: r for r in version.clips().to_pylist()}
        assert len(read) == 6
        for key, found in read.items():
            first = rows[key]["first_frame"] + 200 * int(Path(rows[key]["uri"]).stem[1:])
            shown = [k * 30 // (rate or 30) for k in range(2 * (rate or 30))]
            assert found == [first + i for i in shown]


def test_a_prefix_reads_whole_groups_only(numbered: tuple[Path, list[Path]], monkeypatch: pytest.MonkeyPatch) -> None:
    version = publish(*numbered, "prefix", {"gop": 12})
    asked: list[int] = []
    real = lance.LanceDataset.read_blob_ranges

    def spy(self: Any, column: str, requests: Any, **more: Any) -> Any:
        asked.extend(length for _, _, length in requests)
        return real(self, column, requests, **more)

    monkeypatch.setattr(lance.LanceDataset, "read_blob_ranges", spy)
    refs = {tuple(r["payload"]["gop_offsets"]) for r in version.clips().to_pylist()}
    with Loader(version, batch_size=6, frames=13, source="payload", epochs=1) as loader:
        (batch,) = list(loader)
    assert [len(numbers(batch, i)) for i in range(6)] == [13] * 6
    assert sorted(asked) == sorted(offsets[2] for offsets in refs)


def test_every_group_decodes_on_its_own(numbered: tuple[Path, list[Path]]) -> None:
    from videoflow.loader.payload import PayloadEngine, PayloadReader
    from videoflow.loader.payload_rows import PayloadRows
    from videoflow.loader.rows import load_table

    version = publish(*numbered, "groups", {"gop": 12})
    table = load_table(version, split=None, where=None, columns=(), more=("t0_pts", "t1_pts", "payload"))
    rows = PayloadRows(table, (), None)
    reader, engine = PayloadReader(version.tables["payload"]), PayloadEngine(threads=1)
    (ref,) = rows.clip_refs(np.array([0]))
    whole = engine.decode(reader.read([ref], [range(60)]), size=None, fit="crop")[0]
    for group in range(5):
        wanted = range(group * 12, group * 12 + 12)
        (clip,) = reader.read([ref], [wanted])
        alone = engine.decode([clip], size=None, fit="crop")[0]
        assert np.array_equal(alone, whole[wanted.start : wanted.stop])
        small = engine.decode([clip], size=(32, 32), fit="crop")[0]
        want = np.zeros((32, 32, 3), np.uint8)
        fit_into(whole[wanted.start], place(64, 128, (32, 32), "crop"), want)
        assert np.array_equal(small[0], want)


def test_auto_takes_the_payload_where_rate_or_size_need_it(numbered: tuple[Path, list[Path]]) -> None:
    root, files = numbered
    recipe = stages({}).model_copy(update={"stages": {**stages({}).stages, "frames": {"short_side": 32}}})
    version = videoflow.open(root).version(run_job(recipe, files, root, name="auto").version or "")

    def source_of(**options: Any) -> str:
        with Loader(version, batch_size=1, frames=4, epochs=1, **options) as loader:
            next(loader)
            return str(loader.state_dict()["config"].get("source", "frames"))

    assert source_of() == source_of(fps=4) == source_of(size=32) == source_of(size=16, fps=2) == "frames"
    assert source_of(fps=15) == source_of(size=64) == source_of(size=48, fps=4) == "payload"
    assert source_of(fps=15, source="frames", allow_uneven=True) == "frames"
    with pytest.raises(LoaderError, match=r"fps=15 does not divide"):
        Loader(version, batch_size=1, frames=4, fps=15, source="frames")
    with pytest.raises(LoaderError, match=r"source='disk' cannot be used; allowed are 'auto', 'frames', 'payload'"):
        Loader(version, batch_size=1, frames=4, source="disk")
    with pytest.raises(LoaderError, match="no single-valued column 'payload'"):
        Loader(version, batch_size=1, frames=4, columns=("payload",))


def test_clips_without_a_payload(numbered: tuple[Path, list[Path]]) -> None:
    root, files = numbered
    version = publish(root, files, "some", {"count": 4})
    with pytest.raises(LoaderError, match=r"payload is asked for, but 2 of 6 clips have none.*payload IS NOT NULL"):
        Loader(version, batch_size=1, frames=4, source="payload")
    with pytest.raises(LoaderError, match=r"needed for fps=15 \(the frame cache has 8\), but 2 of 6"):
        Loader(version, batch_size=1, frames=4, fps=15)
    assert len(by_clip(Loader(version, batch_size=1, frames=4, fps=15, filter="payload IS NOT NULL", epochs=1))) == 4
    assert len(by_clip(Loader(version, batch_size=1, frames=4, epochs=1))) == 6  # from the frame cache
    without = stages({}).model_copy(update={"stages": {"frames": {}, "clips": {"by": "windows"}}})
    plain = videoflow.open(root).version(run_job(without, files, root, name="plain").version or "")
    assert "payload" not in plain.clips().column_names
    with pytest.raises(LoaderError, match="has no payload; add the payload stage"):
        Loader(plain, batch_size=1, frames=4, source="payload")


def test_batches_can_be_made_again_on_more_ranks(numbered: tuple[Path, list[Path]]) -> None:
    version = publish(*numbered, "resume", {})
    options: dict[str, Any] = {"frames": 20, "fps": 10, "source": "payload", "seed": 5, "epochs": 2, "batch_size": 2}
    with Loader(version, **options) as loader:
        batches = [(b["clip_key"], b["video"].clone()) for b in loader]
        assert len(batches) == 6
    with Loader(version, **options) as again:
        for _ in range(2):
            next(again)
        state = again.state_dict()
    halves = []
    for rank in range(2):
        with Loader(version, **options, rank=rank, world_size=2) as part:
            part.load_state_dict(state)
            halves.append([(b["clip_key"], b["video"].clone()) for b in part])
    for whole, a, b in zip(batches[2:], *halves, strict=True):
        assert whole[0] == [*a[0], *b[0]] and torch.equal(whole[1], torch.cat([a[1], b[1]]))


def test_a_damaged_payload_is_named(numbered: tuple[Path, list[Path]], tmp_path: Path) -> None:
    root = tmp_path / "cat"
    version = publish(root, numbered[1][:1], "bad", {})
    (blob,) = [
        p for p in (root / "payload").rglob("*") if p.is_file() and p.stat().st_size > 3000 and "data" in p.parts
    ]
    row = version.clips().to_pylist()[0]
    payload = lance.dataset(str(next((root / "payload").glob("*/part-*.lance"))))
    ((_, _, data),) = payload.read_blob_ranges("data", [(row["payload"]["row_id"], 0, 600)], selector="ids")
    stored = bytearray(blob.read_bytes())
    at = stored.index(bytes(data)) + 300
    stored[at] ^= 0xFF
    blob.write_bytes(stored)
    with (
        Loader(version, batch_size=1, frames=4, source="payload", shuffle=False) as loader,
        pytest.raises(BadSample, match=f"clip {row['clip_key']}.*fails its CRC"),
    ):
        next(loader)


def test_a_file_that_cannot_be_decoded_again_costs_its_own_clips(
    numbered: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    import os

    folder, root = tmp_path / "v", tmp_path / "cat"
    folder.mkdir()
    for path in numbered[1]:
        shutil.copy(path, folder)
    frames_only = Recipe(stages={k: v for k, v in stages({}).stages.items() if k != "payload"})
    run_job(frames_only, [folder], root)
    spoilt = folder / "v1.mp4"
    before = spoilt.stat()
    data = bytearray(spoilt.read_bytes())
    data[len(data) // 3 :] = bytes(len(data) - len(data) // 3)
    spoilt.write_bytes(data)
    os.utime(spoilt, ns=(before.st_atime_ns, before.st_mtime_ns))
    summary = run_job(stages({}), [folder], root)
    assert (summary.done, summary.quarantined, summary.clips) == (2, 1, 6)
    rows = videoflow.open(root).version(summary.version or "").clips().to_pylist()
    assert {Path(r["uri"]).name for r in rows if r["payload"]} == {"v0.mp4", "v2.mp4"}
    assert {r["stage"] for r in videoflow.open(root).quarantine()} == {"payload"}
