"""What runs on a rank: the pipeline, the requests' states, and failures that stay apart."""
