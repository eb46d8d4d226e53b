"""How `status` shows what a job's watch saw: lines for people, made from the same JSON that programs get."""

from __future__ import annotations

from typing import Any

from videoflow.cli.run import show_bytes

#: States below this share of a stage's time are left out.
SHOWN_SHARE = 0.02
#: What a user reads for a group of states.
_GROUPS = {
    "busy": "busy",
    "blocked_on_input": "blocked on input",
    "blocked_on_output": "blocked on output",
    "idle": "idle",
    "starting": "starting",
}


def stage_lines(s: dict[str, Any]) -> list[str]:
    """A stage of a record's ``watch``: rates, shares and states, queues, the driver."""
    whole = sum(s["states"].values())
    if not whole:
        return []
    rates = [f"{s['items_per_second']:.1f} {s['counted']}/s"]
    if s["frames"]:
        rates.append(f"{s['frames_per_second']:.0f} frames/s")
    rates += [f"{show_bytes(s[name])} {what}" for name, what in _BYTES if s[name]]
    shares = ", ".join(f"{_GROUPS[g]} {share:.0%}" for g, share in s["shares"].items() if share)
    workers = "1 worker" if s["workers"] == 1 else f"{s['workers']} workers"
    lines = [f"{', '.join(rates)}; {workers}: {shares}"]
    states = [f"{n.replace('_', ' ')} {v / whole:.0%}" for n, v in _falling(s["states"]) if v / whole >= SHOWN_SHARE]
    riders = sum(s["consumers"].values())
    of_consume = ", ".join(f"{n} {v / riders:.0%}" for n, v in _falling(s["consumers"])) if riders else ""
    lines.append(f"time: {', '.join(states)}" + (f"; consume: {of_consume}" if of_consume else ""))
    u = s["units"]
    if u["total"]:
        ended = f"{u['committed']} of {u['total']} committed, {u['mean_waiting']:.1f} lay waiting on average"
        queues = f"{u['queued']} queued, {u['running']} running, {u['waiting']} waiting, " if s["running"] else ""
        driver = ", ".join(f"{n} {v:.1f} s" for n, v in s["driver"].items())
        lines.append(f"units: {queues}{ended}; driver: {driver}")
    return lines


_BYTES = (("bytes_read", "read"), ("bytes_written", "written"))


def job_lines(watch: dict[str, Any]) -> list[str]:
    """Of a record's ``watch``: its workers, its memory, the verdict."""
    lines = []
    for w in watch["workers"]:
        own = show_bytes(w["rss_bytes"] + w["child_rss_bytes"])
        lines.append(f"worker {w['worker']}: {w['state'].replace('_', ' ')}, {w['units']} units, {own}")
    if watch["workers_left_out"]:
        lines.append(f"and {watch['workers_left_out']} more workers")
    rss = watch["rss_bytes"]
    of = ", ".join(f"{name} {show_bytes(rss[name])}" for name in ("driver", "workers", "children") if rss[name])
    lines.append(f"memory: {of}; at most {show_bytes(rss['peak'])} together")
    lines.append(watch["verdict"]["says"])
    return lines


def _falling(parts: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(parts.items(), key=lambda p: -p[1])
