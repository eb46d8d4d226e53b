"""Tokenizers by their real loading code: TorchScript in Cosmos' layout, video VAEs of diffusers, classes of one's own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from videoflow.errors import MediaError, MissingWeights, RecipeError
from videoflow.fingerprint import fingerprint
from videoflow.recipe import Recipe
from videoflow.stage import ClipFrames
from workers import reconstruction
from workers.tokenize import Tokenize, TokenizeParams, as_stored

torch = pytest.importorskip("torch", reason="needs videoflow[torch]")
from tests.workers.video_models import VAES, Flat, Fold, Luma, Unfold, moving, save_jit, save_vae  # noqa: E402


def clip(video: np.ndarray, key: str = "c" * 32) -> ClipFrames:
    return ClipFrames(key, "v" * 32, video, 1.5 + np.arange(len(video), dtype=np.float64) / 8)


def stage(**params: Any) -> Tokenize:
    return Tokenize(Tokenize.resolve(TokenizeParams(**params)))


def array(row: Any) -> np.ndarray:
    return np.frombuffer(row["data"], row["dtype"]).reshape(row["shape"])


def row_of(made: Tokenize, video: np.ndarray, key: str = "c" * 32) -> Any:
    (product,) = made.process([clip(video, key)])
    return product.rows[0]


# ── TorchScript in the layout of the Cosmos tokenizer ────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def jit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_jit(tmp_path_factory.mktemp("jit"), Unfold(), Fold())


def test_continuous_latents_of_a_lossless_tokenizer_are_the_pixels(jit: Path) -> None:
    made = stage(
        tokenizer="torchscript", weights=str(jit), output="latents", allow_torchscript=True, latent_dtype="float32"
    )
    video = moving(30, 52, 70)  # 25 = 1 + 8·3 frames and 48 × 64 pixels of it
    row = row_of(made, video)
    assert (row["num_frames"], row["height"], row["width"]) == (25, 48, 64)
    assert (row["kind"], row["grid"], row["shape"]) == ("latents", [4, 6, 8], [1536, 4, 6, 8])
    assert (row["first_us"], row["last_us"]) == (1_500_000, 4_500_000)
    seen = video[:25, 2:50, 3:67]
    found = array(row).reshape(3, 8, 8, 8, 4, 6, 8)  # colour, frame, y, x in the block; block
    for c, t, y, x in ((0, 0, 0, 0), (2, 24, 47, 63), (1, 9, 13, 30)):
        at = t + 7
        value = found[c, at % 8, y % 8, x % 8, at // 8, y // 8, x // 8]
        assert value == pytest.approx(seen[t, y, x, c] / 127.5 - 1, abs=1e-6)
    assert (row["psnr"], row["ssim"]) == (100.0, pytest.approx(1.0))
    assert made.column() == "latents"


def test_discrete_ids_are_the_means_of_blocks(tmp_path: Path) -> None:
    folder = save_jit(tmp_path / "dv", Luma(), Flat())
    made = stage(tokenizer="torchscript", weights=str(folder), output="ids", allow_torchscript=True)
    levels = np.random.default_rng(0).integers(0, 256, (3, 4, 5)).astype(np.uint8)
    video = np.concatenate([levels[:1].repeat(1, 0), levels[1:].repeat(8, 0)]).repeat(8, 1).repeat(8, 2)
    row = row_of(made, np.stack([video] * 3, axis=-1))
    assert row["dtype"] == "int32"
    assert np.array_equal(array(row), levels)
    assert row["psnr"] == 100.0  # every block is flat, so its mean is all of it
    assert made.column() == "tokens"
    product = made.process([clip(np.stack([video] * 3, axis=-1))])[0]
    assert product.digest != made.process([clip(np.stack([video[::-1]] * 3, axis=-1))])[0].digest


def test_without_a_decoder_there_are_no_scores(tmp_path: Path, jit: Path) -> None:
    folder = save_jit(tmp_path / "encoder", Unfold())
    row = row_of(
        stage(tokenizer="torchscript", weights=str(folder), output="latents", allow_torchscript=True), moving(9, 16, 16)
    )
    assert (row["psnr"], row["ssim"]) == (None, None)
    unscored = stage(tokenizer="torchscript", weights=str(jit), output="latents", allow_torchscript=True, score=False)
    assert row_of(unscored, moving(9, 16, 16))["psnr"] is None


def test_torchscript_runs_only_where_it_is_allowed(jit: Path) -> None:
    stages = {
        "frames": {},
        "clips": {"by": "windows"},
        "tokenize": {"tokenizer": "torchscript", "weights": str(jit), "output": "latents"},
    }
    with pytest.raises(RecipeError, match="allow_torchscript: true"):
        Recipe(stages=stages).build()
    stages["tokenize"]["allow_torchscript"] = True
    allowed = Recipe(stages=stages).build()[-1]
    assert allowed.name == "tokenize"
    assert "allow_torchscript" not in allowed.stage.params.model_dump()


def test_another_grid_than_was_said_is_the_models_error(jit: Path) -> None:
    made = stage(tokenizer="torchscript", weights=str(jit), output="latents", allow_torchscript=True, temporal=4)
    with pytest.raises(MediaError, match=r"makes \(1536, 2, 2, 2\) of 9 frames of 16×16.*grid would be \(3, 2, 2\)"):
        made.process([clip(moving(9, 16, 16))])
    wrong = stage(tokenizer="torchscript", weights=str(jit), output="ids", allow_torchscript=True)
    with pytest.raises(MediaError, match="not ids"):
        wrong.process([clip(moving(9, 16, 16))])


def test_changed_weights_are_another_fingerprint_another_path_is_not(jit: Path, tmp_path: Path) -> None:
    def printed(folder: Path) -> str:
        return fingerprint(
            stage(tokenizer="torchscript", weights=str(folder), output="latents", allow_torchscript=True)
        )

    shutil.copytree(jit, tmp_path / "copy")
    shutil.copytree(jit, tmp_path / "other")
    save_jit(tmp_path / "other", Unfold(gain=0.5))
    assert printed(tmp_path / "copy") == printed(jit)
    assert printed(tmp_path / "other") != printed(jit)
    (tmp_path / "other/decoder.jit").unlink()
    before = printed(tmp_path / "copy")
    (tmp_path / "copy/decoder.jit").unlink()  # the scores were the decoder's
    assert printed(tmp_path / "copy") != before


def test_weights_that_change_between_plan_and_work_stop_the_job(jit: Path, tmp_path: Path) -> None:
    shutil.copytree(jit, tmp_path / "copy")
    made = stage(tokenizer="torchscript", weights=str(tmp_path / "copy"), output="latents", allow_torchscript=True)
    fingerprint(made)
    save_jit(tmp_path / "copy", Unfold(gain=0.25))
    with pytest.raises(MissingWeights, match="not those that the plan was made with"):
        made.setup()


def test_folders_that_hold_no_tokenizer(tmp_path: Path) -> None:
    for params, said in (
        ({"tokenizer": "torchscript", "output": "ids", "allow_torchscript": True}, "needs weights"),
        ({"tokenizer": "torchscript", "output": "ids", "allow_torchscript": True, "weights": str(tmp_path / "no")}, "no folder"),
        ({"tokenizer": "torchscript", "output": "ids", "allow_torchscript": True, "weights": str(tmp_path)}, "no encoder.jit"),
        ({"tokenizer": "diffusers", "weights": str(tmp_path)}, "no config.json"),
    ):  # fmt: skip
        with pytest.raises(MissingWeights, match=said):
            stage(**params).identity()
    (tmp_path / "encoder.jit").write_bytes(b"no program")
    with pytest.raises(MissingWeights, match="cannot be loaded as TorchScript"):
        stage(tokenizer="torchscript", output="ids", allow_torchscript=True, weights=str(tmp_path)).setup()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(MissingWeights, match="no _class_name"):
        stage(tokenizer="diffusers", weights=str(tmp_path)).identity()


# ── video VAEs of diffusers ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module", params=sorted(VAES))
def vae(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    pytest.importorskip("diffusers", reason="needs videoflow[diffusers]")
    return request.param, save_vae(tmp_path_factory.mktemp(request.param), request.param)


def direct(name: str, folder: Path, video: np.ndarray) -> Any:
    """The VAE's own answer: (model, posterior)."""
    import diffusers

    model = getattr(diffusers, name).from_pretrained(folder).eval()
    x = torch.from_numpy(video.astype(np.float32) / 127.5 - 1).permute(3, 0, 1, 2)[None]
    with torch.no_grad():
        return model, model.encode(x).latent_dist


