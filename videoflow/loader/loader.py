"""The loader: a dataset version as an endless, resumable stream of batches that can be named and made again.

Which samples a step has follows from (version, options, seed, epoch, step) alone, on any number of ranks. Two threads
make batches ahead of the trainer; the trainer's waits are measured here, around ``next``.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from videoflow.errors import LoaderError
from videoflow.loader.ahead import ReadAhead
from videoflow.loader.attached import ArrayColumn
from videoflow.loader.batches import Batch, BatchMaker
from videoflow.loader.embeddings import EmbeddingReader
from videoflow.loader.engine import make_engine, refuse_mixed_sizes
from videoflow.loader.fit import place
from videoflow.loader.options import LoaderOptions, check_batch, check_ranks, check_version
from videoflow.loader.order import Order
from videoflow.loader.payload import H264, PayloadReader, make_payload_engine
from videoflow.loader.payload_rows import choose_rows, engine_name
from videoflow.loader.placing import check_device, find_rank
from videoflow.loader.reader import ClipReader, VersionSource
from videoflow.loader.report import LoaderReport
from videoflow.loader.rows import EMBEDDING, PAYLOAD, VersionRows, sample_rows
from videoflow.loader.sound import SoundReader
from videoflow.loader.state import LoaderConfig, LoaderState
from videoflow.telemetry.spans import STAGES, SpanRing
from videoflow.telemetry.stall import StallMeter


class Loader:
    """Batches of a dataset version.

    Args:
        version: the version; anything that meets ``VersionSource``.
        batch_size: clips of a global batch; rank r takes slots [r·B/W, (r + 1)·B/W), so it must be a multiple of the
            world size.
        frames: frames of a sample: a number, or ``"1+8k"`` for the largest such count that fits each clip (a batch then
            has the largest count among its clips, on all ranks, and shorter ones are padded).
        video: False for a loader that reads no pictures, only ``columns``; leave out ``frames``, ``fps`` and ``size``.
        fps: frames a second; must divide the rate of the cache. None: the cache's own.
        size: S for S×S, (height, width), or None for the cached size.
        fit: ``"crop"`` | ``"pad"`` | ``"stretch"``: how pictures of another shape go into ``size``.
        short: clips with fewer frames: ``"pad"`` repeats the last one (``frame_valid`` False), ``"skip"`` leaves them
            out, ``"error"``.
        seed: any integer.
        shuffle: True, or False for the version's order.
        split: clips of this split only.
        filter: SQL condition on the version's columns.
        epochs: how many to go through, None for no end.
        tail: ``"drop"`` leaves out the rest that fills no batch (another rest every epoch), ``"pad"`` delivers it with
            ``valid`` False in the empty slots. All ranks always take the same number of steps.
        device: where tensors go: None for the CPU, or like ``"cuda:0"``.
        engine: ``"auto"`` | ``"cpu"`` | ``"dali"``.
        rank, world_size: from torch.distributed if it is initialised, else 0 of 1.
        columns: further columns of the version for each batch; ``"embedding"`` brings the clips' vectors,
            ``"tokens"``, ``"latents"``, ``"text_embedding"`` and ``"text_ids"`` what those stages made of them.
        audio: True brings the sound of the delivered frames (of a version whose recipe has the stage audio).
        allow_uneven: take a rate that does not divide the cache's; each frame is then the last cached one at or before
            its time.
        threads: decoding threads on the CPU.
        prefetch: finished batches that may wait for the trainer.
        transform: last step, batch → batch; runs on one of the loader's threads.
        source: where frames are read: ``"frames"`` the frame cache, ``"payload"`` the payload of chosen clips,
            ``"auto"`` the payload where the asked rate or size needs it, else the cache.
        bad_samples: ``"error"``: a sample that is damaged for good raises BadSample, naming the clip. (Substitution,
            with a record of it for replay, is not there yet.)

    A batch is a dict, b = batch_size / world_size; an empty slot of a padded tail has zeros, ``clip_key`` "" and
    ``position`` −1:
        ``video`` uint8 (b, T, C, H, W) RGB, a permuted view of (b, T, H, W, C) memory · ``pts_seconds`` float64 (b, T),
        the stream time of each delivered frame · ``frame_valid`` bool (b, T) · ``valid`` bool (b,) · ``clip_key`` list
        of str · ``position`` int64 (b,), the clip's position in the version · the asked columns: ``embedding`` float32
        (b, D), numbers as tensors, text as lists · with ``audio``: ``audio`` float32 (b, C, N), as long as T frames,
        ``audio_start_seconds`` float64 (b,), the stream time of its first sample (that of the first frame), and
        ``audio_valid`` bool (b, N), False where the clip has no sound: there it is zero. Arrays of clips are padded
        with zeros to the largest of the global batch, with a mask of what is real: ``tokens`` int32 (b, [levels,] t, h,
        w) and ``tokens_valid`` bool (b, t, h, w) · ``latents`` (b, channels, t, h, w) as they were stored and
        ``latents_valid`` · ``text_embedding`` (b, L, D) or ``text_ids`` int32 (b, L) and ``text_mask`` bool (b, L).
        With ``video=False`` there are no ``video``, ``pts_seconds`` and ``frame_valid``.

    Iterating starts the threads and goes through the epochs without a pause; a loop that was left goes on where it
    stood.

    Raises:
        LoaderError: options that do not fit the version, each with what would.
        MissingExtra: torch, or DALI where it was asked for, is not installed.
        BadSample, SystemFailure: from ``next``, when a batch could not be made.
    """

    def __init__(
        self,
        version: VersionSource,
        *,
        batch_size: int,
        frames: int | str | None = None,
        video: bool = True,
        fps: object = None,
        size: int | tuple[int, int] | None = None,
        fit: str = "crop",
        short: str = "pad",
        seed: int = 0,
        shuffle: bool = True,
        split: str | None = None,
        filter: str | None = None,
        epochs: int | None = None,
        tail: str = "drop",
        device: Any = None,
        engine: str = "auto",
        rank: int | None = None,
        world_size: int | None = None,
        columns: Sequence[str] = (),
        audio: bool = False,
        allow_uneven: bool = False,
        threads: int = 2,
        prefetch: int = 2,
        transform: Callable[[Batch], Batch] | None = None,
        bad_samples: str = "error",
        source: str = "auto",
    ) -> None:
        started_ns = time.perf_counter_ns()
        self._ahead: ReadAhead | None = None
        options = LoaderOptions.checked(
            batch_size=batch_size,
            frames=frames,
            video=video,
            fps=fps,
            size=size,
            fit=fit,
            short=short,
            seed=seed,
            shuffle=shuffle,
            split=split,
            filter=filter,
            epochs=epochs,
            tail=tail,
            engine=engine,
            rank=rank,
            world_size=world_size,
            columns=columns,
            audio=audio,
            allow_uneven=allow_uneven,
            threads=threads,
            prefetch=prefetch,
            transform=transform,
            bad_samples=bad_samples,
            source=source,
        )
        self._set_up(version, options, check_device(device))
        self._meter = StallMeter(self._ring, set_up_ns=time.perf_counter_ns() - started_ns)

    def _set_up(self, version: VersionSource, options: LoaderOptions, device: str | None) -> None:
        config = options.config
        rank, world_size = find_rank(options.rank, options.world_size)
        check_ranks(config.batch_size, rank=rank, world_size=world_size)
        check_version(version)
        self._epochs, self._prefetch = options.epochs, options.prefetch
        config = self._choose(version, config)
        self._state = LoaderState(version.id, version.digest, config)
        check_batch(
            num_slots=config.batch_size // world_size,
            num_frames=int(self._sampling.num_frames[self._sampling.kept].max()),
            size=config.size or tuple(self._rows.sizes[self._sampling.kept].max(axis=0).tolist()),
        )
        engine = make_payload_engine if engine_name(self._rows) == H264 else make_engine
        wanted = options.engine if config.frames else "cpu"
        self._take_engine(engine(wanted, device=device, threads=options.threads))
        placing = {"rank": rank, "world_size": world_size, "device": device, "transform": options.transform}
        maker = self._maker(version, config, **placing)
        self._steps = [(stage, getattr(maker, stage)) for stage in STAGES if stage != "queue"]
        self._ring = SpanRing(max(4096, 8 * len(STAGES) * (options.prefetch + 4)))

    def _choose(self, version: VersionSource, config: LoaderConfig) -> LoaderConfig:
        """The version's rows, which of them make samples, and in which order; the config with its source settled."""
        self._rows, source = choose_rows(version, config)
        config = replace(config, source=source)
        self._sampling = sample_rows(self._rows, config)
        num_clips = len(self._sampling.kept)
        self._order = Order(num_clips, config.batch_size, config.seed, config.shuffle, config.tail)
        if not self._order.steps_per_epoch:
            num_short = len(self._rows) - num_clips
            left_out = f" ({num_short} were left out as too short)" if num_short else ""
            raise LoaderError(
                f"{num_clips} clips{left_out} fill no batch of {config.batch_size}; use a smaller batch_size, or "
                "tail='pad' if there are any"
            )
        if config.size is None and config.frames:
            _check_sizes(self._rows.sizes[self._sampling.kept], config)
        return config

    def _take_engine(self, engine: Any) -> None:
        """From here on there is something to close."""
        self._engine = engine
        self._shared = _Shared(engine)
        self._finalizer = weakref.finalize(self, self._shared.close)
        self._pid = os.getpid()
        self._number = 0
        self._fresh = True

    def _maker(self, version: VersionSource, config: LoaderConfig, **placing: Any) -> BatchMaker:
        options = version.storage_options
        if not version.tables.get(config.source):
            raise LoaderError(f"version {version.id} has no cached frames; its recipe needs the frames stage")
        return BatchMaker(
            rows=self._rows,
            sampling=self._sampling,
            order=self._order,
            reader=(PayloadReader if config.source == PAYLOAD else ClipReader)(version.tables[config.source], options),
            embeddings=EmbeddingReader(version.tables["embeddings"], options) if EMBEDDING in config.columns else None,
            arrays=[ArrayColumn(refs, version.tables[refs.name], options) for refs in self._rows.arrays],
            engine=self._engine,
            size=config.size,
            fit=config.fit,
            sound=SoundReader.of(version, self._rows, self._sampling),
            **placing,
        )

    def __repr__(self) -> str:
        config = self._state.config
        return (
            f"Loader({self._state.version}, {len(self._sampling.kept)} clips, batch_size={config.batch_size}, "
            f"frames={config.frames!r}, "
            f"engine={self._engine.name!r}, epoch={self._state.epoch}, step={self._state.step})"
        )

    def __len__(self) -> int:
        """Steps of an epoch."""
        return self._order.steps_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self._check_usable()
        state = self._state
        if self._epochs is not None and state.epoch >= self._epochs:
            self._stop()
            raise StopIteration
        ahead = self._ahead or self._start()
        start_ns = time.perf_counter_ns()
        made = ahead.get()
        end_ns = time.perf_counter_ns()
        if made is None:  # another thread closed the loader
            raise StopIteration
        if made.error is not None:
            self._stop()
            raise made.error
        kind = "first_batch" if self._fresh else "epoch_turn" if state.step == 0 else "steady"
        self._meter.delivered(made.number, kind, start_ns, end_ns)
        self._fresh = False
        self._number = made.number + 1
        self._state = _after(state, len(self))
        return made.value

    def state_dict(self) -> dict[str, Any]:
        """Where the trainer stands: batches that were delivered, not those read ahead. JSON types only."""
        return self._state.to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the last batch that was delivered when ``state`` was taken, on any number of ranks.

        Raises:
            StateMismatch: the state is of another version or configuration; the difference is named.
            LoaderError: it is no loader state.
        """
        self._check_usable()
        moved = self._state.moved_to(state, steps_per_epoch=len(self))
        self._stop()
        self._state = moved

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._state.epoch

    @property
    def step(self) -> int:
        """The step of the next batch inside its epoch, from 0."""
        return self._state.step

    def report(self) -> LoaderReport:
        """Counts, and where the trainer's waits went."""
        return LoaderReport(
            version=self._state.version,
            engine=self._engine.name,
            num_clips=len(self._sampling.kept),
            num_short=self._sampling.num_short,
            num_left_out=len(self._rows) - len(self._sampling.kept),
            num_enlarged=_count_enlarged(self._rows, self._sampling.kept, self._state.config),
            steps_per_epoch=len(self),
            num_batches=self._meter.num_batches,
            stall=self._meter.report(),
        )

    def close(self) -> None:
        """End the threads and free the engine; the loader cannot be used afterwards. Closing twice is fine."""
        self._ahead = None
        self._finalizer()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise LoaderError(
                "this loader was made in another process: its threads do not survive a fork and Lance hangs in a "
                "forked child; "
                "make the loader inside the child, or start the child with the 'spawn' method. It replaces a "
                "DataLoader, so it needs no workers"
            )
        if not self._finalizer.alive:
            raise LoaderError("this loader is closed; make a new one and load its state_dict() to go on")

    def _start(self) -> ReadAhead:
        started_ns = time.perf_counter_ns()
        orders = _orders(len(self), self._epochs, self._state.epoch, self._state.step)
        split = next(i for i, (stage, _) in enumerate(self._steps) if stage == "decode")
        self._ahead = self._shared.ahead = ReadAhead(
            orders,
            first=self._steps[:split],
            second=self._steps[split:],
            prefetch=self._prefetch,
            ring=self._ring,
            first_number=self._number,
        )
        self._fresh = True
        self._ahead.start()
        self._meter.set_up_ns += time.perf_counter_ns() - started_ns
        return self._ahead

    def _stop(self) -> None:
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead = self._shared.ahead = None
            self._number += self._prefetch + 4  # numbers of batches that were made and dropped are not used again


