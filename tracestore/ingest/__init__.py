"""Read untrusted files as data, without running code from them, and make trace records of them; see docs/ingest.md."""
