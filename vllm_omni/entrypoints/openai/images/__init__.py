"""/v1/images/generations and /v1/images/edits: pictures from text, perhaps from other pictures."""
