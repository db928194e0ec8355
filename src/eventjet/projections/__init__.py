"""Read models in SQL: declared, folded, written with their checkpoint in one transaction."""
