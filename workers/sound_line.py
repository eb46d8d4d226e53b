"""Decoded sound on the video's clock: every piece at its pts, resampled as one line, cut where the video begins.

Sample k of the line is at the video's first shown pts + k / rate seconds. Whole seconds are sample points of every
rate, so the line is resampled in *sections* that begin at one: inside a section the place of every source sample is
exact, holes are silence while it is resampled, and a long hole or another format begins a new section. Handed over are
the samples that were heard; holes are left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from videoflow.media.sound import Resampler, as_floats, layout_of
from videoflow.stage import HeardSound
from videoflow.timeline import ceil_div

#: A piece follows the one before if its pts is as near to that one's end as a clock of its time base can tell, or as
#: this: clocks of recorders and muxers jitter, and mending that would be heard.
JITTER_SECONDS = Fraction(1, 1000)
#: A longer hole begins a new section.
MAX_HOLE_SECONDS = 2
#: Silence behind the last sample of a section: more than the resampler looks ahead.
TAIL_SECONDS = 1
#: Times beyond this, about the video's start, are no times.
MAX_SECONDS = 1 << 28


class Piece(NamedTuple):
    """Samples of the line from number ``first`` on: float32 (channels, n)."""

    first: int
    samples: np.ndarray


class SoundLine:
    """The line of one audio stream.

    Attributes:
        overlap_samples: of the source, left out because their time was told already. untimed_samples: left out
            because nothing tells their time.
    """

    def __init__(self, *, start: Fraction, rate: int, channels: int) -> None:
        self._start, self._rate, self._channels = start, rate, channels
        self._section: _Section | None = None
        self._end: Fraction | None = None  # where the last piece ended
        self.overlap_samples = self.untimed_samples = 0

    def add(self, sound: HeardSound) -> Iterator[Piece]:
        """Place one decoded piece; the samples of the line that are ready.

        Raises:
            MediaError: samples that FFmpeg cannot mix.
        """
        samples, rate, layout = as_floats(sound.frame), int(sound.frame.sample_rate), layout_of(sound.frame)
        begin = self._begin(sound, rate)
        if begin is None:
            self.untimed_samples += samples.shape[1]
            return
        at = _nearest(begin * rate)
        told = 0 if self._end is None else max(0, _nearest(self._end * rate) - at)
        self.overlap_samples += min(told, samples.shape[1])
        if told >= samples.shape[1]:
            return
        at, samples = at + told, samples[:, told:]
        self._end = Fraction(at + samples.shape[1], rate)
        if self._end <= -TAIL_SECONDS:
            return  # long before the video: nothing of it reaches the first sample
        section = self._section
        if section is None or not section.takes(at, rate, layout):
            if section is not None:
                yield from section.end()
            section = self._section = _Section(at // rate, rate, layout, to_rate=self._rate, to_channels=self._channels)
        yield from section.feed(at, samples)

    def end(self) -> Iterator[Piece]:
        """The rest of the line."""
        if self._section is not None:
            yield from self._section.end()
            self._section = None

    def _begin(self, sound: HeardSound, rate: int) -> Fraction | None:
        """When a piece begins, seconds after the video's start; None if nobody knows."""
        if sound.pts is None:
            return self._end
        told = sound.pts * sound.time_base - self._start
        if abs(told) > MAX_SECONDS:
            return None
        jitter = max(sound.time_base + Fraction(1, rate), JITTER_SECONDS)
        return self._end if self._end is not None and abs(told - self._end) <= jitter else told


class _Section:
    """A stretch of source samples of one format, numbered from the video's start at the source's rate."""

    def __init__(self, second: int, rate: int, layout: str, *, to_rate: int, to_channels: int) -> None:
        self._rate, self._layout, self._to_rate = rate, layout, to_rate
        self._next, self._made = second * rate, second * to_rate
        self._resampler = Resampler(layout=layout, rate=rate, to_rate=to_rate, to_channels=to_channels)
        self._heard: deque[tuple[int, int]] = deque()
        self._channels = 0

    def takes(self, at: int, rate: int, layout: str) -> bool:
        """True if source sample ``at`` may follow in this section."""
        is_same = (rate, layout) == (self._rate, self._layout)
        return is_same and 0 <= at - self._next <= MAX_HOLE_SECONDS * rate

    def feed(self, at: int, samples: np.ndarray) -> Iterator[Piece]:
        self._channels = len(samples)
        yield from self._silence(at - self._next)
        stop = at + samples.shape[1]
        first, last = (ceil_div(n * self._to_rate, self._rate) for n in (at, stop))
        if self._heard and self._heard[-1][1] == first:
            first = self._heard.pop()[0]
        if first < last:
            self._heard.append((first, last))
        self._next = stop
        yield from self._made_of(self._resampler.push(samples))

    def end(self) -> Iterator[Piece]:
        yield from self._silence(TAIL_SECONDS * self._rate)
        yield from self._made_of(self._resampler.end())

    def _silence(self, count: int) -> Iterator[Piece]:
        if count:
            self._next += count
            yield from self._made_of(self._resampler.push(np.zeros((self._channels, count), np.float32)))

    def _made_of(self, blocks: Iterator[np.ndarray]) -> Iterator[Piece]:
        """What was heard of some samples that follow those made before, from the video's start on."""
        for block in blocks:
            begin, self._made = self._made, self._made + block.shape[1]
            while self._heard and self._heard[0][0] < self._made:
                first, last = self._heard[0]
                low, high = max(first, begin, 0), min(last, self._made)
                if low < high:
                    yield Piece(low, block[:, low - begin : high - begin])
                if last > self._made:
                    break
                self._heard.popleft()


def _nearest(x: Fraction) -> int:
    """Nearest integer, halves up."""
    return int((2 * x + 1) // 2)
