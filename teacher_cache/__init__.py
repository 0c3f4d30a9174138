"""Compact teacher records: which tokens a teacher scored, with what weight, and the scores."""
