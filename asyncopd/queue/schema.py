"""The tables of a ledger, and the triggers that count in the same transaction as every change.

Codes of ``state`` are those of ``rows.State``: below 6 a sample is live, 6 is trained, 7 is dropped.

The indices on live samples are partial: they hold the window, not the history, so that the cost of a sample does not
grow with the number of samples that went before.
"""

FORMAT = 2
"""Changes whenever an older asyncopd could misread the tables."""

TABLES = (
    "CREATE TABLE run (id INTEGER PRIMARY KEY CHECK (id = 0), format INTEGER NOT NULL, plan TEXT NOT NULL,"
    " policy_version INTEGER NOT NULL, next_slot INTEGER NOT NULL) STRICT",
    "CREATE TABLE published (version INTEGER PRIMARY KEY) STRICT",
    # final_at is the first policy version whose checkpoint covers the sample: the version that its step made if it was
    # trained, one more than the policy version of the moment if it was dropped. rolled_at is the policy version when
    # its answer was put: what it aged before that it aged in flight, the rest in the queue.
    "CREATE TABLE samples (ordinal INTEGER PRIMARY KEY, slot INTEGER NOT NULL, attempt INTEGER NOT NULL,"
    " prompt_index INTEGER NOT NULL, state INTEGER NOT NULL, min_version INTEGER NOT NULL, exact_version INTEGER,"
    " token INTEGER, rolled_by INTEGER, scored_by INTEGER,"
    " rollout_path TEXT, rollout_offset INTEGER, rollout_bytes INTEGER, rollout_checksum TEXT, finish TEXT,"
    " tokens INTEGER, oldest_version INTEGER, newest_version INTEGER, rolled_at INTEGER,"
    " record_path TEXT, record_offset INTEGER, record_bytes INTEGER, record_checksum TEXT, valid_tokens INTEGER,"
    " disagreement REAL,"
    " final_at INTEGER, reason TEXT, detail TEXT, forgotten INTEGER NOT NULL DEFAULT 0,"
    " admitted_s REAL NOT NULL, rolled_s REAL, scored_s REAL, final_s REAL, UNIQUE (slot, attempt)) STRICT",
    "CREATE INDEX live ON samples (ordinal) WHERE state < 6",
    "CREATE INDEX by_state ON samples (state, ordinal) WHERE state < 6",
    "CREATE INDEX undeleted ON samples (final_at) WHERE state >= 6 AND forgotten = 0",
    # AUTOINCREMENT: a fencing token is never used twice, even after its lease is gone.
    "CREATE TABLE leases (token INTEGER PRIMARY KEY AUTOINCREMENT, state INTEGER NOT NULL, owner TEXT NOT NULL,"
    " expires_s REAL NOT NULL) STRICT",
    "CREATE TABLE requeued (id INTEGER PRIMARY KEY, slot INTEGER NOT NULL, attempt INTEGER NOT NULL) STRICT",
    # The all_ columns are running totals, so that reading them costs no more as the run grows.
    "CREATE TABLE steps (version INTEGER PRIMARY KEY, final_s REAL NOT NULL, samples INTEGER NOT NULL,"
    " staleness_sum INTEGER NOT NULL, staleness_max INTEGER NOT NULL, trained_tokens INTEGER NOT NULL,"
    " dropped INTEGER NOT NULL, dropped_tokens INTEGER NOT NULL, all_samples INTEGER NOT NULL,"
    " all_trained_tokens INTEGER NOT NULL, all_dropped INTEGER NOT NULL, all_dropped_tokens INTEGER NOT NULL) STRICT",
    "CREATE TABLE tally (state INTEGER PRIMARY KEY, n INTEGER NOT NULL CHECK (n >= 0)) STRICT",
    "CREATE TABLE admitted (id INTEGER PRIMARY KEY CHECK (id = 0), n INTEGER NOT NULL) STRICT",
    "CREATE TABLE drops (reason TEXT PRIMARY KEY, n INTEGER NOT NULL CHECK (n >= 0)) STRICT",
)

TRIGGERS = (
    "CREATE TRIGGER count_admitted AFTER INSERT ON samples BEGIN"
    " UPDATE tally SET n = n + 1 WHERE state = NEW.state;"
    " UPDATE admitted SET n = n + 1; END",
    "CREATE TRIGGER count_moved AFTER UPDATE OF state ON samples WHEN OLD.state <> NEW.state BEGIN"
    " UPDATE tally SET n = n - 1 WHERE state = OLD.state;"
    " UPDATE tally SET n = n + 1 WHERE state = NEW.state; END",
    "CREATE TRIGGER count_dropped AFTER UPDATE OF state ON samples WHEN NEW.state = 7 AND OLD.state <> 7 BEGIN"
    " INSERT INTO drops VALUES (NEW.reason, 1) ON CONFLICT (reason) DO UPDATE SET n = n + 1; END",
    "CREATE TRIGGER count_revived AFTER UPDATE OF state ON samples WHEN OLD.state = 7 AND NEW.state <> 7 BEGIN"
    " UPDATE drops SET n = n - 1 WHERE reason = OLD.reason; END",
    "CREATE TRIGGER keep_history BEFORE DELETE ON samples BEGIN"
    " SELECT RAISE(ABORT, 'a sample is never deleted from the ledger'); END",
)

ROWS = (
    "INSERT INTO admitted VALUES (0, 0)",
    "INSERT INTO tally VALUES (0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (6, 0), (7, 0)",
)
