"""Models that follow from the same solver: labels, Correct and Smooth, label features."""
