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
-- What isn't as it should be: a rule, and what it is about ('' where that is the database). What is fine has no row.
CREATE TABLE IF NOT EXISTS {alert} (
    rule      VARBINARY(64) NOT NULL,
    subject   VARBINARY(255) NOT NULL,
    -- Else it waits for the rule's time.
    firing    BOOLEAN NOT NULL,
    -- Since when it has been so.
    since     DATETIME(6) NOT NULL,
    value     DOUBLE NOT NULL,
    threshold DOUBLE NOT NULL,
    detail    MEDIUMTEXT CHARACTER SET utf8mb4,
    seen_at   DATETIME(6) NOT NULL,
    -- When a notice was last written; NULL: nobody has been told.
    told_at   DATETIME(6),
    PRIMARY KEY (rule, subject)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET = utf8mb4
-- ;;
-- What happened to alerts.
CREATE TABLE IF NOT EXISTS {alert_event} (
    id        BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    at        DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    rule      VARBINARY(64) NOT NULL,
    subject   VARBINARY(255) NOT NULL,
    -- FIRED, REPEATED, RECOVERED or ENDED.
    kind      VARBINARY(10) NOT NULL,
    since     DATETIME(6) NOT NULL,
    value     DOUBLE NOT NULL,
    threshold DOUBLE NOT NULL,
    detail    MEDIUMTEXT CHARACTER SET utf8mb4,
    instance  VARBINARY(150) NOT NULL,
    silenced  BOOLEAN NOT NULL
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET = utf8mb4
-- ;;
-- Who is to be told of an event, written together with it.
CREATE TABLE IF NOT EXISTS {alert_notice} (
    event    BIGINT NOT NULL,
    channel  VARBINARY(64) NOT NULL,
    attempts INT NOT NULL DEFAULT 0,
    -- When it is tried next; NULL: it was sent, or given up.
    due_at   DATETIME(6) DEFAULT (UTC_TIMESTAMP(6)),
    sent_at  DATETIME(6),
    error    MEDIUMTEXT CHARACTER SET utf8mb4,
    PRIMARY KEY (event, channel),
    KEY alert_notice_open (due_at)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET = utf8mb4
-- ;;
-- What nobody wants to be told of for a while: a rule ('': all) and a subject ('': all of the rule).
CREATE TABLE IF NOT EXISTS {alert_silence} (
    rule    VARBINARY(64) NOT NULL,
    subject VARBINARY(255) NOT NULL,
    since   DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    ends_at DATETIME(6) NOT NULL,
    actor   VARCHAR(255) CHARACTER SET utf8mb4 NOT NULL,
    reason  TEXT CHARACTER SET utf8mb4 NOT NULL,
    PRIMARY KEY (rule, subject)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET = utf8mb4
-- ;;
-- What only one instance knows, for the one that judges.
CREATE TABLE IF NOT EXISTS {alert_report} (
    instance VARBINARY(150) NOT NULL,
    rule     VARBINARY(64) NOT NULL,
    subject  VARBINARY(255) NOT NULL,
    at       DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    value    DOUBLE NOT NULL,
    detail   MEDIUMTEXT CHARACTER SET utf8mb4,
    PRIMARY KEY (instance, rule, subject)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET = utf8mb4
-- ;;

-- Retention.

UPDATE {meta} SET schema_version = 5 WHERE schema_version < 5
