"""/v1/chat/completions of a pipeline that answers with pictures and nothing else."""
