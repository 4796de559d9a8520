"""Each place where vLLM or what it stands on is changed from outside: one file, four headings."""
