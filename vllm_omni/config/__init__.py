"""What a pipeline is, where it runs, and the one merge of both (`resolve`)."""
