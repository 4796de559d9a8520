"""Which requests take part in the next piece of work: pure functions over plain records."""
