"""Export what an app records and serves, and judge changes of it for stored events and older readers. PURE."""
