"""Layers that run their own code on several ranks: found out, cut, rehearsed and split."""
