"""diffusers' models: attention, feed-forwards and convolutions of images."""
