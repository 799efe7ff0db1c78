-- Posthouse schema version 5: work that one instance does for all, alerts, archives, and how much an operator changed.
-- How many messages an action was applied to at once; NULL in lines about one message.
ALTER TABLE {audit} ADD COLUMN amount BIGINT
-- ;;
-- Work that one instance does for all, as long as its lease lasts.
CREATE TABLE IF NOT EXISTS {duty} (
    duty_name   VARBINARY(64) NOT NULL PRIMARY KEY,
    owner       VARBINARY(150) NOT NULL,
    lease_until DATETIME(6) NOT NULL
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET = utf8mb4
-- ;;
-- Alerts.

-- Retention.

UPDATE {meta} SET schema_version = 5 WHERE schema_version < 5
