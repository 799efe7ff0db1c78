-- Posthouse schema version 4: groups, their runs, and tables that belong to others.
-- Which houses an instance takes, as "0-31,40"; NULL: all; '': none. And which it takes only for a run; NULL: none.
ALTER TABLE {instance} ADD COLUMN houses TEXT CHARACTER SET ascii, ADD COLUMN run_houses TEXT CHARACTER SET ascii
-- ;;
-- What instances have to know of a group beyond their configuration.
CREATE TABLE IF NOT EXISTS {group} (
    group_name VARBINARY(64) NOT NULL PRIMARY KEY,
    -- The last time at which its trigger was due and somebody saw to it.
    fired_at   DATETIME(6),
    paused_at  DATETIME(6),
    -- Runs that began before this are to stop.
    stopped_at DATETIME(6)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET = utf8mb4
-- ;;
-- One row per run of a group on an instance, and per run that was asked for or did not come about.
CREATE TABLE IF NOT EXISTS {run} (
    id           BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    group_name   VARBINARY(64) NOT NULL,
    -- every, rate, cron, manual, external, misfire, retry, after or takeover.
    cause        VARBINARY(10) NOT NULL,
    -- REQUESTED, RUNNING, DONE, FAILED, TIMEOUT, STOPPED, DISCARDED or LOST.
    status       VARBINARY(10) NOT NULL,
    instance     VARBINARY(150),
    -- The row that asked all instances for a run.
    request      BIGINT,
    -- When its trigger was due.
    due_at       DATETIME(6),
    requested_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    started_at   DATETIME(6),
    ended_at     DATETIME(6),
    messages     BIGINT NOT NULL DEFAULT 0,
    delivered    BIGINT NOT NULL DEFAULT 0,
    retried      BIGINT NOT NULL DEFAULT 0,
    failed       BIGINT NOT NULL DEFAULT 0,
    error        MEDIUMTEXT CHARACTER SET utf8mb4,
    KEY run_group (group_name, id),
    KEY run_open (status, id),
    KEY run_request (request)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET = utf8mb4
-- ;;
-- What tables of others have no columns for: one row per row of theirs that was tried or is being sent.
CREATE TABLE IF NOT EXISTS {adopted} (
    source          VARBINARY(130) NOT NULL,
    row_id          VARBINARY(255) NOT NULL,
    attempts        INT NOT NULL DEFAULT 0,
    claims          INT NOT NULL DEFAULT 0,
    version         INT NOT NULL DEFAULT 0,
    owner           VARBINARY(150),
    -- Of a row that is being sent: when its lease ends. Of one that waits: when it is due. 9999-12-31: FAILED.
    next_attempt_at DATETIME(6),
    last_error      MEDIUMTEXT CHARACTER SET utf8mb4,
    updated_at      DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    PRIMARY KEY (source, row_id),
    KEY adopted_due (source, next_attempt_at)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET = utf8mb4
-- ;;
UPDATE {meta} SET schema_version = 4 WHERE schema_version < 4
