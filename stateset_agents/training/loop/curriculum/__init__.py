"""What a step plays and how its rewards are put together: weights of the parts, order, sizes, stages."""
