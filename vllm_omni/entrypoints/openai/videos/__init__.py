"""/v1/videos: videos as jobs that outlive a request, and a restart of the server."""
