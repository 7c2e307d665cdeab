"""Hallucination detectors: models, their configuration and their inputs."""
