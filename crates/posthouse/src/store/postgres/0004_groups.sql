-- Posthouse schema version 4: groups, their runs, and tables that belong to others.
-- Which houses an instance takes, as "0-31,40"; NULL: all; '': none. And which it takes only for a run; NULL: none.
ALTER TABLE {instance} ADD COLUMN houses text, ADD COLUMN run_houses text;

-- What instances have to know of a group beyond their configuration.
CREATE TABLE {group} (
    group_name text PRIMARY KEY,
    -- The last time at which its trigger was due and somebody saw to it.
    fired_at   timestamptz,
    paused_at  timestamptz,
    -- Runs that began before this are to stop.
    stopped_at timestamptz
);

-- One row per run of a group on an instance, and per run that was asked for or did not come about.
CREATE TABLE {run} (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    group_name   text NOT NULL,
    -- every, rate, cron, manual, external, misfire, retry, after or takeover.
    cause        text NOT NULL,
    -- REQUESTED, RUNNING, DONE, FAILED, TIMEOUT, STOPPED, DISCARDED or LOST.
    status       text NOT NULL,
    instance     text,
    -- The row that asked all instances for a run.
    request      bigint,
    -- When its trigger was due.
    due_at       timestamptz,
    requested_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    started_at   timestamptz,
    ended_at     timestamptz,
    messages     bigint NOT NULL DEFAULT 0,
    delivered    bigint NOT NULL DEFAULT 0,
    retried      bigint NOT NULL DEFAULT 0,
    failed       bigint NOT NULL DEFAULT 0,
    error        text
);
CREATE INDEX {-run_group} ON {run} (group_name, id);
CREATE INDEX {-run_open} ON {run} (id) WHERE status IN ('REQUESTED', 'RUNNING');
CREATE INDEX {-run_request} ON {run} (request) WHERE request IS NOT NULL;

-- What tables of others have no columns for: one row per row of theirs that was tried or is being sent.
CREATE TABLE {adopted} (
    source          text COLLATE "C" NOT NULL,
    row_id          text COLLATE "C" NOT NULL,
    attempts        integer NOT NULL DEFAULT 0,
    claims          integer NOT NULL DEFAULT 0,
    version         integer NOT NULL DEFAULT 0,
    owner           text,
    -- Of a row that is being sent: when its lease ends. Of one that waits: when it is due. 9999-12-31: FAILED.
    next_attempt_at timestamptz,
    last_error      text,
    updated_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (source, row_id)
);
CREATE INDEX {-adopted_due} ON {adopted} (source, next_attempt_at);

UPDATE {meta} SET schema_version = 4 WHERE schema_version < 4;
