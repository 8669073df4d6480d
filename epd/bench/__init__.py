"""An open-loop load generator for any server of the OpenAI chat API."""
