"""Folded states kept beside the log: always disposable, never believed without the log's own last word."""
