"""The one block, its kinds of attention, how transformers calls it, and the paged cache that it writes."""
