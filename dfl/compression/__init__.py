"""Message formats: models and updates as bytes."""
