-- Posthouse schema version 1 for PostgreSQL 13 and newer.
-- The log: insert-only, one row per message, never updated. Publishers write only this table.

-- The stable hash all clients agree on: the first 15 hexadecimal digits of an MD5, as a number.
-- Keyed: of destination, line feed, key. Unkeyed: of the message id.
CREATE FUNCTION {hash}(destination text, message_key text, message_id text) RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$SELECT ('x' || pg_catalog.substr(pg_catalog.md5(CASE WHEN message_key IS NULL THEN message_id
                  ELSE destination || pg_catalog.chr(10) || message_key END), 1, 15))::bit(60)::bigint$$;

-- The house of a message.
%HOUSE_OF%;

CREATE TABLE {message} (
    id           bigint GENERATED ALWAYS AS IDENTITY,
    message_id   text NOT NULL DEFAULT gen_random_uuid()::text CHECK (octet_length(message_id) BETWEEN 1 AND 255),
    type         text NOT NULL DEFAULT '' CHECK (octet_length(type) <= 255),
    destination  text NOT NULL CHECK (destination <> '' AND octet_length(destination) <= 255),
    message_key  text CHECK (octet_length(message_key) <= 255),
    payload      bytea NOT NULL DEFAULT '',
    content_type text NOT NULL DEFAULT 'application/json' CHECK (octet_length(content_type) <= 255),
    headers      json,
    -- The statement's clock, not the transaction's start.
    created_at   timestamptz NOT NULL DEFAULT statement_timestamp() CHECK (isfinite(created_at)),
    -- The years 1 to 9998: neither infinity nor the end of 9999, which marks FAILED.
    deliver_at   timestamptz CHECK (deliver_at >= '0001-01-01 00:00Z' AND deliver_at < '9999-01-01 00:00Z'),
    max_attempts integer CHECK (max_attempts BETWEEN 1 AND 10000),
    PRIMARY KEY (id)
) PARTITION BY RANGE (id);

CREATE INDEX {-message_message_id} ON {message} (message_id);

-- Log rows that outlive their partition: pending or failed when it was dropped.
CREATE TABLE {kept} (LIKE {message} INCLUDING DEFAULTS, PRIMARY KEY (id));

-- The small mutable working set: messages whose delivery isn't finished. Delivered = deleted here.
CREATE TABLE {pending} (
    house        integer NOT NULL,
    id           bigint NOT NULL,
    destination  text NOT NULL,
    key_hash     bigint,
    size         integer NOT NULL,
    status       text NOT NULL DEFAULT 'PENDING',
    attempts     integer NOT NULL DEFAULT 0,
    claims       integer NOT NULL DEFAULT 0,
    max_attempts integer,
    due_at       timestamptz,
    owner        text,
    version      integer NOT NULL DEFAULT 0,
    last_error   text,
    updated_at   timestamptz,
    PRIMARY KEY (house, id)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0,
        autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 50000);

CREATE INDEX {-pending_due} ON {pending} (house, due_at, id) WHERE due_at IS NOT NULL;
CREATE INDEX {-pending_key} ON {pending} (house, key_hash, id) WHERE key_hash IS NOT NULL;
CREATE INDEX {-pending_failed} ON {pending} (id) WHERE status = 'FAILED';

-- One plain INSERT into the log publishes: this trigger adds the pending row, with the owner's rights,
-- so that a publisher needs none on {=pending}.
CREATE FUNCTION {enqueue}() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
BEGIN
    INSERT INTO {pending} (house, id, destination, key_hash, size, max_attempts, due_at)
    VALUES ({house_of}(NEW.destination, NEW.message_key, NEW.message_id), NEW.id, NEW.destination,
            CASE WHEN NEW.message_key IS NOT NULL THEN {hash}(NEW.destination, NEW.message_key, NEW.message_id) END,
            octet_length(NEW.payload) + coalesce(octet_length(NEW.headers::text), 0), NEW.max_attempts, NEW.deliver_at);
    RETURN NULL;
