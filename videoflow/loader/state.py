"""What names a loader's samples, and where it stands: a state that does not fit is refused with the difference named.

A state is (version, configuration, epoch, step). The configuration holds what decides which samples a step has and what
they look like; rank, world size, device, engine, threads and queues are no part of it, so a run may go on with another
number of ranks. Nor is ``epochs``, which only says when to stop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from blake3 import blake3

from videoflow.errors import LoaderError, StateMismatch, shown
from videoflow.loader.order import ORDER_FORMAT

STATE_FORMAT = 1


@dataclass(frozen=True)
class LoaderConfig:
    """The options that decide a loader's samples, in canonical form (JSON types only)."""

    batch_size: int
    frames: int | str
    fps: str | None
    size: tuple[int, int] | None
    fit: str
    short: str
    seed: int
    shuffle: bool
    split: str | None
    filter: str | None
    tail: str
    columns: tuple[str, ...]
    allow_uneven: bool
    bad_samples: str
    order: int = ORDER_FORMAT
    source: str = "frames"
    audio: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON gives them back; those that earlier builds do not know are told where they are used."""
        told = dict(json.loads(json.dumps(asdict(self))))
        unused = {"source": "frames", "audio": False}
        return {name: value for name, value in told.items() if name not in unused or value != unused[name]}

    @property
    def digest(self) -> str:
        """BLAKE3 of the canonical JSON: 32 hex characters."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return blake3(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class LoaderState:
    """Where a loader stands: ``step`` batches of ``epoch`` were delivered."""

    version: str
    version_digest: str
    config: LoaderConfig
    epoch: int = 0
    step: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As JSON types, to be stored in a checkpoint."""
        return {
            "format": STATE_FORMAT,
            "version": self.version,
            "version_digest": self.version_digest,
            "config_digest": self.config.digest,
            "config": self.config.to_dict(),
            "epoch": self.epoch,
            "step": self.step,
        }

    def moved_to(self, state: Mapping[str, Any], *, steps_per_epoch: int) -> LoaderState:
        """This loader's state at the place another state names.

        Raises:
            StateMismatch: it belongs to another version or configuration; what differs is named, old → new.
            LoaderError: it is no loader state, or one of a newer format.
        """
        mine = self.to_dict()
        _check_form(state, mine)
        if state["format"] != STATE_FORMAT:
            raise LoaderError(
                f"the loader state has format {state['format']}, this videoflow reads {STATE_FORMAT}; use the "
                "videoflow that wrote it"
            )
        changes = _differences(state, mine)
        if changes:
            raise StateMismatch(
                f"the loader state does not fit this loader: {'; '.join(changes)} (old → new). "
                "Make the loader as it was, or start anew without the state"
            )
        epoch, step = state["epoch"], state["step"]
        if epoch < 0 or not 0 <= step < max(1, steps_per_epoch):
            raise LoaderError(
                f"the loader state stands at epoch {epoch}, step {step}, but an epoch has {steps_per_epoch} steps"
            )
        return LoaderState(self.version, self.version_digest, self.config, epoch, step)


def _check_form(state: Any, mine: Mapping[str, Any]) -> None:
    """Raises LoaderError for what `to_dict` did not write; ``mine`` is such a state."""
    ask = "give what loader.state_dict() returned"
    if not isinstance(state, Mapping):
        raise LoaderError(f"this is no loader state but {type(state).__name__}; {ask}")
    missing = sorted(mine.keys() - state.keys())
    if missing:
        raise LoaderError(f"this is no loader state: it lacks {', '.join(missing)}; {ask}")
    for name, value in mine.items():
        kind = Mapping if isinstance(value, dict) else type(value)
        if not isinstance(state[name], kind) or isinstance(state[name], bool):
            raise LoaderError(f"this is no loader state: its {name} is {shown(state[name])}; {ask}")


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    changes = []
    if old["version"] != new["version"]:
        changes.append(f"version: {old['version']} → {new['version']}")
    elif old["version_digest"] != new["version_digest"]:
        changes.append(f"content of version {new['version']}: digest {old['version_digest']} → {new['version_digest']}")
    if old["config_digest"] != new["config_digest"]:
        was, now = old["config"], new["config"]
        names = sorted(k for k in was.keys() | now.keys() if was.get(k) != now.get(k))
        changes += [f"{k}: {was.get(k)!r} → {now.get(k)!r}" for k in names] or [
            "configuration digest, though no option differs"
        ]
    return changes
