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
-- A partition of the log on its way out, and those that went. Every step is written down when it is done, so that the next
-- round goes on where one was cut off.
CREATE TABLE IF NOT EXISTS {retired} (
    part      BIGINT NOT NULL PRIMARY KEY,
    low       BIGINT NOT NULL,
    high      BIGINT NOT NULL,
    -- FOUND, DETACHED, KEPT, ARCHIVED, VERIFIED, DROPPED.
    step      VARBINARY(10) NOT NULL,
    -- Messages that weren't delivered, now in {=kept}.
    survivors BIGINT NOT NULL DEFAULT 0,
    -- Messages that went.
    amount    BIGINT NOT NULL DEFAULT 0,
    found_at  DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    step_at   DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6))
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET = utf8mb4
-- ;;
-- One row per file of an archive. It is noted before it is written, and its messages go when it has been read back.
CREATE TABLE IF NOT EXISTS {archive} (
    id         BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    location   VARBINARY(1000) NOT NULL,
    -- Where its messages were: message, kept.
    shelf      VARBINARY(10) NOT NULL,
    -- The partition they were in; NULL: rows that went one by one.
    part       BIGINT,
    low        BIGINT NOT NULL,
    high       BIGINT NOT NULL,
    amount     BIGINT NOT NULL,
    bytes      BIGINT NOT NULL,
    sha256     VARBINARY(64) NOT NULL,
    noted_at   DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    written_at DATETIME(6),
    removed_at DATETIME(6),
    UNIQUE KEY archive_location (location),
    KEY archive_part (part),
    KEY archive_removed (removed_at)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET = utf8mb4
-- ;;
-- Rows are copied to {=kept} before their partition is taken out, and stay there when they are delivered: so a row of it counts
-- while there is none in the log, which is looked up by its primary key.
CREATE OR REPLACE SQL SECURITY INVOKER VIEW {outbox} AS
    SELECT p.id, m.message_id, CONVERT(m.type USING utf8mb4) AS type, CONVERT(p.destination USING utf8mb4) AS destination,
           CONVERT(m.message_key USING utf8mb4) AS message_key, CONVERT(p.status USING utf8mb4) AS status, p.attempts, p.claims,
           p.max_attempts, CASE WHEN p.status <> 'FAILED' THEN p.due_at END AS next_attempt_at, p.last_error, p.version, p.house,
           p.updated_at, m.payload, CONVERT(m.content_type USING utf8mb4) AS content_type, m.headers, m.created_at, m.deliver_at
      FROM {pending} p JOIN {message} m ON m.id = p.id
    UNION ALL
    SELECT p.id, m.message_id, CONVERT(m.type USING utf8mb4), CONVERT(p.destination USING utf8mb4),
           CONVERT(m.message_key USING utf8mb4), CONVERT(p.status USING utf8mb4), p.attempts, p.claims,
           p.max_attempts, CASE WHEN p.status <> 'FAILED' THEN p.due_at END, p.last_error, p.version, p.house,
           p.updated_at, m.payload, CONVERT(m.content_type USING utf8mb4), m.headers, m.created_at, m.deliver_at
      FROM {pending} p JOIN {kept} m ON m.id = p.id
     WHERE (SELECT l.id FROM {message} l WHERE l.id = m.id) IS NULL
    UNION ALL
    SELECT m.id, m.message_id, CONVERT(m.type USING utf8mb4), CONVERT(m.destination USING utf8mb4),
           CONVERT(m.message_key USING utf8mb4), 'SENT', NULL, NULL,
           m.max_attempts, NULL, NULL, NULL, {hash}(m.destination, m.message_key, m.message_id) % t.houses,
           NULL, m.payload, CONVERT(m.content_type USING utf8mb4), m.headers, m.created_at, m.deliver_at
      FROM {meta} t JOIN {message} m
     WHERE t.one = 1
       AND NOT EXISTS (SELECT 1 FROM {pending} p
                        WHERE p.house = {hash}(m.destination, m.message_key, m.message_id) % t.houses AND p.id = m.id)
    UNION ALL
    SELECT m.id, m.message_id, CONVERT(m.type USING utf8mb4), CONVERT(m.destination USING utf8mb4),
           CONVERT(m.message_key USING utf8mb4), 'SENT', NULL, NULL,
           m.max_attempts, NULL, NULL, NULL, {hash}(m.destination, m.message_key, m.message_id) % t.houses,
           NULL, m.payload, CONVERT(m.content_type USING utf8mb4), m.headers, m.created_at, m.deliver_at
      FROM {meta} t JOIN {kept} m
     WHERE t.one = 1 AND (SELECT l.id FROM {message} l WHERE l.id = m.id) IS NULL
       AND NOT EXISTS (SELECT 1 FROM {pending} p
                        WHERE p.house = {hash}(m.destination, m.message_key, m.message_id) % t.houses AND p.id = m.id)
-- ;;
UPDATE {meta} SET schema_version = 5 WHERE schema_version < 5