END$$;
REVOKE EXECUTE ON FUNCTION {enqueue}() FROM PUBLIC;

CREATE TRIGGER {-enqueue} AFTER INSERT ON {message} FOR EACH ROW EXECUTE FUNCTION {enqueue}();

-- One row per finished batch and house.
CREATE TABLE {receipt} (
    id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    house    integer NOT NULL,
    at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    instance text NOT NULL,
    low      bigint NOT NULL,
    ids      bigint[] NOT NULL,
    versions integer[] NOT NULL
);
CREATE INDEX {-receipt_low} ON {receipt} (house, low);

-- One row per failed attempt.
CREATE TABLE {attempt} (
    id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    row_id   bigint NOT NULL,
    attempt  integer NOT NULL,
    at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    instance text NOT NULL,
    outcome  text NOT NULL,
    error    text NOT NULL,
    response text,
    took_ms  integer NOT NULL
);
CREATE INDEX {-attempt_row} ON {attempt} (row_id);

CREATE TABLE {dedup} (
    dedup_key  text PRIMARY KEY CHECK (octet_length(dedup_key) <= 255),
    message_id text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT statement_timestamp()
);

-- What operators did; relays read it to find the rows they touched.
CREATE TABLE {audit} (
    id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    change   bigint NOT NULL,
    at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    actor    text NOT NULL,
    action   text NOT NULL,
    row_id   bigint NOT NULL,
    house    integer NOT NULL,
    key_hash bigint,
    detail   text
);
CREATE INDEX {-audit_change} ON {audit} (change);
CREATE INDEX {-audit_row} ON {audit} (row_id);

CREATE TABLE {instance} (
    instance    text PRIMARY KEY,
    started_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    lease_until timestamptz NOT NULL
);

CREATE TABLE {house} (
    house    integer PRIMARY KEY,
    owner    text,
    epoch    bigint NOT NULL DEFAULT 0,
    taken_at timestamptz
);
INSERT INTO {house} (house) SELECT generate_series(0, %HOUSES% - 1);

CREATE TABLE {meta} (
    one            boolean PRIMARY KEY DEFAULT true CHECK (one),
    schema_version integer NOT NULL,
    houses         integer NOT NULL,
    changes        bigint NOT NULL DEFAULT 0,
    migrated_at    timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- Every message with its status. The arms carry their status as conditions, so that WHERE status = 'FAILED' never reads the log.
CREATE VIEW {outbox} AS
    SELECT p.id, m.message_id, m.type, p.destination, m.message_key, p.status, p.attempts, p.claims, p.max_attempts,
           CASE WHEN p.status <> 'FAILED' THEN p.due_at END AS next_attempt_at, p.last_error, p.version, p.house, p.updated_at,
           m.payload, m.content_type, m.headers, m.created_at, m.deliver_at
      FROM {pending} p JOIN {message} m ON m.id = p.id
    UNION ALL
    SELECT p.id, m.message_id, m.type, p.destination, m.message_key, p.status, p.attempts, p.claims, p.max_attempts,
           CASE WHEN p.status <> 'FAILED' THEN p.due_at END, p.last_error, p.version, p.house, p.updated_at,
           m.payload, m.content_type, m.headers, m.created_at, m.deliver_at
      FROM {pending} p JOIN {kept} m ON m.id = p.id
    UNION ALL
    SELECT m.id, m.message_id, m.type, m.destination, m.message_key, 'SENT', NULL, NULL, m.max_attempts,
           NULL, NULL, NULL, {house_of}(m.destination, m.message_key, m.message_id), NULL,
           m.payload, m.content_type, m.headers, m.created_at, m.deliver_at
      FROM {message} m
     WHERE NOT EXISTS (SELECT FROM {pending} p
                        WHERE p.house = {house_of}(m.destination, m.message_key, m.message_id) AND p.id = m.id);

INSERT INTO {meta} (schema_version, houses) VALUES (1, %HOUSES%);
