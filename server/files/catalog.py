"""Which files there are: one SQLite table (WAL, synchronous=FULL). Not thread-safe; must not know the files' bytes."""

import sqlite3
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from server.files.examples import Form

VERSION = 1
BUSY_SECONDS = 10.0  # how long another process may hold the table
SCHEMA = """
CREATE TABLE files (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    purpose TEXT NOT NULL,
    filename TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    form TEXT NOT NULL,
    examples INTEGER NOT NULL
)
"""


@dataclass(frozen=True, slots=True)
class StoredFile:
    id: str
    owner: str
    purpose: str
    filename: str
    bytes: int
    created_at: int  # seconds since 1970
    expires_at: int | None
    form: Form | None  # None: it is no training file
    examples: int  # or lines of data, of another file


COLUMNS = ", ".join(field.name for field in fields(StoredFile))
LIVE = "(expires_at IS NULL OR expires_at > :now)"


class CatalogError(Exception):
    """The table is damaged, lost, not one of ours, or of a later version. It is left as it is."""


class Catalog:
    def __init__(self, path: Path, *, has_files: bool = False) -> None:
        """`has_files`: of a table before, so there must be one. Raises CatalogError, sqlite3.Error."""
        self._connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=FULL")
            (verdict,) = self._connection.execute("PRAGMA integrity_check(1)").fetchone()
            if verdict != "ok":  # a sweep deletes what is not found
                raise CatalogError(f"{path} is damaged: {verdict}")
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                (version,) = self._connection.execute("PRAGMA user_version").fetchone()
                if version == 0 and has_files:
                    raise CatalogError(f"{path} is lost, and what it listed is there: put it back, or move that away")
                if version == 0:
                    self._connection.execute(SCHEMA)
                    self._connection.execute(f"PRAGMA user_version={VERSION}")
                elif version != VERSION:
                    raise CatalogError(f"{path} has version {version}; this server reads version {VERSION}")
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        self._connection.close()

    def usage(self) -> tuple[int, int]:
        """How many files, and their bytes together."""
        count, total = self._connection.execute("SELECT count(*), coalesce(sum(bytes), 0) FROM files").fetchone()
        return count, total

    def add(self, file: StoredFile, max_files: int, max_total_bytes: int) -> bool:
        """False, and nothing added, when it would be too many or too much: other processes add files too."""
        marks = ", ".join("?" * len(fields(StoredFile)))
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            count, total = self.usage()
            if count >= max_files or total + file.bytes > max_total_bytes:
                return False
            self._connection.execute(f"INSERT INTO files ({COLUMNS}) VALUES ({marks})", _row(file))
        return True

    def find(self, file_id: str, owner: str, now: float) -> StoredFile | None:
        row = self._connection.execute(
            f"SELECT {COLUMNS} FROM files WHERE id = :id AND owner = :owner AND {LIVE}",
            {"id": file_id, "owner": owner, "now": now},
        ).fetchone()
        return None if row is None else _file(row)

    def holds(self, file_id: str) -> bool:
        return self._connection.execute("SELECT 1 FROM files WHERE id = ?", (file_id,)).fetchone() is not None

    def page(self, owner: str, purpose: str | None, after: str | None, limit: int, order: str, now: float) -> list[
        StoredFile
    ]:  # fmt: skip
        """Up to `limit` files in the order in which they came ("asc") or the last first ("desc"), behind `after`."""
        sign, direction = (">", "ASC") if order == "asc" else ("<", "DESC")
        rows = self._connection.execute(
            f"""SELECT {COLUMNS} FROM files WHERE owner = :owner AND {LIVE}
            AND (:purpose IS NULL OR purpose = :purpose)
            AND (:after IS NULL OR sequence {sign} (SELECT sequence FROM files WHERE id = :after))
            ORDER BY sequence {direction} LIMIT :limit""",
            {"owner": owner, "now": now, "purpose": purpose, "after": after, "limit": limit},
        )
        return [_file(row) for row in rows]

    def remove(self, file_id: str, owner: str, now: float) -> bool:
        gone = self._connection.execute(
            f"DELETE FROM files WHERE id = :id AND owner = :owner AND {LIVE}",
            {"id": file_id, "owner": owner, "now": now},
        )
        return gone.rowcount == 1

    def remove_expired(self, now: float) -> list[str]:
        """The ids that went."""
        rows = self._connection.execute("SELECT id FROM files WHERE expires_at <= ?", (now,)).fetchall()
        if rows:
            with self._connection:  # all or none: whoever tries again is told of all
                self._connection.execute("BEGIN IMMEDIATE")
                self._connection.executemany("DELETE FROM files WHERE id = ?", rows)
        return [file_id for (file_id,) in rows]


def _file(row: tuple[Any, ...]) -> StoredFile:
    file = StoredFile(*row)
    return replace(file, form=Form(file.form) if file.form else None)


def _row(file: StoredFile) -> tuple[Any, ...]:
    values = asdict(file)
    return tuple({**values, "form": file.form or ""}.values())  # the column is not null
