"""Both engines give the same pixels, keep what they handed out, and name what does not decode."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import simplejpeg

from videoflow.errors import BadSample, LoaderError, MissingExtra
from videoflow.loader import engine as engine_module
from videoflow.loader.engine import make_engine
from videoflow.loader.reader import EncodedClip


def encoded(num_frames: int, *, height: int = 64, width: int = 96, seed: int = 0, repeats: int = 0) -> EncodedClip:
    rng = np.random.default_rng(seed)
    ramp = np.add.outer(np.arange(height), np.arange(width))[..., None]
    frames = [(ramp + rng.integers(0, 90, (height, width, 3))).clip(0, 255).astype(np.uint8) for _ in range(num_frames)]
    payloads = [
        memoryview(simplejpeg.encode_jpeg(f, quality=90, colorspace="RGB", colorsubsampling="420")) for f in frames
    ]
    payloads += payloads[-1:] * repeats
    pts = tuple(range(num_frames)) + (num_frames - 1,) * repeats
    valid = (True,) * num_frames + (False,) * repeats
    return EncodedClip(f"{seed:032x}", pts, tuple(payloads), valid, Fraction(1, 8), height, width)


@pytest.fixture(params=["cpu", "dali"])
def engine(request: pytest.FixtureRequest) -> Any:
    if request.param == "dali":
        pytest.importorskip("nvidia.dali")
        pytest.importorskip("torch")
    made = make_engine(request.param)
    yield made
    made.close()


def reference(clip: EncodedClip) -> np.ndarray:
    return np.stack([simplejpeg.decode_jpeg(p, colorspace="RGB") for p in clip.payloads])


def test_pixels_at_cached_size(engine: Any) -> None:
    clips = [encoded(3, seed=s, repeats=s) for s in (0, 0)] + [encoded(3, seed=5)]
    video = np.asarray(engine.decode(clips, size=None, fit="crop"))
    assert video.shape == (3, 3, 64, 96, 3)
    assert video.dtype == np.uint8
    assert np.array_equal(video, np.stack([reference(c) for c in clips]))


def test_repeated_frames(engine: Any) -> None:
    clips = [encoded(4, seed=1), encoded(1, seed=2, repeats=3), encoded(3, seed=3, repeats=1)]
    video = np.asarray(engine.decode(clips, size=None, fit="crop"))
    assert np.array_equal(video, np.stack([reference(c) for c in clips]))


def test_crops_are_moved_not_computed(engine: Any) -> None:
    clip = encoded(2)
    video = np.asarray(engine.decode([clip], size=(64, 64), fit="crop"))
    assert np.array_equal(video[0], reference(clip)[:, :, 16:80])


@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
def test_engines_agree_on_resized_and_mixed_sizes(fit: str) -> None:
    pytest.importorskip("nvidia.dali")
    clips = [encoded(3, seed=1), encoded(3, height=80, width=50, seed=2), encoded(2, seed=3, repeats=1)]
    for batch in (clips, clips[:1]):
        made = [np.asarray(make_engine(n).decode(batch, size=(48, 40), fit=fit)).astype(int) for n in ("cpu", "dali")]
        difference = np.abs(made[0] - made[1])
        assert difference.mean() <= 0.5
        assert difference.max() <= 12


def test_batches_keep_their_memory(engine: Any) -> None:
    batches = [[encoded(4, seed=10 * i + j) for j in range(2 + i % 3)] for i in range(6)]
    kept = [engine.decode(b, size=None, fit="crop") for b in batches]
    for batch, video in zip(batches, kept, strict=True):
        assert np.array_equal(np.asarray(video), np.stack([reference(c) for c in batch]))


def test_what_does_not_decode_is_named_and_the_engine_goes_on(engine: Any) -> None:
    good = encoded(2, seed=1)
    for payload in (b"", b"no picture", bytes(good.payloads[0][:2])):
        bad = EncodedClip("b" * 32, (7, 8), (good.payloads[0], memoryview(payload)), (True, True), Fraction(1), 64, 96)
        if engine.name == "dali" and payload[:2] == b"\xff\xd8":
            continue  # such bytes can end the process in DALI's CPU decoder; the CRC keeps them away from it
        with pytest.raises(BadSample, match=r"clip b{32}: its frame at pts 8 does not decode"):
            engine.decode([good, bad], size=None, fit="crop")
    assert np.array_equal(np.asarray(engine.decode([good], size=None, fit="crop"))[0], reference(good))


def test_a_picture_of_another_size_than_its_row_says(engine: Any) -> None:
    wrong = EncodedClip("c" * 32, (0,), (encoded(1, height=32, width=32).payloads[0],), (True,), Fraction(1), 64, 96)
    for size in (None, (20, 20)):
        with pytest.raises(BadSample, match=r"clip c{32}"):
            engine.decode([wrong], size=size, fit="crop")


def test_clips_that_cannot_share_an_array(engine: Any) -> None:
    with pytest.raises(LoaderError, match=r"same number of frames"):
        engine.decode([encoded(2), encoded(3)], size=None, fit="crop")
    with pytest.raises(LoaderError, match=r"64×96, 80×50.*size="):
        engine.decode([encoded(2), encoded(2, height=80, width=50)], size=None, fit="crop")


def test_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_engine("auto").name == "cpu"
    monkeypatch.setattr(engine_module.importlib.util, "find_spec", lambda name: None)
    assert make_engine("auto", device="cuda").name == "cpu"
    with pytest.raises(LoaderError, match=r"engine='fast'"):
        make_engine("fast")
    with pytest.raises(LoaderError, match=r"threads=0"):
        make_engine("cpu", threads=0)


def test_without_dali_the_install_line_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(MissingExtra, match=r"pip install 'videoflow\[dali-cuda13\]'"):
        make_engine("dali")


def test_importing_the_loader_starts_nothing_and_needs_neither_torch_nor_dali() -> None:
    code = (
        "import sys, threading; before = threading.active_count(); sys.modules['torch'] = None; import "
        "videoflow.loader; "
        "assert threading.active_count() == before; assert not any(m.startswith('nvidia') for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
