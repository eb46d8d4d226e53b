"""decoder: nvdec: fingerprints of its own, the GPU checked before it is believed, the CPU for what it leaves, and jobs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import lance
import numpy as np
import pytest

import videoflow
from tests import fake_gpu
from tests.jobs import Quiet, run_job
from videoflow import recipe as recipes
from videoflow import split
from videoflow.errors import RecipeError, SystemFailure
from videoflow.find import find_stage
from videoflow.fingerprint import NVDEC_TAG, components, fingerprint
from videoflow.forecast import forecast
from videoflow.identify import identify
from videoflow.plan import Plan
from videoflow.recipe import Recipe
from videoflow.sources import scan
from videoflow.testing import make_barcode_video
from workers import nvdec
from workers.decode import run_pass
from workers.frames import Frames
from workers.nvdec import by_decoder, check_gpu
from workers.probe import Probe, videos_row
from workers.quality import Quality
from workers.shots import Shots, ShotsParams

STAGES: dict[str, dict[str, Any]] = {
    "frames": {},
    "shots": {"detector": "hsv"},
    "quality": {},
    "clips": {"by": "windows", "window_seconds": 1},
}
CPU, NVDEC = Recipe(stages=STAGES), Recipe(stages=STAGES, decoder="nvdec")
PASS = {"probe", "frames", "shots", "quality"}
no_gpu_here = pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="this machine has a GPU")


@pytest.fixture(autouse=True)
def unchecked() -> Iterator[None]:
    check_gpu.cache_clear()
    yield
    check_gpu.cache_clear()


# -- the recipe's choice ---------------------------------------------------------------------------------------------


def test_only_cpu_and_nvdec_are_decoders() -> None:
    assert CPU.decoder == "cpu"
    assert recipes.load("clips").with_settings(["decoder=nvdec"]).decoder == "nvdec"
    with pytest.raises(RecipeError, match="decoder: Input should be 'cpu' or 'nvdec', given 'cuda'"):
        recipes.load("clips").with_settings(["decoder=cuda"])


def test_fingerprints_of_the_pass_differ_and_of_the_rest_do_not() -> None:
    cpu, gpu = ({b.key: b.fingerprint for b in r.build()} for r in (CPU, NVDEC))
    assert {k for k in cpu if cpu[k] != gpu[k]} == PASS
    assert cpu["frames"] == fingerprint(Frames()) and cpu["probe"] == fingerprint(Probe())
    for built in NVDEC.build():
        if built.key in PASS:
            of_cpu = components(find_stage(built.key)(built.stage.params))["identity"]
            wanted = {**of_cpu, "decoder": f"{of_cpu['decoder']}+{NVDEC_TAG}"}
            assert components(built.stage)["identity"] == wanted


def test_fingerprints_are_stable_in_another_process() -> None:
    code = f"from videoflow import Recipe; print(*(b.fingerprint for b in Recipe(stages={STAGES}, decoder='nvdec').build()))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert other == [b.fingerprint for b in NVDEC.build()]


class Silent(fake_gpu.FakeGpu):
    """Says nothing of a decoder, as a stage of a user's own."""

    name, table = "silent", "silent"


class Blind(Silent):
    """Rides the pass without looking at the video: sound, say."""

    name, table, sees = "blind", "blind", False


def test_a_users_own_stage_is_told_apart_unless_it_sees_no_video() -> None:
    for cls, differs in ((Silent, True), (Blind, False)):
        stages = {"mine": {"use": f"tests.workers.test_nvdec:{cls.__name__}"}}
        found = {Recipe(stages=stages, decoder=d).build()[1].fingerprint for d in ("cpu", "nvdec")}
        assert len(found) == (2 if differs else 1)


# -- is the GPU to be believed ---------------------------------------------------------------------------------------


def test_a_gpu_that_decodes_like_the_cpu_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvdec, "open_on_gpu", fake_gpu.opener())
    check_gpu()


def test_one_wrong_sample_is_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_one(number: int, frames: list[av.VideoFrame]) -> list[av.VideoFrame]:
        for frame in frames:
            plane = frame.planes[1]
            values = np.frombuffer(plane, np.uint8).copy()
            values[100] += 1 if values[100] < 255 else -1
            plane.update(values.tobytes())
        return frames

    monkeypatch.setattr(nvdec, "open_on_gpu", fake_gpu.opener(off_by_one))
    with pytest.raises(SystemFailure, match="clip h264_full comes out of the GPU with samples that differ by up to 1 "):
        check_gpu()


