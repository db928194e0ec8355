"""The applications of the documentation: the bank of the tutorial, and that of the README and the demo."""
