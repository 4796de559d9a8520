"""OpenAI's HTTP API over `AsyncOmni`: one folder for each endpoint family. Runs in the API process."""
