CREATE TABLE eventjet_action (
    id VARCHAR(32) NOT NULL,
    app VARCHAR(48) NOT NULL,
    actor TEXT NOT NULL,
    at DOUBLE PRECISION NOT NULL,
    action VARCHAR(16) NOT NULL,
    target TEXT NOT NULL,
    details TEXT DEFAULT '{}' NOT NULL,
    outcome VARCHAR(16) NOT NULL,
    result TEXT DEFAULT '' NOT NULL,
    ended_at DOUBLE PRECISION,
    PRIMARY KEY (id)
);

CREATE TABLE eventjet_projection (
    name VARCHAR(48) NOT NULL,
    revision INTEGER NOT NULL,
    generation INTEGER DEFAULT '1' NOT NULL,
    position BIGINT DEFAULT '0' NOT NULL,
    event_id TEXT DEFAULT '' NOT NULL,
    log TEXT DEFAULT '' NOT NULL,
    epoch BIGINT DEFAULT '0' NOT NULL,
    owner TEXT,
    lease_until DOUBLE PRECISION DEFAULT '0' NOT NULL,
    lease_s DOUBLE PRECISION DEFAULT '0' NOT NULL,
    state VARCHAR(16) DEFAULT 'new' NOT NULL,
    reason TEXT,
    location TEXT DEFAULT '' NOT NULL,
    tables TEXT DEFAULT '[]' NOT NULL,
    takes_over BOOLEAN DEFAULT false NOT NULL,
    identities TEXT DEFAULT '[]' NOT NULL,
    PRIMARY KEY (name, revision)
);

CREATE TABLE eventjet_quarantine (
    projection VARCHAR(48) NOT NULL,
    revision INTEGER NOT NULL,
    position BIGINT NOT NULL,
    aggregate TEXT NOT NULL,
    aggregate_id TEXT NOT NULL,
    event_id TEXT DEFAULT '' NOT NULL,
    event_type TEXT DEFAULT '' NOT NULL,
    resolution VARCHAR(16) NOT NULL,
    reason TEXT DEFAULT '' NOT NULL,
    traceback TEXT DEFAULT '' NOT NULL,
    payload BYTEA,
    parked_at DOUBLE PRECISION NOT NULL,
    resolved_at DOUBLE PRECISION,
    PRIMARY KEY (projection, revision, position)
);

CREATE TABLE eventjet_rebuild (
    run VARCHAR(64) NOT NULL,
    part INTEGER NOT NULL,
    projection VARCHAR(48) NOT NULL,
    revision INTEGER NOT NULL,
    rows BIGINT DEFAULT '0' NOT NULL,
    lease_until DOUBLE PRECISION DEFAULT '0' NOT NULL,
    PRIMARY KEY (run, part)
);

CREATE INDEX ix_eventjet_action_at ON eventjet_action (app, at);

CREATE INDEX ix_eventjet_quarantine_aggregate ON eventjet_quarantine (projection, revision, aggregate, aggregate_id);
