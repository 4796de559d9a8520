"""How pieces of work reach the ranks of a replica and come back."""
