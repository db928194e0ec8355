"""Money from one account to another: a process that withdraws, deposits, and gives back what could not be deposited."""
