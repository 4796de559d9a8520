"""Media on the way in and out: checked, decoded, encoded and fetched, never on the event loop."""
