-- Posthouse schema version 3: finding successes that are old enough to be removed.
-- They have been in inbox_due all along, under NULL; now they lie there by time instead of by id. So it costs no index more,
-- and a new one goes to the end of its consumer's instead of anywhere.
ALTER TABLE {inbox} DROP KEY inbox_due, ADD KEY inbox_due (consumer, next_attempt_at, success_at)
-- ;;
UPDATE {meta} SET schema_version = 3 WHERE schema_version < 3
