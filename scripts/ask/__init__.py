"""Ask a trained model."""
