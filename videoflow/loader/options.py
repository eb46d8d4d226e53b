"""A loader's options, all checked in one place before anything is read or started: types, ranges, allowed words.

Whole numbers may be numpy's; booleans are no numbers, text is no number, and nothing is rounded. What follows from the
version (columns, rates, batches that are too large) is checked where its rows are read, see `check_batch`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from videoflow.errors import LoaderError, shown
from videoflow.loader.engine import ENGINES
from videoflow.loader.fit import FITS, parse_size
from videoflow.loader.sampling import SHORT, FrameCount, parse_fps
from videoflow.loader.state import LoaderConfig

TAILS = ("drop", "pad")
#: Where frames are read: ``auto`` is settled when the version's rows are read, see payload_rows.py.
SOURCES = ("auto", "frames", "payload")
MAX_THREADS, MAX_PREFETCH = 1024, 1024
#: One rank's batch may take this many bytes, or the machine's memory if that is less: 64 clips of 64 frames at 1280×720
#: are 11 GB.
MAX_BATCH_BYTES = 16 << 30
#: Beside its pixels: a frame's pts, mask and encoded bytes' view, a clip's key, position and columns.
BYTES_PER_FRAME, BYTES_PER_SLOT = 256, 512


@dataclass(frozen=True)
class LoaderOptions:
    """Checked options: ``config`` decides the samples, the rest how they are made and handed over."""

    config: LoaderConfig
    epochs: int | None
    engine: str
    rank: int | None
    world_size: int | None
    threads: int
    prefetch: int
    transform: Callable[[Any], Any] | None

    @staticmethod
    def checked(
        *,
        batch_size: object,
        frames: object,
        video: object,
        fps: object,
        size: object,
        fit: object,
        short: object,
        seed: object,
        shuffle: object,
        split: object,
        filter: object,
        epochs: object,
        tail: object,
        engine: object,
        rank: object,
        world_size: object,
        columns: object,
        audio: object = False,
        allow_uneven: object,
        threads: object,
        prefetch: object,
        transform: object,
        bad_samples: object,
        source: object = "auto",
    ) -> LoaderOptions:
        """Options as a caller gave them.

        Raises:
            LoaderError: one of them cannot be used; it is named, with what is allowed.
        """
        if not isinstance(bad_samples, str) or bad_samples != "error":
            raise LoaderError(f"bad_samples={bad_samples!r} is not there yet; only 'error' is")
        if transform is not None and not callable(transform):
            raise _refused("transform", transform, "None, or a function from batch to batch")
        has_video = flag("video", video)
        if not has_video and not (frames is None and fps is None and size is None and audio is False):
            raise LoaderError("video=False delivers no pictures: leave out frames=, fps=, size= and audio=")
        rate = parse_fps(fps)
        config = LoaderConfig(
            batch_size=whole("batch_size", batch_size, least=1),
            frames=FrameCount.parse(frames).option if has_video else 0,
            fps=None if rate is None else str(rate),
            size=parse_size(size),
            fit=word("fit", fit, FITS),
            short=word("short", short, SHORT),
            seed=whole("seed", seed),
            shuffle=_shuffle(shuffle),
            split=_text("split", split),
            filter=_text("filter", filter),
            tail=word("tail", tail, TAILS),
            columns=_columns(columns),
            allow_uneven=flag("allow_uneven", allow_uneven),
            bad_samples="error",
            source=word("source", source, SOURCES),
            audio=flag("audio", audio),
        )
        return LoaderOptions(
            config=config,
            epochs=None if epochs is None else whole("epochs", epochs, least=1, instead="None for no end"),
            engine=word("engine", engine, ENGINES),
            rank=None if rank is None else whole("rank", rank, least=0),
            world_size=None if world_size is None else whole("world_size", world_size, least=1),
            threads=whole("threads", threads, least=1, most=MAX_THREADS),
            prefetch=whole("prefetch", prefetch, least=1, most=MAX_PREFETCH),
            transform=transform,
        )


def whole(name: str, value: object, *, least: int | None = None, most: int | None = None, instead: str = "") -> int:
    """A whole number as a Python int.

    Raises:
        LoaderError: a boolean, a float, text, or a number out of range.
    """
    number = _integer(value)
    if number is None or (least is not None and number < least) or (most is not None and number > most):
        span = "" if least is None else f" from {least} on" if most is None else f" from {least} to {most}"
        raise _refused(name, value, f"whole numbers{span}{f', or {instead}' if instead else ''}")
    return number


def _integer(value: object) -> int | None:
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def flag(name: str, value: object) -> bool:
    """A boolean; numbers and text are none."""
    if not isinstance(value, (bool, np.bool_)):
        raise _refused(name, value, "True and False")
    return bool(value)


def word(name: str, value: object, allowed: Sequence[str]) -> str:
    """One of some words."""
    if not isinstance(value, str) or value not in allowed:
        raise _refused(name, value, ", ".join(repr(a) for a in allowed))
    return value


def _shuffle(value: object) -> bool:
    if isinstance(value, str) and value == "clumps":
        raise LoaderError("shuffle='clumps' cannot be used: reading clumps of neighbours is not there yet; allowed are "
                          "True and False")  # fmt: skip
    return flag("shuffle", value)


def _text(name: str, value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise _refused(name, value, "None and text")
    return value


def _columns(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        raise LoaderError(f"columns={value!r} cannot be used; give a list of names, like columns=[{value!r}]")
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        raise _refused("columns", value, "lists of column names")
    return tuple(value)


def _refused(name: str, value: object, allowed: str) -> LoaderError:
    return LoaderError(f"{name}={shown(value)} cannot be used; allowed are {allowed}")


def check_ranks(batch_size: int, *, rank: int, world_size: int) -> None:
    """Raises LoaderError for a rank that is none of the world's, or a batch that its ranks cannot share."""
    if not 0 <= rank < world_size:
        raise LoaderError(f"rank={rank} must lie in [0, world_size={world_size})")
    if batch_size % world_size:
        raise LoaderError(
            f"batch_size={batch_size} is global and must be a multiple of the world size {world_size}, above 0"
        )


def check_batch(*, num_slots: int, num_frames: int, size: tuple[int, int]) -> None:
    """Raises LoaderError if a rank's batch, pictures uint8 (num_slots, num_frames, *size, 3), takes too much memory."""
    num_bytes = num_slots * (num_frames * (size[0] * size[1] * 3 + BYTES_PER_FRAME) + BYTES_PER_SLOT)
    limit = min(MAX_BATCH_BYTES, psutil.virtual_memory().total)
    if num_bytes > limit:
        raise LoaderError(
            f"a batch of {num_slots} clips × {num_frames} frames × {size[0]}×{size[1]} pixels takes "
            f"{num_bytes / (1 << 30):,.1f} GiB on each rank, above the limit of {limit / (1 << 30):.1f} GiB; take a "
            "smaller batch_size=, frames= or size="
        )


def check_version(version: Any) -> None:
    """Raises LoaderError for what is no dataset version."""
    missing = [a for a in ("id", "digest", "clips_uri", "tables", "storage_options") if not hasattr(version, a)]
    if missing:
        raise LoaderError(
            f"version={shown(version)} is no dataset version (it has no {missing[0]}); open one: "
            "videoflow.open(ROOT).version('name@n')"
        )
