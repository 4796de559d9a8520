"""The one-shot engine: batches vocoders, codecs and voices; streaming state per request."""
