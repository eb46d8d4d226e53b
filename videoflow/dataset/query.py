"""SQL over a version: DuckDB on an Arrow stream of the version's rows, with the outside world shut off."""

from __future__ import annotations

import duckdb
import pyarrow as pa

from videoflow.dataset.version import Version
from videoflow.errors import QueryError
from videoflow.store.damage import damaged


def sql(version: Version, query: str) -> pa.Table:
    """Run one query over the table ``clips``; files, network and extensions are out of its reach.

    Raises:
        QueryError: what DuckDB says, as one line. DamagedCatalog: the version's rows cannot be read.
    """
    connection = duckdb.connect(
        ":memory:", config={"enable_external_access": "false", "autoinstall_known_extensions": "false"}
    )
    try:
        connection.register("clips", version.dataset())
        relation = connection.sql(query)
        if relation is None:
            raise QueryError("the statement gives no rows; ask with SELECT")
        doubled = sorted({c for c in relation.columns if relation.columns.count(c) > 1})
        if doubled:
            raise QueryError(f"the answer has the columns {', '.join(doubled)} more than once; name them apart with AS")
        table: pa.Table = relation.to_arrow_table()
    except duckdb.Error as e:
        if "External error" in str(e) or "LanceError" in str(e):  # what the scan of the table says, not DuckDB
            raise damaged(version.root.url, version.clips_path, " ".join(str(e).split())[:200]) from e
        raise QueryError(f"SQL: {' '.join(str(e).split())[:400]}") from e
    finally:
        connection.close()
    return table
