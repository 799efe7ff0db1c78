-- Posthouse schema version 2: what consumers received.
-- One row per consumer and message, so that a message has its effect once.
CREATE TABLE {inbox} (
    consumer     TEXT NOT NULL CHECK (length(CAST(consumer AS BLOB)) BETWEEN 1 AND 255),
    message_id   TEXT NOT NULL CHECK (length(CAST(message_id AS BLOB)) BETWEEN 1 AND 255),
    -- SUCCESS, PENDING_RETRY, RETRYING or FAILED.
    status       TEXT NOT NULL DEFAULT 'SUCCESS',
    type         TEXT NOT NULL DEFAULT '',
    -- Where it came from (and, under "exact", texts that their own columns can't hold).
    source       TEXT,
    -- The copy that is run again. Empty once it succeeded.
    message_key  TEXT,
    content_type TEXT,
    headers      TEXT,
    payload      BLOB,
    -- Runs that gave a failure, and runs that gave nothing because the process died.
    attempts     INTEGER NOT NULL DEFAULT 0,
    claims       INTEGER NOT NULL DEFAULT 0,
    version      INTEGER NOT NULL DEFAULT 0,
    -- When it is due; of a RETRYING one, when its lease ends. NULL: SUCCESS; 9999-12-31: FAILED.
    next_attempt_at INTEGER,
    owner        TEXT,
    last_error   TEXT,
    first_at     INTEGER NOT NULL DEFAULT (%NOW%),
    last_at      INTEGER NOT NULL DEFAULT (%NOW%),
    success_at   INTEGER,
    PRIMARY KEY (consumer, message_id)
) STRICT;

-- Only what isn't done: due ones by time, failed ones at the end.
CREATE INDEX {-inbox_due} ON {inbox} (consumer, next_attempt_at, message_id) WHERE next_attempt_at IS NOT NULL;

UPDATE {meta} SET schema_version = 2 WHERE schema_version < 2;
