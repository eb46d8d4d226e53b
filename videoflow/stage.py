"""The stage contract: one step that computes one product. Small enough to read on one screen; users write their own.

Stage
├── PassConsumer   rides the one decode pass: sees every shown frame of a video once (frames, shots, quality, …), or
│                  hears its audio stream (audio)
├── VideoStage     works on the rows other stages made of one video, without pictures (clips)
├── ClipStage      works on stored frames of clips: those of the frame cache, or of the payload (embed, a tokenizer)
└── SourceStage    works on chosen clips' own frames, decoded from the source once more (payload)

A stage is described by class attributes and its frozen parameters; it is checked when the recipe is built, before any
process starts. Stages know records and arrays, never the engine that runs them. They are found through the entry point
group ``videoflow.stages`` or a dotted path ``package.module:Class``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Protocol, get_args

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from videoflow.errors import RecipeError, SourceError
from videoflow.records import (
    ClipFrames,
    HeardSound,
    Item,
    Margin,
    Product,
    ShownFrame,
    SourceClip,
    VideoHeader,
    VideoSummary,
)

__all__ = [
    "CPU",
    "NVDEC",
    "ClipFrames",
    "ClipMaker",
    "ClipStage",
    "HeardSound",
    "Item",
    "Margin",
    "PassConsumer",
    "Product",
    "Resources",
    "ShownFrame",
    "SourceClip",
    "SourceStage",
    "Stage",
    "StageParams",
    "VideoHeader",
    "VideoStage",
    "VideoSummary",
]

#: Who decodes a pass: the CPU, or NVIDIA's decoder (docs/decisions/0009).
CPU, NVDEC = "cpu", "nvdec"


class StageParams(BaseModel):
    """Base of a stage's parameters: unknown keys are errors, values are frozen. All of them enter the fingerprint."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        """YAML's yes and true would pass for 1."""
        kind = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and bool not in (kind, *get_args(kind)) and {int, float} & {kind, *get_args(kind)}:
            raise ValueError(f"{str(value).lower()} is no number")
        return value


@dataclass(frozen=True)
class Resources:
    """What one worker of the stage takes."""

    cpus: float = 1.0
    gpus: float = 0.0


class Stage(ABC):
    """One step that computes one product. Construct with checked parameters; ``setup`` runs once a worker process."""

    name: ClassVar[str]
    version: ClassVar[int]  # raise it when the same parameters would give another result
    table: ClassVar[str]  # folder of the artifact table
    inputs: ClassVar[tuple[str, ...]] = ()  # names of the stages it reads
    Params: ClassVar[type[StageParams]] = StageParams
    resources: ClassVar[Resources] = Resources()

    def __init__(self, params: StageParams | None = None) -> None:
        self.params: Any = params if params is not None else self.Params()

    @classmethod
    def resolve(cls, params: Any) -> Any:
        """Parameters with every ``auto`` decided; called once when the plan is made, so that fingerprints name
        facts.
        """
        return params

    @abstractmethod
    def schema(self) -> pa.Schema:
        """Arrow schema of the artifact table, head columns included."""

    def required_inputs(self) -> tuple[str, ...]:
        """Which of ``inputs`` these parameters cannot do without; the others are used if the recipe has them."""
        return self.inputs

    def identity(self) -> dict[str, str]:
        """What else decides the result: weights digest, decoder identity. Enters the fingerprint."""
        return {}

    def column(self) -> str | None:
        """Column of a version that leads to this stage's rows, whose arrays (``shape``, ``dtype``, ``data``) loaders
        deliver under its name; None for a stage without arrays.
        """
        return None

    def setup(self) -> None:
        """Called once in the worker before the first item: load weights here."""

    def teardown(self) -> None:
        """Called once in the worker after the last item."""


class PassConsumer(Stage):
    """Rides the decode pass. For each video: ``begin``, ``see`` every frame in order, ``finish``.

    One that has a `margin` may be given a long video in windows, each in a process of its own: it then answers for the
    frames that ``header.owns``, ``finish`` hands over rows that are final and leaves the rest in ``extra``, and `join`
    makes the video's product of these.

    One that ``hears`` is given the pieces of one audio stream in order, each by `hear`, beside the frames. Where all
    that is missing of a video does not ``see``, and an earlier pass knows the video's start, no picture is decoded.
    ``decoder``: who decodes the pictures, set when the recipe is built; part of the fingerprint of what sees them.
    """

    sees: ClassVar[bool] = True
    hears: ClassVar[bool] = False
    decoder: str = CPU

    @abstractmethod
    def begin(self, video: VideoHeader) -> None: ...

    @abstractmethod
    def see(self, frame: ShownFrame) -> Iterator[dict[str, Any]] | None:
        """Look at one frame; rows that are complete may be handed over at once (constant memory)."""

    def hear(self, sound: HeardSound) -> Iterator[dict[str, Any]] | None:
        """Listen to one piece of sound; never called for a video without audio."""
        return None

    def audio_stream(self) -> int | None:
        """Container index of the stream to hear; None: the first audio stream."""
        return None

    @abstractmethod
    def finish(self, summary: VideoSummary) -> Product:
        """The rest of the video's rows, and the digest over all of its rows."""

    def margin(self) -> Margin | None:
        """What it needs around a window; None if it must see a video from beginning to end."""
        return None

    def join(self, parts: Sequence[Product]) -> Product:
        """The video's product from those of its windows, in order: the rows that are still to be written, and the
        digest over all of its rows, equal to that of one pass.
        """
        raise RecipeError(f"stage {self.name} has no join: give it one beside its margin, or no margin")


