"""The gateway: programs that call the policy through an OpenAI-compatible URL."""
