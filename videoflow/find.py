"""Finding stages and other objects by name: an installed entry point, or a dotted path ``package.module:Name``, checked
against the contract before anything runs.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Any

from videoflow.errors import RecipeError, VideoflowError, nearest
from videoflow.stage import ClipStage, PassConsumer, SourceStage, Stage, VideoStage

STAGE_GROUP = "videoflow.stages"


def load_object(path: str, *, what: str) -> Any:
    """The object at ``package.module:name``.

    Raises:
        RecipeError: not of that form, no such module, or no such name in it.
    """
    module, _, name = path.partition(":")
    if not name:
        raise RecipeError(f"{what} {path!r} is not of the form package.module:Name")
    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except VideoflowError:
        raise
    except ImportError as e:
        raise RecipeError(f"{what} {path!r}: cannot import {module} ({e})") from e
    except AttributeError as e:
        raise RecipeError(f"{what} {path!r}: {module} has no {name}") from e
    except (Exception, SystemExit) as e:  # the module's own failure while it is imported
        raise RecipeError(f"{what} {path!r}: importing {module} fails: {type(e).__name__}: {e}") from e
    return value


def known_stages() -> dict[str, str]:
    """Names of the installed stages and their dotted paths."""
    return {e.name: e.value for e in entry_points(group=STAGE_GROUP)}


def find_stage(name_or_path: str) -> type[Stage]:
    """A stage class by entry point name or dotted path, checked against the contract.

    Raises:
        RecipeError: unknown, not importable, or not a stage (what is missing is named).
    """
    path = name_or_path if ":" in name_or_path else known_stages().get(name_or_path)
    if path is None:
        raise RecipeError(
            f"unknown stage {name_or_path!r}{nearest(name_or_path, known_stages())}: installed are "
            f"{', '.join(sorted(known_stages())) or 'none'}; "
            "a stage of your own is named by its path, use: package.module:Class"
        )
    cls = load_object(path, what="stage")
    if not (isinstance(cls, type) and issubclass(cls, Stage)):
        raise RecipeError(f"stage {path!r} is not a subclass of videoflow.stage.Stage")
    missing = [a for a in ("name", "version", "table") if not hasattr(cls, a)] + sorted(cls.__abstractmethods__)
    if missing:
        raise RecipeError(f"stage {path!r} lacks {', '.join(missing)}")
    if not issubclass(cls, (PassConsumer, VideoStage, ClipStage, SourceStage)):
        raise RecipeError(f"stage {path!r} must be a PassConsumer, a VideoStage, a ClipStage or a SourceStage")
    if issubclass(cls, PassConsumer) and cls.margin is not PassConsumer.margin and cls.join is PassConsumer.join:
        raise RecipeError(f"stage {path!r} has a margin, so that videos are cut between workers, but no join")
    return cls
