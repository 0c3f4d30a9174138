"""The sample queue: a ledger that loses nothing, trains nothing twice and keeps its staleness promise."""
