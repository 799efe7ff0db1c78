-- Posthouse schema version 3: finding successes that are old enough to be removed.
CREATE INDEX {-inbox_done} ON {inbox} (consumer, success_at) WHERE success_at IS NOT NULL;

UPDATE {meta} SET schema_version = 3 WHERE schema_version < 3;
