-- Posthouse schema version 1 for SQLite 3.40 and newer.
-- Times are milliseconds since 1970 UTC. Text is compared byte by byte, and NUL in it is refused: other databases can't hold it.

-- The log: insert-only, one row per message, never updated. Publishers write only this table.
-- AUTOINCREMENT: an id is never given out twice, also when the newest rows were deleted.
CREATE TABLE {message} (
    id           INTEGER PRIMARY KEY AUTOINCREMENT,
    message_id   TEXT NOT NULL DEFAULT (lower(hex(randomblob(16))))
                 CHECK (length(CAST(message_id AS BLOB)) BETWEEN 1 AND 255 AND instr(CAST(message_id AS BLOB), x'00') = 0),
    type         TEXT NOT NULL DEFAULT ''
                 CHECK (length(CAST(type AS BLOB)) <= 255 AND instr(CAST(type AS BLOB), x'00') = 0),
    destination  TEXT NOT NULL
                 CHECK (length(CAST(destination AS BLOB)) BETWEEN 1 AND 255 AND instr(CAST(destination AS BLOB), x'00') = 0),
    message_key  TEXT
                 CHECK (length(CAST(message_key AS BLOB)) <= 255 AND instr(CAST(message_key AS BLOB), x'00') = 0),
    -- Text is taken as its bytes, so that a payload can be written as '[1, 2]' as well as x'00ff'.
    payload      ANY NOT NULL DEFAULT x'' CHECK (typeof(payload) IN ('blob', 'text')),
    content_type TEXT NOT NULL DEFAULT 'application/json'
                 CHECK (length(CAST(content_type AS BLOB)) <= 255 AND instr(CAST(content_type AS BLOB), x'00') = 0),
    -- json_valid(NULL) is 0 before SQLite 3.41.
    headers      TEXT CHECK (headers IS NULL OR json_valid(headers)),
    created_at   INTEGER NOT NULL DEFAULT (%NOW%),
    -- Before the year 9999.
    deliver_at   INTEGER CHECK (deliver_at BETWEEN 0 AND 253370764799999),
    max_attempts INTEGER CHECK (max_attempts BETWEEN 1 AND 10000)
) STRICT;

CREATE INDEX {-message_message_id} ON {message} (message_id);

-- The small mutable working set: messages whose delivery isn't finished. Delivered = deleted here.
CREATE TABLE {pending} (
    house        INTEGER NOT NULL,
    id           INTEGER NOT NULL,
    destination  TEXT NOT NULL,
    -- SQLite has no hash function, so this is the destination's length in bytes, a colon, the destination and the key:
    -- two keys never have the same.
    key_hash     TEXT,
    size         INTEGER NOT NULL,
    status       TEXT NOT NULL DEFAULT 'PENDING',
    attempts     INTEGER NOT NULL DEFAULT 0,
    claims       INTEGER NOT NULL DEFAULT 0,
    max_attempts INTEGER,
    -- NULL: fresh; the last day of the year 9999: FAILED.
    due_at       INTEGER,
    owner        TEXT,
    version      INTEGER NOT NULL DEFAULT 0,
    last_error   TEXT,
    updated_at   INTEGER,
    PRIMARY KEY (house, id)
) STRICT, WITHOUT ROWID;

CREATE INDEX {-pending_due} ON {pending} (house, due_at, id) WHERE due_at IS NOT NULL;
CREATE INDEX {-pending_key} ON {pending} (house, key_hash, id) WHERE key_hash IS NOT NULL;
CREATE INDEX {-pending_failed} ON {pending} (id) WHERE status = 'FAILED';

-- One plain INSERT into the log publishes: this trigger adds the pending row.
CREATE TRIGGER {-enqueue} AFTER INSERT ON {message} BEGIN
    INSERT INTO {pending} (house, id, destination, key_hash, size, max_attempts, due_at)
    VALUES (0, NEW.id, NEW.destination,
            length(CAST(NEW.destination AS BLOB)) || ':' || NEW.destination || NEW.message_key,
            length(CAST(NEW.payload AS BLOB)) + coalesce(length(CAST(NEW.headers AS BLOB)), 0), NEW.max_attempts, NEW.deliver_at);
END;

-- One row per finished batch. ids and versions are JSON arrays.
CREATE TABLE {receipt} (
    id       INTEGER PRIMARY KEY AUTOINCREMENT,
    house    INTEGER NOT NULL,
    at       INTEGER NOT NULL DEFAULT (%NOW%),
    instance TEXT NOT NULL,
    low      INTEGER NOT NULL,
    ids      TEXT NOT NULL,
    versions TEXT NOT NULL
) STRICT;
CREATE INDEX {-receipt_low} ON {receipt} (house, low);

