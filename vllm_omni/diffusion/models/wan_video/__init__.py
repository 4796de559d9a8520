"""Wan 2.1 and 2.2: text to video, image to video."""
