"""Content keys: BLAKE3, shown as 32 hex characters, over bytes or over canonical JSON.

`clip_key` does not depend on the recipe, so labels and diffs survive a new one. Sources: DESIGN.md, "Keys".
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blake3 import blake3

KEY_CHARS = 32
#: Made once: `json.dumps` with these options makes an encoder a call, which is most of a small key's price.
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest_bytes(data: bytes | memoryview) -> str:
    """BLAKE3 of bytes, first 32 hex characters."""
    return blake3(data).hexdigest()[:KEY_CHARS]


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys and no spaces: equal values give equal bytes in every process. NaN is refused."""
    return _CANONICAL.encode(value).encode()


def digest(*parts: Any) -> str:
    """BLAKE3 over the canonical JSON list of the parts, first 32 hex characters."""
    return digest_bytes(canonical_json(list(parts)))


def digest_file(path: str | Path) -> str:
    """BLAKE3 of a local file's bytes (memory-mapped by the library), first 32 hex characters."""
    return blake3().update_mmap(path).hexdigest()[:KEY_CHARS]


def clip_key(video_key: str, stream: int, t0_pts: int, t1_pts: int) -> str:
    """Key of the clip [t0_pts, t1_pts) of one stream of a video."""
    return digest(video_key, stream, t0_pts, t1_pts)


def clip_order(key: str) -> str:
    """What payload rows are sorted by and clips are drawn by: a hash of the clip's key, the same in every job."""
    return digest("payload order", key)
