"""Products of a 2:4 weight with the windows of images, gathered inside the kernel."""
