"""Arrays as bytes, atomic writes, file locks, and clients' states on disk."""
