"""Stores on object storage and web servers; see docs/remote.md. Object storage needs the extra [remote]."""
