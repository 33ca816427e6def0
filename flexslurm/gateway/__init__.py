"""The OpenAI-compatible HTTP server; knows requests and text, never GPUs."""
