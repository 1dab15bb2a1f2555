"""Infrastructure as a control problem: a simulated cluster that is scaled and configured under load."""
