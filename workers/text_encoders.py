"""Text encoders and tokenizers that are read from local files, and the contract that one of your own keeps.

One text is encoded at a time, without padding: what comes of it does not hang on others beside it. Imports nothing
heavy by itself.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from videoflow.errors import MissingExtra, MissingWeights, RecipeError, first_line
from videoflow.find import load_object


@runtime_checkable
class TextEncoder(Protocol):
    """An encoder of your own: ``encoder: package.module:factory``, called with the path in ``weights`` (or None)."""

    def encode(self, text: str, *, max_tokens: int) -> tuple[np.ndarray, bool]:
        """Outputs float (L, D), or token ids, integers (L,), of a text; and whether it was cut at ``max_tokens``."""
        ...


def _need(module: str, encoder: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise MissingExtra(module, needed_for=f"text with encoder: {encoder}", extra="transformers")


class TokenizerFile:
    """Token ids by a ``tokenizer.json`` of the library tokenizers."""

    def __init__(self, path: Path) -> None:
        _need("tokenizers", "tokenizers")
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as e:  # the library raises plain Exception for a file that it cannot read
            raise MissingWeights(f"{path} is no tokenizer file: {first_line(e)}") from e
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def encode(self, text: str, *, max_tokens: int) -> tuple[np.ndarray, bool]:
        ids = self._tokenizer.encode(text).ids
        return np.asarray(ids[:max_tokens], np.int32), len(ids) > max_tokens


class TransformersEncoder:
    """Hidden states of any text encoder of transformers, from a local folder with safetensors.

    ``layer``: which of the hidden states; −1 is the last, as the model gives it (with its final norm).
    """

    def __init__(self, folder: Path, *, dtype: str, layer: int) -> None:
        for module in ("torch", "transformers"):
            _need(module, "transformers")
        import torch
        from transformers import AutoTokenizer

        where: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, **where)
            model = _text_model(folder, dtype=getattr(torch, dtype), **where)
        except (OSError, ValueError, RuntimeError, KeyError, TypeError) as e:
            raise MissingWeights(f"no text encoder can be loaded from {folder}: {first_line(e)}") from e
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = model.to(self._device).eval().requires_grad_(False)
        self._layer = layer

    def encode(self, text: str, *, max_tokens: int) -> tuple[np.ndarray, bool]:
        import torch

        whole = self._tokenizer(text, truncation=False, verbose=False)["input_ids"]
        cut = self._tokenizer(text, truncation=True, max_length=max_tokens, return_tensors="pt").to(self._device)
        with torch.inference_mode():
            made = self._model(**cut, output_hidden_states=self._layer != -1)
        states = made.last_hidden_state if self._layer == -1 else made.hidden_states[self._layer]
        return np.asarray(states[0].float().cpu().numpy()), len(whole) > cut["input_ids"].shape[1]


def _text_model(folder: Path, **options: Any) -> Any:
    """The encoder alone, of models that also have a decoder or an image tower."""
    from transformers import AutoConfig, AutoModel, AutoModelForTextEncoding

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    is_text = type(config) in AutoModelForTextEncoding._model_mapping
    model = (AutoModelForTextEncoding if is_text else AutoModel).from_pretrained(
        folder, use_safetensors=True, **options
    )
    return model.get_encoder() if config.is_encoder_decoder and not is_text else model


def users_encoder(path: str, weights: str | None) -> TextEncoder:
    """An encoder by dotted path.

    Raises:
        RecipeError: there is no such factory, or what it returns is no encoder.
    """
    factory = load_object(path, what="encoder")
    try:
        made = factory(weights)
    except TypeError as e:
        raise RecipeError(f"encoder {path!r} cannot be called with the path of its weights: {e}") from e
    if not isinstance(made, TextEncoder):
        raise RecipeError(f"encoder {path!r} lacks encode (the contract: workers/text_encoders.py)")
    return made
