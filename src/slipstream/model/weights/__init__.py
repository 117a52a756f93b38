"""The weights of a live model: where they are stored, packing, filling from files, adapters, new values."""
