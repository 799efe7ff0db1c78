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
-- What isn't as it should be: a rule, and what it is about ('' where that is the database). What is fine has no row.
CREATE TABLE {alert} (
    rule      TEXT NOT NULL,
    subject   TEXT NOT NULL,
    -- Else it waits for the rule's time.
    firing    INTEGER NOT NULL,
    -- Since when it has been so.
    since     INTEGER NOT NULL,
    value     REAL NOT NULL,
    threshold REAL NOT NULL,
    detail    TEXT,
    seen_at   INTEGER NOT NULL,
    -- When a notice was last written; NULL: nobody has been told.
    told_at   INTEGER,
    PRIMARY KEY (rule, subject)
) STRICT;

-- What happened to alerts.
CREATE TABLE {alert_event} (
    id        INTEGER PRIMARY KEY AUTOINCREMENT,
    at        INTEGER NOT NULL DEFAULT (%NOW%),
    rule      TEXT NOT NULL,
    subject   TEXT NOT NULL,
    -- FIRED, REPEATED, RECOVERED or ENDED.
    kind      TEXT NOT NULL,
    since     INTEGER NOT NULL,
    value     REAL NOT NULL,
    threshold REAL NOT NULL,
    detail    TEXT,
    instance  TEXT NOT NULL,
    silenced  INTEGER NOT NULL
) STRICT;

-- Who is to be told of an event, written together with it.
CREATE TABLE {alert_notice} (
    event    INTEGER NOT NULL,
    channel  TEXT NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    -- When it is tried next; NULL: it was sent, or given up.
    due_at   INTEGER DEFAULT (%NOW%),
    sent_at  INTEGER,
    error    TEXT,
    PRIMARY KEY (event, channel)
) STRICT;
CREATE INDEX {-alert_notice_open} ON {alert_notice} (event) WHERE due_at IS NOT NULL;

-- What nobody wants to be told of for a while: a rule ('': all) and a subject ('': all of the rule).
CREATE TABLE {alert_silence} (
    rule    TEXT NOT NULL,
    subject TEXT NOT NULL,
    since   INTEGER NOT NULL DEFAULT (%NOW%),
    ends_at INTEGER NOT NULL,
    actor   TEXT NOT NULL,
    reason  TEXT NOT NULL,
    PRIMARY KEY (rule, subject)
) STRICT;

-- What only one instance knows, for the one that judges.
CREATE TABLE {alert_report} (
    instance TEXT NOT NULL,
    rule     TEXT NOT NULL,
    subject  TEXT NOT NULL,
    at       INTEGER NOT NULL DEFAULT (%NOW%),
    value    REAL NOT NULL,
    detail   TEXT,
    PRIMARY KEY (instance, rule, subject)
) STRICT;

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
