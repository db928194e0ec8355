"""PURE: what an application declares, and what its functions are given."""
