"""videoflow: decode video once, cache it in Lance, train from it.

The names below are what users import; they load on first use, so that ``import videoflow`` needs no torch, DALI or Ray.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from videoflow.dataset.catalog import Catalog
    from videoflow.dataset.video import Video
    from videoflow.errors import MediaError, VideoflowError
    from videoflow.loader.loader import Loader
    from videoflow.recipe import Recipe

__all__ = ["Catalog", "Loader", "MediaError", "Recipe", "Video", "VideoflowError", "open"]

_HOME = {
    "Catalog": "videoflow.dataset.catalog",
    "Loader": "videoflow.loader.loader",
    "MediaError": "videoflow.errors",
    "Recipe": "videoflow.recipe",
    "Video": "videoflow.dataset.video",
    "VideoflowError": "videoflow.errors",
}


def open(root: str) -> "Catalog":
    """Open the catalog at a root (a folder or URL); see `videoflow.dataset.catalog.Catalog.open`."""
    from videoflow.dataset.catalog import Catalog

    return Catalog.open(root)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'videoflow' has no attribute {name!r}")
