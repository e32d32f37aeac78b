"""Process groups whose connections can be replaced underneath a living model."""
