"""Decoding with NVIDIA DALI: on a GPU, or on the CPU for comparison. Imported only when asked for.

Frames reach DALI without a copy and leave it through DLPack. DALI decodes and nothing else: fitting to size is the same
filter as the CPU engine's (``fit.py``), on a GPU as two matrix products, because DALI has no such filter. Its CPU
decoder can end the process on damaged bytes, so only frames whose CRC holds and that begin like a JPEG reach it; after
any error of DALI's the batch is redone by the CPU engine, which names the clip that is damaged. ``exec_dynamic`` is
what makes a batch keep its own memory: without it DALI 2.4 writes the next batch over the tensors it has handed out
    (tested).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from videoflow.errors import LoaderError, MissingExtra
from videoflow.loader.engine import check_clips
from videoflow.loader.engine_cpu import CpuEngine, is_first_of_its_frame
from videoflow.loader.fit import Placement, fit_into, place, resize_weights
from videoflow.loader.reader import EncodedClip

JPEG_START = b"\xff\xd8"


class DaliEngine:
    """Decodes with DALI.

    Args:
        device: a CUDA device like "cuda" or "cuda:1", None for the CPU.
        threads: DALI's CPU threads (and those of the engine that redoes failed batches).

    Raises:
        MissingExtra: DALI or torch is not installed.
    """

    name = "dali"

    def __init__(self, *, device: str | None = None, threads: int = 2) -> None:
        try:
            import nvidia.dali  # noqa: F401
        except ImportError as e:
            raise MissingExtra("nvidia-dali", needed_for="engine='dali'", extra="dali-cuda13") from e
        try:
            import torch
        except ImportError as e:
            raise MissingExtra("torch", needed_for="engine='dali'", extra="torch") from e
        self._torch = torch
        self._device = None if device is None else torch.device(device)
        self._threads = threads
        self._pipeline: Any = None
        self._max_frames = 0
        self._feed: list[np.ndarray] = []
        self._fallback = CpuEngine(threads=threads)
        self.num_redone = 0  # batches that the CPU engine had to do

    def __repr__(self) -> str:
        return f"DaliEngine(device={str(self._device or 'cpu')!r}, threads={self._threads})"

    def decode(self, clips: Sequence[EncodedClip], *, size: tuple[int, int] | None, fit: str) -> Any:
        """See ``DecodeEngine.decode``; returns a torch tensor on the engine's device, uint8 (B, T, H, W, 3)."""
        check_clips(clips, size)
        frames = [(b, t) for b, c in enumerate(clips) for t in range(len(c.payloads)) if is_first_of_its_frame(c, t)]
        pictures = None
        if all(clips[b].payloads[t][:2] == JPEG_START for b, t in frames):
            try:
                pictures = self._run([np.frombuffer(clips[b].payloads[t], np.uint8) for b, t in frames])
            except Exception:  # DALI raises RuntimeError and its own family; a pipeline that raised is dead
                self._pipeline = None
        if pictures is None or not self._have_sizes(pictures, [clips[b] for b, _ in frames]):
            self.num_redone += 1
            redone = self._torch.from_numpy(self._fallback.decode(clips, size=size, fit=fit))
            return redone if self._device is None else redone.to(self._device)
        return self._assemble(clips, frames, pictures, size, fit)

    def close(self) -> None:
        self._pipeline = None
        self._fallback.close()

    def _run(self, payloads: list[np.ndarray]) -> Any:
        if self._pipeline is None or len(payloads) > self._max_frames:
            self._max_frames = max(len(payloads), self._max_frames)
            self._pipeline = self._build(self._max_frames)
        self._feed = payloads
        (pictures,) = self._pipeline.run()
        self._feed = []
        return pictures

    def _build(self, max_frames: int) -> Any:
        from nvidia.dali import Pipeline, fn, types

        index = None
        if self._device is not None:
            index = self._device.index if self._device.index is not None else self._torch.cuda.current_device()
        pipeline = Pipeline(
            batch_size=max_frames, num_threads=self._threads, device_id=index, prefetch_queue_depth=1, exec_dynamic=True
        )
        with pipeline:
            encoded = fn.external_source(source=lambda: self._feed, batch=True, no_copy=True, dtype=types.UINT8, ndim=1)
            decoder = "cpu" if self._device is None else "mixed"
            pipeline.set_outputs(fn.decoders.image(encoded, device=decoder, output_type=types.RGB))
        pipeline.build()
        return pipeline

    @staticmethod
    def _have_sizes(pictures: Any, clips: Sequence[EncodedClip]) -> bool:
        return all(tuple(s)[:2] == (c.height, c.width) for s, c in zip(pictures.shape(), clips, strict=True))

    def _assemble(
        self,
        clips: Sequence[EncodedClip],
        frames: list[tuple[int, int]],
        pictures: Any,
        size: tuple[int, int] | None,
        fit: str,
    ) -> Any:
        num_clips, num_frames = len(clips), len(clips[0].payloads)
        placements = {(c.height, c.width): place(c.height, c.width, size, fit) for c in clips}
        if len(placements) == 1:
            (placement,) = placements.values()
            fitted = self._fit_all(self._torch.from_dlpack(pictures.as_tensor()), placement)
        else:
            singles = [self._torch.from_dlpack(pictures[i]) for i in range(len(frames))]
            parts = [self._fit_all(p[None], placements[p.shape[0], p.shape[1]]) for p in singles]
            fitted = self._torch.cat(parts)
        if len(frames) < num_clips * num_frames:
            source = np.cumsum([is_first_of_its_frame(c, t) for c in clips for t in range(num_frames)]) - 1
            fitted = fitted[self._torch.from_numpy(source).to(fitted.device)]
        return fitted.reshape(num_clips, num_frames, *fitted.shape[1:])

    def _fit_all(self, pictures: Any, placement: Placement) -> Any:
        """Fit pictures of one size, uint8 (n, h, w, 3), to uint8 (n, H, W, 3)."""
        rows, columns = placement.source.slices
        if placement.is_copy and placement.fills:
            return pictures[:, rows, columns].contiguous()
        if self._device is not None:
            return fit_on_device(pictures, placement)
        out = np.empty((len(pictures), *placement.size, 3), dtype=np.uint8)
        for picture, target in zip(pictures.numpy(), out, strict=True):
            fit_into(picture, placement, target)
        return self._torch.from_numpy(out)


def fit_on_device(pictures: Any, placement: Placement) -> Any:
    """``fit_into`` for a torch tensor, uint8 (n, h, w, 3) → uint8 (n, H, W, 3), on the tensor's own device.

    Raises:
        LoaderError: not a uint8 tensor of that shape.
    """
    import torch

    if pictures.dtype != torch.uint8 or pictures.ndim != 4:
        raise LoaderError(f"pictures must be uint8 (n, h, w, 3), not {pictures.dtype} of {pictures.ndim} dimensions")
    source, target = placement.source, placement.target
    part = pictures[:, source.slices[0], source.slices[1]]
    if not placement.is_copy:
        weights = resize_weights(source.height, source.width, target.height, target.width)
        rows, columns = (torch.from_numpy(w).to(pictures.device) for w in weights)
        narrow = torch.einsum("wx,nyxc->nywc", columns, part.float())
        part = torch.einsum("hy,nywc->nhwc", rows, narrow).round_().clamp_(0, 255).to(torch.uint8)
    if placement.fills:
        return part.contiguous()
    out = torch.zeros((len(pictures), *placement.size, 3), dtype=torch.uint8, device=pictures.device)
    out[:, target.slices[0], target.slices[1]] = part
    return out
