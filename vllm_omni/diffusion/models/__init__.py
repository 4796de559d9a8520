"""Diffusion families, one folder each, and the interface they implement."""
