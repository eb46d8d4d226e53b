"""Fingerprints: what computed a result, as a key. No paths, no hosts, no package versions.

fingerprint = BLAKE3(canonical JSON of stage name, stage version, parameters, identity, output schema), where identity
is
what the stage itself says decides its result: the weights' digest, the decoder's canaries. `components` keeps the
parts, so that a plan can name the one that changed. `item_key` is what a result is for; a plan makes a million of them,
so where all parts are keys, their canonical JSON is written out (keys hold nothing that JSON would escape).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any

from blake3 import blake3

from videoflow.keys import KEY_CHARS, digest, digest_bytes
from videoflow.stage import NVDEC, PassConsumer, Stage

#: Raised when what a GPU makes of a video, or what is left to the CPU, changes. No digest: plans need no GPU.
NVDEC_TAG = "nvdec-1"


def components(stage: Stage) -> dict[str, Any]:
    """The parts of a stage's fingerprint, JSON-ready."""
    return {
        "stage": stage.name,
        "version": stage.version,
        "params": stage.params.model_dump(mode="json"),
        "identity": dict(sorted(_identity(stage).items())),
        "schema": [[f.name, str(f.type)] for f in stage.schema()],
    }


def _identity(stage: Stage) -> dict[str, str]:
    """What the stage says, and that a GPU decodes for it: such results are never taken for the CPU's."""
    identity = stage.identity()
    if isinstance(stage, PassConsumer) and stage.sees and stage.decoder == NVDEC:
        return {**identity, "decoder": f"{identity.get('decoder', '')}+{NVDEC_TAG}"}
    return identity


def fingerprint(stage: Stage) -> str:
    """32 hex characters; equal in every process for equal components."""
    return digest(components(stage))


def pass_item_key(video_key: str, stream: int | None, fp: str) -> str:
    """Key of a decode product of one video; ``stream`` is the recipe's choice, None for the first."""
    which = "null" if stream is None else stream
    return digest_bytes(f'["video","{video_key}",{which},"{fp}"]'.encode())  # digest("video", video_key, stream, fp)


def video_item_key(video_key: str, input_digest: str, intervals: tuple[tuple[Fraction, Fraction], ...], fp: str) -> str:
    """Key of a VideoStage's result: the digest of what it reads and the intervals asked for."""
    return digest("rows", video_key, input_digest, [[str(a), str(b)] for a, b in intervals], fp)


def clip_item_keys(pairs: Iterable[tuple[str, str]], fp: str) -> Iterator[str]:
    """Keys of a ClipStage's results, of (clip key, input digest) pairs."""
    tail = f'","{fp}"]'
    return (blake3(f'["clip","{clip}","{source}{tail}'.encode()).hexdigest()[:KEY_CHARS] for clip, source in pairs)


def clip_item_key(clip_key: str, input_digest: str, fp: str) -> str:
    """Key of a ClipStage's result."""
    return next(clip_item_keys([(clip_key, input_digest)], fp))  # digest("clip", clip_key, input_digest, fp)