def test_latents_are_the_vaes_own(vae: tuple[str, Path]) -> None:
    name, folder = vae
    _, temporal, spatial = VAES[name]
    video = moving(temporal * 2 + 3, 2 * spatial, 3 * spatial + 5)
    seen = video[: temporal * 2 + 1, :, 2 : 2 + 3 * spatial]
    model, posterior = direct(name, folder, seen)
    row = row_of(stage(tokenizer="diffusers", weights=str(folder), latent_dtype="float32"), video)
    assert (row["num_frames"], row["grid"]) == (temporal * 2 + 1, [3, 2, 3])
    assert row["tokenizer"] == f"diffusers:{name}"
    np.testing.assert_allclose(array(row), posterior.parameters[0].numpy(), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        again = model.decode(posterior.mean).sample[0].permute(1, 2, 3, 0).numpy()
    pixels = np.clip(np.rint((again + 1) * 127.5), 0, 255).astype(np.uint8)
    assert row["psnr"] == pytest.approx(reconstruction.psnr(seen, pixels), abs=0.01)


def test_a_sample_is_the_clips_own_and_the_mode_is_the_mean(vae: tuple[str, Path]) -> None:
    name, folder = vae
    _, temporal, spatial = VAES[name]
    video = moving(2 * temporal + 1, spatial, spatial)
    _, posterior = direct(name, folder, video)
    options = {"tokenizer": "diffusers", "weights": str(folder), "latent_dtype": "float32", "score": False}
    drawn, mode = stage(**options, latents="sample"), stage(**options, latents="mode")
    np.testing.assert_allclose(array(row_of(mode, video)), posterior.mean[0].numpy(), atol=1e-5, rtol=1e-5)
    one, two = (array(row_of(drawn, video, key)) for key in ("a" * 32, "b" * 32))
    assert not np.array_equal(one, two)
    assert np.array_equal(one, array(row_of(drawn, video, "a" * 32)))  # not the second draw of one generator
    other_seed = array(row_of(stage(**options, latents="sample", seed=1), video, "a" * 32))
    assert not np.array_equal(one, other_seed)
    spread = (one - posterior.mean[0].numpy()) / posterior.std[0].numpy()
    assert 0.3 < spread.std() < 2.0


def test_clips_beside_a_clip_change_nothing(vae: tuple[str, Path]) -> None:
    name, folder = vae
    _, temporal, spatial = VAES[name]
    made = stage(tokenizer="diffusers", weights=str(folder), latents="sample")
    clips = [clip(moving(2 * temporal + 1, spatial, spatial * (1 + i % 2), seed=i), f"{i:032x}") for i in range(3)]
    alone = [made.process([c])[0].rows[0] for c in clips]
    for order in ([0, 1, 2], [2, 0, 1], [1, 2]):
        assert [p.rows[0] for p in made.process([clips[i] for i in order])] == [alone[i] for i in order]


def test_tiling_and_slicing_are_switched_on(vae: tuple[str, Path]) -> None:
    name, folder = vae
    made = stage(tokenizer="diffusers", weights=str(folder), tiling=True, slicing=True)
    made.setup()
    inner: Any = made._live._vae  # type: ignore[union-attr]
    assert inner.use_tiling and inner.use_slicing
    _, temporal, spatial = VAES[name]
    assert row_of(made, moving(2 * temporal + 1, spatial, spatial))["grid"] == [3, 1, 1]


def test_a_vaes_fingerprint_is_of_its_weights_and_config(tmp_path: Path) -> None:
    pytest.importorskip("diffusers", reason="needs videoflow[diffusers]")
    one = save_vae(tmp_path / "one", "AutoencoderKLWan")
    same, other = (
        save_vae(tmp_path / "same", "AutoencoderKLWan"),
        save_vae(tmp_path / "other", "AutoencoderKLWan", seed=1),
    )
    (same / "README.md").write_text("not a weight")
    prints = [fingerprint(stage(tokenizer="diffusers", weights=str(p))) for p in (one, same, other)]
    assert prints[0] == prints[1] != prints[2]
    config = (same / "config.json").read_text()
    (same / "config.json").write_text(config.replace('"num_res_blocks": 1', '"num_res_blocks": 2'))
    assert fingerprint(stage(tokenizer="diffusers", weights=str(same))) != prints[0]
    (one / "diffusion_pytorch_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0no json!")
    with pytest.raises(MissingWeights, match="no AutoencoderKLWan can be loaded"):
        stage(tokenizer="diffusers", weights=str(one)).setup()
    (one / "config.json").write_text('{"_class_name": "NoSuchVAE"}')
    with pytest.raises(RecipeError, match="has no VAE NoSuchVAE"):
        stage(tokenizer="diffusers", weights=str(one)).setup()


# ── one of your own, and what is refused ─────────────────────────────────────────────────────────────────────────────


class Thumbnails:
    """Every eighth pixel: ids (t, h, w) of the red values."""

    temporal, spatial, causal, digest = 1, 8, False, "1"

    def encode(self, video: np.ndarray, *, seed: int) -> np.ndarray:
        return video[:, ::8, ::8, 0].astype(np.int64)


class Broken(Thumbnails):
    def encode(self, video: np.ndarray, *, seed: int) -> np.ndarray:
        return np.full((4, 1, 1, 1), np.nan)


def make_thumbnails(weights: str | None) -> Thumbnails:
    return Thumbnails()


def make_broken(weights: str | None) -> Thumbnails:
    return Broken()


def make_nothing(weights: str | None) -> object:
    return object()


def test_a_class_of_your_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = "tests.workers.test_tokenize"
    made = stage(tokenizer=f"{here}:make_thumbnails", output="ids")
    video = moving(5, 33, 20)
    row = row_of(made, video)
    assert np.array_equal(array(row), video[:, 0:32:8, 2:18:8, 0])
    assert (row["psnr"], row["num_frames"]) == (None, 5)
    before = made.identity()
    monkeypatch.setattr(make_thumbnails, "digest", "2", raising=False)
    assert made.identity() != before
    with pytest.raises(RecipeError, match="needs output: ids or output: latents"):
        stage(tokenizer=f"{here}:make_thumbnails")
    with pytest.raises(RecipeError, match="lacks temporal, spatial, causal, encode"):
        stage(tokenizer=f"{here}:make_nothing", output="ids").setup()
    with pytest.raises(MediaError, match="not finite"):
        row_of(stage(tokenizer=f"{here}:make_broken", output="latents"), video)


def test_parameters_that_make_no_sense() -> None:
    for params in ({"tokenizer": "vqgan"}, {"size": 8}, {"size": [64]}, {"levels": 0}, {"fps": 0}, {"latents": "all"}):
        with pytest.raises(ValueError):
            TokenizeParams(**params)
    with pytest.raises(RecipeError, match="makes ids, not latents"):
        stage(output="latents")


def test_pictures_are_cropped_to_shape(jit: Path) -> None:
    made = stage(tokenizer="torchscript", weights=str(jit), output="latents", allow_torchscript=True, size=[32, 32])
    row = row_of(made, np.full((9, 64, 100, 3), 77, np.uint8))
    assert (row["height"], row["width"], row["psnr"]) == (
        32,
        32,
        100.0 if row["psnr"] == 100.0 else pytest.approx(60, abs=20),
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_floats_are_stored_as_torch_rounds_them(dtype: str) -> None:
    values = np.random.default_rng(0).normal(0, 3, 4096).astype(np.float32)
    wanted = torch.from_numpy(values).to(getattr(torch, dtype))
    bits = torch.int32 if dtype == "float32" else torch.int16
    stored = as_stored(values, dtype)
    assert stored.tobytes() == wanted.view(bits).numpy().tobytes()


def test_rows_fit_the_schema(jit: Path) -> None:
    made = stage(tokenizer="torchscript", weights=str(jit), output="latents", allow_torchscript=True)
    row = row_of(made, moving(9, 16, 16))
    body = pa.schema([f for f in made.schema() if f.name in row])
    assert pa.Table.from_pylist([dict(row)], schema=body).num_rows == 1
    assert set(body.names) == set(made.schema().names) - {"item_key", "input_digest", "video_key", "stream"}


def test_scores_are_those_of_scikit_image() -> None:
    metrics = pytest.importorskip("skimage.metrics", reason="the reference for SSIM")
    import cv2

    a = moving(3, 60, 90)
    b = np.clip(a.astype(int) + np.random.default_rng(0).integers(-25, 26, a.shape), 0, 255).astype(np.uint8)
    assert reconstruction.psnr(a, b) == pytest.approx(metrics.peak_signal_noise_ratio(a, b, data_range=255), abs=1e-9)
    options = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "data_range": 255}
    greys = [[cv2.cvtColor(f, cv2.COLOR_RGB2GRAY).astype(float) for f in v] for v in (a, b)]
    wanted = np.mean([metrics.structural_similarity(x, y, **options) for x, y in zip(*greys, strict=True)])
    assert reconstruction.ssim(a, b) == pytest.approx(wanted, abs=1e-4)
    assert reconstruction.psnr(a, a) == 100.0
    assert reconstruction.ssim(a[:, :8], b[:, :8]) is None


def test_a_recipe_with_tokenize_needs_no_torch() -> None:
    code = "import sys; from workers.tokenize import Tokenize; Tokenize().identity(); import workers.text\n"
    subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True)
