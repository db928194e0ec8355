"""Orders: a process that reserves, waits for a payment, ships, and undoes what it did when something goes wrong."""
