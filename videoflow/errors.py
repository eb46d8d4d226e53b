"""Every error a user can meet, with the exit code of the command line beside it.

VideoflowError
├── InputError (2)              what the user gave cannot be used
│   ├── RecipeError             a recipe's key, value or stage
│   ├── SourceError             a source that is not there or a manifest row that makes no sense
│   ├── CatalogError            a root that is no catalog, or of a newer format
│   ├── QueryError              SQL, filter, version name
│   ├── ClusterError            an address that is no Ray dashboard, or one that refuses us
│   ├── FrameIndexError         a frame or a time beyond the video (also an IndexError)
│   └── LoaderError             loader options that do not fit the version
│       └── StateMismatch       a loader state of another version or configuration
├── MissingExtra (2)            an optional package is not installed; the message is the install line
├── SystemFailure (4)           disk, credentials, storage: the job stops and can be resumed
│   ├── DamagedCatalog (4)      a file below the root is lost or damaged (also a CatalogError)
│   └── MissingWeights (4)      a model's weights are not where they should be
├── JobCancelled (130)          somebody asked the job to stop; it can be resumed
├── MediaError                  one video (or clip) cannot be used; ends as `quarantined(class, message)`
└── BadSample                   one stored sample is damaged for good (digest, undecodable, missing row)

Messages say what was given, what is allowed and what to do next; they never hold credentials.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

EXIT_OK = 0
EXIT_INPUT = 2
EXIT_QUARANTINED = 3
EXIT_SYSTEM = 4
EXIT_INTERRUPTED = 130

#: Classes of MediaError: what a file's owner can do about it differs from one to the next.
QUARANTINE_CLASSES: dict[str, str] = {
    "empty": "the file holds no bytes",
    "not_video": "the bytes are no media file that FFmpeg knows",
    "no_video_stream": "a media file without a video stream",
    "header_damaged": "a container whose index or header is lost or broken",
    "codec_unsupported": "no decoder for this codec in the FFmpeg in use",
    "encrypted": "the stream is encrypted",
    "truncated": "the media data is missing, no frame can be decoded",
    "timeout": "decoding did not end within its deadline",
    "crash": "the decoder crashed its process",
    "out_of_memory": "decoding went over its memory limit",
    "bad_timestamps": "frames without usable timestamps",
    "model_error": "a model failed on this item",
    "io_error": "the source could not be read",
}


#: How the message of an io_error begins whose source was moved or changed under the job: it says nothing about the
#: content it is keyed by, so the next run looks again.
MOVED_UNDER_THE_JOB = "the source changed or went away while the job ran"


def shown(value: object, most: int = 80) -> str:
    """A user's value as a message shows it: its repr in one line, cut at ``most`` characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a repr of the user's own
        text = f"a {type(value).__name__}"
    return text if len(text) <= most else text[: most - 1] + "…"


#: Control characters, surrogates, and what turns the direction of a line.
_STEERING = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable_text(text: str, *, keep: str = "") -> str:
    """Text without characters that steer a terminal, each as an escape (``\\x1b``, ``\\n``), less those of ``keep``:
    file names and captions are not ours.
    """
    return _STEERING.sub(lambda m: m[0] if m[0] in keep else m[0].encode("unicode_escape").decode(), text)


def nearest(word: object, allowed: Iterable[str]) -> str:
    """What a message adds after a word that is none of the allowed ones: the one that was meant, if there is one."""
    found = difflib.get_close_matches(str(word)[:100], list(allowed), n=1, cutoff=0.6)
    return f" (did you mean {found[0]}?)" if found else ""


class VideoflowError(Exception):
    """Base of all errors videoflow raises on purpose; the command line prints it as one line."""

    exit_code: int = EXIT_INPUT


class InputError(VideoflowError):
    """What the user gave cannot be used."""


class RecipeError(InputError):
    """A recipe, one of its keys, or a stage it names."""


class SourceError(InputError):
    """A source that does not exist or a manifest that cannot be read."""


class CatalogError(InputError):
    """A root that holds no catalog, or one of a newer format."""


class QueryError(InputError):
    """SQL, a filter, a version's name or a clip key that does not resolve."""


class ClusterError(InputError):
    """An address that is no Ray dashboard, or one that refuses what it was sent."""


class FrameIndexError(InputError, IndexError):
    """A frame index or a time beyond the video."""


class LoaderError(InputError):
    """Loader options that do not fit the version."""


class StateMismatch(LoaderError):
    """A loader state that belongs to another version or configuration."""


class MissingExtra(VideoflowError):
    """An optional package is missing.

    Args:
        package: what is missing, e.g. ``"nvidia-dali"``.
        needed_for: what wanted it.
        extra: the extra of videoflow that brings it.
    """

    def __init__(self, package: str, *, needed_for: str, extra: str) -> None:
        super().__init__(f"{needed_for} needs {package}, which is not installed: pip install 'videoflow[{extra}]'")
        self.package = package
        self.extra = extra


class SystemFailure(VideoflowError):
    """Something is wrong with the system, not with an input: the job stops and can be resumed."""

    exit_code = EXIT_SYSTEM


class DamagedCatalog(SystemFailure, CatalogError):
    """A file of a catalog that is lost or holds something else than was written; the message says what to do."""

    exit_code = EXIT_SYSTEM


class MissingWeights(SystemFailure):
    """A model's weights are not where they should be."""


class JobCancelled(VideoflowError):
    """Somebody asked the job to stop, as Ctrl-C does from afar."""

    exit_code = EXIT_INTERRUPTED


class MediaError(VideoflowError):
    """One item cannot be used. It is quarantined under ``code``, the job goes on.

    Args:
        code: one of QUARANTINE_CLASSES.
        message: one line: what, where.
    """

    def __init__(self, code: str, message: str) -> None:
        if code not in QUARANTINE_CLASSES:
            raise ValueError(f"unknown quarantine class {code!r}, allowed: {', '.join(QUARANTINE_CLASSES)}")
        super().__init__(message)
        self.code = code
        self.message = message

    def __reduce__(self) -> tuple[type[MediaError], tuple[str, str]]:
        return (MediaError, (self.code, self.message))


class BadSample(VideoflowError):
    """A stored sample that is damaged for good: it fails its CRC, does not decode, or its row is gone."""


def first_line(e: BaseException) -> str:
    """The first line of an error's text, of a bounded length: what fits into a message of one line."""
    return (str(e).splitlines() or [""])[0][:200]
