"""Writes that were begun and never ended, since their process was killed: on S3 multipart uploads, whose parts are paid
for and never listed as objects; in a local folder the files beside which they were to become the object.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from videoflow.store.layout import Root
from videoflow.store.s3 import Upload

#: How obstore and Lance name a local file that is to be renamed when it is whole: ``<name>#<number>``.
_HALF = re.compile(r".+#\d+")


@dataclass(frozen=True)
class Unfinished:
    """One such write: ``path`` below the root of what it was to become (or of the half file itself)."""

    path: str
    num_bytes: int
    begun: datetime  # UTC
    upload: Upload | None = None


def find_unfinished(root: Root) -> Iterator[Unfinished]:
    """All of them below the root."""
    if root.s3:
        prefix = urlsplit(root.url).path.strip("/")
        prefix = f"{prefix}/" if prefix else ""
        for upload in root.s3.uploads(prefix):
            yield Unfinished(upload.key.removeprefix(prefix), root.s3.upload_bytes(upload), upload.initiated, upload)
    elif root.is_local:
        for folder, _, names in os.walk(root.url):
            for name in names:
                if _HALF.fullmatch(name):
                    with contextlib.suppress(FileNotFoundError):  # it has become the object meanwhile
                        info = os.stat(os.path.join(folder, name))
                        path = os.path.relpath(os.path.join(folder, name), root.url)
                        yield Unfinished(path, info.st_size, datetime.fromtimestamp(info.st_mtime, UTC))


def discard(root: Root, write: Unfinished) -> None:
    """Free its bytes; one that has ended meanwhile is fine."""
    if write.upload is not None and root.s3:
        root.s3.abort(write.upload)
    else:
        Path(root.url, write.path).unlink(missing_ok=True)
