"""Token ids or latents of clips: what generators and video-language models train on, made once and kept.

Which tokenizer it is, is a parameter; all keep the contract in workers/tokenizers.py. A clip is tokenized from its
start on: as many frames as fit the tokenizer, the middle of the picture as far as its sides fit. Each clip runs
through the model alone, so its ids hang on nothing beside it: equal on every engine and in every unit; patch-vq's are
whole-number arithmetic and equal on every machine too.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, field_validator

from videoflow.errors import MediaError, MissingExtra, MissingWeights, RecipeError
from videoflow.find import load_object
from videoflow.keys import digest, digest_bytes
from videoflow.loader.fit import fit_into, place
from videoflow.stage import ClipFrames, ClipStage, Product, Resources, StageParams
from videoflow.store import schemas
from videoflow.store.blobs import proved
from videoflow.timeline import parse_rate
from workers import patch_vq, reconstruction
from workers.tokenizers import Tokenizer, usable_frames, usable_size, users_tokenizer
from workers.weights import weights_digest, weights_folder

PATCH_VQ, TORCHSCRIPT, DIFFUSERS = "patch-vq", "torchscript", "diffusers"


class TokenizeParams(StageParams):
    """``tokenizer``: patch-vq, torchscript (a folder in the layout of the Cosmos tokenizer), diffusers (a folder with a
    video VAE) or package.module:factory. ``weights``: that folder, or what the factory takes; for patch-vq the file of
    a codebook from elsewhere (without one it is fitted once in the catalog). The path is not part of the fingerprint,
    the digest of the bytes is. ``output``: ids or latents; to be given for torchscript and factories.

    What is tokenized: ``source``, frames (the cache) or payload (its chosen clips); ``fps`` (None: all frames there),
    ``size`` of the pictures (S or [height, width], cropped; None: as stored), ``max_frames`` of a clip at most.
    patch-vq: ``codes`` in each of ``levels`` codebooks. ``temporal``, ``spatial``: frames and pixels of a side that a
    token stands for (patch-vq and torchscript; a VAE says so itself).
    Models: ``dtype`` they run in; ``latents`` of a VAE: moments, sample or mode, kept as ``latent_dtype``; ``tiling``
    and ``slicing`` of a VAE. ``seed``: of the sample and of the codebook. ``score``: decode again for PSNR and SSIM.
    ``allow_torchscript``: such files are programs, which are run only with this.
    """

    tokenizer: str = PATCH_VQ
    weights: str | None = Field(default=None, exclude=True)
    output: Literal["ids", "latents"] | None = None
    source: Literal["frames", "payload"] = "frames"
    fps: str | None = None
    size: int | tuple[int, int] | None = None
    max_frames: int = Field(default=121, ge=1, le=4096)
    codes: int = Field(default=256, ge=2, le=16_384)
    levels: int = Field(default=2, ge=1, le=16)
    temporal: int | None = Field(default=None, ge=1, le=64)
    spatial: int = Field(default=8, ge=1, le=64)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    latents: Literal["moments", "sample", "mode"] = "moments"
    latent_dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    tiling: bool = False
    slicing: bool = False
    seed: int = 0
    score: bool = True
    allow_torchscript: bool = Field(default=False, exclude=True)

    @field_validator("fps", mode="before")
    @classmethod
    def _rate(cls, value: object) -> str | None:
        return None if value is None else str(parse_rate(value))

    @field_validator("size")
    @classmethod
    def _sides(cls, value: int | tuple[int, int] | None) -> tuple[int, int] | None:
        sides = (value, value) if isinstance(value, int) else value
        if sides is not None and not all(16 <= s <= 8192 for s in sides):
            raise ValueError("sides are pixels from 16 to 8192")
        return sides

    @field_validator("tokenizer")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in (PATCH_VQ, TORCHSCRIPT, DIFFUSERS) and ":" not in value:
            raise ValueError("allowed are patch-vq, torchscript, diffusers, or package.module:factory")
        return value


class Tokenize(ClipStage):
    """One array a clip. patch-vq without ``weights`` learns its codebook from the first run's clips."""

    name: ClassVar[str] = "tokenize"
    version: ClassVar[int] = 1
    table: ClassVar[str] = "tokens"
    Params: ClassVar[type[StageParams]] = TokenizeParams
    resources: ClassVar[Resources] = Resources(cpus=1.0)
    batch_size: ClassVar[int] = 1

    def __init__(self, params: StageParams | None = None) -> None:
        super().__init__(params if params is not None else TokenizeParams())
        p: TokenizeParams = self.params
        if p.tokenizer == TORCHSCRIPT and not p.allow_torchscript:
            raise RecipeError(
                "tokenizer: torchscript runs the program that its .jit files hold; if you trust where they come from, "
                "say allow_torchscript: true"
            )
        fixed = {PATCH_VQ: "ids", DIFFUSERS: "latents"}.get(p.tokenizer)
        if (p.output or fixed) is None:
            raise RecipeError(f"tokenizer: {p.tokenizer} needs output: ids or output: latents")
        if fixed and p.output not in (None, fixed):
            raise RecipeError(f"tokenizer: {p.tokenizer} makes {fixed}, not {p.output}; leave out output:")
        self.output: str = p.output or str(fixed)
        self._learned: patch_vq.Codebook | None = None
        self._planned: str | None = None
        self._live: Tokenizer | None = None

    @classmethod
    def resolve(cls, params: Any) -> TokenizeParams:
        """The same parameters with an absolute path: workers may run elsewhere."""
        settled: TokenizeParams = params
        if params.weights is not None:
            settled = params.model_copy(update={"weights": str(Path(params.weights).expanduser().absolute())})
        return settled

    @property
    def inputs(self) -> tuple[str, ...]:  # type: ignore[override]  # the parameters decide
        return ("clips", self.params.source)

    @property
    def fps(self) -> Fraction | None:
        return None if self.params.fps is None else Fraction(self.params.fps)

    @property
    def grid_frames(self) -> int:
        return int(self.params.max_frames)

    def schema(self) -> pa.Schema:
        return schemas.TOKENS

    def column(self) -> str:
        return "tokens" if self.output == "ids" else "latents"

    # -- what decides the result ---------------------------------------------------------------------------------------

    def identity(self) -> dict[str, str]:
        self._planned = self._digest()
        return {"tokenizer": self._kind(), "weights": self._planned}

    def _kind(self) -> str:
        if self.params.tokenizer != DIFFUSERS:
            return str(self.params.tokenizer)
        from workers.vae_folder import class_name

        return f"{DIFFUSERS}:{class_name(self._folder())}"

    def _digest(self) -> str:
        """Of the weights' bytes; for a codebook that is still to be fitted, what it will be fitted to."""
        p: TokenizeParams = self.params
        if p.tokenizer == PATCH_VQ:
            return f"to be fitted: {self.fit_key()}" if self._codebook is None else self._codebook.digest
        if p.tokenizer == TORCHSCRIPT:
            return weights_digest(self._folder(), (".jit",))
        if p.tokenizer == DIFFUSERS:
            from workers.vae_folder import folder_digest

            return folder_digest(self._folder())
        said = str(getattr(load_object(p.tokenizer, what="tokenizer"), "digest", ""))
        return digest(said, weights_digest(p.weights) if p.weights else "")

    def _folder(self) -> Path:
        p: TokenizeParams = self.params
        files = {TORCHSCRIPT: ("encoder.jit",), DIFFUSERS: ("config.json",)}[p.tokenizer]
        return weights_folder(p.weights, needed_for=f"tokenizer: {p.tokenizer}", files=files)

    # -- the codebook of patch-vq --------------------------------------------------------------------------------------

    @property
    def _codebook(self) -> patch_vq.Codebook | None:
        path = self.params.weights
        if self._learned is None and path is not None:
            if not Path(path).is_file():
                raise MissingWeights(f"no codebook at {path} for tokenizer: patch-vq; give the path of a local file")
            self._learned = patch_vq.Codebook.from_bytes(Path(path).read_bytes(), where=path)
        return self._learned

    def fit_key(self) -> str | None:
        p: TokenizeParams = self.params
        if p.tokenizer != PATCH_VQ or self._codebook is not None:
            return None
        fitted = ("codes", "levels", "temporal", "spatial", "seed", "fps", "size", "max_frames")
        return digest(PATCH_VQ, patch_vq.FORMAT, p.model_dump(mode="json", include=set(fitted)))

    def fit(self, clips: Iterator[ClipFrames]) -> bytes:
        p: TokenizeParams = self.params
        videos = ((c.clip_key, self._pictures(c.video)) for c in clips)
        shape = {"temporal": p.temporal or 1, "spatial": p.spatial}
        return patch_vq.fit(videos, **shape, codes=p.codes, levels=p.levels, seed=p.seed).to_bytes()

    def with_fit(self, learned: bytes) -> Tokenize:
        made = Tokenize(self.params)
        made._learned = patch_vq.Codebook.from_bytes(learned, where="the catalog's fits/")
        return made

    # -- the work ------------------------------------------------------------------------------------------------------

    def setup(self) -> None:
        self._weights = self._digest()
        if self._planned not in (None, self._weights):
            raise MissingWeights(
                f"the weights at {self.params.weights} are not those that the plan was made with, on this machine or "
                "since; run again"
            )
        self._live = self._made()

    def teardown(self) -> None:
        self._live = None

    def _made(self) -> Tokenizer:
        p: TokenizeParams = self.params
        if p.tokenizer == PATCH_VQ:
            if self._codebook is None:
                raise MissingWeights("tokenizer: patch-vq has no codebook yet; it is fitted by the run of a recipe")
            return patch_vq.PatchVQ(self._codebook)
        if ":" in p.tokenizer:
            return users_tokenizer(p.tokenizer, p.weights)
        if importlib.util.find_spec("torch") is None:
            raise MissingExtra("torch", needed_for=f"tokenizer: {p.tokenizer}", extra="torch")
        if p.tokenizer == TORCHSCRIPT:
            from workers.torchscript_tokenizer import TorchScriptTokenizer

            steps = {"temporal": p.temporal or 8, "spatial": p.spatial}
            return TorchScriptTokenizer(self._folder(), **steps, dtype=p.dtype)
        from workers.video_vae import DiffusersVAE

        return DiffusersVAE(self._folder(), latents=p.latents, dtype=p.dtype, tiling=p.tiling, slicing=p.slicing)

    def process(self, clips: Sequence[ClipFrames]) -> list[Product]:
        """One product a clip; a clip with too few frames, or too small pictures, is filtered.

        Raises:
            MediaError: the tokenizer gave what is no array of ids or finite latents.
        """
        return [self._one(clip) for clip in clips]

    def _one(self, clip: ClipFrames) -> Product:
        if self._live is None:
            self.setup()
        tokenizer = self._live
        assert tokenizer is not None
        count = usable_frames(tokenizer, min(len(clip.video), self.params.max_frames))
        video = self._pictures(clip.video[:count])
        height, width = usable_size(tokenizer, *video.shape[1:3])
        if not count or not height or not width:
            return Product(filtered="too_few_frames" if not count else "too_small")
        top, left = (video.shape[1] - height) // 2, (video.shape[2] - width) // 2
        video = np.ascontiguousarray(video[:, top : top + height, left : left + width])
        seed = int(digest("latents", self.params.seed, clip.clip_key)[:15], 16)
        made = np.asarray(tokenizer.encode(video, seed=seed))
        kept, dtype = self._kept(clip, made)
        times = np.rint(clip.pts_seconds[[0, count - 1]] * 1e6).astype(np.int64).tolist()
        row = {
            "clip_key": clip.clip_key,
            "kind": self.output,
            "tokenizer": self._kind(),
            "tokenizer_digest": self._weights,
            "num_frames": count,
            "height": height,
            "width": width,
            "first_us": times[0],
            "last_us": times[1],
            "grid": list(made.shape[-3:]),
            "shape": list(made.shape),
            "dtype": dtype,
            **proved(kept.tobytes()),
            **self._scores(tokenizer, video, made),
        }
        told = digest_bytes(row["data"]) if self.output == "ids" else ""  # floats stay out of digests
        return Product([row], digest("tokens", clip.clip_key, count, row["shape"], dtype, told))

    def _pictures(self, video: np.ndarray) -> np.ndarray:
        """Frames at the size that is asked for."""
        size = self.params.size
        if size is None or video.shape[1:3] == tuple(size):
            return video
        where = place(*video.shape[1:3], tuple(size), "crop")
        out = np.empty((len(video), *size, 3), np.uint8)
        for frame, target in zip(video, out, strict=True):
            fit_into(frame, where, target)
        return out

    def _kept(self, clip: ClipFrames, made: np.ndarray) -> tuple[np.ndarray, str]:
        """An array as it is stored, and the name of its type."""
        is_ids = np.issubdtype(made.dtype, np.integer)
        if made.ndim not in (3, 4) or is_ids != (self.output == "ids"):
            what = f"{made.dtype} {made.shape}"
            raise MediaError("model_error", f"clip {clip.clip_key}: the tokenizer gave {what}, not {self.output}")
        if is_ids:
            low, high = int(made.min()), int(made.max())
            if low < 0 or high >= 1 << 31:
                raise MediaError("model_error", f"clip {clip.clip_key}: ids from {low} to {high} are no ids")
            kind = np.dtype(self._id_type(high))
            return np.ascontiguousarray(made, kind.newbyteorder("<")), kind.name
        dtype = str(self.params.latent_dtype)
        limit = np.finfo(np.float16).max if dtype == "float16" else np.finfo(np.float32).max
        if not (np.abs(made) <= limit).all():
            raise MediaError("model_error", f"clip {clip.clip_key}: latents that are not finite, or none in {dtype}")
        return as_stored(made, dtype), dtype

    def _id_type(self, high: int) -> type:
        """One type for a whole table: by the codebook's size where it is known."""
        if self.params.tokenizer != PATCH_VQ:
            return np.int32
        assert self._codebook is not None
        return np.uint8 if max(len(w) for w in self._codebook.words) <= 256 else np.uint16

    def _scores(self, tokenizer: Any, video: np.ndarray, made: np.ndarray) -> dict[str, float | None]:
        decode = getattr(tokenizer, "decode", None) if self.params.score else None
        if decode is None or getattr(tokenizer, "has_decoder", True) is False:
            return {"psnr": None, "ssim": None}
        again = decode(made)
        if again.shape != video.shape or again.dtype != np.uint8:
            raise MediaError("model_error", f"the decoder gave {again.dtype} {again.shape} for {video.shape}")
        return {"psnr": reconstruction.psnr(video, again), "ssim": reconstruction.ssim(video, again)}


def as_stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Floats as they are stored: little-endian numbers of a type, the bits of bfloat16 as uint16 (rounded to even)."""
    if dtype != "bfloat16":
        return np.ascontiguousarray(values, np.dtype(dtype).newbyteorder("<"))
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
