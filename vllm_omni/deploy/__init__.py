"""Verified deploy YAMLs, one per model and, where they differ, per kind of device."""
