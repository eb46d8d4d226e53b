"""Captions as a model's text encoder sees them, made once and kept: outputs of variable length, or token ids alone.

The caption is a column of the sources' metadata, so an item is a video with its caption: all its clips share one row,
another caption is another item, and the ledger and a takedown find it by the video. Within a unit the same text
is encoded once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, field_validator

from videoflow.errors import MediaError, MissingWeights, RecipeError, first_line
from videoflow.find import load_object
from videoflow.keys import digest, digest_bytes
from videoflow.stage import Item, Product, StageParams, VideoStage
from videoflow.store import schemas
from videoflow.store.blobs import proved
from workers.text_encoders import TextEncoder, TokenizerFile, TransformersEncoder, users_encoder
from workers.tokenize import as_stored
from workers.weights import weights_digest, weights_folder

TRANSFORMERS, TOKENIZERS = "transformers", "tokenizers"
#: Of a folder of transformers, what decides the result.
SUFFIXES = (".safetensors", ".json", ".model", ".txt")
#: Texts whose arrays are remembered within a worker: captions repeat.
REMEMBERED = 256


class TextParams(StageParams):
    """``encoder``: transformers (a folder with a model and its tokenizer), tokenizers (a tokenizer.json: token ids
    alone) or package.module:factory. ``weights``: that folder or file; not part of the fingerprint, the digest of its
    bytes is. ``output``: embedding or ids; to be given for a factory.

    ``column``: of the sources' metadata, with the caption. ``max_tokens``: longer texts are cut, and marked.
    ``layer``: of the hidden states, −1 for the last; ``dtype``: the model runs in; ``kept_dtype``: of what is kept.
    """

    encoder: str = TRANSFORMERS
    weights: str | None = Field(default=None, exclude=True)
    output: Literal["embedding", "ids"] | None = None
    column: str = "caption"
    max_tokens: int = Field(default=256, ge=1, le=65_536)
    layer: int = -1
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    kept_dtype: Literal["float16", "bfloat16", "float32"] = "float16"

    @field_validator("encoder")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in (TRANSFORMERS, TOKENIZERS) and ":" not in value:
            raise ValueError("allowed are transformers, tokenizers, or package.module:factory")
        return value


class Text(VideoStage):
    """One array a caption: of a video, or of its intervals where a manifest says something of each."""

    name: ClassVar[str] = "text"
    version: ClassVar[int] = 1
    table: ClassVar[str] = "text"
    by_interval: ClassVar[bool] = True
    Params: ClassVar[type[StageParams]] = TextParams

    def __init__(self, params: StageParams | None = None) -> None:
        super().__init__(params if params is not None else TextParams())
        p: TextParams = self.params
        fixed = {TRANSFORMERS: "embedding", TOKENIZERS: "ids"}.get(p.encoder)
        if (p.output or fixed) is None:
            raise RecipeError(f"encoder: {p.encoder} needs output: embedding or output: ids")
        if fixed and p.output not in (None, fixed):
            raise RecipeError(f"encoder: {p.encoder} makes {fixed}, not {p.output}; leave out output:")
        self.output: str = p.output or str(fixed)
        self._live: TextEncoder | None = None
        self._planned: str | None = None
        self._known: dict[str, dict[str, Any]] = {}

    @classmethod
    def resolve(cls, params: Any) -> TextParams:
        """The same parameters with an absolute path: workers may run elsewhere."""
        settled: TextParams = params
        if params.weights is not None:
            settled = params.model_copy(update={"weights": str(Path(params.weights).expanduser().absolute())})
        return settled

    def schema(self) -> pa.Schema:
        return schemas.TEXT

    def column(self) -> str:
        return "text_embedding" if self.output == "embedding" else "text_ids"

    def metadata_columns(self) -> tuple[str, ...]:
        return (self.params.column,)

    def identity(self) -> dict[str, str]:
        self._planned = self._digest()
        return {"encoder": self.params.encoder, "weights": self._planned}

    def _digest(self) -> str:
        p: TextParams = self.params
        if p.encoder == TRANSFORMERS:
            return weights_digest(self._folder(), SUFFIXES)
        if p.encoder == TOKENIZERS:
            return weights_digest(self._file())
        said = str(getattr(load_object(p.encoder, what="encoder"), "digest", ""))
        return digest(said, weights_digest(p.weights) if p.weights else "")

    def _folder(self) -> Path:
        return weights_folder(self.params.weights, needed_for="encoder: transformers", files=("config.json",))

    def _file(self) -> Path:
        path = self.params.weights
        if path is None or not Path(path).is_file():
            raise MissingWeights(f"encoder: tokenizers needs weights: the path of a tokenizer.json, given {path}")
        return Path(path)

    def setup(self) -> None:
        p: TextParams = self.params
        self._weights = self._digest()
        if self._planned not in (None, self._weights):
            raise MissingWeights(f"the weights at {p.weights} are not those that the plan was made with; run again")
        if p.encoder == TRANSFORMERS:
            self._live = TransformersEncoder(self._folder(), dtype=p.dtype, layer=p.layer)
        elif p.encoder == TOKENIZERS:
            self._live = TokenizerFile(self._file())
        else:
            self._live = users_encoder(p.encoder, p.weights)

    def teardown(self) -> None:
        self._live = None
        self._known.clear()

    def process(self, item: Item) -> Product:
        """The row of a video's caption, none where it has no caption; where its intervals have captions of their own, a
        row for each that differs.

        Raises:
            MediaError: the encoder failed, or gave what is no finite array of the kind that was asked for.
        """
        said: dict[str, list[int]] = {}
        for number, metadata in enumerate(item.interval_metadata or (item.metadata,)):
            if text := str(metadata.get(self.params.column, "")).strip():
                said.setdefault(text, []).append(number)
        rows = [
            {**self._known_row(text), "segments": numbers if item.interval_metadata else None}
            for text, numbers in said.items()
        ]
        if not rows:
            return Product((), digest("no text"))
        told = [[row["text_digest"], row["shape"], row["dtype"], self._told(row), row["segments"]] for row in rows]
        return Product(rows, digest("text", *told))

    def _told(self, row: dict[str, Any]) -> str:
        return digest_bytes(row["data"]) if self.output == "ids" else ""  # floats stay out of digests

    def _known_row(self, text: str) -> dict[str, Any]:
        key = digest_bytes(text.encode())
        if key not in self._known:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[key] = {"text_digest": key, **self._encoded(text)}
        return self._known[key]

    def _encoded(self, text: str) -> dict[str, Any]:
        if self._live is None:
            self.setup()
        assert self._live is not None
        try:
            made, was_cut = self._live.encode(text, max_tokens=self.params.max_tokens)
        except (RuntimeError, ValueError, IndexError, TypeError, KeyError) as e:
            raise MediaError("model_error", f"the text encoder failed: {type(e).__name__}: {first_line(e)}") from e
        made = np.asarray(made)
        is_ids = np.issubdtype(made.dtype, np.integer)
        if is_ids != (self.output == "ids") or made.ndim != (1 if is_ids else 2):
            raise MediaError("model_error", f"the text encoder gave {made.dtype} {made.shape}, not {self.output}")
        dtype = "int32" if is_ids else str(self.params.kept_dtype)
        if not is_ids and not (np.abs(made) <= np.finfo(np.float16 if dtype == "float16" else np.float32).max).all():
            raise MediaError("model_error", f"the text encoder gave numbers that are not finite, or none in {dtype}")
        return {
            "encoder": self.params.encoder,
            "encoder_digest": self._weights,
            "num_tokens": len(made),
            "truncated": was_cut,
            "shape": list(made.shape),
            "dtype": dtype,
            **proved((np.ascontiguousarray(made, "<i4") if is_ids else as_stored(made, dtype)).tobytes()),
        }