def test_lost_and_late_frames_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(number: int, frames: list[av.VideoFrame]) -> list[av.VideoFrame]:
        return [f for f in frames if not f.key_frame] if number else frames

    def late(number: int, frames: list[av.VideoFrame]) -> list[av.VideoFrame]:
        for frame in frames:
            frame.pts += 1
        return frames

    for fault in (lost, late):
        monkeypatch.setattr(nvdec, "open_on_gpu", fake_gpu.opener(fault))
        assert nvdec.largest_difference(nvdec.CLIPS / "h264_limited.mp4") == 256


def test_a_card_may_lack_codecs_but_not_h264(monkeypatch: pytest.MonkeyPatch) -> None:
    real, refusing = fake_gpu.opener(), fake_gpu.opener(fake_gpu.failing_at(0))
    lacks = "hevc"
    monkeypatch.setattr(nvdec, "open_on_gpu", lambda p, *a, **k: (refusing if lacks in p.stem else real)(p, *a, **k))
    check_gpu()
    check_gpu.cache_clear()
    lacks = "h264"
    with pytest.raises(SystemFailure, match=r"this GPU does not decode h264_full .*NVIDIA_DRIVER_CAPABILITIES="):
        check_gpu()


# -- what it leaves to the CPU ---------------------------------------------------------------------------------------


def passed(path: Path, decoder: str) -> tuple[Any, ...]:
    """(why the GPU left it, digests of all consumers, rows by stage, the videos row) of a pass."""
    consumers = [Probe(), Frames(), Shots(ShotsParams(detector="hsv")), Quality()]
    attempts: list[list[tuple[str, Any]]] = []

    def work(opener: Any) -> Any:
        attempts.append([])
        sink = lambda name, row: attempts[-1].append((name, row))  # noqa: E731
        return run_pass(path, video_key="0" * 32, consumers=consumers, sink=sink, opener=opener)

    result, why = by_decoder(decoder, path, None, work)
    row, key = videos_row(result.facts, result.summary)
    return why, len(attempts), {n: p.digest for n, p in result.products.items()}, attempts[-1], row, key


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("cuts_vfr_bikes.mp4", None),
        ("full_range_bt601.mp4", None),
        ("rotate_and_mirror.mp4", None),
        ("two_video_streams_nasa.mp4", None),
        ("corrupt_midstream.mp4", "a packet that the GPU does not decode"),
        ("resolution_change.ts", "pictures of another size than its headers say"),
        ("vp8_vorbis.webm", "codec vp8"),
        ("av1_aac_mono.mp4", "codec av1"),
        ("hdr_pq_hevc_10bit.mp4", "pixel format yuv420p10le"),
    ],
)
def test_every_pass_ends_with_what_the_cpu_finds(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str | None
) -> None:
    monkeypatch.setattr(nvdec, "open_on_gpu", fake_gpu.opener())
    wanted = passed(corpus / name, "cpu")
    found = passed(corpus / name, "nvdec")
    assert wanted[:2] == (None, 1)
    assert found[:2] == (why, 2 if why and not why.startswith(("codec", "pixel format")) else 1)
    assert found[2:] == wanted[2:]


