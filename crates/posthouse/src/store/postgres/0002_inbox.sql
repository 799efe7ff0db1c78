-- Posthouse schema version 2: what consumers received.
-- One row per consumer and message, so that a message has its effect once. Not partitioned: uniqueness holds for all of time.
CREATE TABLE {inbox} (
    consumer     text COLLATE "C" NOT NULL CHECK (octet_length(consumer) BETWEEN 1 AND 255),
    message_id   text COLLATE "C" NOT NULL CHECK (octet_length(message_id) BETWEEN 1 AND 255),
    -- SUCCESS, PENDING_RETRY, RETRYING or FAILED.
    status       text NOT NULL DEFAULT 'SUCCESS',
    type         text NOT NULL DEFAULT '',
    -- Where it came from (and, under "exact", texts that their own columns can't hold).
    source       json,
    -- The copy that is run again. Empty once it succeeded.
    message_key  text,
    content_type text,
    headers      json,
    payload      bytea,
    -- Runs that gave a failure, and runs that gave nothing because the process died.
    attempts     integer NOT NULL DEFAULT 0,
    claims       integer NOT NULL DEFAULT 0,
    version      integer NOT NULL DEFAULT 0,
    -- When it is due; of a RETRYING one, when its lease ends. NULL: SUCCESS; 9999-12-31: FAILED.
    next_attempt_at timestamptz,
    owner        text,
    last_error   text,
    first_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    success_at   timestamptz,
    PRIMARY KEY (consumer, message_id)
);

-- Only what isn't done: due ones by time, failed ones at the end.
CREATE INDEX {-inbox_due} ON {inbox} (consumer, next_attempt_at, message_id) WHERE next_attempt_at IS NOT NULL;

UPDATE {meta} SET schema_version = 2 WHERE schema_version < 2;
