"""The declarations an application makes, and the values passed to its functions. PURE."""
