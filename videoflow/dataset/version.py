"""A dataset version: `name@n`, a numbered immutable table of clips, and what can be asked of it.

One flat row a clip in ``versions/<name>/<n>/clips.lance``; stock Lance reads it without videoflow. ``version.json``
beside it is written last, by one conditional put: that is what publishes the version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa

from videoflow.errors import QueryError
from videoflow.store.layout import Root, version_dir
from videoflow.store.reader import read_rows
from videoflow.store.writer import open_table

if TYPE_CHECKING:
    from videoflow.loader.loader import Loader


class Version:
    """An immutable dataset version. Satisfies the loader's ``VersionSource``."""

    def __init__(self, root: Root, name: str, number: int, manifest: dict[str, Any]) -> None:
        self.root = root
        self.name = name
        self.number = number
        self.manifest = manifest

    def __repr__(self) -> str:
        return f"Version({self.id}, {self.num_clips} clips of {self.manifest['videos']} videos)"

    def __len__(self) -> int:
        return self.num_clips

    @property
    def id(self) -> str:
        return f"{self.name}@{self.number}"

    @property
    def digest(self) -> str:
        """Digest of the content: equal for equal clips, whatever computed them when."""
        return str(self.manifest["digest"])

    @property
    def num_clips(self) -> int:
        return int(self.manifest["clips"])

    @property
    def clips_path(self) -> str:
        """Path of the table below the root."""
        return f"{version_dir(self.name, self.number)}/clips.lance"

    @property
    def clips_uri(self) -> str:
        return self.root.uri(self.clips_path)

    @property
    def tables(self) -> dict[str, list[str]]:
        """URIs of the artifact tables' parts, in the order that references number them."""
        return {name: [self.root.uri(p) for p in parts] for name, parts in self.manifest["tables"].items()}

    @property
    def storage_options(self) -> dict[str, str] | None:
        return self.root.lance_options()

    def dataset(self) -> lance.LanceDataset:
        """The table itself, for stock Lance."""
        return open_table(self.root, self.clips_path)

    def clips(self, columns: list[str] | None = None, filter: str | None = None) -> pa.Table:
        """Rows as an Arrow table, by position; all columns unless named; ``filter`` is a Lance SQL predicate.

        Raises:
            QueryError: an unknown column, or a filter that is none. DamagedCatalog: rows cannot be read.
        """
        dataset = self.dataset()
        try:
            dataset.scanner(
                columns=columns, filter=filter
            ).explain_plan()  # reads no row: it is the question that fails
        except (ValueError, OSError) as e:
            raise QueryError(f"{self.id}: {' '.join(str(e).split())[:300]}") from e
        return read_rows(self.root, self.clips_path, columns, filter, dataset=dataset)

    def sql(self, query: str) -> pa.Table:
        """Answer of a SQL query (DuckDB) over the table ``clips``. See `videoflow.dataset.query`."""
        from videoflow.dataset.query import sql

        return sql(self, query)

    def search(self, clip_key: str, k: int = 10) -> list[dict[str, Any]]:
        """The ``k`` clips nearest to a clip by the cosine of their embeddings. See `videoflow.dataset.search`."""
        from videoflow.dataset.search import search_clip

        return search_clip(self, clip_key, k)

    def loader(self, **options: Any) -> Loader:
        """A `videoflow.Loader` over this version; options as there."""
        from videoflow.loader.loader import Loader

        return Loader(self, **options)
