"""What a study folder says: measures of each arm, differences with intervals, a verdict made of them."""
