"""From a dataset version to training batches: order, reading, decoding, fitting, read-ahead, state."""

from videoflow.loader.engine import DecodeEngine, make_engine
from videoflow.loader.loader import Loader
from videoflow.loader.reader import BlobRef, ClipReader, ClipRef, EncodedClip, VersionSource
from videoflow.loader.report import LoaderReport

__all__ = [
    "BlobRef",
    "ClipReader",
    "ClipRef",
    "DecodeEngine",
    "EncodedClip",
    "Loader",
    "LoaderReport",
    "VersionSource",
    "make_engine",
]
