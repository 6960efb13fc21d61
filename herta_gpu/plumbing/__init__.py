"""What the paper does not speak of: checks of input, files, checkpoints, timing, conversions."""