def _plain(value: Any) -> str | bool | int:
    return value if isinstance(value, (str, bool, int)) else str(value)


class VideoStage(Stage):
    """Works on one video's rows of other stages, or on what its source's metadata say of it. ``media``: those of its
    inputs whose blobs it reads. ``by_interval``: it minds what is said of each interval (`Item.interval_metadata`), and
    its rows have a column ``segments``, the numbers of the intervals that a row is of, null for all clips of the video;
    without it sources that say different things of a video's intervals are refused.
    """

    media: ClassVar[tuple[str, ...]] = ()
    by_interval: ClassVar[bool] = False

    def metadata_columns(self) -> tuple[str, ...]:
        """Columns of the sources' metadata that decide the result: another value there is another item."""
        return ()

    def told(self, each: Sequence[Mapping[str, Any]], uri: str) -> list[dict[str, Any]]:
        """What a source says in these columns, JSON-ready: of the video, or of each interval where they differ; nothing
        for a stage that asks for none. ``each``: all that it says of every interval, or of the video.

        Raises:
            SourceError: intervals differ, and the stage makes one product of a video.
        """
        names = self.metadata_columns()
        found = [{n: _plain(m[n]) for n in names if m.get(n) is not None} for m in each if names]
        odd = [n for n in names if any(m.get(n) != found[0].get(n) for m in found)]
        if odd and not self.by_interval:
            raise SourceError(
                f"{uri}: {', '.join(odd)} differs between its intervals, and stage {self.name} makes one product of a "
                "video; give all of its rows the same value, or the stage by_interval (videoflow/stage.py)"
            )
        return found if odd else found[:1]

    @abstractmethod
    def process(self, item: Item) -> Product: ...


class ClipStage(Stage):
    """Works on clips' stored frames. ``fps``: the rate it wants them at (must divide that of what it reads; a payload
    at the source's own rate has every rate), None for all.

    ``inputs`` name what it reads: ``("clips", "frames")`` the frame cache, ``("clips", "payload")`` the payload, of the
    clips that have one. A stage whose parameters decide may make ``inputs`` a property.
    """

    inputs: ClassVar[tuple[str, ...]] = ("clips", "frames")
    batch_size: ClassVar[int] = 8

    @property
    def fps(self) -> Fraction | None:
        return None

    @property
    def grid_frames(self) -> int | None:
        """So many grid times of a clip, from its start on, a frame that is shown longer as often as it is shown; None:
        the frames that differ.
        """
        return None

    def fit_key(self) -> str | None:
        """For a stage that first learns something from the clips (a codebook): names what it has to learn. None: there
        is nothing to learn, or it was learned.
        """
        return None

    def fit(self, clips: Iterator[ClipFrames]) -> bytes:
        """Learn from a sample of the clips; called once in a catalog, which keeps the answer (see `with_fit`)."""
        raise RecipeError(f"stage {self.name} has a fit_key but no fit")

    def with_fit(self, learned: bytes) -> ClipStage:
        """The stage as it works from then on; what was learned is part of its `identity`."""
        raise RecipeError(f"stage {self.name} has a fit_key but no with_fit")

    @abstractmethod
    def process(self, clips: Sequence[ClipFrames]) -> list[Product]:
        """One product a clip, in order."""


class ClipMaker(Protocol):
    """Makes the product of one clip; several may be at work at a time where clips overlap."""

    def see(self, frame: ShownFrame) -> None:
        """One wanted frame, in order; ``index`` counts the video's shown frames."""

    def finish(self) -> Product:
        """After the last wanted frame."""


class SourceStage(Stage):
    """Works on chosen clips' own frames, decoded from the source: every interval once, from a keyframe that gives the
    same pictures as one pass, in the sandbox. For each clip: ``wanted``, ``open``, then its maker's methods.

    Damaged frames are never shown: a clip that wants one is ``filtered(damaged)``. Cached frames are not read, but the
    clips that may be chosen are those of a version, which have one.
    """

    inputs: ClassVar[tuple[str, ...]] = ("probe", "clips", "frames")

    @property
    def where(self) -> str | None:
        """SQL condition on the clips' columns and scores: which clips are chosen; None: all."""
        return None

    @property
    def count(self) -> int | None:
        """At most so many of them, an even sample by the hash of their keys; None: all."""
        return None

    @abstractmethod
    def wanted(self, clip: SourceClip) -> Sequence[int]:
        """pts of the frames it wants, ascending; none: the clip is ``filtered(no_payload_frame)``."""

    @abstractmethod
    def open(self, clip: SourceClip) -> ClipMaker: ...

    def bytes_per_second(self, width: int, height: int, fps: float) -> float:
        """About how much a second of a clip takes, of a video of this size and rate; decides how many make a block."""
        return 0.0
