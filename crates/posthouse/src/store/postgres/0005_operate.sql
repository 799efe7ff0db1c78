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

UPDATE {meta} SET schema_version = 5 WHERE schema_version < 5;
