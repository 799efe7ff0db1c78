-- Posthouse schema version 3: finding successes that are old enough to be removed.
-- Costs about 85 bytes of WAL for each message. BRIN would cost as much once rows take the place of removed ones, since each
-- of them changes the summary of its pages.
CREATE INDEX {-inbox_done} ON {inbox} (consumer, success_at) WHERE success_at IS NOT NULL;

UPDATE {meta} SET schema_version = 3 WHERE schema_version < 3;
