-- Posthouse schema version 2: what consumers received.
-- One row per consumer and message, so that a message has its effect once. Not partitioned: uniqueness holds for all of time.
CREATE TABLE IF NOT EXISTS {inbox} (
    consumer     VARBINARY(256) NOT NULL,
    message_id   VARBINARY(256) NOT NULL,
    -- SUCCESS, PENDING_RETRY, RETRYING or FAILED.
    status       VARBINARY(15) NOT NULL DEFAULT 'SUCCESS',
    type         VARBINARY(256) NOT NULL DEFAULT '',
    -- Where it came from (and, under "exact", texts that their own columns can't hold).
    source       LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
    -- The copy that is run again. Empty once it succeeded.
    message_key  VARBINARY(256),
    content_type VARBINARY(256),
    headers      LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
    payload      LONGBLOB,
    -- Runs that gave a failure, and runs that gave nothing because the process died.
    attempts     INT NOT NULL DEFAULT 0,
    claims       INT NOT NULL DEFAULT 0,
    version      INT NOT NULL DEFAULT 0,
    -- When it is due; of a RETRYING one, when its lease ends. NULL: SUCCESS; 9999-12-31: FAILED.
    next_attempt_at DATETIME(6),
    owner        VARBINARY(150),
    last_error   MEDIUMTEXT CHARACTER SET utf8mb4,
    first_at     DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    last_at      DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    success_at   DATETIME(6),
    PRIMARY KEY (consumer, message_id),
    -- Due ones by time, failed ones at the end; those that are done (NULL) lie before both.
    KEY inbox_due (consumer, next_attempt_at, message_id),
    CHECK (LENGTH(consumer) BETWEEN 1 AND 255),
    CHECK (LENGTH(message_id) BETWEEN 1 AND 255)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET = utf8mb4
-- ;;
UPDATE {meta} SET schema_version = 2 WHERE schema_version < 2
