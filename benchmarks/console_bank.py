"""The bank whose log `benchmarks.console` looks at: accounts, and a table of their balances."""

from __future__ import annotations

from eventjet import App
from eventjet.examples.demo_bank import Account, balances

bank = App("console_bank", aggregates=[Account], projections=[balances])