class _Shared:
    """What must be ended when a loader goes; it does not know the loader, so that one can be collected."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.ahead: ReadAhead | None = None
        self.pid = os.getpid()

    def close(self) -> None:
        if os.getpid() != self.pid:  # a forked child has none of the threads
            return
        if self.ahead is not None:
            self.ahead.stop()
        self.engine.close()


def _check_sizes(sizes: np.ndarray, config: LoaderConfig) -> None:
    """Find mixed sizes before the first step; in the version's own order only batches that really mix them are
    refused.
    """
    if config.batch_size == 1 or not (sizes != sizes[0]).any():
        return
    step = len(sizes) if config.shuffle else config.batch_size
    for first in range(0, len(sizes), step):
        refuse_mixed_sizes({(int(h), int(w)) for h, w in np.unique(sizes[first : first + step], axis=0)})


def _count_enlarged(rows: VersionRows, kept: np.ndarray, config: LoaderConfig) -> int:
    sizes, counts = np.unique(rows.sizes[kept], axis=0, return_counts=True)
    return sum(
        int(n)
        for (h, w), n in zip(sizes, counts, strict=True)
        if place(int(h), int(w), config.size, config.fit).enlarges
    )


def _orders(steps_per_epoch: int, epochs: int | None, epoch: int, step: int) -> Iterator[tuple[int, int]]:
    """(epoch, step) pairs from a state on."""
    while epochs is None or epoch < epochs:
        yield epoch, step
        step += 1
        if step == steps_per_epoch:
            epoch, step = epoch + 1, 0


def _after(state: LoaderState, steps_per_epoch: int) -> LoaderState:
    turned = state.step + 1 == steps_per_epoch
    epoch, step = (state.epoch + 1, 0) if turned else (state.epoch, state.step + 1)
    return LoaderState(state.version, state.version_digest, state.config, epoch, step)
