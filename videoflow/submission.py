"""What a job takes along to a cluster: its recipe as plain data, the user's own code, and a command that starts it.

A recipe, YAML or Python, is evaluated and checked here and travels as data with its sources, in a zip that becomes the
command's working folder. So nothing that may hold credentials stands in the command or the metadata, which a cluster's
dashboard shows to everybody. Modules of stages of the user's own travel beside it, unless they are installed packages.
"""

from __future__ import annotations

import importlib.util
import io
import shlex
import sysconfig
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

import yaml
from pydantic_core import PydanticSerializationError

from videoflow.errors import InputError, RecipeError
from videoflow.jobrecord import new_job_id
from videoflow.jobs import JOB_KEY
from videoflow.keys import digest_bytes
from videoflow.recipe import Recipe, check_stage
from videoflow.sources import printable

RECIPE_FILE, LAUNCHER = "recipe.yaml", "launch.sh"
#: Packages that every cluster for videoflow has.
OURS = frozenset({"videoflow", "workers", "pipelines"})
#: Ray keeps packages in the memory of the head.
MAX_PACKAGE_BYTES = 100 << 20
_ZIP_DATE = (1980, 1, 1, 0, 0, 0)  # equal contents make equal packages


@dataclass(frozen=True)
class Submission:
    """A job, ready to be handed to a cluster.

    Attributes:
        job: its id in the catalog and its submission's id. entrypoint: the shell command.
        package: a zip, the command's working folder. metadata: what the cluster may show.
        notes: what the user should know, one line each.
    """

    job: str
    entrypoint: str
    package: bytes = field(repr=False)
    metadata: dict[str, str]
    notes: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Names the package by its content."""
        return digest_bytes(self.package)


def submission_of_run(
    recipe: Recipe,
    sources: Sequence[str],
    *,
    root: str,
    name: str,
    options: Sequence[str] = (),
    take: Sequence[str] = (),
    python: str | None = None,
) -> Submission:
    """`videoflow run` of a recipe over sources.

    Args:
        options: further options of the command. take: files and folders of the user's own that go along.
        python: the cluster's interpreter; None lets the launcher find it.

    Raises:
        RecipeError: a stage's parameters, or values that are no plain data.
        InputError: a source or root that means nothing on another machine; a path to take along that is not there.
    """
    sources = [*recipe.sources, *sources]
    notes = check_places(sources, root)
    content, more = _own_code(recipe, take)
    content[RECIPE_FILE] = recipe_text(recipe.model_copy(update={"sources": tuple(sources)})).encode()
    command = ["run", RECIPE_FILE, "--root", root, "--name", name, *options]
    return _submission(command, content, {"root": root, "name": name}, (*notes, *more), python)


def submission_of_resume(
    recipe: Recipe,
    job: str,
    *,
    root: str,
    options: Sequence[str] = (),
    take: Sequence[str] = (),
    python: str | None = None,
) -> Submission:
    """`videoflow resume` of a recorded job; ``recipe`` is the record's, for the code that its stages need."""
    notes = check_places([], root)
    content, more = _own_code(recipe, take)
    command = ["resume", root, job, *options]
    return _submission(command, content, {"root": root, "resumes": job}, (*notes, *more), python)


def _submission(
    command: list[str], content: dict[str, bytes], shown: dict[str, str], notes: tuple[str, ...], python: str | None
) -> Submission:
    start = [python, "-m", "videoflow.cli.main"] if python else ["sh", LAUNCHER]
    content[LAUNCHER] = files("videoflow").joinpath(LAUNCHER).read_bytes()
    job = new_job_id()
    metadata = {JOB_KEY: job, **{f"videoflow_{k}": v for k, v in shown.items()}}
    return Submission(job, shlex.join([*start, *command]), _zip(content), metadata, notes)


# -- what makes sense elsewhere --------------------------------------------------------------------------------------


