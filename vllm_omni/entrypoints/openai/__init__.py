"""OpenAI's HTTP API over `AsyncOmni`, one folder for each endpoint family. In the API process."""
