"""Projections: read models in SQL, how they are declared, checked and folded from events."""
