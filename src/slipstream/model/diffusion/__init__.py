"""Optimizations for diffusers' models: attention, feed-forwards, convolutions and memory layout of images."""
