"""Figures as ratios: eventjet, its peers and the floor, in one run."""
