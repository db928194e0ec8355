"""Log events, traces and metrics of eventjet itself."""
