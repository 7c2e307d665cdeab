"""Stores on object storage and web servers; see docs/remote.md. Needs the extra [remote]."""
