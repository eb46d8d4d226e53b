"""What a job tells about itself: the true bottleneck where one is put in, and parts that sum to the whole."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.jobs import Quiet, run_job
from tests.watching_faults import SlowFiles
from videoflow.cli.main import main
from videoflow.errors import InputError, SystemFailure
from videoflow.execute import JobOptions
from videoflow.job import Job
from videoflow.recipe import Recipe
from videoflow.store.commit import Committer
from videoflow.telemetry import watch as watching
from videoflow.telemetry.meter import GROUP_OF, GROUPS
from videoflow.telemetry.metrics import METRICS
from videoflow.telemetry.outlets import appending, serving
from videoflow.telemetry.verdict import BOTTLENECKS, COMMITTING, DOMINANT, IDLING, MANY_WAITING, MIN_SECONDS
from videoflow.telemetry.watch import JobWatch
from videoflow.testing import make_barcode_video
from workers import local_engine, write_unit

DOCS = (Path(__file__).parent.parent / "docs" / "watching.md").read_text(encoding="utf-8")
NUM_VIDEOS, NUM_FRAMES = 8, 45
STAGES: dict[str, dict[str, Any]] = {"frames": {}, "clips": {"by": "windows", "window_seconds": 1}}


def recipe_with(name: str, seconds: float) -> Recipe:
    """The small recipe with one of the slow stages."""
    use = f"tests.watching_faults:{name}"
    return Recipe(stages={**STAGES, name: {"use": use, "seconds": seconds}})


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("watching")
    for i in range(NUM_VIDEOS):
        make_barcode_video(folder / f"v{i}.mp4", num_frames=NUM_FRAMES, offset=100 * i)
    return folder


def status(root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The one job of a catalog, as `videoflow status --json` says it."""
    (record,) = (root / "jobs").glob("*.json")
    monkeypatch.setattr("sys.argv", ["videoflow", "status", str(root), record.stem, "--json"])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


