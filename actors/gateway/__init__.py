"""An OpenAI-compatible endpoint in front of an actor's engine, for programs that roll out."""