def test_a_packet_that_fails_in_the_middle_redoes_the_whole_video(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Consumers have seen and written much by then: none of it is left."""
    path = corpus / "cuts_bikes.mp4"
    monkeypatch.setattr(nvdec, "open_on_gpu", fake_gpu.opener())
    check_gpu()
    monkeypatch.setattr(nvdec, "open_on_gpu", fake_gpu.opener(fake_gpu.failing_at(200)))
    found, wanted = passed(path, "nvdec"), passed(path, "cpu")
    assert found[:2] == ("a packet that the GPU does not decode", 2)
    assert found[2:] == wanted[2:]


# -- jobs ------------------------------------------------------------------------------------------------------------


def digests(root: Path) -> dict[str, list[tuple[str, str, int, str]]]:
    """By stage: what the ledger says of each video, without fingerprints."""
    rows = lance.dataset(str(root / "ledger.lance")).to_table().to_pylist()
    found: dict[str, list[tuple[str, str, int, str]]] = {}
    for r in rows:
        found.setdefault(r["stage"], []).append((r["video_key"], r["state"], r["rows"], r["output_digest"]))
    return {stage: sorted(set(listed)) for stage, listed in found.items()}


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    make_barcode_video(tmp_path / "in" / "a.mp4", num_frames=45)
    make_barcode_video(tmp_path / "in" / "b.webm", num_frames=30, offset=100, codec=("-c:v", "libvpx"))
    return tmp_path / "in"


@no_gpu_here
def test_without_a_gpu_a_job_plans_stops_and_goes_on_with_the_cpu(videos: Path, tmp_path: Path) -> None:
    root = tmp_path / "cat"
    with pytest.raises(SystemFailure, match=r"decoder: nvdec needs an NVIDIA GPU .* or with --set decoder=cpu"):
        run_job(NVDEC, [videos], root, workers=1)
    catalog = videoflow.open(root)
    assert catalog.quarantine() == []
    found = identify(catalog, scan([str(videos)]), job=None)
    plan = Plan(catalog.root, catalog.ledger, NVDEC, NVDEC.build(), found.videos)
    frames = next(f for f in forecast(plan) if f.stage == "frames")
    assert (frames.to_compute + frames.cached, frames.quarantined) == (2, 0)
    assert frames.to_compute >= 1  # the one that is not for a GPU may have been done before
    done = run_job(NVDEC.with_settings(["decoder=cpu"]), [videos], root, workers=1)
    assert (done.done, done.quarantined, done.pending) == (2, 0, 0)


def test_a_plan_names_the_decoder_as_what_changed(videos: Path, tmp_path: Path) -> None:
    run_job(CPU, [videos], tmp_path / "cat", workers=1)
    catalog = videoflow.open(tmp_path / "cat")
    found = identify(catalog, scan([str(videos)]), job=None)
    plan = Plan(catalog.root, catalog.ledger, NVDEC, NVDEC.build(), found.videos)
    for f in forecast(plan):
        if f.stage in PASS:
            assert (f.to_compute, f.stale, f.changed) == (2, 2, ("identity.decoder",))


def with_stand_in(decoder: str, **params: Any) -> Recipe:
    stages = {"fake_gpu": {"use": "tests.fake_gpu:FakeGpu", **params}, **STAGES}
    return Recipe(stages=stages, decoder=decoder)


@pytest.mark.parametrize("fails_at", [None, 30])
def test_a_job_on_a_gpu_finds_what_one_on_cpus_finds(videos: Path, tmp_path: Path, fails_at: int | None) -> None:
    roots = {d: tmp_path / d for d in ("cpu", "nvdec")}
    told = {d: Quiet() for d in roots}
    for d, root in roots.items():
        summary = run_job(with_stand_in(d, fails_at=fails_at), [videos], root, workers=1, progress=told[d])
        assert (summary.done, summary.frames_decoded, summary.version) == (2, 75, "x@1")
    assert digests(roots["cpu"]) == digests(roots["nvdec"])
    left = [note for note in told["nvdec"].notes if "left to the CPU" in note]
    failed = ["1 video was left to the CPU by nvdec: a packet that the GPU does not decode"] if fails_at else []
    assert sorted(left) == [*failed, "1 video was left to the CPU by nvdec: codec vp8"]
    assert not [note for note in told["cpu"].notes if "left to the CPU" in note]


def test_results_of_the_two_never_stand_in_for_each_other(videos: Path, tmp_path: Path) -> None:
    """A GPU that went wrong after it was checked shows in nothing but its own results."""
    root = tmp_path / "cat"
    run_job(with_stand_in("cpu", darkens=True), [videos], root, workers=1)
    before = {p.name for p in (root / "frames").iterdir()}
    again = run_job(with_stand_in("nvdec", darkens=True), [videos], root, workers=1)
    assert (again.decoded_videos, again.frames_decoded) == (2, 75)
    assert len({p.name for p in (root / "frames").iterdir()} - before) == 1
    frames = digests(root)["frames"]
    assert len(frames) == 3  # the H.264 video looks different on that GPU, the VP8 one never was there
    assert run_job(with_stand_in("nvdec", darkens=True), [videos], root, workers=1).decoded_videos == 0


def test_a_long_video_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "MIN_BYTES", 0)
    monkeypatch.setattr(split, "MIN_PART_SECONDS", 2.0)
    (tmp_path / "in").mkdir()
    x264 = ("-c:v", "libx264", "-g", "30", "-bf", "2")
    make_barcode_video(tmp_path / "in" / "a.mp4", num_frames=300, codec=x264)
    found = {}
    for decoder, darkens in (("cpu", False), ("nvdec", False), ("nvdec", True)):
        root = tmp_path / f"{decoder}{darkens}"
        summary = run_job(with_stand_in(decoder, darkens=darkens), [tmp_path / "in"], root, workers=2)
        assert summary.stages["decode parts"]["items"] >= 3 and "decode" not in summary.stages
        found[decoder, darkens] = digests(root)
    assert found["cpu", False] == found["nvdec", False]
    assert found["nvdec", True]["probe"] == found["cpu", False]["probe"]
    assert found["nvdec", True]["frames"] != found["cpu", False]["frames"]
