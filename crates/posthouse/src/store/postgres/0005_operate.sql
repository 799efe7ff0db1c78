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

-- Retention.

UPDATE {meta} SET schema_version = 5 WHERE schema_version < 5;
