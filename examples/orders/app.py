"""The orders, wired."""

from __future__ import annotations

from eventjet import App
from eventjet.examples.orders.goods import Payment, Shipment, Stock
from eventjet.examples.orders.orders import Order

orders = App("orders", aggregates=[Stock, Payment, Shipment], processes=[Order])
