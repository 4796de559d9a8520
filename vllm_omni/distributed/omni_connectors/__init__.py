"""The data plane: ordered, credited streams of chunks from worker to worker."""