-- One row per failed attempt.
CREATE TABLE {attempt} (
    id       INTEGER PRIMARY KEY AUTOINCREMENT,
    row_id   INTEGER NOT NULL,
    attempt  INTEGER NOT NULL,
    at       INTEGER NOT NULL DEFAULT (%NOW%),
    instance TEXT NOT NULL,
    outcome  TEXT NOT NULL,
    error    TEXT NOT NULL,
    response TEXT,
    took_ms  INTEGER NOT NULL
) STRICT;
CREATE INDEX {-attempt_row} ON {attempt} (row_id);

CREATE TABLE {dedup} (
    dedup_key  TEXT NOT NULL PRIMARY KEY CHECK (length(CAST(dedup_key AS BLOB)) <= 255),
    message_id TEXT NOT NULL,
    created_at INTEGER NOT NULL DEFAULT (%NOW%)
) STRICT, WITHOUT ROWID;

-- What operators did; relays read it to find the rows they touched.
CREATE TABLE {audit} (
    id       INTEGER PRIMARY KEY AUTOINCREMENT,
    change   INTEGER NOT NULL,
    at       INTEGER NOT NULL DEFAULT (%NOW%),
    actor    TEXT NOT NULL,
    action   TEXT NOT NULL,
    row_id   INTEGER NOT NULL,
    house    INTEGER NOT NULL,
    key_hash TEXT,
    detail   TEXT
) STRICT;
CREATE INDEX {-audit_change} ON {audit} (change);
CREATE INDEX {-audit_row} ON {audit} (row_id);

CREATE TABLE {instance} (
    instance    TEXT NOT NULL PRIMARY KEY,
    started_at  INTEGER NOT NULL DEFAULT (%NOW%),
    lease_until INTEGER NOT NULL
) STRICT;

CREATE TABLE {house} (
    house    INTEGER PRIMARY KEY,
    owner    TEXT,
    epoch    INTEGER NOT NULL DEFAULT 0,
    taken_at INTEGER
) STRICT;
INSERT INTO {house} (house) VALUES (0);

CREATE TABLE {meta} (
    one            INTEGER PRIMARY KEY DEFAULT 1 CHECK (one = 1),
    schema_version INTEGER NOT NULL,
    houses         INTEGER NOT NULL,
    changes        INTEGER NOT NULL DEFAULT 0,
    migrated_at    INTEGER NOT NULL DEFAULT (%NOW%)
) STRICT;

-- Every message with its status, times readable (UTC) and as milliseconds. The arms carry their status as conditions, so that
-- WHERE status = 'FAILED' never reads the log.
CREATE VIEW {outbox} AS
    SELECT p.id, m.message_id, m.type, p.destination, m.message_key, p.status, p.attempts, p.claims, p.max_attempts,
           CASE WHEN p.status <> 'FAILED' THEN strftime('%Y-%m-%d %H:%M:%f', p.due_at / 1000.0, 'unixepoch') END AS next_attempt_at,
           p.last_error, p.version, p.house, strftime('%Y-%m-%d %H:%M:%f', p.updated_at / 1000.0, 'unixepoch') AS updated_at,
           m.payload, m.content_type, m.headers, strftime('%Y-%m-%d %H:%M:%f', m.created_at / 1000.0, 'unixepoch') AS created_at,
           strftime('%Y-%m-%d %H:%M:%f', m.deliver_at / 1000.0, 'unixepoch') AS deliver_at,
           CASE WHEN p.status <> 'FAILED' THEN p.due_at END AS next_attempt_at_ms, p.updated_at AS updated_at_ms,
           m.created_at AS created_at_ms, m.deliver_at AS deliver_at_ms
      FROM {pending} p JOIN {message} m ON m.id = p.id
    UNION ALL
    SELECT m.id, m.message_id, m.type, m.destination, m.message_key, 'SENT', NULL, NULL, m.max_attempts,
           NULL, NULL, NULL, 0, NULL,
           m.payload, m.content_type, m.headers, strftime('%Y-%m-%d %H:%M:%f', m.created_at / 1000.0, 'unixepoch'),
           strftime('%Y-%m-%d %H:%M:%f', m.deliver_at / 1000.0, 'unixepoch'),
           NULL, NULL, m.created_at, m.deliver_at
      FROM {message} m
     WHERE NOT EXISTS (SELECT 1 FROM {pending} p WHERE p.house = 0 AND p.id = m.id);

INSERT INTO {meta} (schema_version, houses) VALUES (1, 1);
