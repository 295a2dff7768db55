"""The SQLite file of all jobs: schema, version, and what survives power loss. Must not know what rows mean."""

import sqlite3
from pathlib import Path

VERSION = 1
BUSY_SECONDS = 10.0  # how long another process may hold the file
SCHEMA = """
CREATE TABLE jobs (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    idempotency_key TEXT,
    source TEXT NOT NULL,
    request TEXT NOT NULL,
    seed INTEGER NOT NULL,
    status TEXT NOT NULL,
    created_at REAL NOT NULL,
    finished_at REAL,
    estimated_finish REAL,
    plan TEXT,
    total_steps INTEGER,
    trained_tokens INTEGER,
    fine_tuned_model TEXT,
    result_file TEXT,
    failure TEXT,
    attempt INTEGER NOT NULL DEFAULT 0,
    crashes INTEGER NOT NULL DEFAULT 0,
    holder TEXT,
    lease_until REAL,
    not_before REAL NOT NULL DEFAULT 0,
    checkpoint_step INTEGER NOT NULL DEFAULT 0,
    UNIQUE (owner, idempotency_key)
);
CREATE INDEX jobs_by_owner ON jobs (owner, sequence);
CREATE INDEX jobs_by_status ON jobs (status, sequence);
CREATE TABLE events (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    job_id TEXT NOT NULL,
    created_at REAL NOT NULL,
    level TEXT NOT NULL,
    message TEXT NOT NULL,
    type TEXT NOT NULL,
    data TEXT
);
CREATE INDEX events_by_job ON events (job_id, sequence);
CREATE TABLE steps (
    job_id TEXT NOT NULL,
    step INTEGER NOT NULL,
    metrics TEXT NOT NULL,
    PRIMARY KEY (job_id, step)
) WITHOUT ROWID;
CREATE TABLE checkpoints (
    id TEXT NOT NULL UNIQUE,
    job_id TEXT NOT NULL,
    step INTEGER NOT NULL,
    created_at REAL NOT NULL,
    PRIMARY KEY (job_id, step)
);
CREATE TABLE adapters (
    name TEXT NOT NULL PRIMARY KEY,
    owner TEXT NOT NULL,
    job_id TEXT NOT NULL UNIQUE,
    source TEXT NOT NULL,
    created_at REAL NOT NULL
);
"""


class DatabaseError(Exception):
    """The file is damaged, lost, not one of ours, or of a later version. It is left as it is."""


def connect(path: Path, *, had_jobs: bool = False) -> sqlite3.Connection:
    """To be used by one thread. Makes the tables in a new file, which there is not where it `had_jobs`. Raises
    DatabaseError, sqlite3.Error."""
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")  # of WAL's levels the only one that survives power loss
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise DatabaseError(f"{path} is damaged: {verdict}")
        _make_tables(connection, path, had_jobs)
    except BaseException:
        connection.close()
        raise
    return connection


def _make_tables(connection: sqlite3.Connection, path: Path, had_jobs: bool) -> None:
    with connection:
        connection.execute("BEGIN IMMEDIATE")  # two servers may start at once on a new file
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0 and had_jobs:
            raise DatabaseError(f"{path} is lost, and what its jobs made is there: put it back, or move that away")
        if version == 0:
            for statement in SCHEMA.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version={VERSION}")
        elif version != VERSION:
            raise DatabaseError(f"{path} has version {version}; this server reads version {VERSION}")
