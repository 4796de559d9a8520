"""Promises about the shape of the code, each checked by machine: `python -m tools.architecture`.

A check is a function from the project's root to a list of complaints; empty means kept.
"""
