"""Writes the skeleton of a model family and its tests: `python -m tools.new_model NAME`."""
