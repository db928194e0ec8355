"""Fold processes: the events of one log folded by several processes, each the aggregates that are its own."""
