"""The weights of a live model: where each is kept, packed, filled from files, adapted, written anew."""
