"""/health: the truth for each stage."""
