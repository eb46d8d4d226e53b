"""A folder with a model of diffusers: which class it is of, and its digest. Read without torch, for plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from videoflow.errors import MissingWeights
from videoflow.keys import digest
from workers.weights import weights_digest

CONFIG = "config.json"
WEIGHTS = (".safetensors", ".bin")


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        MissingWeights: it is no config of diffusers.
    """
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if isinstance(config["_class_name"], str):
            return dict(config)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise MissingWeights(f"{folder / CONFIG} is no config of a diffusers model: no _class_name in it") from e
    raise MissingWeights(f"{folder / CONFIG} is no config of a diffusers model: its _class_name is no text")


def class_name(folder: Path) -> str:
    """The class that the config names."""
    return str(read_config(folder)["_class_name"])


def folder_digest(folder: Path) -> str:
    """Of the config (without where it was saved from and by which version) and the bytes of the weights."""
    config = {k: v for k, v in read_config(folder).items() if k not in ("_diffusers_version", "_name_or_path")}
    return digest(json.dumps(config, sort_keys=True), weights_digest(folder, WEIGHTS))
