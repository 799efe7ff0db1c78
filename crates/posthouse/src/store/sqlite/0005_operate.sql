-- Posthouse schema version 5: work that one instance does for all, alerts, archives, and how much an operator changed.
-- How many messages an action was applied to at once; NULL in lines about one message.
ALTER TABLE {audit} ADD COLUMN amount INTEGER;

-- Work that one instance does for all, as long as its lease lasts.
CREATE TABLE {duty} (
    duty_name   TEXT NOT NULL PRIMARY KEY,
    owner       TEXT NOT NULL,
    lease_until INTEGER NOT NULL
) STRICT;

-- Alerts.

-- Retention.
-- One row per file of an archive. It is noted before it is written, and its messages go when it has been read back.
CREATE TABLE {archive} (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    location   TEXT NOT NULL UNIQUE,
    -- Where its messages were: message.
    shelf      TEXT NOT NULL,
    part       INTEGER,
    low        INTEGER NOT NULL,
    high       INTEGER NOT NULL,
    amount     INTEGER NOT NULL,
    bytes      INTEGER NOT NULL,
    sha256     TEXT NOT NULL,
    noted_at   INTEGER NOT NULL DEFAULT (%NOW%),
    written_at INTEGER,
    removed_at INTEGER
) STRICT;
CREATE INDEX {-archive_open} ON {archive} (id) WHERE removed_at IS NULL;

UPDATE {meta} SET schema_version = 5 WHERE schema_version < 5;
