"""What an algorithm sees of its clients during one round."""
