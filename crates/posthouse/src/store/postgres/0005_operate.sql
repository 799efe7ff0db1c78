-- Posthouse schema version 5: work that one instance does for all, alerts, archives, and how much an operator changed.
-- How many messages an action was applied to at once; NULL in lines about one message.
ALTER TABLE {audit} ADD COLUMN amount bigint;

-- Work that one instance does for all, as long as its lease lasts.
CREATE TABLE {duty} (
    duty_name   text PRIMARY KEY,
    owner       text NOT NULL,
    lease_until timestamptz NOT NULL
);

-- Alerts.
-- What isn't as it should be: a rule, and what it is about ('' where that is the database). What is fine has no row.
CREATE TABLE {alert} (
    rule      text NOT NULL,
    subject   text NOT NULL,
    -- Else it waits for the rule's time.
    firing    boolean NOT NULL,
    -- Since when it has been so.
    since     timestamptz NOT NULL,
    value     double precision NOT NULL,
    threshold double precision NOT NULL,
    detail    text,
    seen_at   timestamptz NOT NULL,
    -- When a notice was last written; NULL: nobody has been told.
    told_at   timestamptz,
    PRIMARY KEY (rule, subject)
);

-- What happened to alerts.
CREATE TABLE {alert_event} (
    id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    rule      text NOT NULL,
    subject   text NOT NULL,
    -- FIRED, REPEATED, RECOVERED or ENDED.
    kind      text NOT NULL,
    since     timestamptz NOT NULL,
    value     double precision NOT NULL,
    threshold double precision NOT NULL,
    detail    text,
    instance  text NOT NULL,
    silenced  boolean NOT NULL
);

-- Who is to be told of an event, written together with it.
CREATE TABLE {alert_notice} (
    event    bigint NOT NULL,
    channel  text NOT NULL,
    attempts integer NOT NULL DEFAULT 0,
    -- When it is tried next; NULL: it was sent, or given up.
    due_at   timestamptz DEFAULT clock_timestamp(),
    sent_at  timestamptz,
    error    text,
    PRIMARY KEY (event, channel)
);
CREATE INDEX {-alert_notice_open} ON {alert_notice} (event) WHERE due_at IS NOT NULL;

-- What nobody wants to be told of for a while: a rule ('': all) and a subject ('': all of the rule).
CREATE TABLE {alert_silence} (
    rule    text NOT NULL,
    subject text NOT NULL,
    since   timestamptz NOT NULL DEFAULT clock_timestamp(),
    ends_at timestamptz NOT NULL,
    actor   text NOT NULL,
    reason  text NOT NULL,
    PRIMARY KEY (rule, subject)
);

-- What only one instance knows, for the one that judges.
CREATE TABLE {alert_report} (
    instance text NOT NULL,
    rule     text NOT NULL,
    subject  text NOT NULL,
    at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    value    double precision NOT NULL,
    detail   text,
    PRIMARY KEY (instance, rule, subject)
);

-- Retention.
-- A partition of the log on its way out, and those that went. Every step is written down when it is done, so that the next
-- round goes on where one was cut off.
CREATE TABLE {retired} (
    part      bigint PRIMARY KEY,
    low       bigint NOT NULL,
    high      bigint NOT NULL,
    -- FOUND, DETACHED, KEPT, ARCHIVED, VERIFIED, DROPPED.
    step      text NOT NULL,
    -- Messages that weren't delivered, now in {=kept}.
    survivors bigint NOT NULL DEFAULT 0,
    -- Messages that went.
    amount    bigint NOT NULL DEFAULT 0,
    found_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    step_at   timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- One row per file of an archive. It is noted before it is written, and its messages go when it has been read back.
CREATE TABLE {archive} (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    location   text NOT NULL UNIQUE,
    -- Where its messages were: message, kept.
    shelf      text NOT NULL,
    -- The partition they were in; NULL: rows that went one by one.
    part       bigint,
    low        bigint NOT NULL,
    high       bigint NOT NULL,
    amount     bigint NOT NULL,
    bytes      bigint NOT NULL,
    sha256     text NOT NULL,
    noted_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    written_at timestamptz,
    removed_at timestamptz
);
CREATE INDEX {-archive_part} ON {archive} (part) WHERE part IS NOT NULL;
CREATE INDEX {-archive_open} ON {archive} (id) WHERE removed_at IS NULL;

-- Rows are copied to {=kept} before their partition is detached, and stay there when they are delivered: so a row of it counts
-- while there is none in the log, which is looked up by its primary key.
CREATE OR REPLACE VIEW {outbox} AS
    SELECT p.id, m.message_id, m.type, p.destination, m.message_key, p.status, p.attempts, p.claims, p.max_attempts,
           CASE WHEN p.status <> 'FAILED' THEN p.due_at END AS next_attempt_at, p.last_error, p.version, p.house, p.updated_at,
           m.payload, m.content_type, m.headers, m.created_at, m.deliver_at
      FROM {pending} p JOIN {message} m ON m.id = p.id
    UNION ALL
    SELECT p.id, m.message_id, m.type, p.destination, m.message_key, p.status, p.attempts, p.claims, p.max_attempts,
           CASE WHEN p.status <> 'FAILED' THEN p.due_at END, p.last_error, p.version, p.house, p.updated_at,
           m.payload, m.content_type, m.headers, m.created_at, m.deliver_at
      FROM {pending} p JOIN {kept} m ON m.id = p.id
     WHERE (SELECT l.id FROM {message} l WHERE l.id = m.id) IS NULL
    UNION ALL
    SELECT m.id, m.message_id, m.type, m.destination, m.message_key, 'SENT', NULL, NULL, m.max_attempts,
           NULL, NULL, NULL, {house_of}(m.destination, m.message_key, m.message_id), NULL,
           m.payload, m.content_type, m.headers, m.created_at, m.deliver_at
      FROM {message} m
     WHERE NOT EXISTS (SELECT FROM {pending} p
                        WHERE p.house = {house_of}(m.destination, m.message_key, m.message_id) AND p.id = m.id)
    UNION ALL
    SELECT m.id, m.message_id, m.type, m.destination, m.message_key, 'SENT', NULL, NULL, m.max_attempts,
           NULL, NULL, NULL, {house_of}(m.destination, m.message_key, m.message_id), NULL,
           m.payload, m.content_type, m.headers, m.created_at, m.deliver_at
      FROM {kept} m
     WHERE (SELECT l.id FROM {message} l WHERE l.id = m.id) IS NULL
       AND NOT EXISTS (SELECT FROM {pending} p
                        WHERE p.house = {house_of}(m.destination, m.message_key, m.message_id) AND p.id = m.id);

UPDATE {meta} SET schema_version = 5 WHERE schema_version < 5;