@pytest.fixture
def told(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a job and hear what `status --json` says of it."""

    def run(recipe: Recipe, source: Path | str, **options: Any) -> dict[str, Any]:
        assert run_job(recipe, [source], tmp_path / "cat", **options).done == NUM_VIDEOS
        found = status(tmp_path / "cat", capsys, monkeypatch)["watch"]
        check_sums(found)
        return found

    return run


def check_sums(watch: dict[str, Any]) -> None:
    """Parts sum to wholes, for every stage."""
    for s in watch["stages"].values():
        whole = sum(s["states"].values())
        assert set(s["states"]) <= set(GROUP_OF) and set(s["shares"]) == set(GROUPS)
        assert sum(s["shares"].values()) == pytest.approx(1, abs=1e-3)
        assert sum(s["consumers"].values()) == pytest.approx(s["states"].get("consume", 0), abs=0.01)
        if s["stage"] == "sources":
            continue
        assert sum(s["driver"].values()) == pytest.approx(s["seconds"], abs=0.01)
        assert 0 < whole <= s["workers"] * s["seconds"] + 0.01  # workers are never there longer than their stage
        u = s["units"]
        assert (u["queued"], u["running"], u["waiting"], u["committed"]) == (0, 0, 0, u["total"])


def slow(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, seconds: float) -> None:
    real = getattr(owner, name)

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, late)


# -- the true bottleneck -----------------------------------------------------------------------------------------------


def test_slow_sources(told: Any, videos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("slowfiles", SlowFiles, clobber=True)
    monkeypatch.setattr(SlowFiles, "seconds", 0.7)
    watch = told(Recipe(stages=STAGES), f"slowfiles://{videos}")
    verdict = watch["verdict"]
    assert (verdict["bottleneck"], verdict["stage"]) == ("storage_read", "decode")
    assert "waited for bytes of the sources" in verdict["says"] and "--workers" in verdict["remedy"]
    assert watch["stages"]["decode"]["states"]["fetch"] >= NUM_VIDEOS * 0.7
    assert watch["stages"]["decode"]["bytes_read"] == sum(f.stat().st_size for f in videos.iterdir())


def test_a_decoder_that_waits_for_its_file(told: Any, videos: Path) -> None:
    if not Path("/proc/thread-self/schedstat").exists():
        pytest.skip("this kernel does not say how long a thread waited for a core")
    assert told(recipe_with("WaitingDecoder", 0.02), videos)["verdict"]["bottleneck"] == "storage_read"


def test_slow_writing(told: Any, videos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, write_unit, "write_rows", 0.4)
    verdict = told(Recipe(stages=STAGES), videos)["verdict"]
    assert (verdict["bottleneck"], verdict["stage"]) == ("storage_write", "decode")
    assert "wrote to the catalog" in verdict["says"] and "--root" in verdict["remedy"]


def test_slow_decoder(told: Any, videos: Path) -> None:
    verdict = told(recipe_with("BusyDecoder", 0.01), videos)["verdict"]
    assert (verdict["bottleneck"], verdict["stage"]) == ("decode", "decode")
    assert "workers decoded for" in verdict["says"] and "cores" in verdict["remedy"]


def test_slow_stage_that_rides_the_pass_and_what_people_read(
    told: Any, videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Quiet()
    watch = told(recipe_with("SlowRider", 0.02), videos, progress=progress)
    verdict = watch["verdict"]
    assert (verdict["bottleneck"], verdict["stage"]) == ("decode", "decode")
    assert "stage slow_rider" in verdict["says"] and "slow_rider cheaper" in verdict["remedy"]
    decode = watch["stages"]["decode"]
    assert decode["frames"] == NUM_VIDEOS * NUM_FRAMES
    assert decode["consumers"]["slow_rider"] >= NUM_VIDEOS * NUM_FRAMES * 0.02

    assert progress.notes[-1] == verdict["says"]  # the line at the end of a run
    (record,) = (tmp_path / "cat" / "jobs").glob("*.json")
    monkeypatch.setattr("sys.argv", ["videoflow", "status", str(tmp_path / "cat"), record.stem])
    with pytest.raises(SystemExit):
        main()
    text = capsys.readouterr().out
    assert verdict["says"] in text and text.count("bottleneck") == 1
    for says in ("frames/s", "2 workers: busy", "time: ", "consume: slow_rider", "8 of 8 committed", "memory: driver"):
        assert says in text, text


def test_slow_model(told: Any, videos: Path) -> None:
    verdict = told(recipe_with("SlowModel", 0.7), videos)["verdict"]
    assert (verdict["bottleneck"], verdict["stage"]) == ("model", "SlowModel")
    assert "in stage SlowModel itself" in verdict["says"] and "GPU" in verdict["remedy"]


def test_slow_commit(told: Any, videos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, Committer, "commit", 0.5)
    watch = told(Recipe(stages=STAGES), videos)
    verdict = watch["verdict"]
    assert verdict["bottleneck"] == "commit"
    assert watch["stages"]["decode"]["verdict"]["bottleneck"] == "commit"
    assert "finished units waited" in verdict["says"] and "fewer --workers" in verdict["remedy"]
    assert watch["stages"]["decode"]["units"]["mean_waiting"] >= MANY_WAITING


@pytest.mark.timeout(600)
def test_slow_decode_and_slow_model_under_ray(told: Any, videos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "SAMPLE_SECONDS", 0.5)
    slow_ones = {**recipe_with("SlowRider", 0.03).stages, **recipe_with("SlowModel", 0.5).stages}
    watch = told(Recipe(stages=slow_ones), videos, engine="ray")
    decode, model = (watch["stages"][name] for name in ("decode", "SlowModel"))
    assert [s["verdict"]["bottleneck"] for s in (decode, model)] == ["decode", "model"]
    assert "stage slow_rider" in decode["verdict"]["says"]
    longest = watch["verdict"]["stage"]  # which that is hangs on how busy the machine is
    assert watch["verdict"] == watch["stages"][longest]["verdict"]
    assert decode["frames"] == NUM_VIDEOS * NUM_FRAMES
    assert watch["rss_bytes"]["peak"] > watch["rss_bytes"]["driver"]  # actors and children were seen while they lived


# -- while it runs -----------------------------------------------------------------------------------------------------


class Looking(Quiet):
    """Progress that looks at the job at its first report, from another process's point of view."""

    def __init__(self, look: Any) -> None:
        super().__init__()
        self._look, self.looked = look, False

    def advance(self, stage: str, report: Any) -> None:
        if stage == "decode" and not self.looked:
            self.looked = True
            self._look()


def test_a_running_job_is_seen_in_its_record_by_prometheus_and_in_the_file(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watching, "SAMPLE_SECONDS", 0.2)
    monkeypatch.setattr("videoflow.jobrecord.HEARTBEAT_SECONDS", 0.2)
    watch, seen, ports = JobWatch(), {}, []

    def look() -> None:
        time.sleep(0.6)  # a heartbeat and a sample
        seen["status"] = status(tmp_path / "cat", capsys, monkeypatch)
        with urllib.request.urlopen(f"http://127.0.0.1:{ports[0]}/metrics", timeout=10) as answer:
            seen["metrics"] = answer.read().decode()

    options = JobOptions(engine="local", workers=2, max_quarantined=1.0)
    recipe = recipe_with("SlowRider", 0.01)
    with serving(watch, "127.0.0.1:0") as port, appending(watch, str(tmp_path / "m.jsonl")):
        ports.append(port)
        job = Job(recipe, [str(videos)], root=str(tmp_path / "cat"), name="x", options=options, progress=Looking(look), watch=watch)  # fmt: skip
        job.run()
    running = seen["status"]["watch"]
    assert seen["status"]["state"] == "running" and len(running["workers"]) == 2
    for w in running["workers"]:
        assert sum(w["states"].values()) == pytest.approx(w["seconds"], abs=1e-6)
        assert w["child_rss_bytes"] > 0 and w["rss_bytes"] == 0  # a thread of the driver, with a child
    decode = running["stages"]["decode"]
    units = decode["units"]
    assert decode["running"] and units["committed"] >= 1
    assert sum(units[q] for q in ("queued", "running", "waiting", "committed")) == units["total"] == NUM_VIDEOS
    assert decode["frames"] >= NUM_FRAMES and sum(decode["states"].values()) > 0

    lines = [line for line in seen["metrics"].splitlines() if not line.startswith("#")]
    names = {re.split(r"[{ ]", line)[0] for line in lines}
    assert names == {m.name for m in METRICS}
    assert all(f'job="{job.id}"' in line for line in lines)
    frames = next(line for line in lines if line.startswith("videoflow_frames_total{") and 'stage="decode"' in line)
    assert float(frames.split()[-1]) >= NUM_FRAMES

    kept = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert len(kept) > 2 and {k["job"] for k in kept} == {job.id}
    assert kept[-1]["stages"]["decode"]["units"]["committed"] == NUM_VIDEOS and not kept[-1]["workers"]
    assert [k["at"] for k in kept] == sorted(k["at"] for k in kept)


def test_a_stop_while_finished_units_wait_leaves_no_worker_behind(videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(local_engine, "HAND_OVER_PER_WORKER", 1)
    engines: list[Any] = []
    real = local_engine.LocalEngine.run

    def run(self: Any, units: Any) -> Iterator[Any]:
        engines.append(self)
        return real(self, units)

    def fail(self: Any, records: Any) -> None:
        if not records:  # nothing to take over from an earlier run
            return
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not all(w.state == "hand_over" for w in engines[-1].watch()):
            time.sleep(0.05)
        raise SystemFailure("the disk is full")

    monkeypatch.setattr(local_engine.LocalEngine, "run", run)
    monkeypatch.setattr(Committer, "commit", fail)
    with pytest.raises(SystemFailure, match="the disk is full"):
        run_job(Recipe(stages=STAGES), [videos], tmp_path / "cat")
    assert [w.state for w in engines[-1].watch()] == ["idle", "idle"]
    assert not engines[-1]._threads
    (record,) = (tmp_path / "cat" / "jobs").glob("*.json")
    stopped = json.loads(record.read_text())
    assert stopped["state"] == "stopped" and not stopped["watch"]["stages"]["decode"]["running"]


def test_an_engine_that_tells_nothing_is_seen_through_the_driver(videos: Path, tmp_path: Path) -> None:
    assert run_job(Recipe(stages=STAGES), [videos], tmp_path / "cat", engine="tests.watching_faults:BareEngine").done == NUM_VIDEOS  # fmt: skip
    (record,) = (tmp_path / "cat" / "jobs").glob("*.json")
    decode = json.loads(record.read_text())["watch"]["stages"]["decode"]
    assert decode["units"]["committed"] == decode["units"]["total"] > 0 and decode["items"] == NUM_VIDEOS
    assert not decode["states"] and sum(decode["driver"].values()) == pytest.approx(decode["seconds"], abs=0.01)


# -- documents ---------------------------------------------------------------------------------------------------------


def test_every_metric_state_and_bottleneck_is_documented_and_none_else() -> None:
    rows = re.findall(r"^\| `([a-z_0-9]+)` \| (.*) \|$", DOCS, re.MULTILINE)
    named = [name for name, _ in rows]
    queues, driver = ["queued", "running", "waiting", "committed"], ["start_up", "wait", "commit", "other"]
    assert named == [*GROUP_OF, *driver, *queues, *bottlenecks_in_order(), *(m.name for m in METRICS)]
    for state, group in GROUP_OF.items():
        assert any(cells.startswith(f"{group.replace('_', ' ')} | ") for name, cells in rows if name == state), state
    for m in METRICS:
        labels = ", ".join(f"`{label}`" for label in m.labels)
        assert (m.name, f"{m.kind} | {labels} | {m.help}") in rows


def bottlenecks_in_order() -> list[str]:
    """In the order in which the rule asks."""
    order = ["too_short", "commit", "too_few_units", "storage_read", "decode", "model", "storage_write", "none"]
    assert sorted(order) == sorted(BOTTLENECKS)
    return order


def test_thresholds_are_the_documented_ones() -> None:
    for says in (
        f"less than {MIN_SECONDS:.0f} s of work",
        f"{COMMITTING:.0%} of the stage".replace("%", " %"),
        f"{MANY_WAITING} finished units or more",
        f"more than {IDLING:.0%} of their time".replace("%", " %"),
        f"{DOMINANT:.0%} of it or more".replace("%", " %"),
    ):
        assert says in DOCS, says


@pytest.mark.parametrize("command", ["run", "resume"])
def test_options_are_documented(command: str) -> None:
    import typer

    from videoflow.cli.app import app

    options = {o for p in typer.main.get_command(app).commands[command].params for o in p.opts}  # type: ignore[attr-defined]
    assert {"--metrics-port", "--metrics-file"} <= options
    for option in ("--metrics-port", "--metrics-file", "VIDEOFLOW_METRICS_PORT", "VIDEOFLOW_METRICS_FILE"):
        assert option in DOCS


@pytest.mark.parametrize("address", ["", "x", "1:2:x", "70000", "localhost:"])
def test_a_wrong_address_is_one_line(address: str) -> None:
    with pytest.raises(InputError, match="PORT") as told, serving(JobWatch(), address):
        pass
    assert len(str(told.value).splitlines()) == 1
