"""What holds a stage up, and what to do about it, in plain words.

The rule, by queue gradient: work piles up before the slowest place and runs dry behind it. Where finished units lie
waiting (on average ``MANY_WAITING`` or more when the driver comes for one) and the driver spends ``COMMITTING`` or more
of the stage on commits, it is the commits. Else it is the workers, and within them the kind of work that takes most
of the time in which they have a unit; below ``DOMINANT`` of it there is none. Idle workers are named only
where they idle more than ``IDLING`` of the time: no unit was left to give them. Less than ``MIN_SECONDS`` of work says
nothing; what it takes to start processes and models, once a job, is left out of shares and only mentioned.
The job's verdict is that of the stage that ran longest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from videoflow.telemetry.metrics import SOURCES, StageFigures, rounded

MIN_SECONDS = 2.0
COMMITTING, MANY_WAITING = 0.5, 1.0
DOMINANT = 0.4
IDLING = 0.5
MUCH_STARTING = 0.3

#: Bottlenecks and the states of workers that mean them.
KINDS: dict[str, tuple[str, ...]] = {
    "storage_read": ("fetch", "read"),
    "decode": ("decode", "consume", "unpack"),
    "model": ("process",),
    "storage_write": ("write", "hand_over"),
}
#: What a verdict may name; ``none``: no single one.
NONE, TOO_SHORT = "none", "too_short"
BOTTLENECKS = (*KINDS, "commit", "too_few_units", NONE, TOO_SHORT)


@dataclass(frozen=True)
class Verdict:
    """``share``: of the time in which workers had a unit (of the stage's time for commits and idle workers)."""

    bottleneck: str
    stage: str = ""
    share: float = 0.0
    text: str = "too short to say"
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.text}. What to do: {self.remedy}." if self.remedy else f"{self.text}."

    def to_dict(self) -> dict[str, Any]:
        return {k: rounded(v) for k, v in asdict(self).items()} | {"says": str(self)}


def verdict_of(stages: Sequence[StageFigures]) -> Verdict:
    """The job's: that of the stage that ran longest."""
    longest = max(stages, key=lambda s: s.running_seconds, default=None)
    return Verdict(TOO_SHORT, text="nothing was computed yet") if longest is None else judge(longest)


def judge(f: StageFigures) -> Verdict:
    """One stage's verdict."""
    working = {k: v for k, v in f.states.items() if k not in ("idle", "start_up")}
    seconds = sum(working.values())
    said = f"stage {f.stage}: too short to say where its time goes ({seconds:.1f} s of work)"
    short = Verdict(TOO_SHORT, f.stage, text=said)
    if max(seconds, f.driver.get("commit", 0.0)) < MIN_SECONDS:
        return short
    committing = _committing(f)
    if committing >= COMMITTING and f.units.mean_waiting >= MANY_WAITING:
        return _commits(f, committing)
    if seconds < MIN_SECONDS:  # or its engine does not tell what workers do
        return short
    whole = f.worker_seconds - f.states.get("start_up", 0.0)
    if f.workers > 1 and whole and f.states.get("idle", 0.0) / whole > IDLING:
        return _idle(f, f.states["idle"] / whole)
    sums = {kind: sum(working.get(s, 0.0) for s in states) for kind, states in KINDS.items()}
    kind = max(sums, key=lambda k: sums[k])
    share = sums[kind] / seconds
    if share < DOMINANT:
        parts = ", ".join(f"{s} {v / seconds:.0%}" for s, v in _largest(working, 4))
        return Verdict(NONE, f.stage, share, f"stage {f.stage}: no single bottleneck ({parts})")
    return _of_workers(f, kind, share, working)


def _committing(f: StageFigures) -> float:
    """The share of the stage that the driver spent on commits, the start of its workers apart."""
    return f.driver.get("commit", 0.0) / f.running_seconds if f.running_seconds else 0.0


def _commits(f: StageFigures, share: float) -> Verdict:
    wait = f.units.mean_waiting * f.commit_seconds
    text = (
        f"stage {f.stage}: commit is the bottleneck: the driver spent {share:.0%} of the time on commits "
        f"({f.commit_seconds:.2f} s each), and finished units waited about {wait:.1f} s for theirs"
    )
    remedy = (
        "put the catalog (--root) on a faster or nearer store, or run fewer --workers: their units are larger and fewer"
    )
    return Verdict("commit", f.stage, share, text, remedy)


def _idle(f: StageFigures, share: float) -> Verdict:
    text = (
        f"stage {f.stage}: too few units for {_workers(f)}: they had nothing to do for {share:.0%} of the time, while "
        f"the last of {f.units.total} units ran"
    )
    remedy = "nothing for a job as small as this; fewer --workers would do as well"
    return Verdict("too_few_units", f.stage, share, text, remedy)


def _of_workers(f: StageFigures, kind: str, share: float, working: Mapping[str, float]) -> Verdict:
    state = max(KINDS[kind], key=lambda s: working.get(s, 0.0))
    rider = max(f.consumers, key=lambda c: f.consumers[c], default="")
    doing, remedy = _words(f, state, rider)
    name = {"storage_read": "storage (reading)", "storage_write": "storage (writing)", "model": "the stage's own work"}
    named = f"stage {f.stage}: {name.get(kind, kind)} is the bottleneck"
    text = "; ".join([f"{named}: {_workers(f)} {doing} for {share:.0%} of the time they had work", *_beside(f)])
    return Verdict(kind, f.stage, share, text, remedy)


def _beside(f: StageFigures) -> list[str]:
    """What else belongs to the picture: the queues before and behind the workers, and what starting them took."""
    said = []
    if f.units.total:
        queued = f"{f.units.queued} units queue up before them, " if f.running else ""
        said.append(f"{queued}{f.units.mean_waiting:.1f} finished ones lay waiting on average")
    starting = f.shares["starting"]
    if starting >= MUCH_STARTING:
        said.append(f"starting processes and models took another {starting:.0%} of all their time, once a job")
    return said


def _words(f: StageFigures, state: str, rider: str) -> tuple[str, str]:
    """(what the workers did, what would help)."""
    if f.stage == SOURCES:
        nearer = "bring the sources nearer; later runs do not read again what has not changed"
        return "read the sources (to name them by their content)", nearer
    cores = "raise --workers where cores are idle, or give the job more cores or machines"
    waiting = "or raise --workers, since waiting takes no core"
    return {
        "fetch": (
            "waited for bytes of the sources",
            f"bring the sources nearer (a local disk, a bucket in the same region), {waiting}",
        ),
        "read": ("waited for cached rows and frames", f"bring the catalog (--root) nearer, {waiting}"),
        "decode": ("decoded", cores),
        "consume": (
            f"decoded (most of that in stage {rider}, which rides the pass)",
            f"make stage {rider} cheaper (its parameters), or {cores}",
        ),
        "unpack": ("unpacked cached frames", f"ask for fewer frames (fps of stage {f.stage}), or {cores}"),
        "process": (
            f"were in stage {f.stage} itself",
            "run it where there is a GPU, if it uses one, give it fewer frames or a cheaper model (its parameters), or "
            + cores,
        ),
        "write": ("wrote to the catalog", f"put the catalog (--root) on a faster or nearer store, {waiting}"),
        "hand_over": ("waited to hand over finished units", "put the catalog (--root) on a faster or nearer store"),
    }[state]


def _workers(f: StageFigures) -> str:
    return "the worker" if f.workers == 1 else f"{f.workers} workers"


def _largest(parts: Mapping[str, float], count: int) -> list[tuple[str, float]]:
    return sorted(parts.items(), key=lambda p: -p[1])[:count]
