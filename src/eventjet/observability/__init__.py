"""Names, traces and metrics: what eventjet tells of itself."""
