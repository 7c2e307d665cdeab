"""The detectors of hallucinated answers: models, their options and what they are built from."""
