"""Events that a projection could not take: how they are parked, kept in SQL, and what is done about them."""