def check_places(sources: Sequence[str], root: str) -> tuple[str, ...]:
    """Notes about sources and a root that another machine has to see as this one does.

    Raises:
        InputError: one that it cannot, or a root with credentials.
    """
    places = {f"source {printable(s)}": s for s in sources} | {f"root {printable(root)}": root}
    local = {what: place.removeprefix("file://") for what, place in places.items() if _is_local(place)}
    for what, path in local.items():
        if not Path(path).is_absolute():
            raise InputError(
                f"{what} is a path of this machine's working folder, which means nothing to the cluster: "
                "give an absolute path that all its nodes share, or a URL like s3://bucket/prefix"
            )
    if printable(root) != root:
        raise InputError(
            f"root {printable(root)} was given with credentials or a query, which a cluster's dashboard would show: "
            "leave them out, and set them in the environment of the cluster's nodes"
        )
    notes = [f"all nodes of the cluster must see the same files at {', '.join(local.values())}"] if local else []
    if masked := [printable(s) for s in sources if "://" in s and printable(s) != s]:
        notes.append(
            f"credentials in {', '.join(masked)} travel in the job's package: no dashboard shows it, but whoever may "
            "submit to the cluster can read it; the environment of its nodes is a better place"
        )
    return tuple(notes)


def _is_local(place: str) -> bool:
    return "://" not in place or place.startswith("file://")


# -- what goes along -------------------------------------------------------------------------------------------------


def recipe_text(recipe: Recipe) -> str:
    """A recipe as YAML.

    Raises:
        RecipeError: it holds values that are no plain data.
    """
    try:
        data = recipe.model_dump(mode="json")
    except PydanticSerializationError as e:
        raise RecipeError(f"recipe {recipe.name} holds values that cannot travel as plain data: {e}") from e
    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))


def _own_code(recipe: Recipe, take: Sequence[str]) -> tuple[dict[str, bytes], list[str]]:
    """Files by their path in the package: those the user named, and the modules of stages of the user's own."""
    places: dict[str, Path] = {}
    for text in take:
        path = Path(text).expanduser().absolute()
        if not path.exists():
            raise InputError(f"--with {text}: no such file or folder")
        places[path.name] = path
    notes = []
    for key, params in recipe.stages.items():
        use = params.get("use", key)
        if not isinstance(use, str) or ":" not in use or use.partition(":")[0].partition(".")[0] in OURS:
            check_stage(key, params)
            continue
        top = use.partition(":")[0].partition(".")[0]
        if {top, f"{top}.py"} & places.keys():
            continue
        place = _module(top)
        if place is None or _is_installed(place):
            where = "is not on this machine" if place is None else "is an installed package and does not travel"
            notes.append(f"stage {key}: {top} {where}; the cluster must have it, or take it along by --with")
        else:
            places[place.name] = place
    if clash := places.keys() & {RECIPE_FILE, LAUNCHER, *OURS}:
        raise InputError(f"{places[min(clash)]} cannot go along: the name is taken; rename it")
    content = _read_all(places)
    if places:
        notes.append(f"goes along: {', '.join(sorted(places))} ({len(content)} files)")
    return content, notes


def _module(top: str) -> Path | None:
    """Where a top-level module's source lies, None if it has none here. It is not imported."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    place = folders[0] if folders else spec.origin
    return Path(place) if place and Path(place).exists() else None


def _is_installed(place: Path) -> bool:
    return bool({"site-packages", "dist-packages"} & set(place.parts)) or place.is_relative_to(
        sysconfig.get_path("stdlib")
    )


def _read_all(places: dict[str, Path]) -> dict[str, bytes]:
    found = {name: path for top, place in places.items() for name, path in _below(top, place)}
    size = sum(path.stat().st_size for path in found.values())
    if size > MAX_PACKAGE_BYTES:
        raise InputError(
            f"{', '.join(map(str, places.values()))}: {size >> 20} MiB cannot go along, {MAX_PACKAGE_BYTES >> 20} MiB "
            "can: put large files into the cluster's image or a bucket"
        )
    return {name: path.read_bytes() for name, path in found.items()}


def _below(top: str, place: Path) -> Iterator[tuple[str, Path]]:
    """Files of a module, a folder or a single file; no hidden ones, nothing compiled."""
    if place.is_file():
        yield top, place
        return
    for path in sorted(place.rglob("*")):
        parts = path.relative_to(place).parts
        if path.is_file() and not any(p.startswith(".") or p == "__pycache__" for p in parts):
            yield f"{top}/{'/'.join(parts)}", path


def _zip(content: dict[str, bytes]) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as package:
        for name in sorted(content):
            package.writestr(zipfile.ZipInfo(name, _ZIP_DATE), content[name], zipfile.ZIP_DEFLATED)
    return held.getvalue()
