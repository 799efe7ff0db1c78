-- Posthouse schema version 4: groups and their runs.
-- Which houses an instance takes, as "0-31,40"; NULL: all; '': none. And which it takes only for a run; NULL: none.
ALTER TABLE {instance} ADD COLUMN houses TEXT;
ALTER TABLE {instance} ADD COLUMN run_houses TEXT;

-- What instances have to know of a group beyond their configuration.
CREATE TABLE {group} (
    group_name TEXT NOT NULL PRIMARY KEY,
    -- The last time at which its trigger was due and somebody saw to it. Milliseconds, like all times here.
    fired_at   INTEGER,
    paused_at  INTEGER,
    -- Runs that began before this are to stop.
    stopped_at INTEGER
) STRICT;

-- One row per run of a group on an instance, and per run that was asked for or did not come about.
CREATE TABLE {run} (
    id           INTEGER PRIMARY KEY AUTOINCREMENT,
    group_name   TEXT NOT NULL,
    -- every, rate, cron, manual, external, misfire, retry, after or takeover.
    cause        TEXT NOT NULL,
    -- REQUESTED, RUNNING, DONE, FAILED, TIMEOUT, STOPPED, DISCARDED or LOST.
    status       TEXT NOT NULL,
    instance     TEXT,
    -- The row that asked all instances for a run.
    request      INTEGER,
    -- When its trigger was due.
    due_at       INTEGER,
    requested_at INTEGER NOT NULL DEFAULT (%NOW%),
    started_at   INTEGER,
    ended_at     INTEGER,
    messages     INTEGER NOT NULL DEFAULT 0,
    delivered    INTEGER NOT NULL DEFAULT 0,
    retried      INTEGER NOT NULL DEFAULT 0,
    failed       INTEGER NOT NULL DEFAULT 0,
    error        TEXT
) STRICT;
CREATE INDEX {-run_group} ON {run} (group_name, id);
CREATE INDEX {-run_open} ON {run} (id) WHERE status IN ('REQUESTED', 'RUNNING');
CREATE INDEX {-run_request} ON {run} (request) WHERE request IS NOT NULL;

UPDATE {meta} SET schema_version = 4 WHERE schema_version < 4;
