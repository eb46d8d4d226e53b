"""A job: one run of a plan, from sources to a published version. Everything it does can be stopped at any moment and is
picked up by running the same command again: resume = wanted − ledger − staged.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from videoflow.chosen import check_choices, published
from videoflow.dataset.assemble import version_table
from videoflow.dataset.catalog import Catalog, check_name
from videoflow.dataset.payloads import with_payloads
from videoflow.dataset.placed import PlacedClips, no_clips
from videoflow.dataset.products import clip_products, with_arrays
from videoflow.dataset.publish import missing_words, publish, split_groups, split_of
from videoflow.dataset.sound import sound_scores, with_audio
from videoflow.dataset.version import Version
from videoflow.errors import EXIT_QUARANTINED, SourceError, first_line
from videoflow.execute import Execution, JobOptions, JobSummary, Progress
from videoflow.fitting import fitted
from videoflow.forecast import video_states
from videoflow.identify import Identified, identify
from videoflow.jobrecord import CANCELLED, FINISHED, STOPPED, JobRecord, describe, new_job_id, shown_recipe
from videoflow.plan import AUDIO, CLIPS, FRAMES, SOUND, Plan
from videoflow.recipe import BuiltStage, Recipe
from videoflow.sources import NO_VIDEO, Scan, scan
from videoflow.stage import VideoStage
from videoflow.store.layout import Root
from videoflow.telemetry.watch import JobWatch
from videoflow.unit import UnitReport, engine_path


class Job:
    """One run. ``make_progress`` parts are called in the caller's thread.

    Args:
        resumes: the job that this one goes on with. job: its id, if it was given one already.
        submission: the id that Ray Jobs knows it by.
    """

    def __init__(
        self,
        recipe: Recipe,
        sources: Sequence[str],
        *,
        root: str,
        name: str,
        options: JobOptions,
        progress: Progress,
        resumes: str | None = None,
        job: str | None = None,
        submission: str | None = None,
        watch: JobWatch | None = None,
    ) -> None:
        self.id = job or new_job_id()
        self._submission = submission
        self._recipe = recipe
        self._sources = [*recipe.sources, *sources]
        self._root, self._name = root, check_name(name)
        self._options = options
        self._progress = progress
        self._resumes = resumes
        self.watch = watch or JobWatch()
        self.summary = JobSummary(self.id)

    def run(self) -> JobSummary:
        """Run to the end.

        Raises:
            InputError: the recipe, a source or the name. SystemFailure: the job stopped; run the same again to resume.
            JobCancelled: somebody asked it to stop.
        """
        began = time.monotonic()
        engine_path(self._options.engine)
        Root.at(self._root).exists()
        built = self._recipe.build()
        check_choices(built)
        if not self._sources:
            raise SourceError("no sources: give --source or list them in the recipe under sources:")
        found = scan(self._sources)
        if not found.files:
            others = f"{len(found.ignored)} other files"
            raise SourceError(f"no video among the sources ({others}); docs/sources.md lists what counts as one")
        catalog = Catalog.open(self._root, create=True)
        record = self._begin(catalog)
        try:
            self._run(catalog, built, found)
            record.settle()
        except BaseException as e:
            if record.cancelled:
                self._end(record, CANCELLED, began, error="asked to stop")
                raise record.failure() from e
            self._end(record, STOPPED, began, error=f"{type(e).__name__}: {e}")
            raise
        self._end(record, FINISHED, began)
        return self.summary

    def _run(self, catalog: Catalog, built: Sequence[BuiltStage], found: Scan) -> None:
        self._progress.begin("sources", len(found.files), "files")
        one = UnitReport((), 1)
        with self.watch.sources(found.files):
            identified = identify(catalog, found, job=self.id, on_file=lambda: self._progress.advance("sources", one))
        self._note_sources(identified, found)
        split_groups(identified.videos, self._recipe.split_by)
        for note in missing_words([b for b in built if isinstance(b.stage, VideoStage)], identified.videos):
            self._progress.note(note)
        catalog.ledger.tidy()
        plan = Plan(catalog.root, catalog.ledger, self._recipe, built, identified.videos)
        with Execution(plan, self.id, self._options, self._progress, self.summary, watch=self.watch) as execution:
            execution.recover()
            execution.decode()
            for b in plan.row_stages:
                execution.rows(b)
            clips = plan.clips() if plan.named(CLIPS) and plan.named(FRAMES) else no_clips(catalog.root)
            for b in plan.clip_stages:
                execution.clips(fitted(plan, b, clips, self._progress), clips)
        self._finish(catalog, plan, clips, identified)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _finish(self, catalog: Catalog, plan: Plan, clips: PlacedClips, identified: Identified) -> None:
        states = video_states(plan, clips)
        s = self.summary
        s.videos = len(plan.videos) + len(identified.unreadable)
        s.done, s.filtered, s.pending = states["done"], states["filtered"], states["pending"]
        s.quarantined = states["quarantined"] + len(identified.unreadable)
        s.clips_without_frames = clips.without
        wants_version = bool(plan.named(CLIPS) and plan.named(FRAMES))
        if wants_version and len(clips):
            version, s.is_new_version = self._publish(catalog, plan, clips)
            s.version, s.clips = version.id, version.num_clips
        else:
            s.no_version = _why_none(plan, s) if wants_version else "the recipe has no stages frames and clips"
            self._progress.note(f"no version is published: {s.no_version}")
        allowed = max(1, math.ceil(self._options.max_quarantined * s.videos))
        if s.quarantined > allowed or (s.videos and not s.done) or (wants_version and not len(clips)):
            s.exit_code = EXIT_QUARANTINED

    def _publish(self, catalog: Catalog, plan: Plan, clips: PlacedClips) -> tuple[Version, bool]:
        groups = split_groups(plan.videos.values(), plan.recipe.split_by)
        made = clip_products(plan, clips)
        batches = plan.clip_objects(clips, np.ones(len(clips), bool))
        table = version_table(
            batches,
            sources={k: (v.uri, v.metadata) for k, v in plan.videos.items()},
            intervals={k: v.interval_metadata for k, v in plan.videos.items() if v.intervals},
            splits={k: split_of(group, plan.recipe.split) for k, group in groups.items()},
            embeddings=made.embeddings,
            scores=made.scores | _sound_scores(plan, clips),
        )
        table = with_arrays(table, made.arrays)
        tables = {FRAMES: list(plan.parts(_required(plan, FRAMES))), **made.tables}
        if (found := published(plan, clips)) is not None:
            table, tables["payload"] = with_payloads(table, found[1]), list(plan.parts(found[0]))
        if audio := plan.named(AUDIO):
            tables[AUDIO] = list(plan.parts(audio))
            p, items = audio.stage.params, {k: plan.pass_key(audio, k) for k in plan.keys}
            table = with_audio(table, plan.root, tables[AUDIO], items, rate=p.rate, channels=p.channels)
        manifest = {"job": self.id, "recipe": shown_recipe(plan.recipe), "tables": tables}
        fingerprints = {b.key: b.fingerprint for b in plan.built}
        return publish(catalog, self._name, table, manifest=manifest, fingerprints=fingerprints)

    # -- records -----------------------------------------------------------------------------------------------------

    def _note_sources(self, identified: Identified, found: Scan) -> None:
        s = self.summary
        s.ignored, s.ignored_why = len(found.ignored), dict(found.ignored_why)
        odd = {why: n for why, n in found.ignored_why.items() if why != NO_VIDEO}
        if odd:
            self._progress.note(f"ignored: {', '.join(f'{n} × {why}' for why, n in odd.items())}")
        s.changed, s.vanished, s.duplicates = identified.changed, identified.vanished, identified.duplicates
        for what, uris in (
            ("changed since the last run", identified.changed),
            ("vanished since the last run", identified.vanished),
            ("hold the bytes of another one that says something else of them, which counts", identified.differing),
        ):
            if uris:
                more = f" and {len(uris) - 5} more" if len(uris) > 5 else ""
                self._progress.note(f"{len(uris)} sources {what}: {', '.join(uris[:5])}{more}")

    def _begin(self, catalog: Catalog) -> JobRecord:
        description = describe(self._recipe, self._sources, self._name, self._options)
        description |= {"resumes": self._resumes, "submission": self._submission}
        record = JobRecord(catalog.root, self.id, description, self._progress, watch=self.watch)
        self.watch.start(self.id)
        record.start()
        self._progress = record.progress
        self._progress.note(f"job {self.id}")
        return record

    def _end(self, record: JobRecord, state: str, began: float, error: str | None = None) -> None:
        self.summary.seconds = round(time.monotonic() - began, 3)
        self.watch.stop()
        if said := self.watch.verdict():
            self._progress.note(said)
        try:
            record.end(state, self.summary.to_dict(), error)
        except Exception as e:
            if error is None:  # else the first failure is the one to show
                raise
            self._progress.note(f"and the job's record could not be written: {first_line(e)}")


def _why_none(plan: Plan, s: JobSummary) -> str:
    """Why there is no clip to publish; an empty version would become its name's newest and help nobody."""
    if not s.done:
        stream = "" if plan.recipe.stream is None else f" (of stream {plan.recipe.stream}, which the recipe asks for)"
        return f"of {s.videos} videos none is done{stream}; `videoflow quarantine list` says why"
    if s.clips_without_frames:
        return f"no cached frame falls into any of {s.clips_without_frames} clips; cache at a higher rate (frames.fps)"
    return "no clip is left: all are shorter than clips.min_seconds or damaged"


def _required(plan: Plan, name: str) -> BuiltStage:
    built = plan.named(name)
    assert built is not None
    return built


def _sound_scores(plan: Plan, clips: PlacedClips) -> dict[str, dict[str, Any]]:
    """What stage sound measured, as columns ``<key>_<score>``."""
    built = plan.named(SOUND)
    if built is None:
        return {}
    keys = zip(plan.keys, plan.items(built).keys.to_pylist(), strict=True)
    scores = sound_scores(clips.table, plan.root, plan.parts(built), {k: item for k, item in keys if item})
    return {f"{built.key}_{name}": dict(values) for name, values in scores.items()}
